"""`python -m bench.stages CASE` compares rules for splitting requests between prefill and decode servers.

A simulation, so its figures do not depend on the machine: eight model servers (bench/rig/simulated.py)
either all serve whole requests, or four prefill and four decode. The choice is the product's code
(scheduling/chooser.py); the endpoint with the fewest requests is taken, as by lua/lib/endpoints.lua. The
network and Redis take no time, but a transfer of the KV cache does. Metrics pages are read every 0.5 s.

The figure is goodput as DistServe (Zhong et al., OSDI 2024) defines it: the highest request rate at which 90
% of the requests meet both objectives, time to the first token and mean time per further token. Without CASE
all cases run. Each case replaces its section in bench/results/stages.md.
"""

import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.large_pool.hits import as_the_script
from bench.limits.kinds import Sizes
from bench.rig.report import percentile, run_cases, table
from bench.rig.simulated import Server, Timeline
from picker_fleet.domain.bands import Band
from picker_fleet.domain.config import parse
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.request import (
    ANY_LATENCY,
    Completion,
    Endpoint,
    InferenceRequest,
    LatencyObjective,
    Outcome,
    Workload,
)
from picker_fleet.endpoints.readings import EndpointMetrics, MetricsCache
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.scheduling.route_stream import Ending, ObservationRecord, RouteStream
from picker_fleet.state import accounting_token
from picker_fleet.state.accounting_token import Keyring
from picker_tools.simulator.engine import Limits
from picker_tools.simulator.engine import Sequence as Generation
from picker_tools.simulator.openai_api import BYTES_PER_TOKEN

