"""The admin API's lists over the real scripts: pages, positions, shares and reasons."""

import asyncio
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from script_fleet import Fleet, OpenFleet, Replica, until

from picker_fleet.admin import listed
from picker_fleet.admin.cursor import BadCursor
from picker_fleet.admin.fleet_lists import FleetLists
from picker_fleet.admin.standing import Lookout
from picker_fleet.request import Band
from picker_fleet.scheduling.chooser import LeastLoaded

CONFIG: dict[str, Any] = {
    "fair_request_queue": {"total_capacity": 5000, "flow_capacity": 5000, "queue_ttl": "600s"},
    "request_queue_controller": {"watermark_per_backend": 1, "lower_bound_per_backend": 1,
                                 "upper_bound_per_backend": 1},
}  # fmt: skip


def lists_of(replica: Replica) -> FleetLists:
    assert replica.membership is not None
    lookout = Lookout(replica.store, 60.0)
    return FleetLists(replica.store, replica.membership, lookout, LeastLoaded(replica.cell), replica.name)


async def pages(call: Any, rows: str, limit: int, **fields: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor = None
    while True:
        page = await call(limit, cursor, **fields)
        found += page[rows]
        assert len(page[rows]) <= limit
        cursor = page["cursor"]
        if cursor is None:
            assert page["total"] == len(found)
            return found


async def waiting(it: Fleet, *requests: tuple[str, str, Band, float]) -> None:
    """A request that runs, and `requests` (id, flow, band, weight) that wait, in this order."""
    (a, *_) = it.replicas
    assert (await a.admit("runs")).what == "placed"
    for at in range(0, len(requests), 200):
        verdicts = await asyncio.gather(
            *(
                a.admit(request_id, flow=flow, band=band, weight=weight)
                for request_id, flow, band, weight in requests[at : at + 200]
            )
        )
        assert {verdict.what for verdict in verdicts} == {"queued"}


@pytest.mark.parametrize("limit", [7, 150, 500])
async def test_a_long_queue_comes_whole_in_pages_in_the_order_of_positions(
    valkey_fleet: OpenFleet, limit: int
) -> None:
    # Given 1500 requests of 45 flows with weights 1 to 3, in three bands
    asked = [(f"r{i:04d}", f"f{i % 45:02d}", Band(i % 3), float(1 + i % 45 % 3)) for i in range(1500)]
    async with valkey_fleet("a", joined=CONFIG) as it:
        await waiting(it, *asked)
        lists = lists_of(it.replicas[0])
        # When the queue is read in pages
        found = await pages(lists.queue, "requests", limit, band=None, flow=None)
        # Then each comes once, in its position, higher bands first and tags in order
        assert sorted(each["id"] for each in found) == sorted(each[0] for each in asked)
        assert [each["position"] for each in found] == list(range(1, 1501))
        places = [(Band.parse(each["band"]), each["start_tag"]) for each in found]
        assert places == sorted(places)
        # And in a flow by arrival
        assert [each["id"] for each in found if each["flow"] == "f07"] == [
            request_id for request_id, flow, *_ in asked if flow == "f07"
        ]
        # And one asked for by id has the same position
        for each in (found[0], found[777], found[-1]):
            told = await lists.request(each["id"])
            assert told is not None
            assert (told["position"], told["start_tag"]) == (each["position"], each["start_tag"])
        # And flows come once, and share by their weights
        flows = await pages(lists.flows, "flows", limit, band=Band.DEFAULT)
        assert len(flows) == len({each["flow"] for each in flows}) == 15
        assert sum(each["fair_share"] for each in flows) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("ordering", ["fcfs", "workload-aware"])
async def test_pages_are_of_the_shape_that_is_described(valkey_fleet: OpenFleet, ordering: str) -> None:
    # Given requests that run and wait, of workloads and of none, of a flow with a limit and without
    policy = {**CONFIG["fair_request_queue"], "ordering": ordering}
    async with valkey_fleet("a", joined={**CONFIG, "fair_request_queue": policy}) as it:
        (a,) = it.replicas
        assert (await a.admit("runs", workload="w0", flow="limited", limit=1)).what == "placed"
        for number, kind in enumerate(({"workload": "w1"}, {"flow": "limited", "limit": 1}, {"band": 2})):
            assert (await a.admit(f"q{number}", **kind)).what == "queued"
        lists = lists_of(a)
        # Then each list's pages hold what their description says, each field of it and no other
        kinds: tuple[tuple[type[BaseModel], Any, str], ...] = (
            (listed.Flows, lists.flows(2, None, None), "flows"),
            (listed.Flows, lists.flows(200, None, None), "flows"),
            (listed.Queue, lists.queue(2, None, None, None), "requests"),
            (listed.Queue, lists.queue(200, None, None, None), "requests"),
            (listed.Inflight, lists.in_flight(200, None), "requests"),
            (listed.Workloads, lists.workloads(200, None), "workloads"),
        )
        for model, reading, rows in kinds:
            page = await reading
            assert page[rows]
            assert model.model_validate(page, strict=True).model_dump() == page
            (row,) = get_args(model.model_fields[rows].annotation)
            for each in (page, *page[rows]):
                assert set(each) == set((model if each is page else row).model_fields)


async def test_one_flow_or_band_is_listed_by_itself(valkey_fleet: OpenFleet) -> None:
    async with valkey_fleet("a", joined=CONFIG) as it:
        await waiting(
            it,
            *((f"x{i}", "x", Band(i % 2), 1.0) for i in range(6)),
            *((f"y{i}", "y", Band.DEFAULT, 1.0) for i in range(3)),
        )
        lists = lists_of(it.replicas[0])
        of_x = await pages(lists.queue, "requests", 2, band=None, flow="x")
        assert [each["id"] for each in of_x] == ["x0", "x2", "x4", "x1", "x3", "x5"]
        of_both = await pages(lists.queue, "requests", 2, band=Band.DEFAULT, flow="x")
        assert [each["id"] for each in of_both] == ["x1", "x3", "x5"]
        default = await pages(lists.queue, "requests", 4, band=Band.DEFAULT, flow=None)
        assert [each["id"] for each in default] == ["x1", "y0", "x3", "y1", "x5", "y2"]
        assert await pages(lists.queue, "requests", 4, band=Band.SHEDDABLE, flow=None) == []
        assert await lists.flow("nobody") is None


async def test_reasons_name_what_stands_in_the_way(valkey_fleet: OpenFleet) -> None:
    async with valkey_fleet("a", joined=CONFIG) as it:
        (a,) = it.replicas
        await waiting(it, ("q1", "gold", Band.DEFAULT, 1.0), ("q2", "gold", Band.DEFAULT, 1.0))
        lists = lists_of(a)

        async def why(request_id: str) -> str:
            told = await lists.request(request_id)
            assert told is not None
            text: str = told["why"]
            return text

        assert await why("q2") == (
            "flow gold has 1 request before it; the stock (1) is at its bounds (1 to 1)"
        )
        assert "runs on 10.0.0.1:8000" in await why("runs")
        await a.store.tune({"paused": 1}, {})
        assert (await why("q1")).endswith("no request before it; dispatching is paused")
        await a.settle("runs")
        await a.store.tune({"paused": None}, {})
        assert await why("q1") == "its turn has come; replica a is choosing its endpoint"
        assert await lists.request("nobody") is None


async def test_a_cursor_of_another_list_is_refused(valkey_fleet: OpenFleet) -> None:
    async with valkey_fleet("a", joined=CONFIG) as it:
        await waiting(it, *((f"q{i}", f"f{i}", Band.DEFAULT, 1.0) for i in range(3)))
        lists = lists_of(it.replicas[0])
        cursor = (await lists.flows(1, None, None))["cursor"]
        assert cursor
        for call in (
            lists.queue(1, cursor, None, None),
            lists.in_flight(1, cursor),
            lists.workloads(1, cursor),
            lists.flows(1, "nonsense", None),
        ):
            with pytest.raises(BadCursor):
                await call


async def test_more_flows_than_are_read_are_listed_still(
    valkey_fleet: OpenFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given more flows than a look at all of them takes in
    monkeypatch.setattr("picker_fleet.admin.standing.MOST_LANES", 10)
    async with valkey_fleet("a", joined=CONFIG) as it:
        await waiting(it, *((f"q{i:02d}", f"f{i:02d}", Band.DEFAULT, 1.0) for i in range(25)))
        lists = lists_of(it.replicas[0])
        # Then pages bring all of them, and what would need all is not told
        flows = await pages(lists.flows, "flows", 4, band=None)
        assert [each["flow"] for each in flows] == [f"f{i:02d}" for i in range(25)]
        assert {each["fair_share"] for each in flows} == {None}


async def test_service_is_told_by_heartbeats_and_added_up(valkey_fleet: OpenFleet) -> None:
    async with valkey_fleet("a", joined=CONFIG) as it:
        (a,) = it.replicas
        lists = lists_of(a)
        await waiting(it, ("q1", "gold", Band.DEFAULT, 1.0))
        served = '{"host":"h","up_s":5,"served":{"bands":[0,%d,0],"flows":[[1,"gold",%d]],"cut":false}}'
        # Given two more replicas that tell of the service they gave, and one whose words make no sense
        await a.store._link.call("heartbeat", "b", served % (40, 30), 60_000)
        await a.store._link.call("heartbeat", "c", served % (60, 30), 60_000)
        await a.store._link.call("heartbeat", "d", '{"served": {"bands": "x"}, "up_s": "long"}', 60_000)

        async def told() -> Any:
            (gold,) = (await lists.flows(10, None, None))["flows"]
            return gold if gold["served_cost_per_s"] else None

        # Then a flow's service is the sum, and its share that of the band's
        gold = await until(told)
        assert (gold["served_cost_per_s"], gold["share"]) == (6.0, 0.6)
        replicas = {each["id"]: each for each in await lists.replicas()}
        assert replicas["b"]["started_s_ago"] >= 5
        assert replicas["d"]["started_s_ago"] is None
        assert replicas["a"]["this"] is True
