"""Replicas rebuild a lost shared state, and a replayed accounting token restores nothing."""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import redis
from decision_ledger import events_of, order_of
from script_fleet import Fleet, OpenFleet, addresses, ask, config, ended, until
from timed_server import LEASE_MS, SECOND_MS, SILENCE_MS, TimedPool

from picker_fleet.domain.errors import StateUnavailable
from picker_fleet.domain.request import Placement
from picker_fleet.state import accounting_token
from picker_fleet.state.replies import AnyVerdict

# With two endpoints at most 4 requests are in flight, and dispatch needs a stock below 3.6 requests.
CONFIG = config(2)
# A long heartbeat interval, so that the test decides when a replica sends heartbeats.
SLOW = config(2, "2s")


async def filled(
    it: Fleet, streams: int, waiters: int
) -> "tuple[list[Placement], list[asyncio.Task[Placement]]]":
    """Start `streams` streams, then queue `waiters` requests, spread in turn over the replicas."""
    gates = [replica.gate for replica in it.replicas]
    running = [await gates[i % len(gates)].admit(ask(f"s{i}"), stream_owned=True) for i in range(streams)]
    waiting = []
    for i in range(waiters):
        waiting.append(asyncio.create_task(gates[i % len(gates)].admit(ask(f"q{i}"), stream_owned=False)))
        await it.until_queued(i + 1)
    return running, waiting


async def all_served(it: Fleet, streams: int, waiting: "Sequence[asyncio.Task[Placement]]") -> None:
    """End the streams, serve and end each waiting request, and wait until the fleet is at rest."""
    (first, *_) = it.replicas

    async def served(name: str, task: "asyncio.Task[Placement]") -> None:
        await task
        first.gate.settle(ended(name))

    for number in range(streams):
        first.gate.settle(ended(f"s{number}"))
    await asyncio.gather(*(served(f"q{number}", task) for number, task in enumerate(waiting)))
    await until(it.at_rest)


async def until_accounted(it: Fleet, count: int) -> None:
    """Wait until `count` requests are in flight or queued."""

    async def are_accounted() -> bool:
        stock, queued, loads = await it.counts()
        return stock + queued == count and sum(loads) <= stock

    await until(are_accounted)


