"""What a scenario does to its own fleet while the load runs."""

import asyncio
from collections.abc import Callable
from random import Random

from picker_tools.load.harm import Harm
from picker_tools.load.ledger import read
from picker_tools.load.own_fleet import OwnFleet
from picker_tools.load.scenario import Fault
from picker_tools.load.target import Target

_KILL_EVERY_S = (
    5.0  # on average; never sooner than a part of it, so that each kill meets a fleet that has recovered
)
_LEAST_PART = 0.5
_OUTAGE_AT, _OUTAGE_FOR = 0.3, 1 / 3  # parts of the duration


def kill_moments(duration_s: float, replicas: int, seed: int) -> list[tuple[float, int]]:
    """When which replica (from 0) is killed: random, the same for the same seed, at least once."""
    chance = Random(f"{seed}/kills")
    moments: list[tuple[float, int]] = []
    at_s = 0.0
    while True:
        at_s += _KILL_EVERY_S * (_LEAST_PART + chance.expovariate(1 / (1 - _LEAST_PART)))
        if at_s >= 0.9 * duration_s:
            return moments or [(0.3 * duration_s, chance.randrange(replicas))]
        moments.append((at_s, chance.randrange(replicas)))


async def inflict(
    fault: Fault,
    fleet: OwnFleet,
    target: Target,
    harm: Harm,
    *,
    duration_s: float,
    seed: int,
    now_s: Callable[[], float],
) -> None:
    """Do to `fleet` what `fault` says while the load runs, and note it in `harm`."""
    if fault is Fault.KILL_REPLICAS:
        for at_s, number in kill_moments(duration_s, len(target.admins), seed):
            await asyncio.sleep(max(0.0, at_s - now_s()))
            name = fleet.kill_replica(number)
            if name is not None:
                harm.kills.append((now_s(), name))
    elif fault is Fault.STOP_REDIS:
        await asyncio.sleep(max(0.0, _OUTAGE_AT * duration_s - now_s()))
        harm.ledgers.append(await asyncio.to_thread(read, target.redis))
        began_s = now_s()
        await fleet.stop_redis()
        harm.outages.append((began_s, None))
        try:
            await asyncio.sleep(max(0.0, began_s + _OUTAGE_FOR * duration_s - now_s()))
        finally:
            await fleet.start_redis()
        harm.outages[-1] = (began_s, now_s())
