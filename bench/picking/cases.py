"""What is measured: asks and endpoints made from a seed, the same in every run."""

import itertools
import random
from collections.abc import Callable, Sequence

import orjson

from picker_fleet.body import Body
from picker_fleet.scheduling.endpoint_history import PrefixIndex, block_hashes, prompt_bytes
from picker_fleet.scheduling.scheduler import Scheduler
from picker_fleet.scheduling.scorers import SCORERS, EndpointState, LatencyStats, PickRequest

USUAL = {"queue-depth": 2.0, "kv-cache": 2.0, "prefix-affinity": 3.0, "in-flight": 1.0}
EVERY = dict.fromkeys(SCORERS, 1.0)
_ADAPTERS = [f"adapter-{n}" for n in range(12)]
_WORDS_A_KILOBYTE = 170

Step = Callable[[], object]


def endpoints(count: int, seed: int) -> list[EndpointState]:
    """`count` endpoints as a busy pool has them: no two alike, one in 20 draining, one in 20 stale."""
    chance = random.Random(seed)
    return [
        EndpointState(
            f"10.0.{n // 256}.{n % 256}:8000",
            draining=n % 20 == 7,
            waiting=chance.randrange(40),
            running=chance.randrange(64),
            kv_utilisation=chance.random(),
            max_adapters=8,
            active_adapters=frozenset(chance.sample(_ADAPTERS, 4)),
            stale=n % 20 == 13,
            in_flight=chance.randrange(64),
            latency=LatencyStats(100, chance.uniform(1, 9), chance.random()),
        )
        for n in range(count)
    ]


def picking(weights: dict[str, float], count: int, seed: int, *, anew: bool = False) -> Step:
    """One pick: a chat of 16 KB, its hashes known, looked up and ranked; of an adapter and a session.

    `anew`: what is known of the endpoints is another each time.
    """
    scheduler, pool = Scheduler(weights), endpoints(count, seed)
    pools = itertools.cycle((pool, endpoints(count, seed + 1) if anew else pool))
    index, hashes = _served(pool, seed)
    chance = random.Random(seed).random

    def step() -> object:
        matches, blocks = index.match(hashes), len(hashes)
        pick = PickRequest(
            adapter="adapter-3",
            session_endpoint="10.0.0.3:8000",
            prefix_blocks=blocks,
            prefix_matches=matches,
            random=chance,
        )
        return scheduler.rank(pick, next(pools))

    return step


def prompt(kilobytes: int, seed: int) -> Body:
    """A chat of that many kilobytes in messages of one."""
    chance = random.Random(seed)
    words = [f"word{n:x}" for n in range(256)]
    said = [" ".join(chance.choices(words, k=_WORDS_A_KILOBYTE))[:990] for _ in range(kilobytes)]
    return Body(orjson.dumps({"messages": [{"role": "user", "content": text} for text in said]}))


def hashing(kilobytes: int, seed: int) -> Step:
    """A chat's block hashes, from its body."""
    body = prompt(kilobytes, seed)
    return lambda: block_hashes("a-model", prompt_bytes(body))


def matching(count: int, seed: int) -> Step:
    """The part of a pick that looks the prompt up."""
    index, hashes = _served(endpoints(count, seed), seed)
    return lambda: index.match(hashes)


def _served(pool: Sequence[EndpointState], seed: int) -> tuple[PrefixIndex, tuple[bytes, ...]]:
    """Endpoints that each served some beginning of one chat, and the chat's hashes."""
    hashes = block_hashes("a-model", prompt_bytes(prompt(16, seed)))
    index, chance = PrefixIndex(), random.Random(seed)
    for one in pool:
        index.add(one.address, hashes[: chance.randrange(1, len(hashes))])
    return index, hashes