async def test_a_pause_between_two_registrations_does_not_reverse_their_order(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet("a", endpoints=2, joined=CONFIG) as (it, a):
        _, waiting = await filled(it, 4, 5)
        real = a.store.admit

        def paused(*of_it: Any) -> asyncio.Future[AnyVerdict]:
            time.sleep(0.1)  # a pause longer than the time between two arrivals
            return real(*of_it)

        monkeypatch.setattr(a.store, "admit", paused)
        await it.redis.flushall()
        await until_accounted(it, 9)
        await all_served(it, 4, waiting)
        assert order_of(await it.log()) == [f"q{i}" for i in range(5)]


async def test_streams_are_registered_before_waiting_requests_when_redis_is_slow(fleet: OpenFleet) -> None:
    async with fleet("a", endpoints=2) as (it, a):
        _, waiting = await filled(it, 4, 5)
        await it.redis.flushall()
        await a.publish(*addresses(2))
        await a.beat()
        # The replica registers its requests again while Redis delays writing calls by 0.1 s.
        await it.redis.client_pause(100, all=False)
        asked = asyncio.create_task(a.store.notifications())
        await asyncio.sleep(0)
        assert await a.gate.queue.register_again()
        await asked
        assert await it.counts() == (4, 5, [2, 2])
        for task in waiting:
            task.cancel()


async def test_an_arrival_after_a_flush_makes_its_replica_publish_at_once(fleet: OpenFleet) -> None:
    # The shared state is lost between two heartbeats, which are two seconds apart.
    async with fleet("a", endpoints=2, joined=SLOW) as (it, a):
        await it.redis.flushall()
        assert (await a.gate.admit(ask("r"), stream_owned=False)).endpoints
        assert (await it.counts())[0] == 1


async def test_a_later_heartbeat_registers_waiting_requests_whose_registration_failed(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first attempts to register the waiting requests after a flush fail.
    async with fleet("a", endpoints=1, joined=CONFIG) as (it, a):
        _, waiting = await filled(it, 2, 3)
        real = a.store.admit
        failures = [StateUnavailable("gone again") for _ in range(3)]

        def failing(*of_it: Any) -> asyncio.Future[AnyVerdict]:
            if not failures:
                return real(*of_it)
            answer: asyncio.Future[AnyVerdict] = asyncio.get_running_loop().create_future()
            answer.set_exception(failures.pop())
            return answer

        monkeypatch.setattr(a.store, "admit", failing)
        await it.redis.flushall()
        await until_accounted(it, 5)
        assert not failures
        await all_served(it, 2, waiting)


async def test_a_replica_that_counted_as_silent_registers_its_requests_again(fleet: OpenFleet) -> None:
    async with fleet("a", endpoints=1, joined=CONFIG) as (it, _):
        _, (waiter,) = await filled(it, 2, 1)
        await it.redis.zadd(it.keys.replicas, {"a": 1})

        async def held_again() -> bool:
            return events_of(await it.log(), "q0")[-1] in ("adopted", "queued")

        await until(held_again)
        await all_served(it, 2, (waiter,))
        assert waiter.result().endpoints == addresses(1)


async def test_only_the_replica_with_the_lowest_name_publishes(fleet: OpenFleet) -> None:
    # Two replicas have the same configuration; the replica with the lowest name publishes (the leader).
    async with fleet("a", "b", endpoints=2, joined=CONFIG) as (_, a, b):
        await until(lambda: len(b.cell.current.endpoints) == 2)
        # If only replica b discovers a change, the published endpoints do not change.
        b.membership.discovered([])
        before = b.membership.pulse
        await until(lambda: b.membership.pulse is not before)
        assert len(b.cell.current.endpoints) == 2
        a.membership.discovered([a.cell.current.endpoints[0]])
        await until(lambda: len(a.cell.current.endpoints) == len(b.cell.current.endpoints) == 1)
        await a.membership.leave(5)
        await until(lambda: b.cell.current.endpoints == ())
        assert b.membership.pulse.leader


ENDPOINT = "e:1"
TOKEN = accounting_token.write(ask("r"), ENDPOINT)
WINDOW_MS = LEASE_MS + 10_000  # so long after a loss, all running requests have been reported
HOUR_MS = 3_600_000


@pytest.fixture
def server(client: redis.Redis) -> Iterator[TimedPool]:
    client.flushdb()
    server = TimedPool(client, "replayed")
    assert settled(server)
    yield server
    client.flushdb()


def settled(server: TimedPool) -> bool:
    """Let more than WINDOW_MS pass without a loss. Return whether an accounting token restores nothing."""
    server.calm(WINDOW_MS + SECOND_MS)
    return server.report("nobody", TOKEN) == "unknown"


def test_an_ended_requests_accounting_token_restores_nothing_unless_state_was_lost(server: TimedPool) -> None:
    server.admit("r")
    assert server.report("r", TOKEN) == "renewed"
    assert server.settle("r") == "settled m"
    for _ in range(10):
        assert server.report("r", TOKEN) == "unknown"
        server.calm(10 * SECOND_MS)
    # The replica that owns the stream can restore the request at any time.
    assert server.report("r", TOKEN, attempt="1") == "restored"


def test_a_request_reclaimed_without_reports_is_restored_by_a_late_renewal(server: TimedPool) -> None:
    server.admit("r")
    server.calm(LEASE_MS + SECOND_MS)
    assert server.sweep()
    assert not server.knows("r")
    server.calm(HOUR_MS // 2)
    assert server.report("r", TOKEN) == "restored"
    assert server.settle("r") == "settled llama"
    assert server.report("r", TOKEN) == "unknown"


def test_a_reclaimed_request_can_be_restored_until_its_end_or_for_an_hour(server: TimedPool) -> None:
    for name in ("ends", "stays"):
        server.admit(name)
    server.calm(LEASE_MS + SECOND_MS)
    assert server.sweep()
    # The end of request `ends` is reported after all, which stores a tombstone.
    assert server.settle("ends") == "unknown"
    server.call("tombstone", "a", "ends", "0")
    server.calm(WINDOW_MS + SECOND_MS)
    assert server.report("ends", TOKEN) == "unknown"
    # Request `stays` can no longer be restored an hour later.
    server.calm(HOUR_MS)
    assert server.sweep()
    assert server.report("stays", TOKEN) == "unknown"
    assert not server.client.exists(f"{server.prefix}unheard")


def test_a_damaged_record_is_restored_from_the_accounting_token_of_its_request(server: TimedPool) -> None:
    server.admit("r")
    server.client.hset(f"{server.prefix}requests", "r", "damaged")
    assert server.report("r", TOKEN) == "restored"


def lose_everything(server: TimedPool) -> None:
    server.flush()
    server.publish_endpoint()


def fail_over(server: TimedPool) -> None:
    """Simulate a failover of Redis: the new primary lacks the last writes, and replicas miss it for 20 s."""
    server.lose("r", "late")
    server.load(server.library)  # this call clears the library's cached state
    server.passes(20 * SECOND_MS)


@pytest.mark.parametrize("happen", [lose_everything, fail_over])
def test_after_a_loss_running_requests_can_be_restored_for_a_limited_time(
    server: TimedPool, happen: Callable[[TimedPool], None]
) -> None:
    for name in ("r", "late"):
        server.admit(name)
    happen(server)
    server.beat()
    # A report restores a request, but not after WINDOW_MS, when all running requests have been reported.
    assert server.report("r", TOKEN) == "restored"
    server.calm(WINDOW_MS + SECOND_MS)
    assert server.report("late", TOKEN) == "unknown"


def test_after_a_silence_of_the_whole_fleet_renewals_restore_requests(server: TimedPool) -> None:
    # The fleet's only replica could not reach the server for longer than the silence limit.
    server.passes(2 * SILENCE_MS)
    server.beat()
    assert server.report("r", TOKEN) == "restored"
    # The first heartbeat of a new replica does not start another window for restores.
    assert settled(server)
    server.call("heartbeat", "new", "{}", SILENCE_MS, "")
    assert server.report("other", TOKEN) == "unknown"


def test_a_request_started_without_redis_is_restored_for_a_lease_by_any_replica(server: TimedPool) -> None:
    # One replica has lost Redis and starts requests locally.
    token = accounting_token.write(ask("r"), ENDPOINT, alone_ms=server.now_ms())
    # If the access log reports the request to another replica in time, the request is restored.
    server.calm(5 * SECOND_MS)
    assert server.report("r", token) == "restored"
    # An ended request with a tombstone is not restored, nor is a request first reported after WINDOW_MS.
    assert server.settle("r") == "settled llama"
    server.call("tombstone", "a", "r", "0")
    assert server.report("r", token) == "unknown"
    server.calm(WINDOW_MS)
    assert server.report("other", token) == "unknown"
