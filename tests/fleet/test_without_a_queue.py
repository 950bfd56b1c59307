"""A fleet whose queue is switched off: it picks, and nothing else."""

import asyncio
from typing import Any

from fleet_load import PATIENT, at_rest, complete

CONFIG = {"request_queue_controller": {"enabled": False, "watermark_per_backend": 1}}


async def test_without_a_queue_requests_far_past_the_bound_run_at_once(fleet: Any) -> None:
    # Given two endpoints at a watermark of one each, answers that take a while, and no queue
    here = fleet("--replicas", "2", "--endpoints", "2", "--sim-ttft", "500", "--sim-itl", "1", config=CONFIG)
    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as clients:
        tasks = [clients.create_task(complete(client, f"prompt {i}", 100)) for i in range(20)]

        async def spread() -> bool:
            state = (await here.admin("/api/v1/state")).json()
            assert (state["queue_enabled"], state["queued"], state["stock"]) == (False, 0, 0)
            return state["leases"] == 20 and sorted(state["in_flight"].values()) == [10, 10]

        # When twenty come, then all run at once, half on each
        await here.eventually(spread, what="twenty in flight, half on each endpoint")
        answers = [await task for task in tasks]
    assert all(answer.whole for answer in answers)
    await at_rest(here)
