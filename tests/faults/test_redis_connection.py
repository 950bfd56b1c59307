"""Network faults between replicas and Redis: delays, stalls, lost messages, half-open connections."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from background import running as background
from fault_load import HANGS_S, JOINED, UPPER, admit_all, loaded, rests_within_a_lease, settle_all
from proxy import LOOPBACK, Proxy
from redis_servers import Server
from script_fleet import Fleet, running, until

from picker_fleet.domain.errors import StateUnavailable
from picker_fleet.endpoints.metrics_channel import MetricsChannel
from picker_fleet.scheduling.route_stream import RouteStream
from picker_fleet.state.keys import Keys
from picker_fleet.state.replies import name_of
from picker_fleet.state.subscriptions import listen

SHORT_S = 0.3


@pytest.fixture
async def hasty(redis7: Server, between: Proxy, pool: str) -> AsyncIterator[Fleet]:
    """Two replicas; `a` reaches Redis through the proxy, and declares Redis lost after SHORT_S of silence."""
    how = {"through": {"a": between.url}, "silence_s": SHORT_S}
    async with running(redis7.url, pool, "a", "b", joined=JOINED, listening=True, **how) as it:
        yield it


async def test_every_count_returns_to_zero_after_redis_stalls(hasty: Fleet, between: Proxy) -> None:
    # The connections of replica `a` stall for longer than `redis.silence`.
    a = hasty.replicas[0]
    async with loaded(hasty) as load:
        for _ in range(3):
            await load.served_more(20)
            lost = len(a.lost)
            between.stalled = True
            await until(lambda lost=lost: len(a.lost) > lost)
            between.stalled = False
        await load.served_more(20)
    # The replica detects each stall as silence. Because of a message that Redis receives late, an ended
    # request may stay counted as in flight, but only until the request's lease ends.
    assert set(a.lost) == {"silence"}
    assert load.highest <= UPPER
    await rests_within_a_lease(hasty)


async def test_a_grant_whose_wake_up_was_lost_does_not_wait_for_the_heartbeat(
    between: Proxy, pool: str
) -> None:
    # A request waits at replica `b`, which gets no wake-ups and sends a heartbeat every 30 s.
    between.drop_messages = True
    slow = {**JOINED, "leases": {"heartbeat": "30s", "replica_silence": "60s"}}
    async with running(between.url, pool, "a", "b", joined=slow, listening=True) as it:
        a, b = it.replicas
        await admit_all(a, *(f"runs{number}" for number in range(UPPER)))
        waiting = asyncio.create_task(admit_all(b, "waits"))
        await it.until_queued(1)
        # Once the pool has room, the request is placed without a wake-up.
        settle_all(a, "runs0")
        async with asyncio.timeout(15):
            await waiting
        assert between.dropped >= 1
        settle_all(a, "runs1", "runs2", "runs3")
        settle_all(b, "waits")
        await rests_within_a_lease(it)


async def test_a_half_open_connection_is_replaced_without_a_failover(patient: Fleet, between: Proxy) -> None:
    # The replica's connection is half-open, while new connections work.
    (a,) = patient.replicas
    await a.admit("before")
    epoch = a.store.connection_epoch
    between.strand()
    # The replica gets its answer long before `redis.silence` has passed.
    async with asyncio.timeout(HANGS_S):
        assert name_of(await a.admit("stuck")) == "placed"
    assert a.store.connection_epoch == epoch + 1
    assert a.lost == []
    await a.settle("before", "stuck")
    assert await patient.at_rest()


async def test_a_replica_declares_redis_lost_if_new_connections_close(patient: Fleet, between: Proxy) -> None:
    # The replica's connection breaks, and the proxy closes every new connection at once.
    (a,) = patient.replicas
    between.refusing = True
    between.cut()
    # The replica declares Redis lost at once, without a call in flight.
    await until(lambda: a.lost)
    assert set(a.lost) == {"refused"}
    # Once new connections stay open, the replica counts Redis as available.
    between.refusing = False
    await until(lambda: a.store.fault is None)
    assert name_of(await a.admit("r")) == "placed"
    await a.settle("r")
    assert await patient.at_rest()


async def test_calls_wait_while_redis_stalls_for_less_than_the_silence_limit(
    patient: Fleet, between: Proxy
) -> None:
    # Redis stalls on existing and new connections.
    (a,) = patient.replicas
    made, between.stalled = between.connections, True
    asked = asyncio.create_task(a.admit("r"))
    await until(lambda: between.connections > made)
    assert not asked.done()
    between.stalled = False
    # The caller gets the answer to its call, and the replica never declares Redis lost.
    assert name_of(await asked) == "placed"
    assert (a.lost, a.store.fault) == ([], None)
    await a.settle("r")
    assert await patient.at_rest()


async def test_a_subscriber_resubscribes_after_its_server_vanished(
    redis7: Server, between: Proxy, pool: str
) -> None:
    received: list[str] = []
    channel = Keys.of(pool).wake("a")
    listening = listen(
        between.url, channel, lambda notification: received.append(notification.request_id), check_s=SHORT_S
    )
    async with background(listening):
        await until(lambda: redis7.ask("PUBLISH", channel, "granted one"))
        await until(lambda: received == ["one"])
        between.vanished = True
        made = between.connections
        await until(lambda: between.connections > made)
        # After reconnecting, the subscriber gets messages again.
        between.vanished = False
        between.cut()
        await until(lambda: redis7.ask("PUBLISH", channel, "granted two") and received[-1] == "two")


async def test_interrupted_wake_ups_are_logged_once_despite_many_failed_connections(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts = 0

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal attempts
        attempts += 1
        writer.close()

    async with await asyncio.start_server(close, LOOPBACK, 0) as server:
        url = f"redis://{LOOPBACK}:{server.sockets[0].getsockname()[1]}/0"
        async with background(listen(url, "channel", lambda *_: None)):
            await until(lambda: attempts >= 3)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["wake-ups interrupted"]


async def test_route_and_metrics_streams_reconnect_after_redis_vanished(between: Proxy, pool: str) -> None:
    url, clock = between.url, asyncio.get_running_loop().time
    routes = RouteStream(url, stream=Keys.of(pool).routes, replica="a")
    routes.share()
    readings = MetricsChannel(url, pool, "a", now_ms=lambda: int(clock() * 1000), deadline_s=5.0)
    links: list[float] = []
    following = readings.follow(lambda sender, *_: sender or links.append(clock()), check_s=SHORT_S)
    async with background(routes.run(), following):
        await routes.caught_up.wait()
        await until(lambda: links)
        # The server vanishes, and both streams open new connections.
        made = between.connections
        between.vanished = True
        await until(lambda: between.connections >= made + 2)
        with pytest.raises(StateUnavailable):
            await readings.publish({})
        known = len(links)
        between.vanished = False
        between.cut()
        await until(lambda: len(links) > known)
        await readings.publish({})
    await readings.close()
