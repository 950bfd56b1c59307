"""The order of service: fcfs in a flow, start-time fair queueing across flows (G2, G4), the guard (G3)."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence

import pytest
from decision_ledger import order_of
from script_fleet import Fleet, OpenFleet

from picker_fleet.request import Band
from picker_tools.audit.log import Entry

Backlog = Mapping[str, Sequence[float]]  # flow -> cost of each of its requests


def fair_order(backlog: Backlog, weights: Mapping[str, float]) -> list[str]:
    """The model: of the backlogged flows the one with the least start tag; ties by name."""
    left = {flow: list(enumerate(costs)) for flow, costs in backlog.items()}
    start = dict.fromkeys(backlog, 0.0)
    order = []
    while any(left.values()):
        flow = min((flow for flow in left if left[flow]), key=lambda flow: (start[flow], flow))
        number, cost = left[flow].pop(0)
        order.append(f"{flow}{number}")
        start[flow] += cost / weights[flow]
    return order


async def queue_up(it: Fleet, backlog: Backlog, weights: Mapping[str, float], **fields: Band) -> int:
    """Queue the backlog round the flows and the replicas; how many there are."""
    rows = itertools.zip_longest(*([(flow, i, c) for i, c in enumerate(backlog[flow])] for flow in backlog))
    queued = [entry for row in rows for entry in row if entry is not None]
    for (flow, number, cost), replica in zip(queued, itertools.cycle(it.replicas), strict=False):
        name = f"{flow}{number}"
        verdict = await replica.admit(name, flow=flow, weight=weights[flow], cost=cost, **fields)
        assert verdict.status == "queued"
    return len(queued)


async def drain(it: Fleet, first: str, count: int) -> list[str]:
    """End `first` and then each that is granted, one after the other; the order of grants."""
    ends = first
    for _ in range(count):
        await it.replicas[0].settle(ends)
        # One end makes room for exactly one
        (ends,) = order_of(await it.log(last=2))
    await it.replicas[0].settle(ends)
    return order_of(await it.log())


async def test_one_flow_is_served_in_order_of_arrival_across_replicas(fleet: OpenFleet) -> None:
    # Given one flow whose requests come by three replicas in turn
    async with fleet("a", "b", "c", upper_per=1, lower_per=1) as it:
        await it.replicas[0].admit("runs", flow="other")
        count = await queue_up(it, {"x": [1.0] * 12}, {"x": 1})
        # When capacity comes free one by one, then they are served as they came
        assert await drain(it, "runs", count) == [f"x{i}" for i in range(12)]
        ledger = await it.ledger()
        assert ledger.ends == {"completed": 13}
        assert await it.at_rest()


@pytest.mark.parametrize(
    ("weights", "costs"),
    [
        ({"x": 1, "y": 2, "z": 4}, {"x": 1, "y": 1, "z": 1}),
        ({"x": 1, "y": 2, "z": 4}, {"x": 2, "y": 0.5, "z": 1}),
        ({"x": 1, "y": 1, "z": 1}, {"x": 1, "y": 1, "z": 1}),
    ],
    ids=["weights 1:2:4", "weights and costs", "equals"],
)
async def test_flows_are_served_in_the_order_of_their_start_tags(
    fleet: OpenFleet, weights: dict[str, float], costs: dict[str, float]
) -> None:
    # Given three backlogged flows on three replicas, and a stock that holds one request of any size
    backlog = {flow: [cost] * 10 for flow, cost in costs.items()}
    async with fleet("a", "b", "c", upper_per=2, lower_per=0.25) as it:
        await it.replicas[0].admit("runs", flow="other", cost=2)
        count = await queue_up(it, backlog, weights)
        # When they are served one by one, then in the order of the model
        order = await drain(it, "runs", count)
        assert order == fair_order(backlog, weights)
        # And while all are backlogged no two differ by more than one request's normalised service each
        service = [(name[0], costs[name[0]]) for name in order]
        last = min(max(i for i, (flow, _) in enumerate(service) if flow == f) for f in backlog)
        for first, second in itertools.combinations(weights, 2):
            bound = costs[first] / weights[first] + costs[second] / weights[second]
            for begin, end in itertools.combinations(range(last + 1), 2):
                got = {f: sum(c for flow, c in service[begin:end] if flow == f) for f in (first, second)}
                assert abs(got[first] / weights[first] - got[second] / weights[second]) <= bound + 1e-9
        await it.ledger()


async def test_a_flow_that_was_idle_has_no_credit(fleet: OpenFleet) -> None:
    # Given flow x, which has been served eight times while y brought nothing
    async with fleet("a", upper_per=1, lower_per=1) as (it, a):
        await a.admit("runs", flow="other")
        await queue_up(it, {"x": [1.0] * 12}, {"x": 1})
        for ends in ("runs", *(f"x{i}" for i in range(7))):
            await a.settle(ends)
        # When y comes with four
        await queue_up(it, {"y": [1.0] * 4}, {"y": 1})
        # Then they take turns from here on
        for ends in ("x7", "y0", "x8", "y1", "x9", "y2", "x10", "y3", "x11"):
            assert order_of(await it.log())[-1] == ends
            await a.settle(ends)
        assert await it.at_rest()


async def test_a_flow_that_comes_back_still_owes_for_its_service(fleet: OpenFleet) -> None:
    # Given x, whose one large request has been served, and y with a backlog of small ones
    async with fleet("a", upper_per=5, lower_per=0.5) as (it, a):
        await a.admit("runs", flow="other", cost=5)
        await queue_up(it, {"x": [5.0], "y": [1.0] * 8}, {"x": 1, "y": 1})
        await a.settle("runs")
        # When x brings another at once, then y is served until it has had as much
        await a.admit("x1", flow="x")
        for ends in ("x0", "y0", "y1", "y2", "y3", "y4", "x1", "y5", "y6", "y7"):
            assert order_of(await it.log())[-1] == ends
            await a.settle(ends)
        await it.ledger()


async def test_a_request_that_leaves_the_queue_leaves_no_gap(fleet: OpenFleet) -> None:
    # Given two flows with three each, when the middle one of x leaves
    async with fleet("a", upper_per=1, lower_per=1) as (it, a):
        await a.admit("runs", flow="other")
        await queue_up(it, {"x": [1.0] * 3, "y": [1.0] * 3}, {"x": 1, "y": 1})
        assert await a.store.cancel("x1", 1, "cancelled") == "ended"
        # Then its flow goes on with the next in its turn
        assert await drain(it, "runs", 5) == ["x0", "y0", "x2", "y1", "y2"]


async def test_a_lower_band_is_served_when_the_higher_ones_are_empty(fleet: OpenFleet) -> None:
    # Given one flow in each band, the lowest first to come
    async with fleet("a", upper_per=1, lower_per=1) as it:
        await it.replicas[0].admit("runs", flow="other")
        await queue_up(it, {"s": [1.0] * 2}, {"s": 100}, band=Band.SHEDDABLE)
        await queue_up(it, {"d": [1.0] * 2}, {"d": 1}, band=Band.DEFAULT)
        await queue_up(it, {"c": [1.0] * 2}, {"c": 1}, band=Band.CRITICAL)
        # When capacity comes free, then the bands are served in their order
        assert await drain(it, "runs", 6) == ["c0", "c1", "d0", "d1", "s0", "s1"]


async def test_one_flow_name_in_two_bands_is_two_flows(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, lower_per=1) as (it, a):
        await a.admit("runs", flow="other")
        # Given the same flow in two bands, when it is drained, then neither disturbs the other
        await a.admit("low", flow="f", band=Band.SHEDDABLE)
        await a.admit("high", flow="f", band=Band.CRITICAL)
        assert await drain(it, "runs", 2) == ["high", "low"]
        assert await it.at_rest()


async def test_requests_registered_again_in_one_message_keep_their_order(fleet: OpenFleet) -> None:
    # Given two that came within a millisecond, and whose ids are the other way round, when they come again
    async with fleet("a", upper_per=1) as (it, a):
        await a.admit("runs")
        await asyncio.gather(a.beat(), a.admit("a", age_s=0.0501), a.admit("z", age_s=0.0505))
        # Then who came first is served first
        await a.settle("runs")
        await a.settle(order_of(await it.log())[-1])
        assert order_of(await it.log()) == ["z", "a"]


def by_guard(entries: Sequence[Entry]) -> list[str]:
    return [entry.request for entry in entries if entry.event == "granted" and entry.by == "guard"]


async def test_one_dispatch_in_ten_goes_to_the_most_overdue(fleet: OpenFleet) -> None:
    # Given overdue sheddable requests beside many critical ones
    async with fleet("a", upper_per=1, starvation_ms=30, flow_capacity=100) as (it, a):
        await a.admit("runs")
        for i in range(5):
            await a.admit(f"shed{i}", band=Band.SHEDDABLE, flow="shed")
        await it.after(40)
        for i in range(60):
            await a.admit(f"crit{i}", band=Band.CRITICAL, flow="crit")
        # When 41 are served while the critical ones are not yet overdue for longer
        await a.settle("runs")
        for _ in range(40):
            await a.settle(order_of(await it.log())[-1])
        log = await it.log()
        # Then the overdue got the first and each tenth after it, oldest first
        order = order_of(log)
        assert by_guard(log) == [f"shed{i}" for i in range(5)]
        assert [order.index(f"shed{i}") for i in range(5)] == [0, 10, 20, 30, 40]
        await it.ledger()


async def test_without_a_share_nobody_is_served_out_of_turn(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, starvation_ms=1, guard_share=0) as (it, a):
        await a.admit("runs")
        await a.admit("shed", band=Band.SHEDDABLE)
        await it.after(5)
        await a.admit("crit", band=Band.CRITICAL)
        await a.settle("runs")
        await a.settle("crit")
        assert order_of(await it.log()) == ["crit", "shed"]
        assert by_guard(await it.log()) == []


async def test_a_request_is_overdue_after_half_its_ttl_by_default(fleet: OpenFleet) -> None:
    # Given a short-lived and a long-lived request of equal age
    async with fleet("a", upper_per=1) as (it, a):
        await a.admit("runs")
        await a.admit("long", band=Band.SHEDDABLE, flow="l", ttl_s=60)
        await a.admit("short", band=Band.SHEDDABLE, flow="s", ttl_s=10, age_s=6)
        await a.admit("crit", band=Band.CRITICAL)
        # When a place comes free, then the one past half its time has it
        await a.settle("runs")
        assert order_of(await it.log()) == ["short"]
        assert (await it.state())["guard_dispatches_total"] == 1


async def test_a_request_that_ends_while_overdue_is_forgotten(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, starvation_ms=1) as (it, a):
        await a.admit("runs")
        for name in ("one", "two"):
            await a.admit(name)
        await it.after(5)
        await a.sweep()
        assert (await it.state())["overdue"] == 2
        await a.store.cancel("one", 1, "cancelled")
        await a.settle("runs", "two")
        assert (await it.state())["overdue"] == 0
        assert await it.at_rest()


async def test_a_guard_share_that_does_not_divide_one_is_kept_exactly(fleet: OpenFleet) -> None:
    # Given overdue requests enough, beside a higher band, and a share of 0.3
    async with fleet("a", upper_per=1, starvation_ms=30, flow_capacity=200, guard_share=0.3) as (it, a):
        await a.admit("runs")
        for i in range(40):
            await a.admit(f"shed{i}", band=Band.SHEDDABLE, flow="shed")
        await it.after(40)
        for i in range(80):
            await a.admit(f"crit{i}", band=Band.CRITICAL, flow="crit")
        # When a hundred are served
        await a.settle("runs")
        for _ in range(99):
            await a.settle(order_of(await it.log())[-1])
        # Then thirty were served by the guard, and the one it had saved up for
        assert len(by_guard(await it.log())) == 30
        await it.ledger()
