"""Hours and days of a fleet's life in seconds: quiet, light load, and queues that come and go.

`TIME_LAPSE_DAYS=7` runs the long form: a week in each mode, with one replica and with three.
"""

import asyncio
import logging
import math
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import redis
from redis_servers import Server
from time_lapse import Fleet, TimeLapseLoop, fleet, time_lapse

from picker_fleet.endpoints import scraper
from picker_fleet.failover import gate
from picker_fleet.state import connection

DAYS = float(os.environ.get("TIME_LAPSE_DAYS", "0"))
HOUR_S, DAY_S = 3600.0, 86400.0
SERVICE_S = 2.0
BOUND = 4  # of the two model servers
# A week has as many intervals of a minute as half a day has of five seconds: durations are 12 times as long.
SLOW: dict[str, Any] = {
    "leases": {
        "inflight": "180s", "access_log_interval": "60s", "replica_silence": "60s", "adoption_grace": "36s",
        "heartbeat": "12s",
    },
    "request_queue_controller": {"expiry_cleanup_interval": "12s"},
    "redis": {"silence": "12s"},
    "scraping": {"interval": "60s"},
}  # fmt: skip
MEMORY_SLACK_BYTES = 4 * 1024 * 1024

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture
def slow_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals that no setting has are 12 times as long, too."""
    probes = (scraper, "PROBE_S"), (scraper, "REST_PROBE_S")
    for module, name in ((connection, "TICK_S"), (gate, "_TICK_S"), *probes):
        monkeypatch.setattr(module, name, 12 * getattr(module, name))


@pytest.fixture
def lapse(valkey: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[TimeLapseLoop]:
    with time_lapse(valkey.url, monkeypatch) as loop:
        yield loop


async def light_load(some: Fleet, seconds: float, every_s: float) -> None:
    """One request at a time, which no other waits for."""
    until_s = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < until_s:
        await some.ask(SERVICE_S)
        await asyncio.sleep(every_s)


async def at_rest(some: Fleet, client: redis.Redis) -> None:
    """Nothing is counted that is not there, and every figure is within its range."""
    await asyncio.sleep(60.0)
    for replica in some.replicas:
        parts = replica.pool.parts
        assert parts.failover.outage is None
        state = await parts.store.state(60.0)
        assert (state.stock, state.queued, state.leases, state.overdue) == (0, 0, 0, 0)
        assert set(state.in_flight.values()) <= {0}
        assert set(state.queue_bytes.values()) == {0}
        assert 0 <= state.guard_credit <= 1.1
        assert 0 <= state.drain_rate < 100
        assert 1 <= state.retry_after_s <= 60
        assert 1 <= parts.shared.retry_after_s <= 60
        assert all(0 <= tag < 2**53 for tag in state.virtual_times.values())
        assert len(state.replicas) == len(some.replicas)
        assert parts.shared.places_are_awaited is False
    prefix = "epp:{default}:"
    for name in ("requests", "inflight", "timers", "overdue", "limits", "suspects", "blockers"):
        assert not client.exists(prefix + name), name
    assert not list(client.scan_iter(f"{prefix}queue:*"))
    for name in client.scan_iter(f"{prefix}finish:*"):
        assert client.zcard(name) <= 1


def checked(
    lapse: TimeLapseLoop, caplog: pytest.LogCaptureFixture, life: Coroutine[Any, Any, None], within_s: float
) -> None:
    """Live `life`, which takes at most so long by its own clock; nothing fails, and no background task."""
    lapse.run_until_complete(asyncio.wait_for(life, within_s))
    loud = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert loud == []
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize(("mode", "replicas"), [("lean", 3), ("standard", 1), ("http", 1)])
def test_a_fleet_that_queued_once_serves_a_light_load_on(
    mode: str, replicas: int, valkey: Server, lapse: TimeLapseLoop, caplog: pytest.LogCaptureFixture
) -> None:
    async def life() -> None:
        async with fleet(valkey.url, mode, replicas, {}) as some:
            await some.burst(3 * BOUND, SERVICE_S)
            # Halved by each of 1200 sweeps, the drain rate would become so small that quotients overflow.
            await light_load(some, 20 * 60.0, every_s=30.0)
            assert (await some.replicas[0].pool.parts.store.state(60.0)).drain_rate == 0
            with redis.Redis.from_url(valkey.url) as client:
                await at_rest(some, client)

    checked(lapse, caplog, life(), within_s=HOUR_S)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as figures:
        return int(figures.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.usefixtures("slow_ticks")
@pytest.mark.skipif(not DAYS, reason="the long form: TIME_LAPSE_DAYS=7")
@pytest.mark.timeout(6 * HOUR_S)
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("mode", ["lean", "standard", "http"])
def test_a_week_leaves_nothing_behind(
    mode: str,
    replicas: int,
    valkey: Server,
    lapse: TimeLapseLoop,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def life() -> None:
        memory: list[tuple[int, int]] = []
        async with fleet(valkey.url, mode, replicas, SLOW) as some:
            with redis.Redis.from_url(valkey.url) as client:
                for quarter in range(math.ceil(4 * DAYS)):
                    if quarter // 4 % 2:  # every other day is quiet
                        await some.ask(SERVICE_S)
                        await asyncio.sleep(DAY_S / 4)
                    else:
                        await some.burst(10 * BOUND, SERVICE_S)
                        await some.burst(BOUND, 400.0)  # longer than a lease
                        await light_load(some, HOUR_S, every_s=20.0)
                        await asyncio.sleep(4 * HOUR_S)
                    await at_rest(some, client)
                    memory.append((int(client.info("memory")["used_memory"]), resident_bytes()))
        for first, last in zip(memory[len(memory) // 4], memory[-1], strict=True):
            assert last - first < MEMORY_SLACK_BYTES, memory

    checked(lapse, caplog, life(), within_s=2 * DAYS * DAY_S)
