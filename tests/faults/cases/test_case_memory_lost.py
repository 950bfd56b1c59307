"""Redis repeatedly loses all scripts, or all data (G6, G8)."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from case_fleet import KEYS, LEASE_S, REAP_S, TERMS, config, rests, sent
from fault_case import TTFT_MS, Case
from redis.asyncio import Redis

from picker_tools.load.generator import Answer, closed_loop

OPTIONS = ("--sim-ttft", TTFT_MS, "--sim-itl", "10")
EVERY_S = 0.1


async def test_no_request_fails_while_redis_loses_its_scripts(faulty: Callable[..., Any], case: Case) -> None:
    flushes = case.size(30, 600)
    case.describe(f"FUNCTION FLUSH and SCRIPT FLUSH every 100 ms, {flushes} times")
    # On a busy machine, retried calls may take longer than the suite's short lease.
    here = faulty(*OPTIONS, config=config(lease_s=10))
    async with here.redis() as redis, closed_loop(here.url, clients=30) as load:
        await load.wait_for_served(30)
        # Delete the function library and all scripts ten times a second.
        for _ in range(flushes):
            await redis.function_flush()
            await redis.script_flush()
            await asyncio.sleep(EVERY_S)
    # No client gets an error, and the decision log breaks no promise.
    case.all_served(load)
    await rests(here)
    await case.check(here, load.history)


@pytest.mark.short_form("http")
async def test_running_requests_are_counted_after_a_flushall(faulty: Callable[..., Any], case: Case) -> None:
    flushes = case.size(1, 15)
    case.describe(f"FLUSHALL under load, {flushes} times")
    # Long streams run while other clients send short requests.
    here = faulty(*OPTIONS, config=config())
    histories: list[Answer] = []
    rebuilt_s: list[float] = []
    async with Redis.from_url(here.state["redis"]) as redis, closed_loop(here.url, clients=30) as load:
        for _ in range(flushes):
            streams = [sent(here, "long", 1000, streamed=True) for _ in range(6)]
            await load.wait_for_served(60)
            running = await here.eventually(lambda: _longest(redis), what="the streams' leases")
            await redis.flushall()
            since = time.monotonic()
            # Redis counts every stream again within a lease and one sweep.
            await here.eventually(
                lambda: _placed(redis), running.issubset, within_s=LEASE_S + REAP_S, what="a rebuilt state"
            )
            rebuilt_s.append(time.monotonic() - since)
            histories += await asyncio.gather(*streams)
    case.report(f"all running requests counted again within {max(rebuilt_s):.1f} s ({TERMS})")
    failed = [*load.unserved, *(record for record in histories if not record.served)]
    case.report(f"{len(failed)} errors in {len(load.history) + len(histories)} requests")
    assert failed == []
    await rests(here)
    found = await case.check(here, [*load.history, *histories], log_lost=True)
    case.report(f"highest stock {found.highest_stock:g} of 16 after the last FLUSHALL")


async def _placed(redis: Any) -> set[bytes]:
    return set(await redis.zrange(KEYS.prefix + "inflight", 0, -1))


async def _longest(redis: Any) -> set[bytes]:
    """Ids of the six long streams once all are placed, else empty. All other requests have flows named
    `flow-…`."""
    records = await redis.hgetall(KEYS.prefix + "requests")
    placed = await _placed(redis)
    found = {request for request, record in records.items() if request in placed and b"flow-" not in record}
    return found if len(found) == 6 else set()
