"""An operator changes a fleet that works: pause, tuning, eviction; and the overload that preempts."""

import asyncio
from typing import Any

import httpx
from decision_ledger import Ledger
from fleet_load import PATIENT, at_rest, decisions, shared

CONFIG = {
    "decision_log": {"enabled": True},
    "objectives": [
        {"name": "gold", "criticality": "Critical"},
        {"name": "scrap", "criticality": "Sheddable"},
    ],
    "fair_request_queue": {"total_capacity": 3, "flow_capacity": 3, "overload": "preempt"},
}
DROPPED = "x-llm-d-request-dropped-reason"
PAUSED = "/api/v1/pause"
RESUMED = "/api/v1/resume"


async def post(fleet: Any, path: str, replica: int) -> httpx.Response:
    """POST to one replica's admin API; it must have been accepted."""
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=10.0) as client:
        response = await client.post(f"{fleet.state['replicas'][replica]['admin']}{path}")
    assert response.status_code == 200, response.text
    return response


async def patch(fleet: Any, changes: dict[str, Any], replica: int) -> dict[str, Any]:
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=10.0) as client:
        url = f"{fleet.state['replicas'][replica]['admin']}/api/v1/config"
        response = await client.patch(url, json=changes)
    assert response.status_code == 200, response.text
    config: dict[str, Any] = response.json()
    return config


async def ask(client: httpx.AsyncClient, request_id: str, objective: str = "") -> httpx.Response:
    """A small completion. Its id goes in the prompt too: Envoy gives each request an id of its own."""
    headers = {"x-gateway-inference-objective": objective} if objective else {}
    body = {"model": "llama", "prompt": request_id, "max_tokens": 2}
    return await client.post("/v1/completions", json=body, headers=headers)


async def queued(fleet: Any, count: int) -> None:
    async def look() -> bool:
        return bool((await shared(fleet))["queued"] == count)

    await fleet.eventually(look, what=f"{count} queued")


async def ids_in_order(fleet: Any) -> list[str]:
    """The ids of what is queued, in the order of the log."""
    return [entry.request for entry in await decisions(fleet) if entry.event == "queued"]


async def test_pause_tune_evict_and_resume_through_different_replicas(fleet: Any) -> None:
    # Given a fleet that one replica was told to pause
    config = {**CONFIG, "fair_request_queue": {"flow_capacity": 100}}
    here = fleet("--no-restart", "--endpoints", "1", "--sim-ttft", "10", "--sim-itl", "1", config=config)
    await post(here, PAUSED, replica=0)
    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(client, f"{i}")) for i in range(6)]
        await queued(here, 6)
        assert (await shared(here))["stock"] == 0
        # When another takes one request out
        ids = await ids_in_order(here)
        gone = await post(here, f"/api/v1/requests/{ids[3]}/evict", replica=1)
        assert gone.json() == {"id": ids[3], "result": "evicted"}
        # Then its client has its answer at once, though nothing is dispatched
        done, _ = await asyncio.wait(asked, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        answers = [task.result() for task in done]
        assert [(answer.status_code, answer.headers[DROPPED]) for answer in answers] == [
            (503, "evicted-queue-pressure")
        ]
        # And when the third narrows the bounds, every replica follows
        changed = await patch(here, {"request_queue_controller": {"watermark_per_backend": 1}}, replica=2)
        assert changed["changes"] == {"request_queue_controller": {"watermark_per_backend": 1.0}}
        for replica in range(3):
            config_there = (await here.admin("/api/v1/config", replica)).json()
            assert config_there["config"]["request_queue_controller"]["watermark_per_backend"] == 1
            assert config_there["paused"] is True
        await post(here, RESUMED, replica=1)
    # And what waited is served, within the new bound from the change on
    assert sorted(task.result().status_code for task in asked) == [200] * 5 + [503]
    await at_rest(here)
    log = await decisions(here)
    Ledger.replay(log)
    assert max(entry.stock for entry in log) == 1
    assert [entry.request for entry in log if entry.event == "evicted"] == [ids[3]]


async def test_the_preempted_client_is_answered_at_once(fleet: Any) -> None:
    # Given a queue that is full of Sheddable requests, and nothing dispatched
    here = fleet("--no-restart", "--endpoints", "1", "--sim-ttft", "10", "--sim-itl", "1", config=CONFIG)
    await post(here, PAUSED, replica=0)
    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
        scrap = [tasks.create_task(ask(client, f"{i}", "scrap")) for i in range(3)]
        await queued(here, 3)
        # When a Critical one arrives
        gold = tasks.create_task(ask(client, "gold", "gold"))
        # Then one Sheddable client is told at once, by whichever replica holds it, and when to come back
        done, _ = await asyncio.wait(scrap, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        (told,) = [task.result() for task in done]
        assert (told.status_code, told.headers[DROPPED]) == (503, "evicted-queue-pressure")
        assert int(told.headers["retry-after"]) >= 1
        assert told.json()["error"]
        # And when the fleet goes on, the Critical one is served first and nobody else is refused
        await post(here, RESUMED, replica=2)
    assert gold.result().status_code == 200
    assert sorted(task.result().status_code for task in scrap) == [200, 200, 503]
    await at_rest(here)
    log = await decisions(here)
    Ledger.replay(log)
    first = next(entry for entry in log if entry.event == "granted")
    assert first.band == 0
