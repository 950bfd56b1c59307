"""An operator changes a running fleet: pause, live changes, eviction; and preemption under overload."""

import asyncio
from typing import Any

from admin_calls import ask, patch, post, queue_length
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


async def test_each_change_may_be_made_through_another_replica(fleet: Any) -> None:
    config = {**CONFIG, "fair_request_queue": {"flow_capacity": 100}}
    here = fleet("--no-restart", "--endpoints", "1", "--sim-ttft", "10", "--sim-itl", "1", config=config)
    await post(here, "pause", replica=0)
    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(client)) for _ in range(6)]
        await queue_length(here, 6)
        assert (await shared(here))["stock"] == 0
        ids = [entry.request for entry in await decisions(here) if entry.event == "queued"]
        assert await post(here, f"requests/{ids[3]}/evict", replica=1) == {"id": ids[3], "result": "evicted"}
        done, _ = await asyncio.wait(asked, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        answers = [task.result() for task in done]
        assert [(answer.status_code, answer.headers[DROPPED]) for answer in answers] == [
            (503, "evicted-queue-pressure")
        ]
        changed = await patch(here, {"request_queue_controller": {"watermark_per_backend": 1}}, replica=2)
        assert changed["changes"] == {"request_queue_controller": {"watermark_per_backend": 1.0}}
        for replica in range(3):
            config_there = (await here.admin("/api/v1/config", replica)).json()
            assert config_there["config"]["request_queue_controller"]["watermark_per_backend"] == 1
            assert config_there["paused"] is True
        await post(here, "resume", replica=1)
    assert sorted(task.result().status_code for task in asked) == [200] * 5 + [503]
    await at_rest(here)
    log = await decisions(here)
    Ledger.replay(log)
    assert max(entry.stock for entry in log) == 1
    assert [entry.request for entry in log if entry.event == "evicted"] == [ids[3]]


async def test_the_preempted_client_is_answered_at_once(fleet: Any) -> None:
    here = fleet("--no-restart", "--endpoints", "1", "--sim-ttft", "10", "--sim-itl", "1", config=CONFIG)
    await post(here, "pause", replica=0)
    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
        scrap = [tasks.create_task(ask(client, objective="scrap")) for _ in range(3)]
        await queue_length(here, 3)
        gold = tasks.create_task(ask(client, objective="gold"))
        done, _ = await asyncio.wait(scrap, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        (preempted,) = [task.result() for task in done]
        assert (preempted.status_code, preempted.headers[DROPPED]) == (503, "evicted-queue-pressure")
        assert int(preempted.headers["retry-after"]) >= 1
        assert preempted.json()["error"]
        await post(here, "resume", replica=2)
    assert gold.result().status_code == 200
    assert sorted(task.result().status_code for task in scrap) == [200, 200, 503]
    await at_rest(here)
    log = await decisions(here)
    Ledger.replay(log)
    first = next(entry for entry in log if entry.event == "granted")
    assert first.band == 0
