"""While Redis is slow, stalls or has half-open connections, decisions wait and no replica fails over."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from counted_fleet import REPLICAS, all_at_rest, all_shared, counted, departures, format_ms
from fault_case import Case
from fleet_load import answered, one_token, total
from proxy import Proxy
from whole_fleet import Fleet

from picker_tools.load.generator import Load, open_loop, quantile

PER_S = 60.0
SERVERS, EACH = 4, 200.0  # limits so large that no request waits in the queue
BETWEEN = 120  # number of answers between two faults
STALL_S, LATE_S = 1.0, 0.05
# 99 % of decisions take at most this time, a bucket bound of the histogram (`redis.silence` is 1 s).
MOST_S = 2.5


async def late(between: Proxy, load: Load) -> None:
    between.delay_s = LATE_S
    await answered(load, BETWEEN)
    between.delay_s = 0.0


async def stalls(between: Proxy, load: Load) -> None:
    between.stalled = True
    await asyncio.sleep(STALL_S)
    between.stalled = False
    await answered(load, BETWEEN)


async def half_open(between: Proxy, load: Load) -> None:
    made = between.connections
    between.strand()
    await answered(load, BETWEEN)
    assert between.connections > made


FAULTS: dict[str, tuple[str, Callable[[Proxy, Load], Awaitable[None]]]] = {
    "late": (f"Redis answers {LATE_S * 1000:.0f} ms later", late),
    "stalls": (f"Redis stalls for {STALL_S:g} s", stalls),
    "half-open": ("every connection to Redis becomes half-open; new connections work", half_open),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_no_replica_fails_over_while_redis_is_slow(
    faulty: Callable[..., Any], case: Case, between: Proxy, fault: str
) -> None:
    what, inject = FAULTS[fault]
    well, times = 1200, 20
    case.describe(f"{what}, {times} times, {BETWEEN} answers apart, at {PER_S:g} requests a second")
    async with counted(faulty, between.url, servers=SERVERS, each=EACH, service_s=0.0) as (here, servers):
        # At a steady rate of requests, first measure the response times without the fault.
        async with open_loop(here.url, PER_S, one_token) as load:
            await answered(load, 60)  # number of requests that warm up the fleet
            first, quick = len(load.history), await _decisions(here)
            await answered(load, well)
            usual = sorted(record.took_s for record in load.history[first:])
            before, since_s = await _decisions(here), time.monotonic()
            for _ in range(times):
                await inject(between, load)
            after, until_s = await _decisions(here), time.monotonic()
        ill = [record.took_s for record in load.history if since_s <= record.sent_s < until_s]
        failed = [record for record in load.history if not record.served]
        case.report(f"{len(failed)} of {len(load.history)} answers not 200")
        # The replicas' histograms show that 99 % of decisions took at most MOST_S.
        median_s = quantile(usual, 0.5)
        slow, decided = after[0] - before[0], after[1] - before[1]
        case.report(f"{slow} of {decided} decisions took longer than {MOST_S * 1000:.0f} ms")
        case.report(f"slow decisions without the fault: {before[0] - quick[0]} of {before[1] - quick[1]}")
        case.report(f"whole requests {format_ms(ill)}, without the fault {format_ms(usual)}")
        case.report(f"whole requests minus usual median {format_ms(took_s - median_s for took_s in ill)}")
        alone = await departures(here)
        case.report(f"replicas failed over to local admission {alone} times")
        assert failed == []
        assert alone == 0
        assert slow <= decided * 0.01
        # After the faults every count of requests returns to 0; requests in flight never exceeded the bound.
        await here.eventually(lambda: all_shared(here), within_s=30, what="shared operation")
        await all_at_rest(here, servers)
        assert servers.peak <= SERVERS * EACH


async def _decisions(here: Fleet) -> tuple[int, int]:
    """The numbers of decisions slower than `MOST_S` and of all decisions, by all replicas' histograms."""
    pages = [(await here.admin("/metrics", replica)).text for replica in REPLICAS]
    name = "epp_decision_latency_seconds"
    assert all(f'le="{MOST_S:g}"' in page for page in pages)
    taken = sum(total(page, f"{name}_count") for page in pages)
    in_time = sum(total(page, f"{name}_bucket", le=f"{MOST_S:g}") for page in pages)
    return int(taken - in_time), int(taken)
