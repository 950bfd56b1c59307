"""`python -m bench.prefixes`: compares prefix hits with a fixed and with a learnt capacity of the engines'
caches, and writes prefixes.md.

Runs a replica's chooser, the script's formula for the choice among candidates, and the simulator's engines in
this process, in simulated time. Only the engines know their caches; their own counters give the hits.
"""

import heapq
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple
from unittest.mock import Mock

from bench.large_pool.hits import SCORERS, as_the_script
from bench.large_pool.hits import request as make_request
from bench.rig.report import options_parser, table, write_page
from picker_fleet.domain.config import parse
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.request import Completion, Endpoint, InferenceRequest, Outcome
from picker_fleet.endpoints.readings import EndpointMetrics, MetricsCache
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.scheduling.cache_feedback import CacheWatch
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.scheduling.endpoint_history import BLOCK_BYTES, block_hashes
from picker_fleet.scheduling.route_stream import RouteStream
from picker_fleet.state.accounting_token import Keyring
from picker_tools.simulator import engine as simulated
from picker_tools.simulator.engine import PrefixCache, prompt_blocks
from picker_tools.simulator.openai_api import BYTES_PER_TOKEN

_TOKENS_A_BLOCK = BLOCK_BYTES // BYTES_PER_TOKEN
_ENGINE_BLOCK_TOKENS = 16
_QUESTION_BLOCKS = (1, 5)
_TIMES_WHAT_FITS = 2  # number of conversations, as a multiple of the number that fits into all caches
_RUNNING = 112  # mean number of requests that run on all engines
_SECONDS_A_REQUEST, _SCRAPE_EACH = 0.03, 3  # seconds between requests; requests between two scrapes

FIXED, LEARNT, PRECISE, ORACLE = "fixed", "learnt", "precise", "oracle"


@dataclass(frozen=True, slots=True)
class Case:
    """Engines that keep `capacities` blocks, and run `places` requests at once. A conversation begins with
    one of `systems` system prompts of `system_blocks` blocks, and has `turns`, each with an answer of
    `answer_blocks`. `usage`: answers report cached tokens; `page`: pages report the KV cache's size;
    `weight`: weight of the scorer `prefix-affinity`."""

    name: str
    capacities: tuple[int, ...]
    places: int = 16
    requests: int = 12_000
    turns: int = 12
    answer_blocks: int = 3
    systems: int = 20
    system_blocks: tuple[int, int] = (4, 16)
    usage: bool = True
    page: bool = True
    weight: float = 3


_EACH = (2000,) * 8
CASES = (
    Case("2000 blocks each, idle places", _EACH, places=256),
    Case("2000 blocks each", _EACH),
    Case("half 800, half 3200", (800,) * 4 + (3200,) * 4),
    Case("2000 each, agents", _EACH, turns=4, systems=150, system_blocks=(60, 140)),
    Case("2000 each, agents, weight 6", _EACH, turns=4, systems=150, system_blocks=(60, 140), weight=6),
    Case("2000 each, page without size", _EACH, page=False),
    Case("2000 each, answers without cached tokens", _EACH, usage=False),
    Case("2000 each, only counters of hits", _EACH, usage=False, page=False),
    Case("48 000 blocks each", (48_000,) * 8, requests=9_000, turns=60, answer_blocks=9),
)


class Result(NamedTuple):
    """`hits`: share of the prompts' tokens found in the caches, in the run's second half, by the engines'
    counters. `estimates`: the learnt capacities divided by the engines' own."""

    hits: float
    estimates: tuple[float, ...]


class _Conversations:
    """Makes prompts of random conversations; a prompt grows with each turn. All runs of a case get the same
    prompts."""

    def __init__(self, case: Case) -> None:
        self._case, self._dice = case, (dice := random.Random(3))
        self._systems = [self._text(case.system_blocks) for _ in range(case.systems)]
        turn_blocks = sum(_QUESTION_BLOCKS) / 2 + case.answer_blocks
        mean_blocks = sum(case.system_blocks) / 2 + case.turns * turn_blocks / 2
        self._texts = [b""] * round(_TIMES_WHAT_FITS * sum(case.capacities) / mean_blocks)
        self._turns = [dice.randrange(case.turns) for _ in self._texts]
        for at, turns in enumerate(self._turns):
            length = round(turns * turn_blocks)
            self._texts[at] = dice.choice(self._systems) + self._text((length, length))

    def next(self) -> bytes:
        at = self._dice.randrange(len(self._texts))
        if self._turns[at] == self._case.turns:
            self._texts[at], self._turns[at] = self._dice.choice(self._systems), 0
        asked = self._texts[at] + self._text(_QUESTION_BLOCKS)
        self._texts[at] = asked + self._text((self._case.answer_blocks,) * 2)
        self._turns[at] += 1
        return asked

    def _text(self, blocks: tuple[int, int]) -> bytes:
        return self._dice.randbytes(BLOCK_BYTES * self._dice.randint(*blocks))


