"""A full queue: who is refused, who is preempted, and what a flow's limit on endpoints does."""

import asyncio

import pytest
from decision_ledger import events_of, order_of
from script_fleet import OpenFleet, addresses

from picker_fleet.request import Band
from picker_fleet.state.store import Decision


async def test_a_higher_band_preempts_the_newest_of_the_flow_preempted_longest_ago(
    fleet: OpenFleet,
) -> None:
    # Given a queue full of two sheddable flows and a default one
    async with fleet("a", "b", upper_per=1, total_capacity=7) as (it, a, b):
        await a.admit("runs")
        for name in ("x1", "x2", "x3", "y1", "y2", "y3"):
            await b.admit(name, flow=name[0], band=Band.SHEDDABLE)
        await a.admit("d1", flow="d", band=Band.DEFAULT)
        # When critical and default requests come
        for name in ("c1", "c2", "c3"):
            assert (await a.admit(name, flow="c", band=Band.CRITICAL)).status == "queued"
        assert (await a.admit("d2", flow="d", band=Band.DEFAULT)).status == "queued"
        # Then the sheddable flows take turns, each losing its newest, and their owner is told
        await b.beat()
        assert sorted(b.notifications) == sorted(("preempted", name) for name in ("x3", "y3", "x2", "y2"))
        log = await it.log()
        assert [entry.request for entry in log if entry.event == "preempted"] == ["x3", "y3", "x2", "y2"]
        await it.ledger()


async def test_a_flow_that_was_preempted_empty_is_not_the_next_when_it_comes_back(fleet: OpenFleet) -> None:
    # Given a full queue of three flows with one request each
    async with fleet("a", upper_per=1, total_capacity=3) as (it, a):
        await a.admit("runs")
        for name in ("x", "y", "z"):
            await a.admit(name, flow=name, band=Band.SHEDDABLE)
        # When the first has lost its only one and, a place having come free, brings another
        await a.admit("c1", flow="c", band=Band.CRITICAL)
        await a.store.cancel("c1", 1, "cancelled")
        await a.admit("x again", flow="x", band=Band.SHEDDABLE)
        # Then it is preempted after the others
        for name in ("c2", "c3", "c4"):
            await a.admit(name, flow="c", band=Band.CRITICAL)
        log = await it.log()
        assert [entry.request for entry in log if entry.event == "preempted"] == ["x", "y", "z", "x again"]
        # And when the pressure has ended, what was known of it is forgotten, and no flow queue is left
        for name in ("c2", "c3", "c4"):
            await a.store.cancel(name, 1, "cancelled")
        await a.settle("runs")
        await a.sweep()
        for kind in ("victims", "preempted"):
            assert await it.redis.keys(f"{it.keys.prefix}{kind}*") == []


async def test_flows_that_another_version_has_queued_are_preempted_too(fleet: OpenFleet) -> None:
    # Given an order of candidates with a flow queue that has drained, and without two that wait
    async with fleet("a", upper_per=1, total_capacity=3) as (it, a):
        await a.admit("runs")
        for name in ("x", "y", "z"):
            await a.admit(name, flow=name, band=Band.SHEDDABLE)
        candidates = it.keys.prefix + "victims:2"
        await it.redis.delete(candidates)
        await it.redis.zadd(candidates, {"gone": 0})
        # When a critical request finds the queue full, then one of those that wait gives way
        assert (await a.admit("c1", flow="c", band=Band.CRITICAL)).status == "queued"
        (first,) = [entry.request for entry in await it.log() if entry.event == "preempted"]
        # And after a sweep the order is whole
        await a.sweep()
        assert set(await it.redis.zrange(candidates, 0, -1)) == {"x", "y", "z"} - {first}


async def test_critical_is_never_preempted_nor_its_own_band(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, total_capacity=2) as (it, a):
        await a.admit("runs")
        await a.admit("c1", band=Band.CRITICAL)
        await a.admit("d1", band=Band.DEFAULT, flow="d")
        assert (await a.admit("d2", band=Band.DEFAULT, flow="e")).detail == "total-capacity 1"
        assert (await a.admit("c2", band=Band.CRITICAL)).status == "queued"
        assert (await a.admit("c3", band=Band.CRITICAL)).detail == "total-capacity 1"
        assert events_of(await it.log(), "d1") == ["queued", "preempted"]


async def test_a_critical_flow_gets_its_places_however_full_the_queue_is(fleet: OpenFleet) -> None:
    # Given a queue with room for two flows, full of a critical one and a default one
    async with fleet("a", upper_per=1, total_capacity=6, flow_capacity=3) as (it, a):
        await a.admit("runs")
        for n in range(3):
            await a.admit(f"c{n}", flow="c", band=Band.CRITICAL)
            await a.admit(f"d{n}", flow="d", band=Band.DEFAULT)
        # When another critical flow comes, then it gets all of its places, and no more
        for n in range(3):
            assert (await a.admit(f"e{n}", flow="e", band=Band.CRITICAL)).status == "queued"
        refused = await a.admit("e3", flow="e", band=Band.CRITICAL)
        assert refused.detail.startswith("insufficient-flow-capacity")
        log = await it.log()
        assert [entry.request for entry in log if entry.event == "preempted"] == ["d2", "d1", "d0"]
        # And what the queue cannot hold is refused, critical as it is: nothing critical makes way
        assert (await a.admit("f0", flow="f", band=Band.CRITICAL)).detail.startswith("total-capacity")
        await it.ledger()


