"""Admission: bypass, queue, hysteresis, capacities, refusals (G1); and with the queue off."""

import asyncio

import pytest
from decision_ledger import order_of
from script_fleet import OpenFleet, addresses, ask

from picker_fleet.errors import InsufficientFlowCapacity, NoEndpoints, TooManyFlows, TotalCapacity
from picker_fleet.request import Endpoint
from picker_fleet.state import accounting_token
from picker_fleet.state.store import Decision
from picker_tools.audit.auditor import audit


async def test_below_the_bound_a_request_is_placed_at_once(fleet: OpenFleet) -> None:
    # Given room for two and an empty queue
    async with fleet("a", upper_per=2) as (it, a):
        # When two come
        verdicts = [await a.admit("r1"), await a.admit("r2")]
        # Then both have the endpoint, and the stock is two
        assert verdicts == [Decision("placed", "10.0.0.1:8000")] * 2
        assert await it.counts() == (2, 0, [2])


async def test_at_the_bound_a_request_is_queued_with_its_time_to_live(fleet: OpenFleet) -> None:
    # Given a full stock
    async with fleet("a", upper_per=1) as (it, a):
        await a.admit("r1")
        # When another comes, 2 s old already, then it waits for what is left of its TTL
        assert await a.admit("r2", ttl_s=30, age_s=2) == Decision("queued", "28000")
        assert await it.counts() == (1, 1, [1])


async def test_many_in_one_call_take_what_there_is_and_no_more(fleet: OpenFleet) -> None:
    # Given room for three on each of two endpoints
    async with fleet("a", endpoints=2, upper_per=3) as (it, a):
        # When ten come in one turn of the loop
        verdicts = await asyncio.gather(*(a.admit(f"r{i}") for i in range(10)))
        # Then the first six are placed
        assert [verdict.status for verdict in verdicts] == ["placed"] * 6 + ["queued"] * 4
        assert await it.counts() == (6, 4, [3, 3])
        await it.ledger()


async def test_the_queue_is_served_only_below_the_lower_bound(fleet: OpenFleet) -> None:
    # Given four running at an upper bound of 4 and a lower one of 2, and one waiting
    async with fleet("a", upper_per=4, lower_per=2) as (it, a):
        for i in range(1, 5):
            await a.admit(f"r{i}")
        await a.admit("waits")
        # When two end, then the stock has reached the lower bound and nothing is served yet
        await a.settle("r1")
        await a.settle("r2")
        assert await it.counts() == (2, 1, [2])
        # When one more ends, then it is below, and the waiting one is granted
        await a.settle("r3")
        assert a.notifications == [("granted", "waits")]
        assert await it.counts() == (2, 0, [1])


async def test_nothing_bypasses_a_queue(fleet: OpenFleet) -> None:
    # Given room below the upper bound, but one that waits for the lower
    async with fleet("a", upper_per=4, lower_per=1) as (it, a):
        for i in range(1, 5):
            await a.admit(f"r{i}")
        await a.admit("first")
        await a.settle("r1", "r2")
        # When another comes
        verdict = await a.admit("second")
        # Then it waits behind, though there is room
        assert verdict.status == "queued"
        await a.settle("r3", "r4")
        assert order_of(await it.log()) == ["first"]
        await it.ledger()


async def test_a_request_that_costs_more_than_there_is_waits_for_room(fleet: OpenFleet) -> None:
    # Given three of four taken
    async with fleet("a", upper_per=4, lower_per=4) as (it, a):
        for i in range(1, 4):
            await a.admit(f"r{i}")
        # When one of cost 2 comes, then it waits
        assert (await a.admit("large", cost=2)).status == "queued"
        # When one ends, then it fits exactly
        await a.settle("r1")
        assert a.notifications == [("granted", "large")]
        assert (await it.counts())[0] == 4
        await it.ledger()


async def test_a_request_past_its_time_to_live_is_not_admitted_into_an_empty_pool(fleet: OpenFleet) -> None:
    # Given room, when a request comes that is as old as it may get, then it has expired (G5)
    async with fleet("a") as (it, a):
        assert await a.admit("late", ttl_s=1, age_s=1) == Decision("expired", "")
        assert await it.at_rest()