# An A100-80GB at vLLM's default of 0.9 has 46 GB beside OPT-13B's weights: 3500 blocks of 16 tokens.
_LIMITS = Limits(max_num_seqs=256, kv_blocks=3500)
_SERVERS = 8
_PAGE_S = 0.5  # seconds between two readings of a metrics page
_ATTAINED = 0.9  # share of requests that must meet both objectives
_SEEDS = (1, 2, 3)
_STEP, _HALVINGS = 1.15, 6  # the search raises the rate by this factor, then halves so often
_NEVER = 1_000_000  # a threshold that no prompt exceeds


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of `sizes`, and their objectives in s, `ttft_s` to the first token and `pace_s` for each
    further one. The search begins at `per_s` requests a second; a run has `requests`."""

    sizes: Sizes
    ttft_s: float
    pace_s: float
    per_s: float
    thresholds: Sequence[int]
    requests: int = 600

    def arrivals(self, requests: int, per_s: float, seed: int) -> Iterator[tuple[float, int, int]]:
        """Poisson arrivals: the time in s, the tokens of the prompt and of the answer. With equal seeds,
        arrivals at different rates differ only in their times."""
        dice, at_s = random.Random(seed), 0.0
        for _ in range(requests):
            at_s += dice.expovariate(1.0) / per_s
            yield (at_s, *self.sizes(dice))


def _long(dice: random.Random) -> tuple[int, int]:
    return dice.randint(3000, 5000), dice.randint(50, 150)


def _short(dice: random.Random) -> tuple[int, int]:
    return dice.randint(50, 150), dice.randint(50, 150)


def _mixed(dice: random.Random) -> tuple[int, int]:
    return (_long if dice.random() < 0.3 else _short)(dice)


# A long prompt alone takes 0.63 s, and each further token 0.022 s. The strict objectives are 3 and 1.5 times
# as long, as Splitwise has for 90 % of requests (Patel et al., ISCA 2024, table VI). The relaxed objectives
# are DistServe's for summarization; for `short`, DistServe's for a chatbot with OPT-13B (table 1).
_STRICT_S = 1.9, 0.033
CASES = {
    "long-strict": Case(_long, *_STRICT_S, per_s=3.3, thresholds=(0, _NEVER)),
    "long-relaxed": Case(_long, ttft_s=15.0, pace_s=0.15, per_s=8.0, thresholds=(0, _NEVER)),
    "short": Case(_short, ttft_s=0.25, pace_s=0.1, per_s=200.0, thresholds=(0, 500, _NEVER), requests=5000),
    "mixed-strict": Case(_mixed, *_STRICT_S, per_s=8.0, thresholds=(0, 500, _NEVER), requests=1200),
}


class _Routes(RouteStream):
    """A RouteStream that learns its own observations at once, not from the shared stream."""

    def add(self, record: Ending) -> None:
        if isinstance(record, ObservationRecord):
            self.model.learn(record.model, record.address, record.load, record.ttft_s, record.tpot_s)


@dataclass(slots=True)
class Served:
    """A request and its times in s: when it began, had its first token, and ended."""

    prompt_tokens: int
    tokens: int
    began_s: float
    token: str = ""
    decoder: str = ""
    prefiller: str = ""
    first_s: float = 0.0
    ended_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.began_s

    @property
    def pace_s(self) -> float:
        return (self.ended_s - self.first_s) / max(1, self.tokens - 1)


class Pool:
    """Simulated servers: `prefill` servers that only prefill, and `decode` servers that only decode;
    with `both`, all do both. `stages` is the section `scheduling.stages`, None for whole requests.
    `objective` gives the latency objective by the prompt's tokens; if set, endpoints are scored by it, and
    requests that no endpoint can serve in time are `refused`."""

    def __init__(
        self,
        prefill: int,
        decode: int,
        stages: dict[str, Any] | None,
        seed: int,
        *,
        both: bool = False,
        objective: Callable[[int], LatencyObjective] | None = None,
    ) -> None:
        addresses = [f"10.0.0.{number}:8000" for number in range(1, prefill + decode + 1)]
        self._prefillers = addresses if both else addresses[:prefill]
        self._decoders = addresses if both else addresses[prefill:]
        self._time = time = Timeline()
        self._servers = {each: Server(time, _LIMITS) for each in addresses}
        self.served: list[Served] = []
        self._numbers = itertools.count()
        self._in_flight, self._prefills = Counter[str](), Counter[str]()
        self._keys, self._dice = Keyring(), random.Random(seed)
        random.seed(seed)  # the chooser draws at random which requests explore
        cell = SnapshotCell()
        endpoints = (
            Endpoint(each, prefills=each in self._prefillers, decodes=each in self._decoders)
            for each in addresses
        )
        cell.publish(Snapshot("1", tuple(endpoints)))
        self._objective = objective
        self.refused = 0
        scheduling = {} if stages is None else {"stages": stages}
        if objective is not None:
            scheduling["scorers"] = {"slo-headroom": 3}
        self._fleet = KnownFleet(parse({"scheduling": scheduling, "request_queue_controller": {}}))
        self._pages = MetricsCache(None, time.clock)
        routes = _Routes("redis://127.0.0.1:1/0", stream="s", replica="r", clock=time.clock)
        self._chooser = EndpointChooser(
            self._fleet, cell, readings=self._pages, routes=routes, keys=self._keys, clock=time.clock
        )

    def serve(self, arrivals: Iterator[tuple[float, int, int]]) -> list[Served]:
        """Serve all of `arrivals`, whose times begin now; returns the requests in order of their ends."""
        begun_s, self.served, self.refused = self._time.now_s, [], 0
        asked = 0
        for at_s, *sizes in arrivals:
            self._time.at(begun_s + at_s, lambda sizes=sizes: self._ask(*sizes))  # type: ignore[misc]
            asked += 1
        page_s = begun_s
        while len(self.served) + self.refused < asked:
            act = self._time.next()
            if self._time.now_s >= page_s:
                self._read_pages()
                page_s = self._time.now_s + _PAGE_S
            act()
        return self.served

    def _read_pages(self) -> None:
        at_ms = int(self._time.now_s * 1000)
        for address, server in self._servers.items():
            load = server.engine.load()
            page = EndpointMetrics(
                at_ms, waiting=load.waiting, running=load.running, kv_utilisation=load.kv_usage
            )
            self._pages.update({address: page})

    def _least(self, among: Sequence[str], counts: Counter[str]) -> str:
        """The server with the fewest requests, equal ones in random order."""
        return min(among, key=lambda each: (counts[each], self._dice.random()))

    def _ask(self, prompt_tokens: int, tokens: int) -> None:
        self._fleet.in_flight, self._fleet.prefills = dict(self._in_flight), dict(self._prefills)
        request = InferenceRequest(
            f"{next(self._numbers)}", model="m", target_model="m", stream=True, flow="f", band=Band.DEFAULT,
            weight=1.0, workload=Workload("", 3), cost=1.0, ttl_s=30.0, subset=None,
            body_bytes=BYTES_PER_TOKEN * prompt_tokens, can_split=True,
            latency=ANY_LATENCY if self._objective is None else self._objective(prompt_tokens),
        )  # fmt: skip
        if self._chooser.shortfall_s(request) is not None:
            self.refused += 1
            return
        choice = self._chooser.choose(request)
        served = Served(prompt_tokens, tokens, self._time.now_s)
        if self._objective is not None and "=" in choice.candidates:
            decoder = as_the_script(choice.candidates, self._in_flight, self._chooser.live_weight)
        else:
            decoder = self._least(self._decoders, self._in_flight)
        served.decoder = decoder
        self._in_flight[decoder] += 1
        if choice.prefill and (prefiller := self._least(self._prefillers, self._prefills)) != decoder:
            served.prefiller = prefiller
            self._prefills[prefiller] += 1
        chosen = (served.prefiller,) if served.prefiller else ()
        loads = self._chooser.placed(request, choice, (decoder,), "", chosen)
        served.token = accounting_token.signed(
            accounting_token.write(
                request, decoder, load=loads.decode or (), prefiller=served.prefiller,
                prefill_load=loads.prefill or (),
            ),
            request.id, self._keys,
        )  # fmt: skip
        grown = partial(self._grown, served)
        if served.prefiller:
            prompt = Generation(prompt_tokens, 1, keeps_blocks=True)
            answer = Generation(prompt_tokens, tokens, pulls=True)
            prefills, decodes = self._servers[served.prefiller], self._servers[decoder]
            free = partial(prefills.free, prompt)
            prefills.submit(prompt, lambda _: decodes.submit(answer, grown, free))
        else:
            self._servers[decoder].submit(Generation(prompt_tokens, tokens), grown)

    def _grown(self, served: Served, sequence: Generation) -> None:
        if not served.first_s:
            served.first_s = self._time.now_s
            self._prefills[served.prefiller] -= 1
        if sequence.remaining_tokens:
            return
        served.ended_s = self._time.now_s
        self._in_flight[served.decoder] -= 1
        self.served.append(served)
        took_s = served.ended_s - served.began_s
        self._chooser.ended(
            Completion(
                "r", Outcome.COMPLETED, 200, served.decoder, served.prompt_tokens, served.tokens, took_s,
                first_byte_s=None, service_s=took_s, ttft_s=served.ttft_s,
            ),
            served.token,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Level:
    """Results of the runs at one rate: fraction of requests that met both objectives (`attained`), fraction
    that were split, and p90 of both times in seconds."""

    per_s: float
    attained: float
    split: float
    ttft_p90_s: float
    pace_p90_s: float


def level(case: Case, per_s: float, pool: Callable[[int], Pool], *, learns: bool) -> Level:
    """Measure at `per_s`; if `learns`, as many requests at half the rate first teach the latency model."""
    served: list[Served] = []
    for seed in _SEEDS:
        it = pool(seed)
        if learns:
            it.serve(case.arrivals(case.requests, per_s / 2, 1000 + seed))
        served += it.serve(case.arrivals(case.requests, per_s, seed))
    met = sum(each.ttft_s <= case.ttft_s and each.pace_s <= case.pace_s for each in served)
    split = sum(each.prefiller != "" for each in served)
    firsts, paces = [each.ttft_s for each in served], [each.pace_s for each in served]
    return Level(
        per_s, met / len(served), split / len(served), percentile(firsts, 0.9), percentile(paces, 0.9)
    )


def goodput(case: Case, pool: Callable[[int], Pool], *, learns: bool) -> Level:
    """The highest rate found at which 90 % of the requests meet both objectives."""

    def at(per_s: float) -> Level:
        return level(case, per_s, pool, learns=learns)

    best = at(case.per_s)
    while best.attained < _ATTAINED:
        best = at(best.per_s / _STEP)
    above_s = best.per_s * _STEP
    while (higher := at(above_s)).attained >= _ATTAINED:
        best, above_s = higher, above_s * _STEP
    for _ in range(_HALVINGS):
        middle = at((best.per_s + above_s) / 2)
        if middle.attained >= _ATTAINED:
            best = middle
        else:
            above_s = middle.per_s
    return best


def _compare(name: str, case: Case) -> str:
    half = _SERVERS // 2
    pools: dict[str, Callable[[int], Pool]] = {
        "8 endpoints, whole": partial(Pool, 0, _SERVERS, None),
        "8 of both stages, auto": partial(Pool, half, half, {}, both=True),
        "4 + 4, auto": partial(Pool, half, half, {}),
    }
    names = {0: "4 + 4, always split", _NEVER: "4 + 4, never split"}
    for each in case.thresholds:
        title = names.get(each, f"4 + 4, above {each} tokens")
        pools[title] = partial(Pool, half, half, {"threshold": each})
    found: dict[str, Level] = {}
    for title, pool in pools.items():
        found[title] = goodput(case, pool, learns="auto" in title)
        print(name, title, found[title], flush=True)
    whole = found["8 endpoints, whole"].per_s
    best = max([*found][3:], key=lambda each: found[each].per_s)
    rows = [
        [
            title, f"{it.per_s:.2f}", f"{it.per_s / whole:.2f}", f"{it.split:.0%}", f"{it.ttft_p90_s:.2f}",
            f"{1000 * it.pace_p90_s:.0f}",
        ]
        for title, it in found.items()
    ]  # fmt: skip
    head = ["", "goodput, requests/s", "to the first row", "split", "TTFT p90, s", "per token p90, ms"]
    return "\n\n".join([
        f"{case.requests} requests a run, {len(_SEEDS)} seeds. Objectives: the first token within "
        f"{case.ttft_s:g} s, {1000 * case.pace_s:g} ms for each further one.",
        table(head, rows),
        f"`auto` has {found['4 + 4, auto'].per_s / found[best].per_s:.2f} of the goodput of the best fixed "
        f"threshold ({best}).",
    ])  # fmt: skip


_TITLE = "# Prefill and decode apart: goodput by when requests are split\n"


if __name__ == "__main__":
    cases = {name: partial(_compare, name, case) for name, case in CASES.items()}
    sys.exit(run_cases("bench.stages", __doc__, _TITLE, cases))
