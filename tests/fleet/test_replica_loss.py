"""No client notices that a replica is killed or terminated (G7)."""

import asyncio
import math
from typing import Any

import pytest
from decision_ledger import order_of
from fleet_load import at_rest, complete, decisions
from whole_fleet import exact_bounds

LEASE_S = 15.0
BASE = {"fair_request_queue": {"flow_capacity": 1000}}


@pytest.mark.parametrize("mode", ["lean", "http"])
async def test_a_killed_replicas_100_queued_and_20_streaming_requests_are_all_served(
    fleet: Any, mode: str
) -> None:
    # Exactly 20 requests may be in flight, so the streams fill the pool.
    config: dict[str, Any] = {**BASE, "request_queue_controller": exact_bounds(5)}
    if mode == "lean":  # mode `http` cannot rename a model
        targets = [{"name": "llama", "weight": 9}, {"name": "canary", "weight": 1}]
        config["models"] = [{"name": "llama", "target_models": targets}]
    here = fleet("--no-restart", "--mode", mode, "--sim-ttft", "10", "--sim-itl", "20", config=config)
    async with asyncio.TaskGroup() as tasks:
        streams = [
            tasks.create_task(complete(here.url, f"stream {i}", 400, streamed=True)) for i in range(20)
        ]
        await here.until_state(stock=20)
        queued = [tasks.create_task(complete(here.url, f"queued {i}", 3)) for i in range(100)]
        await here.until_state(queued=100)
        here.replica(1).kill()
    answers = [task.result() for task in (*streams, *queued)]
    assert [answer for answer in answers if not answer.served] == []
    if mode == "lean":
        # Model `canary` gets 10 % of requests, within 5 standard deviations. (tests/unit/test_exchange.py
        # tests retries.)
        assert abs(sum('"canary"' in answer.text for answer in answers) - 12) < 5 * math.sqrt(120 * 0.1 * 0.9)
    await at_rest(here, within_s=LEASE_S + 5)
    # Other replicas adopt the killed replica's queued requests in their positions: grants follow arrivals.
    log = await decisions(here)
    queued_ones = [entry for entry in log if entry.event == "queued"]
    arrived = [entry.request for entry in sorted(queued_ones, key=lambda entry: entry.arrived)]
    assert len(arrived) == 100
    assert order_of(log) == arrived
    assert {entry.request for entry in log if entry.event == "adopted"} & set(arrived)


@pytest.mark.parametrize("mode", ["lean", "http"])
async def test_a_terminated_replica_serves_its_queued_requests_and_exits_0(fleet: Any, mode: str) -> None:
    config = {**BASE, "request_queue_controller": {"watermark_per_backend": 1}}
    options = ("--endpoints", "1", "--sim-ttft", "400", "--sim-itl", "1")
    here = fleet("--no-restart", "--mode", mode, *options, config=config)
    async with asyncio.TaskGroup() as tasks:
        queued = [tasks.create_task(complete(here.url, f"queued {i}", 3)) for i in range(10)]
        await here.until("state", lambda state: state["queued"] >= 5, what="5 queued requests")
        here.replica(1).terminate()
    assert [task.result() for task in queued if not task.result().served] == []
    await at_rest(here, within_s=LEASE_S + 5)
    here.wait_line("replica-2    exited with 0")