async def test_a_flow_has_its_part_of_the_queue_and_the_queue_its_capacity(fleet: OpenFleet) -> None:
    # Given a queue of three, two a flow, and a full stock
    async with fleet("a", upper_per=1, total_capacity=3, flow_capacity=2) as (it, a):
        await a.admit("runs")
        # When flow x brings three, then its third is refused
        assert [(await a.admit(f"x{i}", flow="x")).status for i in range(2)] == ["queued"] * 2
        assert await a.admit("x2", flow="x") == Decision("refused", "insufficient-flow-capacity 1")
        # When y takes the last place, then z finds none
        assert (await a.admit("y0", flow="y")).status == "queued"
        assert await a.admit("z0", flow="z") == Decision("refused", "total-capacity 1")
        # And y neither, which has one of its own two places: the queue's bound holds for all
        assert await a.admit("y1", flow="y") == Decision("refused", "total-capacity 1")
        # When one leaves, then there is a place again
        await a.store.cancel("x0", 1, "cancelled")
        assert (await a.admit("z1", flow="z")).status == "queued"
        assert (await it.ledger()).started.keys() == {"runs", "x0", "x1", "y0", "z1"}


async def test_requests_of_so_many_flows_may_wait(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, total_capacity=9, flow_capacity=9, max_flows=2) as (_, a):
        await a.admit("runs")
        for name, flow in (("x0", "x"), ("y0", "y"), ("x1", "x")):
            assert (await a.admit(name, flow=flow)).status == "queued"
        # A third flow is one too many, in whatever band, unless it is critical, which has its places
        assert await a.admit("z0", flow="z") == Decision("refused", "too-many-flows 1")
        assert await a.admit("x2", flow="x", band=2) == Decision("refused", "too-many-flows 1")
        with pytest.raises(TooManyFlows):
            await a.gate.admit(ask("z1", flow="z"), stream_owned=False)
        assert (await a.admit("c0", flow="c", band=0)).status == "queued"
        # When one of them waits no more, then another may
        await a.store.cancel("y0", 1, "cancelled")
        await a.store.cancel("c0", 1, "cancelled")
        assert (await a.admit("z2", flow="z")).status == "queued"


async def test_the_gate_names_each_refusal(fleet: OpenFleet) -> None:
    # Given a queue with one place a flow, two in all, and a full stock
    async with fleet("a", upper_per=1, total_capacity=2, flow_capacity=1) as (_, a):
        await a.admit("runs")
        await a.admit("x0", flow="x")
        # When the gate asks for more than there is, then it raises what the protocol names
        with pytest.raises(InsufficientFlowCapacity):
            await a.gate.admit(ask("x1", flow="x"), stream_owned=False)
        await a.admit("y0", flow="y")
        with pytest.raises(TotalCapacity):
            await a.gate.admit(ask("z0", flow="z"), stream_owned=False)
        await a.publish()
        with pytest.raises(NoEndpoints):
            await a.gate.admit(ask("n0", flow="n"), stream_owned=False)
        assert a.gate.waiting == 0


async def test_without_a_ready_endpoint_a_request_is_refused(fleet: OpenFleet) -> None:
    async with fleet("a") as (it, a):
        # Given no endpoint, or only one that drains, when a request comes, then it is refused
        for endpoints in ((), (Endpoint("10.0.0.1:8000", draining=True),)):
            await a.publish(*endpoints)
            assert await a.admit("r") == Decision("refused", "no-endpoints 1")
        assert await it.at_rest()


async def test_queued_requests_are_served_when_an_endpoint_returns(fleet: OpenFleet) -> None:
    # Given one waiting, and no endpoint left
    async with fleet("a", upper_per=1) as (_, a):
        await a.admit("runs")
        await a.admit("waits")
        await a.publish()
        await a.settle("runs")
        assert a.notifications == []
        # When an endpoint is published, then that very call dispatches
        await a.publish("10.0.0.9:8000")
        assert a.notifications == [("granted", "waits")]
        assert await a.place("waits") == Decision("placed", "10.0.0.9:8000")


async def test_before_anything_is_published_the_pool_is_unknown(fleet: OpenFleet) -> None:
    # Given replicas that have not published, when one asks, then it is told to publish first
    async with fleet("a") as (it, a):
        await it.redis.delete(*await it.redis.keys(it.keys.prefix + "*"))
        assert (await a.admit("r")).status == "unknown-pool"
        pulse = await a.beat()
        assert (pulse.epoch, pulse.was_known) == ("0", False)
        assert not (await a.sweep()).ran


