"""What the tests of the admin API and the dashboard share: requests, a paused queue, the events."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fleet_load import PATIENT, at_rest


async def ask(
    client: httpx.AsyncClient,
    flow: str = "",
    *,
    objective: str = "",
    workload: str = "",
    criticality: int = 2,
    prompt: str = "hi",
) -> httpx.Response:
    """The answer to a small completion."""
    context = json.dumps({"workload_id": workload, "criticality": criticality}) if workload else ""
    headers = {
        "x-gateway-inference-fairness-id": flow.encode(),
        "x-gateway-inference-objective": objective.encode(),
        "x-workload-context": context.encode(),
    }
    body = {"model": "llama", "prompt": prompt, "max_tokens": 2}
    given = {name: value for name, value in headers.items() if value}
    return await client.post("/v1/completions", json=body, headers=given)


@asynccontextmanager
async def waiting(fleet: Any, *flows: str, **fields: str) -> AsyncIterator[None]:
    """A paused fleet with one request a flow in its queue, all with `fields` of `ask`; at rest on leaving."""
    await fleet.post("pause")
    async with fleet.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
        for flow in flows:
            tasks.create_task(ask(client, flow, **fields))
        try:
            await fleet.until_state(queued=len(flows))
            yield
        finally:
            await fleet.post("resume")
    await at_rest(fleet)


@asynccontextmanager
async def event_stream(fleet: Any, replica: int) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """The (event, data) of one replica, from now on."""
    url = f"{fleet.state['replicas'][replica]['admin']}/api/v1/events"
    async with (
        httpx.AsyncClient(trust_env=False, verify=False, timeout=20.0) as client,
        client.stream("GET", url) as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")

        async def events() -> AsyncIterator[tuple[str, Any]]:
            name = ""
            async for line in response.aiter_lines():
                key, _, value = line.partition(": ")
                if key == "event":
                    name = value
                elif key == "data":
                    yield name, json.loads(value)

        yield events()
