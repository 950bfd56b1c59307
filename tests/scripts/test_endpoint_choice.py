"""Which endpoint a request gets: live load, subsets, fallbacks, marks, endpoints that come and go."""

import asyncio

import pytest
from decision_ledger import events_of
from script_fleet import OpenFleet, addresses

from picker_fleet.request import Endpoint
from picker_fleet.state.store import Decision

E1, E2, E3, E4 = addresses(4)


def listed(verdict: Decision) -> list[str]:
    assert verdict.status == "placed"
    return verdict.detail.split(",")


async def test_equal_endpoints_take_turns(fleet: OpenFleet) -> None:
    # With four idle endpoints, when requests come one at a time, no endpoint is left out.
    async with fleet("a", endpoints=4) as (_, a):
        seen = set()
        for i in range(100):
            seen.add(listed(await a.admit(f"r{i}"))[0])
            await a.settle(f"r{i}")
        assert seen == {E1, E2, E3, E4}


async def test_the_pool_lists_what_was_published(fleet: OpenFleet) -> None:
    async with fleet("a") as (_, a):
        # With endpoints with labels, one draining, when a replica asks, it has them by address.
        endpoints = (Endpoint(E1, labels={"zone": "ü"}), Endpoint("[::1]:8000", draining=True))
        await a.publish(*reversed(endpoints))
        assert await a.store.endpoints() == endpoints
        await a.publish()
        assert await a.store.endpoints() == ()


async def test_equal_scores_spread_requests_of_all_replicas_evenly(fleet: OpenFleet) -> None:
    # Four replicas that think alike of eight endpoints.
    async with fleet("a", "b", "c", "d", endpoints=8, upper_per=200, live_weight=0.3) as it:
        scored = ",".join(f"{address}=0.7" for address in addresses(8))
        # A thousand requests come at once.
        picks = (it.replicas[i % 4].admit(f"r{i}", candidates=scored) for i in range(1000))
        assert {verdict.status for verdict in await asyncio.gather(*picks)} == {"placed"}
        # No endpoint has more than another.
        assert set((await it.state()).in_flight.values()) == {125}


async def test_an_endpoint_that_takes_nothing_new_is_not_picked_whatever_its_score(fleet: OpenFleet) -> None:
    # The best of three endpoints drained, and one of them at its flow's limit.
    async with fleet("a", endpoints=3, upper_per=10) as (_, a):
        scored = f"{E1}=0.9,{E2}=0.8,{E3}=0.1"
        await a.store.mark_endpoint(E1, "drained", True)
        await a.admit("limited", subset=(E2,), limit=1)
        # When a request of that flow comes with scores, the third has it.
        assert listed(await a.admit("r", candidates=scored, limit=1)) == [E3]
        assert await a.admit("none", candidates=f"{E1}=0.9") == Decision("refused", "no-endpoints 1")


@pytest.mark.parametrize("why", ["drained", "full"])
async def test_an_endpoint_that_takes_nothing_new_does_not_scale_the_load_of_others(
    fleet: OpenFleet, why: str
) -> None:
    # An endpoint that takes nothing of a flow, a busy one with the better score, and an idle one.
    async with fleet("a", endpoints=3, upper_per=10, live_weight=0.5) as (_, a):
        await a.admit("busy", subset=(E2,))
        await a.admit("other", subset=(E1,))
        await a.admit("limited", subset=(E1,), limit=1)
        if why == "drained":
            await a.store.mark_endpoint(E1, "drained", True)
        # When a request may go to any of them, the load of the second weighs in full.
        limit = 1 if why == "full" else 0
        chosen = listed(await a.admit("r", candidates=f"{E1}=0.9,{E2}=0.3,{E3}=0", limit=limit))
        assert chosen == [E3, E2]


E1, E2 = addresses(2)
MARKS = pytest.mark.parametrize("what", ["drained", "down"])


