"""What an operator reads of the shared state: pages of lanes, requests, workloads and replicas."""

import asyncio

import pytest
from script_fleet import Fleet, OpenFleet, addresses

from picker_fleet.state.reads import Stretch

(E1,) = addresses(1)


async def queued_behind_one(it: Fleet, *requests: tuple[str, str, int]) -> None:
    """A running request, and `requests` (id, flow, band) waiting in this order."""
    (a, *_) = it.replicas
    await a.admit("runs")
    for request_id, flow, band in requests:
        assert (await a.admit(request_id, flow=flow, band=band)).what == "queued"


async def test_lanes_come_band_by_band_by_start_tag_then_the_parked_ones(fleet: OpenFleet) -> None:
    # Given three bands with waiting flows, one flow that has been served, and one at its limit
    async with fleet("a", upper_per=1) as it:
        (a,) = it.replicas
        await queued_behind_one(
            it, ("d1", "served", 1), ("d2", "served", 1), ("d3", "new", 1), ("s", "low", 2)
        )
        await a.settle("runs")
        await a.admit("c1", flow="limited", band=0, limit=1)
        await a.store.place("d1", 1, "*")
        await a.admit("c2", flow="limited", band=0, limit=1)
        await a.settle("d1")  # serves c1, whose flow is then at its limit
        await a.place("c1")
        await a.publish(E1, upper_per=3)
        await a.beat()
        found = await a.store.reads.lanes(10)
        told = [(each.group, each.name, each.queued, each.in_flight) for each in found.lanes]
        # Then what waits for its turn comes first, and the one at its limit last, though its band is higher
        assert told == [(2, "low", 1, None), (3, "limited", 1, 1)]
        assert found.totals == (0, 0, 1, 1, 0, 0)
        of_band = await a.store.reads.lanes(10, band=0)
        assert [each.name for each in of_band.lanes] == ["limited"]


async def test_a_lane_tells_its_tag_length_age_weight_and_share(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, weights={"gold": 4.0}) as it:
        (a,) = it.replicas
        await queued_behind_one(it, ("g1", "gold", 1), ("g2", "gold", 1), ("i1", "iron", 1), ("c", "top", 0))
        await a.settle("runs")
        await it.after(20)
        # When one of each band has been served
        await a.settle("c")
        lanes = (await a.store.reads.lanes(10)).lanes
        # Then the flow that was served stands behind by its share, which its weight made small
        assert [(each.band, each.name, each.start, each.queued) for each in lanes] == [
            (1, "iron", 0.0, 1),
            (1, "gold", 0.25, 1),
        ]
        iron, gold = lanes
        assert (gold.weight, gold.share, iron.weight, iron.share) == (4.0, 0.25, 1.0, 1.0)
        assert min(iron.oldest_s, gold.oldest_s) >= 0.02
        assert gold.in_flight is None
        (alone,) = await a.store.reads.lane("gold")
        assert (alone.band, alone.start, alone.queued) == (1, 0.25, 1)
        assert await a.store.reads.lane("nobody") == []


@pytest.mark.parametrize("page", [1, 7, 150])
async def test_pages_of_lanes_bring_each_once_though_all_have_the_same_tag(
    fleet: OpenFleet, page: int
) -> None:
    # Given 230 flows in two bands, whose tags are all 0
    async with fleet("a", upper_per=1, total_capacity=1000) as it:
        (a,) = it.replicas
        await a.admit("runs")
        names = [f"flow-{i:03d} é" for i in range(115)]
        await asyncio.gather(
            *(a.admit(f"{band}-{name}", flow=name, band=band) for band in (1, 2) for name in names)
        )
        # When they are read page by page, and the one at which a page ended leaves in between
        seen: list[tuple[int, str]] = []
        group, behind = 0, None
        while True:
            found = (await a.store.reads.lanes(page, group=group, behind=behind)).lanes
            seen += [(each.band, each.name) for each in found]
            if len(found) < page:
                break
            group, behind = found[-1].group, (repr(found[-1].start), found[-1].name)
            await a.store.cancel(f"{found[-1].band}-{found[-1].name}", 1, "cancelled")
        # Then each came exactly once, in order
        assert seen == [(band, name) for band in (1, 2) for name in names]


@pytest.mark.parametrize("ordering", ["fcfs", "edf", "workload-aware"])
async def test_stretches_of_lanes_bring_their_requests_in_order(fleet: OpenFleet, ordering: str) -> None:
    # Given two lanes, one of them longer than a call may read
    async with fleet("a", upper_per=1, ordering=ordering) as it:
        (a,) = it.replicas
        await a.admit("runs")
        # By arrival, and by deadline
        await asyncio.gather(
            *(a.admit(f"q{i:03d}", workload="w", criticality=4, ttl_s=60 + i) for i in range(230))
        )
        await a.admit("other", flow="other", band=2, ttl_s=30, cost=3, limit=2)
        # When stretches of them are read, one of them past the end
        long, short, past = await a.store.reads.queued(
            [Stretch(1, "flow", 10, 219), Stretch(2, "other", 0, 5), Stretch(1, "flow", 300, 310)]
        )
        # Then all of their requests come, in the lane's order
        assert [each.id for each in long] == [f"q{i:03d}" for i in range(10, 220)]
        assert past == []
        (other,) = short
        assert (other.state, other.owner, other.flow, other.band) == ("queued", "a", "other", 2)
        assert (other.model, other.cost, other.limit, other.workload) == ("llama", 3.0, 2, "")
        assert other.endpoints == ()
        assert 29 < other.deadline_in_s + other.age_s < 31
        assert 14 < other.overdue_in_s + other.age_s < 16
        assert not other.overdue
        # And scores are told where they count
        score = long[0].score
        if ordering == "workload-aware":
            assert score is not None
            assert score.criticality == pytest.approx(0.32)
            assert 0 <= score.wait < 0.4
            assert score.rate == pytest.approx(-0.2 * min(230 / 60 / 100, 1), rel=0.01)
        else:
            assert score is None


