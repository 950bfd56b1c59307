"""Helpers for tests of the admin API and the dashboard: requests, a paused queue, the event stream."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from crowd import http_client
from fleet_load import at_rest


async def ask(
    client: httpx.AsyncClient,
    flow: str = "",
    *,
    objective: str = "",
    workload: str = "",
    criticality: int = 2,
    prompt: str = "hi",
    model: str = "llama",
) -> httpx.Response:
    """Post a small completion and return the answer."""
    context = json.dumps({"workload_id": workload, "criticality": criticality}) if workload else ""
    headers = {
        "x-gateway-inference-fairness-id": flow.encode(),
        "x-gateway-inference-objective": objective.encode(),
        "x-workload-context": context.encode(),
    }
    body = {"model": model, "prompt": prompt, "max_tokens": 2}
    given = {name: value for name, value in headers.items() if value}
    return await client.post("/v1/completions", json=body, headers=given)


@asynccontextmanager
async def paused(fleet: Any) -> AsyncIterator[Callable[..., "asyncio.Task[httpx.Response]"]]:
    """Pause `fleet` and yield a function that sends a request with arguments of `ask`. The `with` block must
    resume the fleet: leaving the block waits for all answers."""
    await fleet.post("pause")
    async with fleet.client() as client, asyncio.TaskGroup() as tasks:
        yield lambda *flow, **fields: tasks.create_task(ask(client, *flow, **fields))


@asynccontextmanager
async def waiting(fleet: Any, *flows: str, **fields: str) -> AsyncIterator[None]:
    """Pause `fleet` and queue a request of each flow, with `fields` of `ask`; resume at the block's end."""
    async with paused(fleet) as send:
        for flow in flows:
            send(flow, **fields)
        try:
            await fleet.until_state(queued=len(flows))
            yield
        finally:
            await fleet.post("resume")
    await at_rest(fleet)


@asynccontextmanager
async def event_stream(fleet: Any, replica: int) -> AsyncIterator[AsyncIterator[tuple[str, Any]]]:
    """The (event, data) pairs of one replica's event stream from now on."""
    url = f"{fleet.admin_url(replica)}/api/v1/events"
    async with http_client(timeout=20.0) as client, client.stream("GET", url) as response:
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