async def test_a_claim_takes_no_more_than_its_share_of_the_stock(fleet: OpenFleet) -> None:
    # Given a stock of 1000 tokens, of which one request takes a quarter at most
    async with fleet("a", upper_per=1000, lower_per=1000, claim_share=0.25) as (it, a):
        # When six claim a million each, and a hundred honest ones of 10 come behind them
        for n in range(6):
            await a.admit(f"greedy{n}", flow="greedy", cost=1e6)
        for n in range(100):
            await a.admit(f"honest{n}", flow="honest", cost=20)
        # Then four of the six run at a time; as two end, their flow has a turn, and the honest ones the next
        assert (await it.state())["stock"] == 1000
        await a.settle("greedy0", "greedy1")
        running = [entry.request for entry in await it.log() if entry.event in ("bypassed", "granted")]
        assert sum(name.startswith("honest") for name in running) == 12
        assert all(entry.stock <= 1000 for entry in await it.log())
        # And what an accounting token brings back takes no more either
        await it.redis.flushall()
        await a.publish("10.0.0.1:8000", upper_per=1000, lower_per=1000, claim_share=0.25)
        token = accounting_token.write(ask("lost", cost=1e6), "10.0.0.1:8000")
        assert await a.store.renew("lost", None, "", token) == "restored"
        assert (await it.state())["stock"] == 250


A, B = addresses(2)


async def test_without_a_queue_all_are_placed_at_once_on_the_least_loaded_endpoint(fleet: OpenFleet) -> None:
    # Given bounds of two requests, and no queue
    async with fleet("a", "b", endpoints=2, upper_per=1, queue_enabled=0) as (it, a, b):
        # When fifty come through either replica, of any flow and band
        for i in range(50):
            verdict = await (a, b)[i % 2].admit(f"r{i}", flow=f"flow{i % 3}", band=i % 3, cost=1 + i % 4)
            assert verdict.status == "placed"
        # Then each endpoint has half, all have a lease, and nothing is taken of the stock
        assert await it.counts() == (0, 0, [25, 25])
        assert (await it.state())["leases"] == 50
        # And one that is sent again keeps its place
        assert (await b.admit("r0")).status == "placed"
        assert await it.counts() == (0, 0, [25, 25])
        # When they end, then nothing is left, and by the log nothing was broken
        await a.settle(*(f"r{i}" for i in range(50)))
        assert await it.at_rest()
        report = audit([fields for _, fields in await it.redis.xrange(it.keys.log)])
        assert report.violations == 0, report.as_json()["promises"]


async def test_the_queue_goes_off_and_on_while_requests_wait(fleet: OpenFleet) -> None:
    # Given a full fleet and more who wait than one call serves
    async with fleet("a", endpoints=1, upper_per=1) as (it, a):
        for i in range(60):
            await a.admit(f"r{i}")
        assert await it.counts() == (1, 59, [1])
        # When the queue is switched off, then they are let go, a part by each call
        await a.store.set_live_config({"queue_enabled": 0}, {})
        while (await it.counts())[1]:
            await a.beat()
        for i in range(1, 60):
            assert (await a.place(f"r{i}")).status == "placed"
        assert (await a.admit("straight")).status == "placed"
        assert await it.counts() == (1, 0, [61])
        # When it is on again, then what was let go without it is not counted; the bound holds for the rest
        await a.store.set_live_config({"queue_enabled": None}, {})
        assert (await a.admit("waits")).status == "queued"
        await a.settle(*(f"r{i}" for i in range(60)), "straight")
        assert (await a.place("waits")).status == "placed"
        await a.settle("waits")
        assert await it.at_rest()
        report = audit([fields for _, fields in await it.redis.xrange(it.keys.log)])
        assert report.violations == 0, report.as_json()["promises"]


async def test_without_a_queue_a_request_is_refused_when_all_endpoints_are_at_their_limits(
    fleet: OpenFleet,
) -> None:
    async with fleet("a") as (_, a):
        await a.publish(Endpoint(A, max_inflight=1), Endpoint(B, max_inflight=1), queue_enabled=0)
        assert [(await a.admit(f"r{i}")).status for i in range(2)] == ["placed"] * 2
        verdict = await a.admit("third")
        assert (verdict.status, verdict.detail.split()[0]) == ("refused", "saturated")
        # While it is paused, requests are held all the same: that is an operator's wish
        await a.settle("r0", "r1")
        await a.store.set_live_config({"paused": 1}, {})
        assert (await a.admit("kept")).status == "queued"
        await a.store.set_live_config({"paused": None}, {})
        assert (await a.place("kept")).status == "placed"
