"""Calls that the tests of the admin API and the dashboard share: requests, changes, and the event stream."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fleet_load import shared


async def get(fleet: Any, path: str, replica: int = 0) -> Any:
    """What one replica answers to a read, which must succeed."""
    response = await fleet.admin(f"/api/v1/{path}", replica)
    assert response.status_code == 200, response.text
    return response.json()


async def post(fleet: Any, path: str, replica: int = 0) -> Any:
    """The answer to a change through one replica, which must accept it."""
    answer = await fleet.admin(f"/api/v1/{path}", replica, method="POST")
    assert answer.status_code == 200, answer.text
    return answer.json()


async def patch(fleet: Any, changes: dict[str, Any], replica: int = 0) -> Any:
    """The configuration after a live change through one replica, which must accept it."""
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=10.0) as client:
        url = f"{fleet.state['replicas'][replica]['admin']}/api/v1/config"
        answer = await client.patch(url, json=changes)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def queue_length(fleet: Any, count: int) -> None:
    """Wait until `count` requests are queued."""

    async def reached() -> bool:
        return bool((await shared(fleet))["queued"] == count)

    await fleet.eventually(reached, what=f"{count} queued")


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
