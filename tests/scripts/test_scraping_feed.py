"""Redis publishes and stores readings of metrics pages; the clocks of replicas are never compared."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis
from script_fleet import until

from picker_fleet.domain.errors import StateUnavailable
from picker_fleet.endpoints.metrics_channel import MetricsChannel
from picker_fleet.endpoints.readings import EndpointMetrics
from picker_fleet.state.keys import Keys


class Follower:
    """A follower of the channel of readings; records everything that it receives."""

    def __init__(self) -> None:
        self.readings: dict[str, EndpointMetrics] = {}
        self.batches: list[tuple[str | None, Mapping[str, EndpointMetrics]]] = []
        self.suspects: list[str] = []
        self.links = 0

    def take(
        self, sender: str | None, readings: Mapping[str, EndpointMetrics], suspects: Sequence[str]
    ) -> None:
        self.suspects += suspects
        self.batches.append((sender, readings))
        self.readings.update(readings)
        self.links += sender is None


@asynccontextmanager
async def opened(
    url: str, pool: str, replica: str, now_ms: Callable[[], int]
) -> AsyncIterator[MetricsChannel]:
    channel = MetricsChannel(url, pool, replica, now_ms=now_ms, deadline_s=5)
    try:
        yield channel
    finally:
        await channel.close()


@asynccontextmanager
async def following(channel: MetricsChannel) -> AsyncIterator[Follower]:
    """A follower of the Redis channel `channel` that has caught up."""
    follower = Follower()
    task = asyncio.create_task(channel.follow(follower.take, check_s=10))
    try:
        await until(lambda: follower.links == 1)
        yield follower
    finally:
        task.cancel()
        await asyncio.wait((task,), timeout=10)
        assert task.cancelled()


Pair = tuple[MetricsChannel, MetricsChannel]


@asynccontextmanager
async def two_replicas(url: str, pool: str) -> AsyncIterator[Pair]:
    """Two replicas whose clocks differ widely: they show 1000 s and 50 s."""
    async with (
        opened(url, pool, "one", lambda: 1_000_000) as one,
        opened(url, pool, "two", lambda: 50_000) as two,
    ):
        yield one, two


@pytest.fixture
async def pair(valkey_url: str, pool: str) -> AsyncIterator[Pair]:
    async with two_replicas(valkey_url, pool) as pair:
        yield pair


def reading(scraped_ms: int) -> EndpointMetrics:
    return EndpointMetrics(
        scraped_ms, waiting=3.0, interval_ms=100, before_ms=scraped_ms - 100, before_load=2.0,
        kv_utilisation=0.25, max_adapters=2, active_adapters=frozenset({"a"}),
    )  # fmt: skip


def without_times(it: EndpointMetrics) -> EndpointMetrics:
    return replace(it, scraped_ms=0, before_ms=None)


async def test_times_of_received_readings_are_converted_to_the_receiving_replicas_clock(pair: Pair) -> None:
    one, two = pair
    async with following(two) as follower:
        await one.publish({"a:1": reading(999_700)}, ["b:1"])
        await until(lambda: "a:1" in follower.readings)
    assert follower.readings["a:1"] == reading(49_700)
    assert follower.batches[-1][0] == "one"
    assert follower.suspects == ["b:1"]


async def test_a_new_follower_gets_the_stored_readings_aged_by_the_clock_of_redis(pair: Pair) -> None:
    one, two = pair
    await one.publish({"a:1": reading(999_000), "b:1": reading(999_000)})
    await one.publish({"b:1": replace(reading(999_400), waiting=None, fault="no page", failures=3)})
    async with following(two) as follower:
        pass
    # The follower has the newest reading of each endpoint, with an age no less than the real age.
    assert follower.batches[0][0] is None
    assert follower.readings.keys() == {"a:1", "b:1"}
    assert follower.readings["a:1"].scraped_ms <= 49_000
    assert follower.readings["b:1"].scraped_ms <= 49_400
    assert (follower.readings["b:1"].fault, follower.readings["b:1"].failures) == ("no page", 3)
    assert without_times(follower.readings["a:1"]) == without_times(reading(0))


async def test_a_replica_receives_its_own_published_messages_without_readings(pair: Pair) -> None:
    one, _ = pair
    async with following(one) as follower:
        await one.publish({"a:1": reading(999_000)})
        await until(lambda: ("one", {}) in follower.batches)
    assert not follower.readings


async def test_removed_readings_of_endpoints_are_no_longer_stored(pair: Pair) -> None:
    one, two = pair
    await one.publish({"a:1": reading(999_000), "b:1": reading(999_000)})
    await two.remove(["a:1", "unknown:1"])
    await two.remove([])
    assert (await one.stored()).keys() == {"b:1"}


async def test_unreadable_readings_of_endpoints_are_ignored(valkey_url: str, pool: str, pair: Pair) -> None:
    one, two = pair
    name = Keys.of(pool).prefix + "metrics"
    async with Redis.from_url(valkey_url) as redis:
        await redis.hset(name, mapping={"bad:1": "{", b"\xff": '{"at":1}', "wrong:1": '{"at":"x"}'})
        await one.publish({"a:1": reading(999_000)})
        async with following(two) as follower:
            await redis.publish(name, b"\xff")
            await redis.publish(name, '{"from":"three","sent":5,"readings":{"bad:1":7}}')
            await one.publish({"b:1": reading(999_000)})
            await until(lambda: "b:1" in follower.readings)
    assert follower.readings.keys() == {"a:1", "b:1"}
    assert follower.links == 1


async def test_a_reconnected_replica_gets_the_readings_that_it_missed(valkey_url: str, pool: str) -> None:
    async with (
        two_replicas(valkey_url, pool) as (one, two),
        Redis.from_url(valkey_url) as redis,
        following(two) as follower,
    ):
        await redis.client_kill_filter(_type="pubsub")
        await one.publish({"a:1": reading(999_000)})
        await until(lambda: follower.links == 2)
        assert follower.readings.keys() == {"a:1"}


async def test_calls_without_a_redis_server_raise_state_unavailable(pool: str) -> None:
    channel = MetricsChannel("redis://127.0.0.1:1/0", pool, "one", now_ms=lambda: 0)
    for call in (channel.publish({}), channel.remove(["a:1"]), channel.stored()):
        with pytest.raises(StateUnavailable, match="Redis took no metrics"):
            await call
    await channel.close()
