"""The admin API of a running fleet: every replica reports the shared state correctly."""

import asyncio
from functools import partial
from typing import Any
from urllib.parse import quote

from admin_calls import ask, event_stream, paused
from fleet_load import at_rest, decisions, metric

from picker_fleet.admin import models
from picker_fleet.admin.models import Endpoint, State

TWO_EACH = {"request_queue_controller": {"watermark_per_backend": 2}}
OBJECTIVES = [{"name": "gold", "criticality": "Critical", "weight": 3.0}, {"name": "iron", "weight": 1.0}]
SLOW = ("--no-restart", "--endpoints", "1", "--sim-ttft", "20", "--sim-itl", "5")
HARD_NAME = "a/b ?é%2F#"


async def all_pages(fleet: Any, path: str, rows: str, replica: int, limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    cursor = ""
    while True:
        joint = "&" if "?" in path else "?"
        page = await fleet.get(f"{path}{joint}limit={limit}{cursor}", replica)
        found += page[rows]
        assert len(page[rows]) <= limit
        if page["cursor"] is None:
            assert len(found) == page["total"]
            return found
        cursor = f"&cursor={page['cursor']}"


async def test_every_replica_lists_the_queue_in_dispatch_order(fleet: Any) -> None:
    here = fleet(
        *SLOW, config={**TWO_EACH, "objectives": OBJECTIVES, "fair_request_queue": {"guard_share": 0}}
    )
    asked = [(HARD_NAME, "iron", "w 1"), ("b", "iron", "w/2")] * 4 + [("g", "gold", "w 1")] * 3
    async with paused(here) as send:
        waiting = []
        for count, (flow, objective, workload) in enumerate(asked, 1):
            waiting.append(send(flow, objective=objective, workload=workload))
            await here.until_state(queued=count)  # so that requests arrive in the order of the list `asked`
        lists = [await all_pages(here, "queue", "requests", replica, 1 + replica) for replica in range(3)]
        order = [each["id"] for each in lists[0]]
        assert [[each["id"] for each in one] for one in lists] == [order] * 3
        assert [each["position"] for each in lists[0]] == list(range(1, 12))
        assert [each["flow"] for each in lists[0]] == ["g"] * 3 + [HARD_NAME, "b"] * 4
        for each in lists[0]:
            models.Queued.model_validate(each, strict=True)
        arrived = [entry.request for entry in await decisions(here) if entry.event == "queued"]
        for flow in (HARD_NAME, "b", "g"):
            of_flow = [each for each in arrived if each in {r["id"] for r in lists[0] if r["flow"] == flow}]
            assert [each["id"] for each in lists[0] if each["flow"] == flow] == of_flow
        flows = await all_pages(here, "flows", "flows", 2, 1)
        assert [(each["flow"], each["band"], each["queued"], each["fair_share"]) for each in flows] == [
            ("g", "Critical", 3, 1.0),
            (HARD_NAME, "Default", 4, 0.5),
            ("b", "Default", 4, 0.5),
        ]
        one = await here.get(f"flows/{quote(HARD_NAME, safe='')}", 1)
        assert (one["flow"], [each["queued"] for each in one["bands"]]) == (HARD_NAME, [4])
        of_one = await here.get(f"queue?flow={quote(HARD_NAME, safe='')}&band=Default")
        assert [each["id"] for each in of_one["requests"]] == order[3::2]
        assert (await here.get("queue?flow=b&band=Critical"))["total"] == 0
        workloads = {each["id"]: each for each in await all_pages(here, "workloads", "workloads", 1, 1)}
        assert {name: each["active"] for name, each in workloads.items()} == {"w 1": 7, "w/2": 4}
        assert (await here.get("workloads/w%2F2"))["total"] == 4
        state = State.model_validate(await here.get("state", 1))
        assert (state.queued, state.active_flows, state.paused) == (11, 3, True)
        assert [(each.band, each.queued, each.active_flows) for each in state.bands] == [
            ("Critical", 3, 1),
            ("Default", 8, 2),
            ("Sheddable", 0, 0),
        ]

        await here.until(
            "replicas",
            lambda found: sum(each["waiting"] for each in found["replicas"]) == 11,
            what="heartbeats that report 11 waiting requests",
        )
        last = await here.get(f"requests/{order[-1]}", 2)
        assert (last["state"], last["position"]) == ("queued", 11)
        behind = "flow b has 3 requests before it, and 10 in all are served sooner"
        assert last["why"] == f"{behind}; dispatching is paused"
        await here.post("resume")
    assert {task.result().status_code for task in waiting} == {200}
    assert [entry.request for entry in await decisions(here) if entry.event == "granted"] == order
    await at_rest(here)


async def test_under_load_flows_share_service_by_weight_and_metrics_count_each_dispatch(fleet: Any) -> None:
    # Answers take long, so that requests queue at the bound even if the machine is busy.
    slower = ("--no-restart", "--endpoints", "1", "--sim-ttft", "150", "--sim-itl", "5")
    here = fleet(
        *slower,
        config={**TWO_EACH, "objectives": [{**each, "criticality": "Default"} for each in OBJECTIVES]},
    )
    async with here.client() as client, asyncio.TaskGroup() as tasks:
        going = True

        async def user(flow: str, objective: str) -> None:
            while going:
                assert (await ask(client, flow, objective=objective)).status_code == 200

        clients = (("rich", "gold"), ("poor", "iron")) * 15
        users = [tasks.create_task(user(*client)) for client in clients]

        def shares(found: dict[str, Any]) -> dict[str, float]:
            return {each["flow"]: each["share"] or 0 for each in found["flows"]}

        found = await here.until(
            "flows",
            lambda found: len(shares(found)) == 2 and abs(shares(found).get("rich", 0) - 0.75) < 0.15,
            within_s=90.0,
            what="service in the ratio of the weights",
        )
        flows = {each["flow"]: each for each in found["flows"]}
        assert flows["rich"]["fair_share"] == 0.75
        assert abs(flows["rich"]["share"] + flows["poor"]["share"] - 1) < 0.05
        for _ in range(5):
            found = models.Inflight.model_validate(await here.get("inflight", 1))
            assert 1 <= found.total <= 3
            assert all(each.lease_in_s > 0 for each in found.requests)
        for endpoint in await here.get("endpoints"):
            assert Endpoint.model_validate(endpoint).in_flight <= 3
        replicas = models.Replicas.model_validate(await here.get("replicas", 2)).replicas
        assert [each.live for each in replicas] == [True] * 3
        assert [each.this for each in replicas].count(True) == 1
        assert {each.admin for each in replicas} == {each["admin"] for each in here.state["replicas"]}
        going = False
        await asyncio.gather(*users)
    state = await at_rest(here)

    dequeued = partial(metric, here, "epp_popper_dequeue_successes_total")
    total = state["dispatched_total"]
    await here.eventually(dequeued, lambda count: count == total, what="a counted dequeue of each dispatch")
    for path, rows in (("flows", "flows"), ("queue", "requests"), ("inflight", "requests")):
        page = await here.get(path)
        assert (page[rows], page["total"], page["cursor"]) == ([], 0, None)


async def test_the_event_stream_has_every_decision_once_and_ends_when_its_replica_stops(fleet: Any) -> None:
    here = fleet(*SLOW, config={**TWO_EACH, "objectives": OBJECTIVES})
    async with (
        here.client() as client,
        event_stream(here, 0) as first,
        event_stream(here, 1) as second,
        asyncio.timeout(60),
    ):
        for _ in range(5):
            assert (await ask(client, "f", objective="iron", workload="w")).status_code == 200
        log = await decisions(here)
        for stream in (first, second):
            entries: list[dict[str, Any]] = []
            snapshots = 0
            async for name, data in stream:
                if name == "snapshot":
                    snapshots += 1
                    State.model_validate(data["state"])
                    assert data["workloads_total"] == len(data["workloads"])
                    assert data.keys() >= {"at", "flows", "flows_total", "endpoints", "replicas"}
                elif name != "unavailable":  # reading Redis timed out; the next event has the decisions
                    assert (name, data["skipped"]) == ("decisions", 0)
                    entries += data["entries"]
                if snapshots and len(entries) >= len(log):
                    break
            assert [each["seq"] for each in entries] == list(range(1, len(entries) + 1))
            assert [each["event"] for each in entries[: len(log)]] == [entry.event for entry in log]
        replica = here.replica(0)
        replica.terminate()
        async for _ in first:
            pass
        await here.eventually(lambda: not replica.is_running(), within_s=10, what="the replica's exit")