@MARKS
async def test_nothing_new_goes_to_a_marked_endpoint_at_any_replica(fleet: OpenFleet, what: str) -> None:
    # Two endpoints with room for two each, and a request on the first.
    async with fleet("a", "b", endpoints=2, upper_per=2) as (it, a, b):
        assert await a.admit("runs", subset=(E1,)) == Decision("placed", E1)
        # One replica marks it.
        assert await a.store.mark_endpoint(E1, what, True) == "marked"
        # Neither replica places there, the bounds are those of one endpoint, and what runs is counted.
        assert await b.admit("r1") == Decision("placed", E2)
        assert (await b.admit("r2")).status == "queued"
        state = await it.state()
        assert (state.upper, state.ready_backends) == (2, 1)
        assert state.in_flight == {E1: 1, E2: 1}
        # When the mark is taken away, what waited goes on, there too.
        assert await b.store.mark_endpoint(E1, what, False) == "marked"
        assert events_of(await it.log(), "r2") == ["queued", "granted"]
        assert (await b.place("r2")).status == "placed"
        await a.settle("runs", "r1", "r2")
        assert await it.at_rest()
        assert (await it.state()).upper == 4


async def test_both_marks_must_go_before_an_endpoint_is_picked(fleet: OpenFleet) -> None:
    # An endpoint that is drained and down, each said twice.
    async with fleet("a", endpoints=2, upper_per=5) as (_, a):
        for what in ("drained", "down", "drained", "down"):
            await a.store.mark_endpoint(E1, what, True)
        # When one mark goes, the other still holds; when both have gone, it is picked again.
        await a.store.mark_endpoint(E1, "down", False)
        assert await a.admit("r1", subset=(E1,)) == Decision("refused", "no-endpoints 1")
        await a.store.mark_endpoint(E1, "drained", False)
        assert await a.admit("r2", subset=(E1,)) == Decision("placed", E1)


@MARKS
async def test_a_mark_outlives_publishing_and_goes_with_its_endpoint(fleet: OpenFleet, what: str) -> None:
    # A marked endpoint.
    async with fleet("a", endpoints=2, upper_per=5) as (it, a):
        await a.store.mark_endpoint(E1, what, True)
        # When the same endpoints are published again, the mark holds.
        await a.publish(E1, E2, upper_per=5)
        assert await a.admit("r1", subset=(E1,)) == Decision("refused", "no-endpoints 1")
        assert (await it.state()).ready_backends == 1
        marks = {each.address: (each.drained, each.down, each.ready) for each in await a.store.endpoints()}
        assert marks == {E1: (what == "drained", what == "down", False), E2: (False, False, True)}
        # When it leaves and comes back, it is a new one.
        await a.publish(E2, upper_per=5)
        await a.publish(E1, E2, upper_per=5)
        assert await a.admit("r2", subset=(E1,)) == Decision("placed", E1)
        assert not await it.redis.exists(it.keys.marks)


async def test_a_draining_endpoint_that_is_marked_is_counted_once(fleet: OpenFleet) -> None:
    # An endpoint that discovery calls draining.
    async with fleet("a", endpoints=2, upper_per=5) as (it, a):
        await a.publish(Endpoint(E1, draining=True), Endpoint(E2), upper_per=5)
        # When it is marked and unmarked, there is one ready endpoint all along.
        for on in (True, False):
            await a.store.mark_endpoint(E1, "down", on)
            assert (await it.state()).ready_backends == 1
        assert await a.admit("r", subset=(E1,)) == Decision("refused", "no-endpoints 1")


async def test_an_unknown_endpoint_cannot_be_marked(fleet: OpenFleet) -> None:
    async with fleet("a") as (it, a):
        assert await a.store.mark_endpoint("10.9.9.9:1", "down", True) == "unknown"
        assert not await it.redis.exists(it.keys.marks)


async def test_a_mark_changes_the_version_that_heartbeats_bring(fleet: OpenFleet) -> None:
    # A replica that knows the endpoints.
    async with fleet("a", endpoints=2) as (_, a):
        before = (await a.store.heartbeat("{}", 60)).endpoints_version
        # When one is marked, the version changes; when it is said again, it does not.
        await a.store.mark_endpoint(E1, "down", True)
        marked = (await a.store.heartbeat("{}", 60)).endpoints_version
        assert marked != before
        assert marked.partition("+")[0] == before
        await a.store.mark_endpoint(E1, "down", True)
        assert (await a.store.heartbeat("{}", 60)).endpoints_version == marked
