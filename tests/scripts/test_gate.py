"""The gate: wake-ups, cancelling in every phase, withdrawal, and answers without admission."""

import asyncio

import pytest
from decision_ledger import events_of
from script_fleet import Fleet, OpenFleet, addresses, ask, asked, until, until_is, waiting

from picker_fleet.admission import shared_gate
from picker_fleet.errors import NoEndpoints
from picker_fleet.request import Endpoint, Placement
from picker_fleet.state.store import Decision

E1, E2 = addresses(2)


async def until_acknowledged(it: Fleet) -> None:
    await until_is(lambda: it.has("inbox:b"), False)


async def cancel(task: "asyncio.Task[Placement]") -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_heartbeat_delivers_a_grant_whose_wake_up_was_lost(fleet: OpenFleet) -> None:
    # A replica that never hears wake-ups.
    async with fleet("a", "b", full=True) as (it, a, b):
        waiter = await waiting(it, b, "q")
        await a.settle("runs")
        assert b.notifications == []
        # When it beats, its waiter is placed, and nothing is left in its inbox.
        await b.beat()
        assert (await waiter).endpoints == (E1,)
        assert not await it.has("inbox:b")


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


async def test_a_client_that_is_reported_gone_from_the_queue_is_suspected_once_its_request_is_placed(
    fleet: OpenFleet,
) -> None:
    # Envoy's log tells one replica that a client has left before its owner, which is slow, knows it.
    async with fleet("a", "b", full=True) as (it, a, b):
        waiter = await waiting(it, b, "q")
        a.gate.suspect("q")
        # When the request is placed meanwhile, for nobody, the next pages of its endpoint decide.
        await a.settle("runs")
        await b.beat()
        await waiter
        await until(lambda: it.has("suspects"))


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
        task = await waiting(it, a, "q", subset=(E1,))  # one that could go anywhere is placed when granted
        await a.settle("runs")
        await placing.wait()
        # When its client leaves, all it held is given back.
        await cancel(task)
        await a.beat()
        assert await it.at_rest()
        placed = ["placed"] if when == "after" else []
        assert events_of(await it.log(), "q") == ["queued", "granted", *placed, "cancelled"]
        assert not await it.has("inbox:a")


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


@pytest.mark.parametrize("candidates", [E1, "*"], ids=["granted", "placed"])
async def test_a_grant_that_nobody_waits_for_is_given_back_at_once(fleet: OpenFleet, candidates: str) -> None:
    # A queue that holds a request of b's that b knows nothing of, and one behind it.
    async with fleet("a", "b", listening=True, full=True) as (it, a, b):
        await b.store.admit(ask("unknown"), "1", candidates)
        waiter = await waiting(it, b, "q")
        # When its turn comes, b gives its grant back, and the next is served.
        await a.settle("runs")
        assert (await waiter).endpoints == (E1,)
        placed = ["placed"] if candidates == "*" else []
        assert events_of(await it.log(), "unknown") == ["queued", "granted", *placed, "withdrawn"]
        await it.ends(b, "q")


async def test_a_request_that_may_go_anywhere_is_placed_by_the_call_that_grants_it(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet("a", "b", listening=True, full=True) as (it, a, b):
        waiter = await waiting(it, b, "q")
        monkeypatch.setattr(b.store, "place", None)  # it is not to be called
        # Another replica frees the capacity.
        await a.settle("runs")
        # It is placed, and its replica acknowledges that.
        assert (await waiter).endpoints == (E1,)
        assert b.gate.waiting == 0
        assert events_of(await it.log(), "q") == ["queued", "granted", "placed"]
        await until_acknowledged(it)
        # A late heartbeat's word of it changes nothing.
        b.gate.on_notification("granted", "q")
        assert await b.store.return_grant("q") == "foreign"
        assert (await it.counts())[0] == 1
        await it.ends(b, "q")


async def test_a_placement_whose_acknowledgement_is_on_its_way_is_not_given_back(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet("a", "b", listening=True, full=True) as (it, a, b):
        waiter = await waiting(it, b, "q")
        acknowledge, sent = b.store.acknowledge, asyncio.get_running_loop().create_future()
        monkeypatch.setattr(b.store, "acknowledge", lambda *_: sent)
        await a.settle("runs")
        assert (await waiter).endpoints == (E1,)
        # The heartbeat tells of the grant once more.
        await b.beat()
        await b.beat()
        assert b.notifications.count(("granted", "q")) == 2
        assert events_of(await it.log(), "q") == ["queued", "granted", "placed"]
        sent.set_result(await acknowledge("q", "1."))
        assert sent.result() == "taken"
        await it.ends(b, "q")


async def test_where_many_placements_are_not_acknowledged_the_next_one_asks_for_its_place(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_gate, "_MAX_UNACKNOWLEDGED", 0)
    async with fleet("a", "b", listening=True, full=True) as (it, a, b):
        waiter = await waiting(it, b, "q")
        monkeypatch.setattr(b.store, "acknowledge", None)  # it is not to be called
        await a.settle("runs")
        assert (await waiter).endpoints == (E1,)
        assert events_of(await it.log(), "q") == ["queued", "granted", "placed"]
        assert not await it.has("inbox:b")
        await it.ends(b, "q")


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_client_that_leaves_just_as_it_is_placed_leaves_nothing(
    fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    async with fleet("a", "b", listening=True, full=True) as (it, a, b):
        task, notified = await waiting(it, b, "q"), b.gate.on_notification

        def leave(what: str, about: str) -> bool:
            if when == "before":
                task.cancel()
            is_new = notified(what, about)
            task.cancel()
            return is_new

        monkeypatch.setattr(b.gate, "on_notification", leave)
        await a.settle("runs")
        await asyncio.wait((task,))
        assert task.cancelled()
        await until(it.at_rest)
        assert events_of(await it.log(), "q") == ["queued", "granted", "placed", "cancelled"]
        await until_acknowledged(it)


@pytest.mark.parametrize("what", ["drained", "down"])
async def test_a_request_whose_endpoint_is_closed_before_it_is_notified_goes_to_another(
    fleet: OpenFleet, what: str
) -> None:
    # A replica that no wake-up reaches.
    async with fleet("a", "b", endpoints=2, full=True) as (it, a, b):
        await b.admit("more")
        waiter = await waiting(it, b, "q")
        await a.settle("more")
        first = (await a.store.reads.request("q")).entry.endpoints[0]
        await a.store.mark_endpoint(first, what, True)
        await a.settle("runs")
        # When the heartbeat tells it, its request goes where requests still go.
        await b.beat()
        assert (await waiter).endpoints[0] == {E1: E2, E2: E1}[first]
        assert events_of(await it.log(), "q") == ["queued", "granted", "placed", "moved"]
        await it.ends(b, "q")
