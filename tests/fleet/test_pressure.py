"""What clients are told before they are refused, through a real Envoy in each mode.

The gateway has a metadata namespace of its own here.
"""

import asyncio
from typing import Any

import httpx
import pytest
from fleet_load import PATIENT, Caller, at_rest, shared

HEADER = "x-queue-pressure"
MODES = ["lean", "standard", "headers"]
SLOW = ("--replicas", "1", "--endpoints", "1", "--sim-ttft", "20", "--sim-itl", "20")
CONFIG = {
    "extproc": {"metadata_namespace": "gateway.lb"},
    "request_queue_controller": {"watermark_per_backend": 1},
    "fair_request_queue": {"total_capacity": 4, "flow_capacity": 4},
}


@pytest.mark.parametrize("mode", MODES)
async def test_every_answer_tells_how_near_the_queue_is_to_refusing(fleet: Any, mode: str) -> None:
    here = fleet("--mode", mode, "--debug-headers", *SLOW, config=CONFIG)
    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as clients:

        async def told(pressure: str) -> bool:
            return bool((await client.get("/v1/models")).headers[HEADER] == pressure)

        # Given nobody who waits
        answer = await completion(client)
        assert answer.headers[HEADER] == "0.00"
        # (and both ways of the protocol name the endpoint, the metadata in the gateway's own namespace)
        assert answer.headers["x-picker-endpoint"] == answer.headers["x-picker-header"] != ""

        # When one runs and two of four places in the queue are taken
        running = await Caller.ask(here.url, tokens=1000)
        assert b"200 OK" in await running.first_bytes()
        waiting = [clients.create_task(completion(client)) for _ in range(2)]
        # Then answers say so before anybody is refused
        await here.eventually(lambda: told("0.50"), what="half a queue")

        # When all of them are, then so does the refusal
        waiting += [clients.create_task(completion(client)) for _ in range(2)]

        async def full() -> bool:
            return bool((await shared(here))["queued"] == 4)

        await here.eventually(full, what="a full queue")
        refused = await completion(client)
        assert (refused.status_code, refused.headers[HEADER]) == (503, "1.00")

        # When the four have been served, then some of their answers told that they had waited, and it is over
        await running.leave()
        answers = [await task for task in waiting]
        assert [each.status_code for each in answers] == [200] * 4
        assert 0 < max(float(each.headers[HEADER]) for each in answers) <= 1
        await here.eventually(lambda: told("0.00"), what="an empty queue")
    await at_rest(here)


async def completion(client: httpx.AsyncClient) -> httpx.Response:
    ask = {"model": "llama", "prompt": "Hello.", "max_tokens": 1}
    return await client.post("/v1/completions", json=ask)
