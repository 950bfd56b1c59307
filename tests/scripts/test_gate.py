"""Admission through Redis: wake-ups, cancellation in every phase, withdrawal; routing without admission."""

import asyncio
from typing import Any

import pytest
from decision_ledger import events_of
from script_fleet import Fleet, OpenFleet, addresses, ask, asked, until, until_is, waiting

from picker_fleet.domain.errors import NoEndpoints
from picker_fleet.domain.request import Endpoint, Placement
from picker_fleet.state.replies import AnyVerdict, Notification, Verdict

E1, E2 = addresses(2)


async def until_acknowledged(it: Fleet) -> None:
    await until_is(lambda: it.has("inbox:b"), False)


async def cancel(task: "asyncio.Task[Placement]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_heartbeat_delivers_a_grant_whose_wake_up_was_lost(fleet: OpenFleet) -> None:
    # Replica `b` receives no wake-ups.
    async with fleet("a", "b", full=True) as (it, a, b):
        waiter = await waiting(it, b, "q")
        await a.settle("runs")
        assert b.notifications == []
        await b.beat()
        assert (await waiter).endpoints == (E1,)
        assert not await it.has("inbox:b")


async def test_a_client_that_disconnects_during_admission_leaves_no_state(fleet: OpenFleet) -> None:
    # An admission has been sent, and the reply to this admission cannot have been read yet.
    async with fleet("a") as (it, a):
        task = asked(a, "q")
        await asyncio.sleep(0)
        # The client disconnects: the replica sends a cancel after the admission.
        await cancel(task)
        await a.beat()
        await until(it.at_rest)
        assert events_of(await it.log(), "q") == ["bypassed", "cancelled"]


async def test_a_request_whose_client_is_reported_gone_becomes_a_suspect_once_placed(
    fleet: OpenFleet,
) -> None:
    # An access-log entry tells replica `a` that the client has gone, before the owner `b` notices this.
    async with fleet("a", "b", full=True) as (it, a, b):
        waiter = await waiting(it, b, "q")
        a.gate.suspect("q")
        # Meanwhile the request is placed: the endpoint's next metrics pages decide whether the request runs.
        await a.settle("runs")
        await b.beat()
        await waiter
        await until(lambda: it.has("suspects"))


async def test_a_request_whose_client_disconnects_leaves_the_queue_at_once(fleet: OpenFleet) -> None:
    async with fleet("a", "b", full=True) as (it, a, b):
        task = await waiting(it, a, "q")
        behind = await waiting(it, a, "behind")
        await cancel(task)
        await a.beat()
        await b.settle("runs")
        await a.beat()
        assert (await behind).endpoints == (E1,)
        assert events_of(await it.log(), "q") == ["queued", "cancelled"]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_client_that_disconnects_during_placement_leaves_no_state(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    # The request is granted; the call `place` stops before it is sent, or before its reply is read.
    async with fleet("a", upper_per=1) as (it, a):
        placing = asyncio.Event()
        real = a.store.place

        def stopped(*of_it: Any) -> asyncio.Future[AnyVerdict]:
            if when == "after":
                real(*of_it).add_done_callback(lambda _: placing.set())
            else:
                placing.set()
            return asyncio.get_running_loop().create_future()

        monkeypatch.setattr(a.store, "place", stopped)
        await a.admit("runs")
        task = await waiting(it, a, "q", subset=(E1,))  # with candidates `*` the grant would place q, too
        await a.settle("runs")
        await placing.wait()
        await cancel(task)
        await a.beat()
        assert await it.at_rest()
        placed = ["placed"] if when == "after" else []
        assert events_of(await it.log(), "q") == ["queued", "granted", *placed, "cancelled"]
        assert not await it.has("inbox:a")


async def test_a_placement_that_is_withdrawn_twice_is_released_once(fleet: OpenFleet) -> None:
    async with fleet("a") as (it, a):
        placement = await a.gate.admit(ask("r"), stream_owned=True)
        a.gate.withdraw("r", placement)
        a.gate.withdraw("r", placement)
        await a.beat()
        assert await it.at_rest()
        assert events_of(await it.log(), "r") == ["bypassed", "withdrawn"]


async def test_a_waiting_request_whose_granted_record_is_lost_is_admitted_again(fleet: OpenFleet) -> None:
    async with fleet("a", "b", full=True) as (it, a, b):
        waiter = await waiting(it, a, "q")
        await b.settle("runs")
        await b.settle("q")
        a.notified(Notification("q", Verdict.GRANTED))
        assert (await waiter).endpoints == (E1,)
        assert (await it.ledger()).started["q"] == 2


async def test_a_request_without_a_body_gets_an_endpoint_without_admission(fleet: OpenFleet) -> None:
    async with fleet("a", full=True) as (it, a):
        await a.publish(E1, Endpoint(E2, draining=True))
        assert a.route(None) == (E1,)
        assert a.route((E1, E2)) == (E1,)
        for subset in ((), (E2,)):
            with pytest.raises(NoEndpoints):
                a.route(subset)
        assert (await it.counts())[0] == 1


@pytest.mark.parametrize("candidates", [E1, "*"], ids=["granted", "placed"])
async def test_a_replica_returns_a_grant_for_an_unknown_request(fleet: OpenFleet, candidates: str) -> None:
    # Redis queues a request for replica `b` that `b` itself does not know, and another request behind it.
    async with fleet("a", "b", listening=True, full=True) as (it, a, b):
        await b.store.admit(ask("unknown"), "1", candidates)
        waiter = await waiting(it, b, "q")
        await a.settle("runs")
        assert (await waiter).endpoints == (E1,)
        placed = ["placed"] if candidates == "*" else []
        assert events_of(await it.log(), "unknown") == ["queued", "granted", *placed, "withdrawn"]
        await it.ends(b, "q")


async def test_the_call_that_grants_a_request_also_picks_its_endpoint_if_all_endpoints_may_serve_it(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet("a", "b", listening=True, full=True) as (it, a, b):
        waiter = await waiting(it, b, "q")
        monkeypatch.setattr(b.store, "place", None)  # a call of `place` would fail the test
        await a.settle("runs")
        assert (await waiter).endpoints == (E1,)
        assert b.gate.queue.waiting == 0
        assert events_of(await it.log(), "q") == ["queued", "granted", "placed"]
        await until_acknowledged(it)
        # A late notification of the same grant changes nothing.
        b.gate.queue.notified(Notification("q", Verdict.GRANTED))
        assert await b.store.return_grant("q") == "foreign"
        assert (await it.counts())[0] == 1
        await it.ends(b, "q")


async def test_a_placement_is_not_returned_while_its_acknowledgement_is_in_flight(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet("a", "b", listening=True, full=True) as (it, a, b):
        waiter = await waiting(it, b, "q")
        acknowledge, sent = b.store.acknowledge, asyncio.get_running_loop().create_future()
        monkeypatch.setattr(b.store, "acknowledge", lambda *_: sent)
        await a.settle("runs")
        assert (await waiter).endpoints == (E1,)
        # Heartbeats repeat the notification of the grant.
        await b.beat()
        await b.beat()
        assert b.notifications.count(("granted", "q")) == 2
        assert events_of(await it.log(), "q") == ["queued", "granted", "placed"]
        sent.set_result(await acknowledge("q", "1."))
        assert sent.result() == "taken"
        await it.ends(b, "q")


async def test_after_a_pause_a_replica_calls_place_for_a_request_that_its_grant_placed(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet("a", "b", listening=True, full=True) as (it, a, b):
        waiter = await waiting(it, b, "q")
        b.gate.queue.pause_detector.mark_resumed()
        monkeypatch.setattr(b.store, "acknowledge", None)  # a call of `acknowledge` would fail the test
        await a.settle("runs")
        assert (await waiter).endpoints == (E1,)
        assert events_of(await it.log(), "q") == ["queued", "granted", "placed"]
        assert not await it.has("inbox:b")
        await it.ends(b, "q")


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_client_that_disconnects_when_its_grant_arrives_leaves_no_state(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    async with fleet("a", "b", listening=True, full=True) as (it, a, b):
        task, notified = await waiting(it, b, "q"), b.gate.queue.notified

        def leave(notification: Notification) -> bool:
            if when == "before":
                task.cancel()
            is_new = notified(notification)
            task.cancel()
            return is_new

        monkeypatch.setattr(b.gate.queue, "notified", leave)
        await a.settle("runs")
        await asyncio.wait((task,))
        assert task.cancelled()
        await until(it.at_rest)
        assert events_of(await it.log(), "q") == ["queued", "granted", "placed", "cancelled"]
        await until_acknowledged(it)


@pytest.mark.parametrize("what", ["drained", "down"])
async def test_a_placement_moves_if_its_endpoint_is_marked_down_before_the_owner_is_notified(
    fleet: OpenFleet, what: str
) -> None:
    # Replica `b` receives no wake-ups.
    async with fleet("a", "b", endpoints=2, full=True) as (it, a, b):
        await b.admit("more")
        waiter = await waiting(it, b, "q")
        await a.settle("more")
        first = (await a.store.reads.request("q")).entry.endpoints[0]
        await a.store.mark_endpoint(first, what, True)
        await a.settle("runs")
        await b.beat()
        assert (await waiter).endpoints[0] == {E1: E2, E2: E1}[first]
        assert events_of(await it.log(), "q") == ["queued", "granted", "placed", "moved"]
        await it.ends(b, "q")
