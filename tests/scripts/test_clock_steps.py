"""Redis's clock steps forward and back by up to an hour; the pool's own clock continues steadily."""

import itertools

import pytest
import redis
from direct_calls import START_MS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from timed_server import LEASE_MS, SECOND_MS, SILENCE_MS, TimedPool

EXAMPLES = itertools.count()
HOUR_MS = 3_600_000
TTL_MS = 6_000
STEPS = st.sampled_from([HOUR_MS, -HOUR_MS, 600_000, -600_000, 3_000, -3_000])


@given(steps=st.lists(st.tuples(st.integers(0, 40), STEPS), max_size=6))
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_leases_and_ttls_end_on_time_although_redis_time_steps_by_an_hour(
    client: redis.Redis, steps: list[tuple[int, int]]
) -> None:
    server = TimedPool(client, f"steps-{next(EXAMPLES)}")
    for name in ("alive", "silent"):
        assert server.admit(name)[0] == "placed"
    assert server.admit("waits", ttl_ms=TTL_MS) == ["queued", str(TTL_MS)]
    ended_ms: dict[str, int] = {}
    swept_ms = at = 0
    # Time advances by halves of a second, with some clock steps in between.
    while server.real_ms < 2 * LEASE_MS + 5 * SECOND_MS:
        server.step(sum(by_ms for when, by_ms in steps if when == at))
        at += 1
        server.passes(500)
        if at % 2 == 0:
            assert server.beat()[4] == 1  # 1: the replica still counts as live
            server.renew("alive")
        if server.sweep():
            swept_ms = server.real_ms
        assert server.real_ms - swept_ms < SECOND_MS
        for name in ("silent", "waits"):
            if not server.knows(name):
                ended_ms.setdefault(name, server.real_ms)
    assert TTL_MS - SECOND_MS <= ended_ms["waits"] <= TTL_MS + SECOND_MS
    assert LEASE_MS - SECOND_MS <= ended_ms["silent"] <= 2 * LEASE_MS
    assert server.settle("alive") == "settled m"
    assert server.settle("silent") == "unknown"
    assert server.stock() == 0


@pytest.fixture
def server(client: redis.Redis, pool: str) -> TimedPool:
    return TimedPool(client, pool)


def test_a_heartbeat_advances_the_pools_clock_by_the_time_without_calls(server: TimedPool) -> None:
    # A request waits, and no script is called for ten seconds.
    for name in ("one", "two"):
        server.admit(name)
    assert server.admit("waits", ttl_ms=TTL_MS) == ["queued", str(TTL_MS)]
    server.passes(10_000)
    # A sweep does not move the pool's clock; a heartbeat advances the clock by the elapsed time.
    server.sweep()
    assert server.knows("waits")
    server.beat()
    assert not server.knows("waits")


def test_times_from_the_future_are_clamped_so_that_a_replica_and_a_lease_still_end(server: TimedPool) -> None:
    # A server whose clock was an hour ahead has written a heartbeat and a lease.
    server.admit("runs")
    later_ms = START_MS + HOUR_MS
    server.client.zadd(f"{server.prefix}replicas", {"gone": later_ms})
    server.client.zadd(f"{server.prefix}inflight", {"runs": later_ms + LEASE_MS})
    server.client.hset(f"{server.prefix}pool", "swept_ms", later_ms)
    assert server.beat()[6] == 2  # number of live replicas
    for _ in range(4 * (LEASE_MS + SILENCE_MS) // SECOND_MS):
        server.passes(250)
        server.beat()
        server.sweep()
    assert server.beat()[6] == 1
    assert server.stock() == 0
