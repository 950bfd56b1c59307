"""One stock and one queue behind three replicas, on real parts."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from decision_ledger import Ledger
from fleet_load import PATIENT, at_rest, complete, decisions, shared

CONFIG = {"decision_log": {"enabled": True}, "fair_request_queue": {"flow_capacity": 1000}}


@pytest.mark.parametrize("mode", ["lean", "standard", "headers"])
async def test_300_at_once_never_pass_the_bound(fleet: Any, mode: str) -> None:
    # Given three replicas, four endpoints, a watermark of 2 an endpoint, and the decision log on
    here = fleet("--mode", mode, "--sim-ttft", "10", "--sim-itl", "1", config=CONFIG)
    # When 300 clients ask at once
    async with here.client(**PATIENT) as client:
        answers = await asyncio.gather(*(complete(client, f"prompt {i}", 5) for i in range(300)))
    # Then each is answered in full, and every count returns to exactly 0
    assert [answer for answer in answers if not answer.whole] == []
    await at_rest(here)
    # And by the log itself stock was never above the bound of 8, and each request ended once
    log = await decisions(here)
    ledger = Ledger.replay(log)
    assert max(entry.stock for entry in log) == 8
    assert ledger.ends == Counter({"completed": 300})
    # And all endpoints had their share
    served = Counter(answer.endpoint for answer in answers)
    assert len(served) == 4
    assert min(served.values()) >= 2  # one that stands still is rightly passed over, but for what it had
    # And who came before anything had ended went where there was least
    events = [entry.event for entry in log]
    first = Counter(entry.endpoint for entry in log[: events.index("completed")] if entry.endpoint)
    assert max(first.values()) - min(first[endpoint] for endpoint in served) <= 1


async def test_what_waits_too_long_is_refused_and_never_served(fleet: Any) -> None:
    # Given one endpoint that takes one request, and a TTL of a second
    config = {
        **CONFIG,
        "fair_request_queue": {"queue_ttl": "1s"},
        "request_queue_controller": {"watermark_per_backend": 1},
    }
    here = fleet("--endpoints", "1", "--sim-ttft", "6000", "--sim-itl", "0", config=config)
    async with here.client(**PATIENT) as client:
        # When one request runs for six seconds and five more come
        answers = await asyncio.gather(*(complete(client, f"prompt {i}", 1) for i in range(6)))
        # And one more when all that is over
        await at_rest(here)
        last = await complete(client, "last", 1)
    # Then the five have their refusal, with what the protocol says about it
    late = [answer for answer in answers if not answer.whole]
    assert len(late) == 5
    assert all("expired_ttl" in answer.text and answer.status == 503 for answer in late)
    assert last.whole
    # And none of them was dispatched
    await at_rest(here)
    log = await decisions(here)
    expired = {entry.request for entry in log if entry.event == "expired"}
    assert len(expired) == 5
    assert not expired & {entry.request for entry in log if entry.event in ("granted", "bypassed")}
    Ledger.replay(log)


async def test_refusals_carry_what_the_protocol_says(fleet: Any) -> None:
    # Given a queue of one
    config = {
        "fair_request_queue": {"total_capacity": 1, "flow_capacity": 1, "overload_status": 429},
        "request_queue_controller": {"watermark_per_backend": 1},
    }
    here = fleet("--endpoints", "1", "--sim-ttft", "10", "--sim-itl", "0", config=config)
    ask = {"model": "llama", "prompt": "x", "max_tokens": 1}

    async def waits() -> bool:
        return bool((await shared(here))["queued"] == 1)

    async with here.client(**PATIENT) as client, asyncio.TaskGroup() as tasks:
        # And one request that fills it, since nothing is dispatched
        assert (await here.admin("/api/v1/pause", method="POST")).status_code == 200
        waiting = tasks.create_task(complete(client, "x", 1))
        await here.eventually(waits, what="a full queue")
        # When three more come at once
        answers = await asyncio.gather(*(client.post("/v1/completions", json=ask) for _ in range(3)))
        assert (await here.admin("/api/v1/resume", method="POST")).status_code == 200
    # Then the one is served, and they are dropped with status, reason, time and an OpenAI-style body
    assert waiting.result().whole
    for answer in answers:
        assert answer.status_code == 429
        assert answer.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["error"]["code"] == "insufficient_flow_capacity"
