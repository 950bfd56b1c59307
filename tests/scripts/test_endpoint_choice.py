"""Which endpoint a request gets: live load, subsets, fallbacks, marks, and changes of the endpoint list."""

import asyncio

import pytest
from script_fleet import OpenFleet, addresses

from picker_fleet.domain.request import Endpoint
from picker_fleet.state.replies import Placed, name_of
from picker_fleet.state.store import parse_verdict

E1, E2 = addresses(2)


async def test_replicas_read_the_published_endpoints(fleet: OpenFleet) -> None:
    async with fleet("a") as (_, a):
        endpoints = (Endpoint(E1, labels={"zone": "ü"}), Endpoint("[::1]:8000", draining=True))
        await a.publish(*reversed(endpoints))
        assert await a.store.endpoints() == endpoints
        await a.publish()
        assert await a.store.endpoints() == ()


async def test_equal_scores_spread_requests_of_all_replicas_evenly(fleet: OpenFleet) -> None:
    async with fleet("a", "b", "c", "d", endpoints=8, upper_per=200, live_weight=0.3) as it:
        scored = ",".join(f"{address}=0.7" for address in addresses(8))
        picks = (it.replicas[i % 4].admit(f"r{i}", candidates=scored) for i in range(1000))
        assert {name_of(verdict) for verdict in await asyncio.gather(*picks)} == {"placed"}
        assert set((await it.state()).in_flight.values()) == {125}


@pytest.mark.parametrize("what", ["drained", "down"])
async def test_a_mark_lasts_until_its_endpoint_is_removed(fleet: OpenFleet, what: str) -> None:
    async with fleet("a", endpoints=2, upper_per=5) as (it, a):
        await a.store.mark_endpoint(E1, what, True)
        # The mark of an endpoint outlives the publication of the same endpoints.
        await a.publish(E1, E2, upper_per=5)
        assert await a.admit("r1", subset=(E1,)) == parse_verdict("refused no-endpoints 1")
        assert (await it.state()).ready_backends == 1
        marks = {each.address: (each.drained, each.down, each.ready) for each in await a.store.endpoints()}
        assert marks == {E1: (what == "drained", what == "down", False), E2: (False, False, True)}
        # An endpoint that is removed and published again has no mark.
        await a.publish(E2, upper_per=5)
        await a.publish(E1, E2, upper_per=5)
        assert await a.admit("r2", subset=(E1,)) == Placed((E1,))
        assert not await it.redis.exists(it.keys.marks)
