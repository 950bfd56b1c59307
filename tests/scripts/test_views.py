"""Reads of the shared state for operators, and the admin API's lists made from these reads."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from choosers import chooser_of
from script_fleet import Fleet, OpenFleet, Replica, addresses, until

from picker_fleet.admin.fleet_state import MAX_FLOWS, FleetStateCache
from picker_fleet.admin.protection import Refused
from picker_fleet.admin.views import BadCursor, FleetView
from picker_fleet.domain.bands import NAMED, Band
from picker_fleet.state.reads import RankRange, group_of
from picker_fleet.state.replies import name_of

(E1,) = addresses(1)


async def queued_behind_one(it: Fleet, *requests: tuple[str, str, int]) -> None:
    """Place one request, then queue `requests` (id, flow, band) in the given order."""
    (a, *_) = it.replicas
    await a.admit("runs")
    for request_id, flow, band in requests:
        assert name_of(await a.admit(request_id, flow=flow, band=band)) == "queued"


async def test_flow_queues_are_listed_by_band_and_start_tag_throttled_queues_last(fleet: OpenFleet) -> None:
    # Flows wait in three bands; one flow has been served, and another flow is at its limit.
    async with fleet("a", upper_per=1) as (it, a):
        waiting = ("d1", "served", 1), ("d2", "served", 1), ("d3", "new", 1), ("s", "low", 2)
        await queued_behind_one(it, *waiting)
        await a.settle("runs")
        await a.admit("c1", flow="limited", band=0, limit=1)
        await a.store.place("d1", 1, "*")
        await a.admit("c2", flow="limited", band=0, limit=1)
        await a.settle("d1")  # grants c1, so that the flow `limited` is at its limit
        await a.place("c1")
        await a.publish(E1, upper_per=3)
        await a.beat()
        found = await a.store.reads.flow_queues(10)
        rows = [(each.group, each.name, each.queued, each.in_flight) for each in found.queues]
        # Unthrottled flow queues come first; the throttled flow queue is last, though its band is higher.
        low, limited = group_of(Band.SHEDDABLE.priority), group_of(Band.CRITICAL.priority, throttled=True)
        assert rows == [(low, "low", 1, None), (limited, "limited", 1, 1)]
        assert [each for each in found.totals if each[1]] == [(low, 1), (limited, 1)]
        of_band = await a.store.reads.flow_queues(10, priority=Band.CRITICAL.priority)
        assert [each.name for each in of_band.queues] == ["limited"]


async def test_the_list_of_flow_queues_shows_tags_lengths_ages_weights_and_shares(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, weights={"gold": 4.0}) as (it, a):
        await queued_behind_one(it, ("g1", "gold", 1), ("g2", "gold", 1), ("i1", "iron", 1), ("c", "top", 0))
        await a.settle("runs")
        await it.after(20)
        # One request of a higher band has been served, then one request of flow gold.
        await a.settle("c")
        queues = (await a.store.reads.flow_queues(10)).queues
        # The served flow's tag has advanced by cost / weight: little, because the weight is high.
        rows = [(each.priority, each.name, each.start, each.queued) for each in queues]
        assert rows == [(0, "iron", 0.0, 1), (0, "gold", 0.25, 1)]
        iron, gold = queues
        assert (gold.weight, gold.share, iron.weight, iron.share) == (4.0, 0.25, 1.0, 1.0)
        assert min(iron.oldest_s, gold.oldest_s) >= 0.02
        assert gold.in_flight is None
        (alone,) = await a.store.reads.flow_queue("gold")
        assert (alone.priority, alone.start, alone.queued) == (0, 0.25, 1)
        assert await a.store.reads.flow_queue("nobody") == []


@pytest.mark.parametrize("ordering", ["fcfs", "edf", "workload-aware"])
async def test_ranges_of_flow_queues_list_their_requests_in_order(fleet: OpenFleet, ordering: str) -> None:
    # One of two flow queues is longer than a call may read.
    async with fleet("a", ordering=ordering, full=True) as (_, a):
        # The order by arrival is also the order by deadline.
        names = [f"q{i:03d}" for i in range(230)]
        asked = (a.admit(each, workload="w", criticality=4, ttl_s=60 + i) for i, each in enumerate(names))
        await asyncio.gather(*asked)
        await a.admit("other", flow="other", band=2, ttl_s=30, cost=3, limit=2)
        ranges = RankRange(0, "flow", 10, 219), RankRange(-10, "other", 0, 5), RankRange(0, "flow", 300, 310)
        long, (other,), past = await a.store.reads.queued(ranges)
        assert [each.id for each in long] == names[10:220]
        assert past == []
        assert (other.state, other.owner, other.flow, other.priority) == ("queued", "a", "other", -10)
        assert (other.model, other.cost, other.limit, other.workload) == ("llama", 3.0, 2, "")
        assert other.endpoints == ()
        assert 29 < other.deadline_in_s + other.age_s < 31
        assert 14 < other.overdue_in_s + other.age_s < 16
        assert not other.overdue
        score = long[0].score
        if ordering == "workload-aware":
            assert score.criticality == pytest.approx(0.32)
            assert 0 <= score.wait < 0.4
            assert score.rate == pytest.approx(-0.2 * min(230 / 60 / 100, 1), rel=0.01)
        else:
            assert score is None


async def test_requests_in_flight_are_listed_in_pages_by_lease(fleet: OpenFleet) -> None:
    # 230 requests are in flight, two of these granted but not yet placed.
    async with fleet("a", upper_per=230) as (_, a):
        await asyncio.gather(*(a.admit(f"r{i:03d}") for i in range(230)))
        await a.admit("q1", subset=(E1,))
        await a.admit("q2")
        await a.settle("r000", "r001")
        seen, total = await a.store.reads.in_flight(60)
        while len(seen) % 60 == 0:
            page, again = await a.store.reads.in_flight(60, (seen[-1].lease_ms, seen[-1].entry.id))
            seen += page
            assert (again, len(page) <= 60) == (total, True)
        assert total == 230
        placed = [f"r{i:03d}" for i in range(2, 230)]
        assert sorted(each.entry.id for each in seen) == ["q1", "q2", *placed]
        states = {each.entry.id: (each.entry.state, each.entry.endpoints) for each in seen}
        assert states["q1"] == ("granted", ())
        assert states["r002"] == ("placed", (E1,))
        assert all(0 < each.lease_in_s <= 60 for each in seen)
        assert [each.lease_ms for each in seen] == sorted(each.lease_ms for each in seen)


async def test_an_operator_finds_a_request_in_every_state(fleet: OpenFleet) -> None:
    async with fleet("a", "b", upper_per=1, starvation_ms=1) as (it, a, b):
        await queued_behind_one(it, ("first", "f", 1), ("second", "f", 1))
        await it.after(5)
        await a.beat()
        found = await a.store.reads.request("second")
        assert (found.entry.state, found.rank, found.queue.name, found.queue.queued) == ("queued", 1, "f", 2)
        assert (found.entry.overdue, found.lease_in_s) == (True, None)
        runs = await a.store.reads.request("runs")
        assert (runs.entry.state, runs.rank, runs.queue, runs.entry.overdue) == ("placed", None, None, False)
        assert runs.lease_in_s is not None
        # Granted; ended.
        await a.admit("first", flow="f", candidates=E1)  # with `*` the grant would place `first`
        await a.settle("runs")
        assert (await b.store.reads.request("first")).entry.state == "granted"
        assert await a.store.reads.request("runs") is None


async def test_workloads_are_read_in_pages_and_one_by_one(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1000) as (_, a):
        await asyncio.gather(*(a.admit(f"r{i}", workload=f"w{i % 230}") for i in range(460)))
        await a.settle("r7")
        seen, cursor = [], ("0", 0)
        while cursor is not None:
            page, total, cursor = await a.store.reads.workloads(40, *cursor)
            assert total == 230
            assert len(page) <= 40
            seen += page
        assert sorted(each.id for each in seen) == sorted(f"w{i}" for i in range(230))
        seven = await a.store.reads.workload("w7")
        assert (seven.total, seven.active, seven.dispatched) == (2, 1, 2)
        assert seven.rate == pytest.approx(2 / 60, rel=0.2)
        assert seven.average_wait_s == 0
        assert seven.last_request_s_ago < 60
        assert await a.store.reads.workload("nobody") is None


async def test_replicas_and_decisions_are_listed(fleet: OpenFleet) -> None:
    async with fleet("a", "b") as (_, a, b):
        await b.store.leave()
        found = {each.id: each for each in await a.store.reads.replicas()}
        assert found["a"].heartbeat_s_ago < 60 < found["b"].heartbeat_s_ago
        assert found["a"].about == '{"host":"test"}'
        await a.admit("r")
        (last,) = await a.store.reads.decisions(1)
        assert (last["event"], last["request"]) == ("bypassed", "r")
        assert [each["event"] for each in await a.store.reads.decisions(50)][-1] == "bypassed"


async def test_reads_of_an_empty_redis_return_nothing_and_write_nothing(fleet: OpenFleet) -> None:
    async with fleet("a") as (it, a):
        await it.redis.flushall()
        reads = a.store.reads
        assert (await reads.flow_queues(10)).queues == []
        assert await reads.flow_queue("f") == []
        assert await reads.queued([RankRange(0, "f", 0, 9)]) == [[]]
        assert (await reads.in_flight(10), await reads.workloads(10)) == (([], 0), ([], 0, None))
        assert await reads.request("r") is None
        assert await reads.replicas() == []
        assert await reads.decisions(10) == []
        assert await it.redis.keys("*") == []


QUEUE = {"total_capacity": 5000, "flow_capacity": 5000, "queue_ttl": "600s"}
BOUNDS = dict.fromkeys(("watermark_per_backend", "lower_bound_per_backend", "upper_bound_per_backend"), 1)
CONFIG = {"fair_request_queue": QUEUE, "request_queue_controller": BOUNDS}


def lists_of(replica: Replica, max_flows: int = MAX_FLOWS) -> FleetView:
    cache, chooser = FleetStateCache(replica.store, 60.0, max_flows), chooser_of(replica.cell)
    unused = [cast(Any, None)] * 2
    reads = replica.store, replica.membership
    return FleetView(*reads, *unused, cache, chooser, replica=replica.name, pool="default")


async def pages(call: Any, rows: str, limit: int, **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor: str | None = ""
    while cursor is not None:
        page = (await call(limit, cursor or None, **fields)).model_dump()
        found, cursor = found + page[rows], page["cursor"]
        assert len(page[rows]) <= limit
    assert page["total"] == len(found)
    return found


@contextlib.asynccontextmanager
async def listed(
    fleet: OpenFleet, *requests: tuple[str, str, Band], **weights: float
) -> AsyncIterator[tuple[Replica, FleetView]]:
    """A replica with one request in flight and `requests` (id, flow, band) queued, and its lists as in the
    admin API. Flows have the weights `weights`, by default 1."""
    async with fleet("a", joined=CONFIG) as (_, a):
        assert name_of(await a.admit("runs")) == "placed"
        verdicts = await asyncio.gather(
            *(
                a.admit(request_id, flow=flow, band=band, weight=weights.get(flow, 1.0))
                for request_id, flow, band in requests
            )
        )
        assert {name_of(verdict) for verdict in verdicts} == {"queued"}
        yield a, lists_of(a)


async def test_pages_list_a_long_queue_completely_and_in_order_of_position(fleet: OpenFleet) -> None:
    asked = [(f"r{i:04d}", f"f{i % 45:02d}", NAMED[i % 3]) for i in range(1500)]
    weights = {f"f{i:02d}": 1.0 + i % 3 for i in range(45)}
    async with listed(fleet, *asked, **weights) as (_, lists):
        found = await pages(lists.queue, "requests", 150, band=None, flow=None)
        # Each request is listed once at its position: higher bands first, then by start tag.
        assert sorted(each["id"] for each in found) == sorted(each[0] for each in asked)
        assert [each["position"] for each in found] == list(range(1, 1501))
        places = [([band.name for band in NAMED].index(each["band"]), each["start_tag"]) for each in found]
        assert places == sorted(places)
        # Within a flow, requests are in order of arrival.
        of_one = [request_id for request_id, flow, _ in asked if flow == "f07"]
        assert [each["id"] for each in found if each["flow"] == "f07"] == of_one
        for each in (found[0], found[777], found[-1]):
            one = await lists.request(each["id"])
            assert (one.position, one.start_tag) == (each["position"], each["start_tag"])
        flows = await pages(lists.flows, "flows", 7, band="Default")
        assert len(flows) == len({each["flow"] for each in flows}) == 15
        assert sum(each["fair_share"] for each in flows) == pytest.approx(1.0, abs=1e-4)


async def test_the_view_of_a_request_says_why_it_waits(fleet: OpenFleet) -> None:
    two = [(name, "gold", Band.DEFAULT) for name in ("q1", "q2")]
    async with listed(fleet, *two) as (a, lists):

        async def why(request_id: str) -> str:
            return (await lists.request(request_id)).why

        assert await why("q2") == "flow gold has 1 request before it; the stock (1) is at its bounds (1 to 1)"
        assert "runs on 10.0.0.1:8000" in await why("runs")
        await a.store.set_live_config({"paused": 1}, {})
        assert (await why("q1")).endswith("no request before it; dispatching is paused")
        await a.admit("q1", flow="gold", candidates=E1)  # with other candidates the grant would place q1
        await a.settle("runs")
        await a.store.set_live_config({"paused": None}, {})
        assert await why("q1") == "its turn has come; replica a is choosing its endpoint"
        with pytest.raises(Refused):
            await lists.request("nobody")


async def test_a_page_cursor_of_another_list_is_refused(fleet: OpenFleet) -> None:
    async with listed(fleet, *((f"q{i}", f"f{i}", Band.DEFAULT) for i in range(3))) as (_, lists):
        cursor = (await lists.flows(1, None, None)).cursor
        assert cursor
        others = lists.queue(1, cursor, None, None), lists.in_flight(1, cursor), lists.workloads(1, cursor)
        for call in (*others, lists.flows(1, "nonsense", None)):
            with pytest.raises(BadCursor):
                await call


async def test_flows_beyond_the_limit_max_flows_are_still_listed(fleet: OpenFleet) -> None:
    async with listed(fleet, *((f"q{i:02d}", f"f{i:02d}", Band.DEFAULT) for i in range(25))) as (a, _):
        lists = lists_of(a, max_flows=10)
        # The pages list all flows, but the fair share is None: it would need all flows at once.
        flows = await pages(lists.flows, "flows", 4, band=None)
        assert [each["flow"] for each in flows] == [f"f{i:02d}" for i in range(25)]
        assert {each["fair_share"] for each in flows} == {None}


async def test_the_service_of_a_flow_is_the_sum_of_the_replicas_reports(fleet: OpenFleet) -> None:
    async with listed(fleet, ("q1", "gold", Band.DEFAULT)) as (a, lists):
        served = '{"host":"h","up_s":5,"served":{"priorities":[[0,%d]],"flows":[[0,"gold",%d]],"cut":false}}'
        nonsense = '{"served": {"priorities": "x"}, "up_s": "long"}'
        for name, about in (("b", served % (40, 30)), ("c", served % (60, 30)), ("d", nonsense)):
            await a.store._client.call("heartbeat", name, about, 60_000)

        async def found() -> Any:
            (gold,) = (await lists.flows(10, None, None)).flows
            return gold if gold.served_cost_per_s else None

        # A flow's service is the sum of the reports, and the flow's share is relative to the band's service.
        gold = await until(found)
        assert (gold.served_cost_per_s, gold.share) == (6.0, 0.6)
        replicas = {each.id: each for each in (await lists.replicas()).replicas}
        assert (replicas["b"].started_s_ago or 0) >= 5
        assert replicas["d"].started_s_ago is None
        assert replicas["a"].this is True
