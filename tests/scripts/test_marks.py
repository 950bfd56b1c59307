"""Endpoints that an operator has drained or that are down: nothing new goes there, from that moment on."""

import pytest
from decision_ledger import events_of
from script_fleet import OpenFleet, addresses

from picker_fleet.endpoints.snapshot import Endpoint
from picker_fleet.state.store import Verdict

E1, E2 = addresses(2)
MARKS = pytest.mark.parametrize("what", ["drained", "down"])


@MARKS
async def test_nothing_new_goes_to_a_marked_endpoint_whoever_picks(fleet: OpenFleet, what: str) -> None:
    # Given two endpoints with room for two each, and a request on the first
    async with fleet("a", "b", endpoints=2, upper_per=2) as it:
        a, b = it.replicas
        assert await a.admit("runs", subset=(E1,)) == Verdict("placed", E1)
        # When one replica marks it
        assert await a.store.mark(E1, what, True) == "marked"
        # Then neither replica places there, the bounds are those of one endpoint, and what runs is counted
        assert await b.admit("r1") == Verdict("placed", E2)
        assert (await b.admit("r2")).what == "queued"
        state = await it.state()
        assert (state["bounds"]["upper"], state["ready_backends"]) == (2, 1)
        assert state["in_flight"] == {E1: 1, E2: 1}
        # When the mark is taken away, then what waited goes on, there too
        assert await b.store.mark(E1, what, False) == "marked"
        assert events_of(await it.log(), "r2") == ["queued", "granted"]
        assert (await b.place("r2")).what == "placed"
        await a.settle("runs", "r1", "r2")
        assert await it.at_rest()
        assert (await it.state())["bounds"]["upper"] == 4


async def test_both_marks_must_go_before_an_endpoint_is_picked(fleet: OpenFleet) -> None:
    # Given an endpoint that is drained and down, each said twice
    async with fleet("a", endpoints=2, upper_per=5) as it:
        (a,) = it.replicas
        for what in ("drained", "down", "drained", "down"):
            await a.store.mark(E1, what, True)
        # When one mark goes, then the other still holds; when both have gone, it is picked again
        await a.store.mark(E1, "down", False)
        assert await a.admit("r1", subset=(E1,)) == Verdict("refused", "no-endpoints 1")
        await a.store.mark(E1, "drained", False)
        assert await a.admit("r2", subset=(E1,)) == Verdict("placed", E1)


@MARKS
async def test_a_mark_outlives_publishing_and_goes_with_its_endpoint(fleet: OpenFleet, what: str) -> None:
    # Given a marked endpoint
    async with fleet("a", endpoints=2, upper_per=5) as it:
        (a,) = it.replicas
        await a.store.mark(E1, what, True)
        # When the same endpoints are published again, then the mark holds
        await a.publish(E1, E2, upper_per=5)
        assert await a.admit("r1", subset=(E1,)) == Verdict("refused", "no-endpoints 1")
        assert (await it.state())["ready_backends"] == 1
        told = {each.address: (each.drained, each.down, each.ready) for each in await a.store.endpoints()}
        assert told == {E1: (what == "drained", what == "down", False), E2: (False, False, True)}
        # When it leaves and comes back, then it is a new one
        await a.publish(E2, upper_per=5)
        await a.publish(E1, E2, upper_per=5)
        assert await a.admit("r2", subset=(E1,)) == Verdict("placed", E1)
        assert not await it.redis.exists(it.keys.marks)


async def test_a_draining_endpoint_that_is_marked_is_counted_once(fleet: OpenFleet) -> None:
    # Given an endpoint that discovery calls draining
    async with fleet("a", endpoints=2, upper_per=5) as it:
        (a,) = it.replicas
        await a.publish(Endpoint(E1, draining=True), Endpoint(E2), upper_per=5)
        # When it is marked and unmarked, then there is one ready endpoint all along
        for on in (True, False):
            await a.store.mark(E1, "down", on)
            assert (await it.state())["ready_backends"] == 1
        assert await a.admit("r", subset=(E1,)) == Verdict("refused", "no-endpoints 1")


async def test_an_unknown_endpoint_cannot_be_marked(fleet: OpenFleet) -> None:
    async with fleet("a") as it:
        (a,) = it.replicas
        assert await a.store.mark("10.9.9.9:1", "down", True) == "unknown"
        assert not await it.redis.exists(it.keys.marks)


async def test_a_mark_changes_the_version_that_heartbeats_bring(fleet: OpenFleet) -> None:
    # Given a replica that knows the endpoints
    async with fleet("a", endpoints=2) as it:
        (a,) = it.replicas
        before = (await a.store.heartbeat("{}", 60)).endpoints_version
        # When one is marked, then the version changes; when it is said again, it does not
        await a.store.mark(E1, "down", True)
        marked = (await a.store.heartbeat("{}", 60)).endpoints_version
        assert marked != before
        assert marked.partition("+")[0] == before
        await a.store.mark(E1, "down", True)
        assert (await a.store.heartbeat("{}", 60)).endpoints_version == marked
