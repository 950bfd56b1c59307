"""Through a real Envoy, every answer says how full the queue is, in modes `lean` and `standard`.

The fleet sets `extproc.metadata_namespace`.
"""

import asyncio
from typing import Any

import httpx
import pytest
from admin_calls import ask
from fleet_load import Caller, at_rest

HEADER = "x-queue-pressure"
SLOW = ("--replicas", "1", "--endpoints", "1", "--sim-ttft", "20", "--sim-itl", "20")
CONFIG = {
    "extproc": {"metadata_namespace": "gateway.lb"},
    "request_queue_controller": {"watermark_per_backend": 1},
    "fair_request_queue": {"total_capacity": 4, "flow_capacity": 4},
}


@pytest.mark.parametrize("mode", ["lean", "standard"])
async def test_every_answer_and_every_refusal_says_how_full_the_queue_is(fleet: Any, mode: str) -> None:
    here = fleet("--mode", mode, "--debug-headers", *SLOW, config=CONFIG)
    async with here.client() as client, asyncio.TaskGroup() as clients:

        async def models() -> httpx.Response:
            return await client.get("/v1/models")

        answer = await ask(client)
        assert answer.headers[HEADER] == "0.00"
        # The header and the metadata namespace name the same endpoint.
        assert answer.headers["x-picker-endpoint"]
        assert answer.headers["x-picker-endpoint"] == answer.headers["x-picker-header"]
        running = await Caller.ask(here.url, tokens=1000)
        assert b"200 OK" in await running.first_bytes()
        waiting = [clients.create_task(ask(client)) for _ in range(2)]
        await here.eventually(models, lambda each: each.headers[HEADER] == "0.50", what="a half-full queue")
        waiting += [clients.create_task(ask(client)) for _ in range(2)]
        await here.until_state(queued=4)
        refused = await ask(client)
        assert (refused.status_code, refused.headers[HEADER]) == (503, "1.00")
        await running.leave()
        answers = await asyncio.gather(*waiting)
        assert [each.status_code for each in answers] == [200] * 4
        assert 0 < max(float(each.headers[HEADER]) for each in answers) <= 1
        await here.eventually(models, lambda each: each.headers[HEADER] == "0.00", what="an empty queue")
    await at_rest(here)
