"""A replica is killed: nobody but the operators should notice (G7)."""

import asyncio
from typing import Any

from decision_ledger import Ledger, order_of
from fleet_load import PATIENT, at_rest, complete, decisions, shared, stream

LEASE_S = 15.0
CONFIG = {
    "decision_log": {"enabled": True},
    "fair_request_queue": {"flow_capacity": 1000},
    # exactly 20 in flight: what streams below fills the pool
    "request_queue_controller": {
        "watermark_per_backend": 5,
        "upper_bound_per_backend": 5,
        "lower_bound_per_backend": 5,
    },
}


async def test_kill_with_100_queued_and_20_streaming(fleet: Any) -> None:
    # Given 20 answers being streamed, which fill the pool, and 100 requests queued behind them
    here = fleet("--no-restart", "--mode", "lean", "--sim-ttft", "10", "--sim-itl", "10", config=CONFIG)
    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
        streams = [tasks.create_task(stream(client, f"stream {i}", 1200)) for i in range(20)]

        async def streaming() -> bool:
            return bool((await shared(here))["stock"] == 20)

        await here.eventually(streaming, what="20 streams")
        queued = [tasks.create_task(complete(client, f"queued {i}", 3)) for i in range(100)]

        async def waiting() -> bool:
            return bool((await shared(here))["queued"] == 100)

        await here.eventually(waiting, what="100 queued")
        # When one of the three replicas is killed outright
        here.kill_replica(1)
    # Then every client has its whole answer
    assert [task.result() for task in (*streams, *queued) if not task.result().whole] == []
    # And the counts are exact within a lease
    await at_rest(here, within_s=LEASE_S + 5)
    # And what was queued through it was adopted, and kept its place: arrival order, by the log
    log = await decisions(here)
    queued_ones = [entry for entry in log if entry.event == "queued"]
    arrived = [entry.request for entry in sorted(queued_ones, key=lambda entry: entry.arrived)]
    assert len(arrived) == 100
    assert order_of(log) == arrived
    assert {entry.request for entry in log if entry.event == "adopted"} & set(arrived)
    Ledger.replay(log)


async def test_a_stopped_replica_finishes_what_waits(fleet: Any) -> None:
    # Given a pool that is full, and requests queued behind it
    config = {**CONFIG, "request_queue_controller": {"watermark_per_backend": 1}}
    here = fleet("--no-restart", "--endpoints", "1", "--sim-ttft", "400", "--sim-itl", "1", config=config)
    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
        queued = [tasks.create_task(complete(client, f"queued {i}", 3)) for i in range(20)]

        async def waiting() -> bool:
            return bool((await shared(here))["queued"] >= 5)

        await here.eventually(waiting, what="a queue")
        # When a replica is told to stop
        here.terminate_replica(1)
    # Then it has finished what waited on it: nobody saw an error
    assert [task.result() for task in queued if not task.result().whole] == []
    await at_rest(here, within_s=LEASE_S + 5)
    # And it has left the list of live replicas by itself, with exit status 0
    here.wait_line("replica-2    exited with 0")
