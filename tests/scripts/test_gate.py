"""The gate: wake-ups, cancelling in every phase, withdrawal, and answers without admission."""

import asyncio

import pytest
from decision_ledger import events_of
from script_fleet import Fleet, OpenFleet, Replica, addresses, ask, ended, until

from picker_fleet.errors import NoEndpoints
from picker_fleet.request import Endpoint, Placement
from picker_fleet.state.store import Decision

E1, E2 = addresses(2)


def asked(replica: Replica, request_id: str) -> "asyncio.Task[Placement]":
    return asyncio.create_task(replica.gate.admit(ask(request_id), stream_owned=False))


async def waiting(it: Fleet, replica: Replica, request_id: str) -> "asyncio.Task[Placement]":
    """A request that waits in the queue."""
    task = asked(replica, request_id)
    await it.until_logged("queued", request_id)
    return task


async def cancel(task: "asyncio.Task[Placement]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_wake_up_delivers_a_grant_without_a_heartbeat(fleet: OpenFleet) -> None:
    # A replica that listens and waits.
    async with fleet("a", "b", listening=True, full=True) as (it, a, b):
        waiter = await waiting(it, b, "q")
        # When another replica frees the capacity, the waiter is placed.
        await a.settle("runs")
        assert (await waiter).endpoints == (E1,)
        assert b.gate.waiting == 0


async def test_the_heartbeat_delivers_a_grant_whose_wake_up_was_lost(fleet: OpenFleet) -> None:
    # A replica that never hears wake-ups.
    async with fleet("a", "b", full=True) as (it, a, b):
        waiter = await waiting(it, b, "q")
        await a.settle("runs")
        assert b.notifications == []
        # When it beats, its waiter is placed, and nothing is left in its inbox.
        await b.beat()
        assert (await waiter).endpoints == (E1,)
        assert await it.redis.exists(it.keys.prefix + "inbox:b") == 0


async def test_many_waiters_are_served_by_heartbeats_alone(fleet: OpenFleet) -> None:
    # Memberships that beat, and no wake-ups at all.
    config = {
        "leases": {"heartbeat": "50ms"},
        "decision_log": {"enabled": True},
        "request_queue_controller": {"watermark_per_backend": 2},
    }
    async with fleet("a", "b", endpoints=2, joined=config) as (it, a, b):

        async def one(number: int) -> None:
            name = f"r{number}"
            await (a, b)[number % 2].gate.admit(ask(name), stream_owned=False)
            (b, a)[number % 2].gate.settle(ended(name))

        # When more come than fit, all are served.
        await asyncio.gather(*(one(number) for number in range(24)))
        await until(it.at_rest)
        assert (await it.ledger()).ends == {"completed": 24}


async def test_a_client_that_leaves_during_its_admission_leaves_nothing(fleet: OpenFleet) -> None:
    # An admission that has been sent, and whose reply cannot have been read.
    async with fleet("a") as (it, a):
        task = asked(a, "q")
        await asyncio.sleep(0)
        # When its client leaves, the cancel follows the admission.
        await cancel(task)
        await a.beat()
        await until(it.at_rest)
        assert events_of(await it.log(), "q") == ["bypassed", "cancelled"]


async def test_a_client_that_leaves_the_queue_frees_its_place_at_once(fleet: OpenFleet) -> None:
    # One that waits and one behind it.
    async with fleet("a", "b", full=True) as (it, a, b):
        task = await waiting(it, a, "q")
        behind = await waiting(it, a, "behind")
        # When the first leaves, the other is served.
        await cancel(task)
        await a.beat()
        await b.settle("runs")
        await a.beat()
        assert (await behind).endpoints == (E1,)
        assert events_of(await it.log(), "q") == ["queued", "cancelled"]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_client_that_leaves_while_being_placed_leaves_nothing(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    # A granted request whose placement is stopped before it is sent, or before its answer is read.
    async with fleet("a", upper_per=1) as (it, a):
        placing = asyncio.Event()
        real = a.store.place

        async def stopped(request_id: str, attempt: int, subset: tuple[str, ...] | None) -> Decision:
            if when == "after":
                await real(request_id, attempt, subset)
            placing.set()
            await asyncio.Event().wait()
            raise AssertionError

        monkeypatch.setattr(a.store, "place", stopped)
        await a.admit("runs")
        task = await waiting(it, a, "q")
        await a.settle("runs")
        await placing.wait()
        # When its client leaves, all it held is given back.
        await cancel(task)
        await a.beat()
        assert await it.at_rest()
        placed = ["placed"] if when == "after" else []
        assert events_of(await it.log(), "q") == ["queued", "granted", *placed, "cancelled"]
        assert await it.redis.exists(it.keys.prefix + "inbox:a") == 0


async def test_a_withdrawn_placement_is_given_back(fleet: OpenFleet) -> None:
    # With a placement, when it never reaches Envoy, it is given back, once.
    async with fleet("a") as (it, a):
        placement = await a.gate.admit(ask("r"), stream_owned=True)
        a.gate.withdraw("r", placement)
        a.gate.withdraw("r", placement)
        await a.beat()
        assert await it.at_rest()
        assert events_of(await it.log(), "r") == ["bypassed", "withdrawn"]


async def test_a_grant_that_was_lost_is_asked_for_again(fleet: OpenFleet) -> None:
    # A waiter whose granted request is taken away before it is placed.
    async with fleet("a", "b", full=True) as (it, a, b):
        waiter = await waiting(it, a, "q")
        await b.settle("runs")
        await b.settle("q")
        # When it is notified of its grant, it is admitted again.
        a.on_notification("granted", "q")
        assert (await waiter).endpoints == (E1,)
        assert (await it.ledger()).started["q"] == 2


async def test_a_request_that_ends_with_its_headers_gets_an_endpoint_without_admission(
    fleet: OpenFleet,
) -> None:
    # A full stock and one endpoint that drains.
    async with fleet("a", full=True) as (it, a):
        await a.publish(E1, Endpoint(E2, draining=True))
        # When such a request asks, it has a ready endpoint of its subset, and holds nothing.
        assert (await a.gate.route(None)).endpoints == (E1,)
        assert (await a.gate.route((E1, E2))).endpoints == (E1,)
        for subset in ((), (E2,)):
            with pytest.raises(NoEndpoints):
                await a.gate.route(subset)
        assert (await it.counts())[0] == 1


async def test_a_grant_that_nobody_waits_for_is_given_back_at_once(fleet: OpenFleet) -> None:
    # A queue that holds a request of b's that b knows nothing of, and one behind it.
    async with fleet("a", "b", listening=True, full=True) as (it, a, b):
        await b.store.admit(ask("unknown"), 1, "*")
        waiter = await waiting(it, b, "q")
        # When its turn comes, b gives its grant back, and the next is served.
        await a.settle("runs")
        assert (await waiter).endpoints == (E1,)
        assert events_of(await it.log(), "unknown") == ["queued", "granted", "withdrawn"]
        b.gate.settle(ended("q"))
        await until(it.at_rest)


async def test_a_late_notification_of_a_grant_changes_nothing_for_a_running_request(fleet: OpenFleet) -> None:
    # A request that was granted and placed, and is not waited for any more.
    async with fleet("a", "b", full=True) as (it, a, b):
        waiter = await waiting(it, b, "q")
        await a.settle("runs")
        await b.beat()
        await waiter
        # The wake-up of its grant comes late.
        b.gate.on_notification("granted", "q")
        assert await b.store.return_grant("q") == "foreign"
        # It runs on.
        assert (await it.counts())[0] == 1
        b.gate.settle(ended("q"))
        await until(it.at_rest)