async def test_where_only_critical_requests_queue_others_are_refused(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, overload="reject-noncritical", total_capacity=1) as (_, a):
        await a.admit("runs")
        assert (await a.admit("d", band=Band.DEFAULT)) == Decision("refused", "saturated 1")
        assert (await a.admit("c", band=Band.CRITICAL)).status == "queued"
        assert (await a.admit("c2", band=Band.CRITICAL)) == Decision("refused", "total-capacity 1")


async def test_retry_after_is_the_time_the_queue_takes_to_drain(fleet: OpenFleet) -> None:
    # Given a queue that has drained at a known rate for a while
    async with fleet("a", upper_per=1, total_capacity=8) as (it, a):
        await a.sweep()
        await a.admit("runs")
        for i in range(4):
            await a.admit(f"q{i}")
        await it.after(1000)
        await a.beat()  # it tells how much time has passed
        await a.settle("runs", "q0")
        await a.sweep()
        rate = (await it.state())["drain_rate"]
        assert 0 < rate <= 2
        # When one more than fits comes, then it is told when its place will have come free
        for i in range(4, 10):
            await a.admit(f"q{i}")
        refused = await a.admit("late")
        assert refused == Decision("refused", f"total-capacity {-int(-9 // rate)}")


async def test_a_flow_at_its_limit_waits_and_blocks_nobody(fleet: OpenFleet) -> None:
    # Given room for many, and a flow that may have one on each of two endpoints
    async with fleet("a", "b", endpoints=2, upper_per=10) as (it, a, b):
        verdicts = await asyncio.gather(*(a.admit(f"x{i}", flow="x", limit=1) for i in range(4)))
        assert sorted(verdict.status for verdict in verdicts) == ["placed", "placed", "queued", "queued"]
        # When others come, then they pass
        assert (await b.admit("y", flow="y")).status == "queued"
        assert ("granted", "y") in b.notifications
        assert (await b.place("y")).status == "placed"
        # When one of the flow's ends, then its next has the place that came free
        await a.settle("x0")
        assert [id for what, id in a.notifications if what == "granted"] == ["x2"]
        assert (await a.place("x2")).status == "placed"
        for name in ("x1", "x2", "x3", "y"):
            await a.settle(name)
        assert await it.at_rest()
        assert await it.redis.exists(it.keys.prefix + "limits") == 0
        await it.ledger()


async def test_a_grant_whose_subset_is_at_the_limit_goes_back_to_its_place(fleet: OpenFleet) -> None:
    # Given a flow with its one request on the first endpoint, and one that must go there too
    async with fleet("a", endpoints=2, upper_per=10) as (it, a):
        first, second = addresses(2)
        await a.admit("x0", flow="x", limit=1, subset=(first,))
        await a.admit("x1", flow="x", limit=1, subset=(first,))
        # When it is to be placed, then it waits again, charged nothing
        again = await a.place("x1", subset=(first,))
        assert again.status == "queued"
        assert (await it.counts())[:2] == (1, 1)
        # And it is placed when the endpoint has let go
        await a.settle("x0")
        assert (await a.place("x1", subset=(first,))).detail == first
        await a.settle("x1")
        assert await it.at_rest()
        assert second  # the other endpoint never took part
        await it.ledger()


@pytest.mark.parametrize("when", ["queued", "running", "unknown"])
async def test_an_operator_evicts_queued_requests(fleet: OpenFleet, when: str) -> None:
    async with fleet("a", "b", upper_per=1) as (it, a, b):
        await a.admit("running")
        await a.admit("queued")
        answer = await b.store.evict(when)
        assert answer == {"queued": "evicted"}.get(when, when)
        await a.beat()
        assert a.notifications == ([("evicted", "queued")] if when == "queued" else [])
        assert order_of(await it.log()) == []


async def test_fractions_of_costs_leave_nothing_of_the_stock(fleet: OpenFleet) -> None:
    # Given requests whose costs have no exact sum
    async with fleet("a", upper_per=1000) as (it, a):
        for i in range(10):
            await a.admit(f"r{i}", cost=0.1 + i / 3)
        # When all have ended, in another order
        for i in (3, 7, 1, 9, 0, 5, 2, 8, 6, 4):
            await a.settle(f"r{i}")
        # Then the stock is 0, and not nearly
        assert (await it.state())["stock"] == 0
        assert await it.at_rest()