class _Server:
    """One simulated engine, and a copy of its prefix cache for the precise index."""

    def __init__(self, capacity: int, places: int) -> None:
        self.capacity = capacity
        blocks = capacity * _TOKENS_A_BLOCK // _ENGINE_BLOCK_TOKENS
        self.engine = simulated.Engine(simulated.Limits(places, blocks, _ENGINE_BLOCK_TOKENS))
        self.copy = PrefixCache(blocks)

    def page(self, at_s: float, in_flight: int, *, sized: bool) -> EndpointMetrics:
        load = self.engine.load()
        return EndpointMetrics(
            int(at_s * 1000),
            waiting=load.waiting,
            running=load.running,
            kv_utilisation=min(load.kv_usage, 1.0),
            kv_tokens=float(self.capacity * _TOKENS_A_BLOCK) if sized else None,
            prefix_queries=float(load.queried_tokens),
            prefix_hits=float(load.hit_tokens),
        )


class _Run:
    """One run of a case with one kind of index."""

    def __init__(self, case: Case, index: str) -> None:
        random.seed(3)  # the scheduler breaks ties at random
        self._case, self._dice, self._now_s = case, random.Random(3), 0.0
        # Requests that run, by their end: due number, id, endpoint, request, sequence; requests that wait.
        self._ends: list[tuple[float, int, str, InferenceRequest, simulated.Sequence]] = []
        self._requests: dict[simulated.Sequence, InferenceRequest] = {}
        self._servers = {
            f"10.0.0.{n}:8000": _Server(each, case.places) for n, each in enumerate(case.capacities)
        }
        self._loads, self._asked = Counter[str](), b""
        cell, clock = SnapshotCell(), lambda: self._now_s
        cell.publish(Snapshot("1", tuple(map(Endpoint, self._servers))))
        scorers = SCORERS | {"prefix-affinity": case.weight}
        self._fleet = KnownFleet(parse({"scheduling": {"scorers": scorers}}))
        self._readings = MetricsCache(None, clock)
        self._routes = RouteStream("redis://127.0.0.1:1/0", stream="unused", replica="r", clock=clock)
        if index != LEARNT:
            self._routes.index.learn = self._routes.index.report_size = Mock()  # type: ignore[method-assign]
        if index == PRECISE:
            self._routes.index.match = self._precise  # type: ignore[method-assign]
        self._watch = CacheWatch(self._routes, self._readings)
        self._chooser = EndpointChooser(
            self._fleet, cell, readings=self._readings, routes=self._routes, keys=Keyring(), clock=clock
        )

    def result(self) -> Result:
        conversations, case, ends = _Conversations(self._case), self._case, self._ends
        before = (0, 0)
        for number in range(case.requests):
            self._now_s += _SECONDS_A_REQUEST
            while ends and ends[0][0] <= number:
                _, _, address, request, sequence = heapq.heappop(ends)
                self._end(address, request, sequence)
                self._start(address, number)
            if number % _SCRAPE_EACH == 0:
                self._scrape()
            if number == case.requests // 2:
                before = self._counted()
            self._asked = text = conversations.next()
            request = make_request(block_hashes("llama", text), str(number), len(text))
            choice = self._chooser.choose(request)
            address = as_the_script(choice.candidates, self._loads, self._chooser.live_weight)
            self._chooser.placed(request, choice, (address,))
            self._loads[address] += 1
            blocks = prompt_blocks(text, _ENGINE_BLOCK_TOKENS, None)
            sequence = simulated.Sequence(len(text) // BYTES_PER_TOKEN, 1, prompt_blocks=blocks)
            self._requests[sequence] = request
            self._servers[address].engine.submit(sequence)
            self._start(address, number)
            self._share()
        queried, hit = (now - then for now, then in zip(self._counted(), before, strict=True))
        capacity = self._routes.index.capacity
        estimates = (capacity(address) / server.capacity for address, server in self._servers.items())
        return Result(hit / queried, tuple(estimates))

    def _start(self, address: str, number: int) -> None:
        server = self._servers[address]
        for sequence in server.engine.schedule():
            server.copy.use(sequence.prompt_blocks)
            request = self._requests.pop(sequence)
            due = number + self._dice.expovariate(1 / _RUNNING)
            heapq.heappush(self._ends, (due, int(request.id), address, request, sequence))

    def _end(self, address: str, request: InferenceRequest, sequence: simulated.Sequence) -> None:
        self._loads[address] -= 1
        self._servers[address].engine.release(sequence)
        cached = sequence.cached_tokens if self._case.usage else None
        end = Completion(request.id, Outcome.COMPLETED, 200, address, sequence.prompt_tokens, 1, 1.0, None)
        self._chooser.ended(end._replace(cached_tokens=cached), "token")

    def _scrape(self) -> None:
        self._fleet.in_flight = dict(self._loads)
        pages = {
            address: server.page(self._now_s, self._loads[address], sized=self._case.page)
            for address, server in self._servers.items()
        }
        for address, page in pages.items():
            self._watch.read(address, page)
        self._readings.update(pages)

    def _share(self) -> None:
        """Apply the records that this replica would read from the stream."""
        records = list(self._routes._completions)
        self._routes._completions.clear()
        self._routes._routes.clear()
        self._routes._apply(records)

    def _counted(self) -> tuple[int, int]:
        loads = [server.engine.load() for server in self._servers.values()]
        return sum(load.queried_tokens for load in loads), sum(load.hit_tokens for load in loads)

    def _precise(self, hashes: Sequence[bytes], among: Iterable[str] | None = None) -> dict[str, int]:
        blocks = prompt_blocks(self._asked, _ENGINE_BLOCK_TOKENS, None)
        per_block = _TOKENS_A_BLOCK // _ENGINE_BLOCK_TOKENS
        cached = {at: server.copy.cached(blocks) // per_block for at, server in self._servers.items()}
        return {at: min(count, len(hashes)) for at, count in cached.items() if count}


def _oracle(case: Case) -> float:
    """The hits as in `Result`, if one cache had room for the blocks of all engines."""
    conversations = _Conversations(case)
    cache = PrefixCache(sum(case.capacities) * _TOKENS_A_BLOCK // _ENGINE_BLOCK_TOKENS)
    asked = had = 0
    for number in range(case.requests):
        blocks = prompt_blocks(conversations.next(), _ENGINE_BLOCK_TOKENS, None)
        if number >= case.requests // 2:
            asked, had = asked + len(blocks), had + cache.cached(blocks)
        cache.use(blocks)
    return had / asked


@cache
def _without_learning(case: Case) -> tuple[float, float, float]:
    """The hits with the fixed and with the precise index, and of the oracle."""
    return _Run(case, FIXED).result().hits, _Run(case, PRECISE).result().hits, _oracle(case)


_PAGE = f"""\
# Prefix hits by the capacity that the index assumes

`python -m bench.prefixes`, a simulation, so its figures do not depend on the machine. Eight simulated engines
with an LRU prefix cache; {_TIMES_WHAT_FITS} times the conversations that fit; each request is the next turn
of a random conversation; on average {_RUNNING} requests run, on 16 places an engine. The chooser, the index
and the correction are the product's code; scorers and weights: `queue-depth` 2, `kv-cache` 2,
`prefix-affinity` 3.

*Fixed*: the index assumes 31 250 blocks of 256 bytes for each engine. *Learnt*: the index learns each
engine's capacity, as in the product. *Precise*: the index reads the engines' caches. *Oracle*: one LRU cache
has room for the blocks of all engines, and load does not matter; since all conversations are equally likely
to go on, no index keeps better blocks than the most recently used. Hits are by the engines' counters: prompt
tokens found in the cache, divided by prompt tokens, in the second half of the requests. *Estimate*: the
learnt capacities at the end, divided by the engines' own, from the lowest to the highest. *Idle places*: 256
places an engine, so that no request waits there. *Weight 6*: `prefix-affinity` has weight 6. *Agents*: a
conversation has four turns after one of 150 system prompts of 15 to 36 KB. Other conversations have twelve
turns (with 48 000 blocks sixty) after one of 20 system prompts of 1 to 4 KB.

Learnt is as good as precise, so reading the engines' caches gains nothing. Both have fewer hits than the
oracle, because the scorers of load move requests away from their prompts' endpoints, unless places are idle
or `prefix-affinity` weighs more. On real servers: [vllm-prefixes.md](vllm-prefixes.md).
"""


def main(arguments: Sequence[str]) -> int:
    parser = options_parser("python -m bench.prefixes", __doc__)
    parser.add_argument("--only", default="", help="run only cases whose names contain this text")
    args = parser.parse_args(arguments)
    rows = []
    for case in (each for each in CASES if args.only in each.name):
        fixed, precise, oracle = _without_learning(replace(case, name="", usage=True, page=True))
        learnt, estimates = _Run(case, LEARNT).result()
        hits = [f"{each:.1%}" for each in (fixed, learnt, precise, oracle)]
        ratios = [f"{each:.2f}" for each in (learnt / fixed, oracle / fixed, learnt / precise)]
        rows.append([case.name, *hits, *ratios, f"{min(estimates):.2f}–{max(estimates):.2f}"])
        print(*rows[-1], sep="  ", flush=True)
    ratios = ["learnt/fixed", "oracle/fixed", "learnt/precise"]
    head = ["engines", FIXED, LEARNT, PRECISE, ORACLE, *ratios, "estimate"]
    write_page(args.out / "prefixes.md", f"{_PAGE}\n{table(head, rows)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
