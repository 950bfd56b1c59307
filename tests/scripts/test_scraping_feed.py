"""Readings through Redis: published to followers, stored for new ones, aged without comparing clocks."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from picker_fleet.endpoints.metrics_channel import MetricsChannel
from picker_fleet.endpoints.readings import EndpointMetrics
from picker_fleet.errors import StateUnavailable
from picker_fleet.state.keys import Keys


class Clock:
    """A replica's own clock, ms; it stands still unless moved, and has nothing to do with Redis's."""

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms


class Follower:
    """What a follower received; `until` waits for a condition."""

    def __init__(self) -> None:
        self.readings: dict[str, EndpointMetrics] = {}
        self.batches: list[tuple[str | None, Mapping[str, EndpointMetrics]]] = []
        self.suspects: list[str] = []
        self.links = 0
        self._changed = asyncio.Event()

    def take(
        self, sender: str | None, readings: Mapping[str, EndpointMetrics], suspects: Sequence[str]
    ) -> None:
        self.suspects += suspects
        self.batches.append((sender, readings))
        self.readings.update(readings)
        self._changed.set()

    def link(self) -> None:
        self.links += 1
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                self._changed.clear()
                await self._changed.wait()


@asynccontextmanager
async def opened(url: str, pool: str, replica: str, clock: Clock) -> AsyncIterator[MetricsChannel]:
    channel = MetricsChannel(url, pool, replica, now_ms=clock, deadline_s=5)
    try:
        yield channel
    finally:
        await channel.close()


@asynccontextmanager
async def following(channel: MetricsChannel) -> AsyncIterator[Follower]:
    """A follower that has caught up."""
    follower = Follower()
    task = asyncio.create_task(channel.follow(follower.take, on_subscribed=follower.link, check_s=10))
    try:
        await follower.until(lambda: follower.links == 1)
        yield follower
    finally:
        task.cancel()
        await asyncio.wait((task,), timeout=10)
        assert task.cancelled()


@pytest.fixture
async def pair(redis_url: str, pool: str) -> AsyncIterator[tuple[MetricsChannel, MetricsChannel]]:
    """Two replicas whose clocks are far apart."""
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(opened(redis_url, pool, "one", Clock(1_000_000)))
        two = await stack.enter_async_context(opened(redis_url, pool, "two", Clock(50_000)))
        yield one, two


def reading(scraped_ms: int) -> EndpointMetrics:
    return EndpointMetrics(
        scraped_ms,
        waiting=3.0,
        interval_ms=100,
        before=(scraped_ms - 100, 2.0),
        kv_utilisation=0.25,
        max_adapters=2,
        active_adapters=frozenset({"a"}),
    )


async def test_a_follower_receives_readings_on_its_own_clock(
    pair: tuple[MetricsChannel, MetricsChannel],
) -> None:
    # A follower whose clock is at 50 s.
    one, two = pair
    async with following(two) as follower:
        # When a reading is published that is 300 ms old, by a clock at 1000 s
        await one.publish({"a:1": reading(999_700)}, ["b:1"])
        await follower.until(lambda: "a:1" in follower.readings)
    # It is 300 ms old by the follower's clock as well.
    assert follower.readings["a:1"] == reading(49_700)
    assert follower.batches[-1][0] == "one"
    assert follower.suspects == ["b:1"]


async def test_a_new_follower_catches_up_with_ages_by_redis_clock(
    pair: tuple[MetricsChannel, MetricsChannel],
) -> None:
    # Two batches that nobody has received.
    one, two = pair
    await one.publish({"a:1": reading(999_000), "b:1": reading(999_000)})
    await one.publish({"b:1": replace(reading(999_400), waiting=None, fault="no page", failures=3)})
    # A follower comes.
    async with following(two) as follower:
        pass
    # It knows the newest of each, at least as old as it is.
    assert follower.batches[0][0] is None
    assert follower.readings.keys() == {"a:1", "b:1"}
    assert follower.readings["a:1"].scraped_ms <= 49_000
    assert follower.readings["b:1"].scraped_ms <= 49_400
    assert (follower.readings["b:1"].fault, follower.readings["b:1"].failures) == ("no page", 3)
    assert replace(follower.readings["a:1"], scraped_ms=0, before=None) == replace(reading(0), before=None)


async def test_a_follower_receives_its_own_messages_empty(
    pair: tuple[MetricsChannel, MetricsChannel],
) -> None:
    one, _ = pair
    async with following(one) as follower:
        await one.publish({"a:1": reading(999_000)})
        await follower.until(lambda: ("one", {}) in follower.batches)
    assert not follower.readings


async def test_an_empty_batch_is_a_sign_of_life(pair: tuple[MetricsChannel, MetricsChannel]) -> None:
    one, two = pair
    async with following(two) as follower:
        await one.publish({})
        await follower.until(lambda: ("one", {}) in follower.batches)


async def test_removed_readings_are_gone(pair: tuple[MetricsChannel, MetricsChannel]) -> None:
    # Two stored readings. One is removed.
    one, two = pair
    await one.publish({"a:1": reading(999_000), "b:1": reading(999_000)})
    await two.remove(["a:1", "unknown:1"])
    await two.remove([])
    # The other is left.
    assert (await one.stored()).keys() == {"b:1"}


async def test_pools_do_not_receive_each_others_readings(
    redis_url: str, pair: tuple[MetricsChannel, MetricsChannel]
) -> None:
    one, two = pair
    async with opened(redis_url, "another", "three", Clock(0)) as three, following(two) as follower:
        await three.publish({"z:1": reading(0)})
        await one.publish({"a:1": reading(999_000)})
        await follower.until(lambda: "a:1" in follower.readings)
    assert follower.readings.keys() == {"a:1"}


async def test_unreadable_readings_are_left_out(
    redis_url: str, pool: str, pair: tuple[MetricsChannel, MetricsChannel]
) -> None:
    # A hash and a channel on which others write nonsense.
    one, two = pair
    name = Keys.of(pool).prefix + "metrics"
    async with Redis.from_url(redis_url) as redis:
        await redis.hset(name, mapping={"bad:1": "{", b"\xff": '{"at":1}', "wrong:1": '{"at":"x"}'})
        await one.publish({"a:1": reading(999_000)})
        async with following(two) as follower:
            await redis.publish(name, b"\xff")
            await redis.publish(name, '{"from":"three","sent":5,"readings":{"bad:1":7}}')
            await one.publish({"b:1": reading(999_000)})
            # When it is followed. What can be read is there, and nothing else.
            await follower.until(lambda: "b:1" in follower.readings)
    assert follower.readings.keys() == {"a:1", "b:1"}
    assert follower.links == 1


async def test_a_lost_connection_is_made_again_and_caught_up(valkey_url: str, pool: str) -> None:
    # A follower.
    async with (
        opened(valkey_url, pool, "one", Clock(1_000_000)) as one,
        opened(valkey_url, pool, "two", Clock(50_000)) as two,
        Redis.from_url(valkey_url) as redis,
        following(two) as follower,
    ):
        # Its connection is cut and something is published meanwhile.
        await redis.client_kill_filter(_type="pubsub")
        await one.publish({"a:1": reading(999_000)})
        # It comes back and knows.
        await follower.until(lambda: follower.links == 2)
        assert follower.readings.keys() == {"a:1"}


async def test_a_redis_that_does_not_answer_is_unavailable_and_then_used_again(
    valkey_url: str, pool: str
) -> None:
    # A Redis that stops answering.
    channel = MetricsChannel(valkey_url, pool, "one", now_ms=Clock(1_000_000), deadline_s=0.1)
    async with Redis.from_url(valkey_url) as redis:
        await persist(lambda: channel.publish({"c:1": reading(999_000)}))
        await redis.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
        # It is told something. That fails within the deadline.
        for _ in range(2):
            with pytest.raises(StateUnavailable, match="no answer in time"):
                await channel.publish({"b:1": reading(999_000)})
        # When it answers again. It is told, and replies are not mixed up.
        await redis.execute_command("CLIENT", "UNPAUSE")
        await persist(lambda: channel.publish({"c:1": reading(999_000)}))
        assert replace((await persist(channel.stored))["c:1"], scraped_ms=0, before=None) == replace(
            reading(0), before=None
        )
    await channel.close()


async def persist(call: Callable[[], Awaitable[Any]]) -> Any:
    """The answer to `call`, which a busy machine may need to make again."""
    async with asyncio.timeout(20):
        while True:
            try:
                return await call()
            except StateUnavailable:
                continue


async def test_no_redis_at_all_is_unavailable(pool: str) -> None:
    channel = MetricsChannel("redis://127.0.0.1:1/0", pool, "one", now_ms=Clock(0))
    for call in (channel.publish({}), channel.remove(["a:1"]), channel.stored()):
        with pytest.raises(StateUnavailable, match="Redis took no metrics"):
            await call
    await channel.close()