async def test_an_overdue_request_is_marked(fleet: OpenFleet) -> None:
    async with fleet("a", upper_per=1, starvation_ms=1) as it:
        (a,) = it.replicas
        await queued_behind_one(it, ("late", "f", 1))
        await it.after(5)
        await a.beat()
        await a.admit("early", flow="f")
        ((late, early),) = await a.store.reads.queued([Stretch(1, "f", 0, 9)])
        assert (late.id, late.overdue) == ("late", True)
        assert late.overdue_in_s < 0
        assert (early.id, early.overdue) == ("early", False)


async def test_requests_in_flight_come_by_their_leases_in_pages(fleet: OpenFleet) -> None:
    # Given 230 requests in flight, two of them granted and not yet placed
    async with fleet("a", upper_per=230) as it:
        (a,) = it.replicas
        await asyncio.gather(*(a.admit(f"r{i:03d}") for i in range(230)))
        await a.admit("q1")
        await a.admit("q2")
        await a.settle("r000", "r001")
        # When they are read in pages
        seen = []
        behind = None
        while True:
            page, total = await a.store.reads.in_flight(60, behind)
            seen += page
            assert total == 230
            if len(page) < 60:
                break
            behind = (page[-1].lease_ms, page[-1].entry.id)
        # Then each comes once, with its state, endpoints and lease
        assert sorted(each.entry.id for each in seen) == sorted(
            [f"r{i:03d}" for i in range(2, 230)] + ["q1", "q2"]
        )
        states = {each.entry.id: (each.entry.state, each.entry.endpoints) for each in seen}
        assert states["q1"] == ("granted", ())
        assert states["r002"] == ("placed", (E1,))
        assert all(0 < each.lease_in_s <= 60 for each in seen)
        assert [each.lease_ms for each in seen] == sorted(each.lease_ms for each in seen)


async def test_a_request_is_found_wherever_it_is(fleet: OpenFleet) -> None:
    async with fleet("a", "b", upper_per=1, starvation_ms=1) as it:
        a, b = it.replicas
        await queued_behind_one(it, ("first", "f", 1), ("second", "f", 1))
        # Queued: with its rank, its lane, and its place among the overdue
        await it.after(5)
        await a.beat()
        found = await a.store.reads.request("second")
        assert found is not None
        assert found.lane is not None
        assert (found.entry.state, found.rank, found.lane.name, found.lane.queued) == ("queued", 1, "f", 2)
        assert (found.overdue_rank, found.lease_in_s) == (1, None)
        # Placed: with its lease
        runs = await a.store.reads.request("runs")
        assert runs is not None
        assert (runs.entry.state, runs.rank, runs.lane, runs.overdue_rank) == ("placed", None, None, None)
        assert runs.lease_in_s is not None
        # Granted, then held by a silent replica's name, then gone
        await a.settle("runs")
        granted = await b.store.reads.request("first")
        assert granted is not None
        assert granted.entry.state == "granted"
        assert await a.store.reads.request("runs") is None


async def test_workloads_come_in_pages_and_one_by_one(fleet: OpenFleet) -> None:
    # Given 230 workloads
    async with fleet("a", upper_per=1000) as it:
        (a,) = it.replicas
        await asyncio.gather(*(a.admit(f"r{i}", workload=f"w{i % 230}") for i in range(460)))
        await a.settle("r7")
        # When they are read in pages of 40
        seen = []
        cursor: tuple[str, int] | None = ("0", 0)
        while cursor is not None:
            page, total, cursor = await a.store.reads.workloads(40, *cursor)
            assert total == 230
            assert len(page) <= 40
            seen += page
        # Then each comes once
        assert sorted(each.id for each in seen) == sorted(f"w{i}" for i in range(230))
        seven = await a.store.reads.workload("w7")
        assert seven is not None
        assert (seven.total, seven.active, seven.dispatched) == (2, 1, 2)
        assert seven.rate == pytest.approx(2 / 60, rel=0.2)
        assert seven.average_wait_s == 0
        assert seven.last_request_s_ago < 60
        assert await a.store.reads.workload("nobody") is None


async def test_replicas_and_decisions_are_told(fleet: OpenFleet) -> None:
    async with fleet("a", "b") as it:
        a, b = it.replicas
        await b.store.leave()
        told = {each.id: each for each in await a.store.reads.replicas()}
        assert told["a"].heartbeat_s_ago < 60 < told["b"].heartbeat_s_ago
        assert told["a"].about == '{"host":"test"}'
        await a.admit("r")
        last = await a.store.reads.decisions(1)
        assert [(each["event"], each["request"]) for each in last] == [("bypassed", "r")]
        assert [each["event"] for each in await a.store.reads.decisions(50)][-1] == "bypassed"


async def test_reading_writes_nothing_and_needs_no_pool(fleet: OpenFleet) -> None:
    # Given an empty Redis
    async with fleet("a") as it:
        (a,) = it.replicas
        await it.redis.flushall()
        reads = a.store.reads
        # When everything is read
        assert (await reads.lanes(10)).lanes == []
        assert await reads.lane("f") == []
        assert await reads.queued([Stretch(0, "f", 0, 9)]) == [[]]
        assert await reads.in_flight(10) == ([], 0)
        assert await reads.request("r") is None
        assert await reads.workloads(10) == ([], 0, None)
        assert await reads.replicas() == []
        assert await reads.decisions(10) == []
        # Then nothing is there
        assert await it.redis.keys("*") == []
