"""Redis is late, stalls, or is silent on some connections: decisions wait, and no replica leaves it."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
from counted_fleet import REPLICAS, all_at_rest, all_shared, counted, format_ms, quantile
from fault_case import FULL, Case
from paced import paced
from proxy import Proxy
from whole_fleet import Fleet

pytestmark = pytest.mark.alone
PER_S = 60.0
SERVERS, EACH = 4, 200.0  # so much that nobody queues
EVERY_S, STALL_S, LATE_S = 5.0, 1.0, 0.05
# Of 99 in 100 decisions: `redis.silence` (1 s) and what comes before; a bound of the replicas' own histogram.
MOST_S = 2.5


async def late(between: Proxy, for_s: float) -> None:
    between.delay_s = LATE_S
    await asyncio.sleep(for_s)
    between.delay_s = 0.0


async def stalls(between: Proxy, for_s: float) -> None:
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        between.stalled = True
        await asyncio.sleep(STALL_S)
        between.stalled = False
        await asyncio.sleep(EVERY_S - STALL_S)


async def half_open(between: Proxy, for_s: float) -> None:
    until_s = time.monotonic() + for_s
    while time.monotonic() < until_s:
        made = between.connections
        between.strand()
        await asyncio.sleep(EVERY_S)
        assert between.connections > made


FAULTS: dict[str, tuple[str, Callable[[Proxy, float], Awaitable[None]]]] = {
    "late": (f"Redis answers {LATE_S * 1000:.0f} ms later", late),
    "stalls": (f"Redis stalls for {STALL_S:g} s each {EVERY_S:g} s", stalls),
    "half-open": (f"every connection to Redis half-open each {EVERY_S:g} s, new ones work", half_open),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_redis_slow(faulty: Callable[..., Any], case: Case, between: Proxy, fault: str) -> None:
    what, inject = FAULTS[fault]
    well_s, ill_s = case.size(2, 20), case.size(5, 60)
    case.describe(f"{what}, for {ill_s} s at {PER_S:g} requests a second")
    async with counted(faulty, between.url, servers=SERVERS, each=EACH, service_s=0.0) as (here, servers):
        # Requests at a steady pace; how long they take without the fault.
        async with paced(here.url, PER_S) as load:
            await here.eventually(lambda: _answered(load, PER_S), what="requests that warm everything up")
            first, quick = len(load.history), await _decisions(here)
            await asyncio.sleep(well_s)
            usual = sorted(record.took_s for record in load.history[first:])
            # Redis has the fault for a while.
            before, since_s = await _decisions(here), time.monotonic()
            await inject(between, ill_s)
            after, until_s = await _decisions(here), time.monotonic()
        ill = [record.took_s for record in load.history if since_s <= record.sent_s < until_s]
        # Each request is answered, none with an error.
        failed = [record for record in load.history if not record.served]
        case.report(f"{len(failed)} of {len(load.history)} answers not 200")
        # Decisions are in time, by the replicas' own clocks.
        median_s = quantile(usual, 0.5)
        slow, decided = after[0] - before[0], after[1] - before[1]
        case.report(f"{slow} of {decided} decisions took longer than {MOST_S * 1000:.0f} ms")
        case.report(f"without the fault {before[0] - quick[0]} of {before[1] - quick[1]}")
        case.report(f"whole requests {format_ms(ill)}, without the fault {format_ms(usual)}")
        case.report(f"less its median {format_ms(took_s - median_s for took_s in ill)}")
        departures = await _departures(here)
        case.report(f"replicas went by themselves {departures} times")
        assert failed == []
        assert departures == 0
        assert slow <= decided * 0.01 or not FULL
        # After the fault the counts are exact.
        await here.eventually(lambda: all_shared(here), within_s=30, what="shared operation")
        await all_at_rest(here, servers)
        assert servers.peak <= SERVERS * EACH


async def _answered(load: Any, count: float) -> bool:
    return len(load.history) >= count


async def _departures(here: Fleet) -> int:
    pages = [(await here.admin("/metrics", replica)).text.splitlines() for replica in REPLICAS]
    found = (line for page in pages for line in page if line.startswith("epp_failover_transitions_total{"))
    return _sum(line for line in found if 'to="local"' in line)


async def _decisions(here: Fleet) -> tuple[int, int]:
    """How many took longer than `MOST_S` so far, and how many there were: all replicas' histograms."""
    pages = [(await here.admin("/metrics", replica)).text.splitlines() for replica in REPLICAS]
    found = [line for page in pages for line in page if line.startswith("epp_decision_latency_seconds_")]
    bucket = [line for line in found if "_bucket{" in line and f'le="{MOST_S:g}"' in line]
    assert bucket
    taken = _sum(line for line in found if "_count{" in line)
    return taken - _sum(bucket), taken


def _sum(lines: Iterable[str]) -> int:
    return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))
