"""A whole fleet exports spans over real OTLP and logs a line for each decision."""

import asyncio
import json
import secrets
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import pytest
from otlp_collector import Collector, ReceivedSpan

ASK = {"model": "llama", "prompt": "hi", "max_tokens": 4}
REQUESTS = 8


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    running = Collector()
    await running.start()
    yield running
    await running.stop()


def config(collector: Collector, sample: float = 0.0) -> dict[str, Any]:
    return {
        "tracing": {"enabled": True, "endpoint": collector.address, "sample": sample},
        "request_queue_controller": {"watermark_per_backend": 2},
        "logging": {"format": "json", "level": "DEBUG"},
        "objectives": [{"name": "batch", "criticality": "Sheddable"}],
    }


@pytest.mark.parametrize("mode", ["lean", "standard"])
async def test_a_clients_trace_has_spans_of_the_admission_the_wait_and_the_end(
    fleet: Any, collector: Collector, mode: str
) -> None:
    options = ("--replicas", "2", "--endpoints", "1", "--mode", mode, "--sim-itl", "5")
    running = fleet(*options, config=config(collector))
    traces = [secrets.token_hex(16) for _ in range(REQUESTS)]
    parents = [{"traceparent": f"00-{trace}-{'1' * 16}-01"} for trace in traces]
    async with running.client() as client:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=ASK, headers=headers) for headers in (*parents, {}))
        )
    assert {answer.status_code for answer in answers} == {200}

    def spans_by_trace() -> dict[str, dict[str, ReceivedSpan]]:
        """The spans of each trace, by the span's name."""
        found: dict[str, dict[str, ReceivedSpan]] = defaultdict(dict)
        for span in collector.spans:
            assert span.name not in found[span.trace]
            found[span.trace][span.name] = span
        return found

    found = await running.eventually(
        spans_by_trace,
        lambda found: sum({"decide", "settle"} <= each.keys() for each in found.values()) >= REQUESTS,
        within_s=30.0,
        what="the settle span of every request",
    )
    assert found.keys() == set(traces)
    for spans in found.values():
        decide, settle = spans.pop("decide"), spans.pop("settle")
        assert decide.parent == "1" * 16
        assert {span.parent for span in (settle, *spans.values())} == {decide.span}
        assert decide.attributes["picker.endpoint"] == running.state["endpoints"][0]["address"]
        assert settle.attributes["picker.verdict"] == "settled"
        assert settle.attributes["gen_ai.usage.output_tokens"] == "4"
        assert sorted(spans) in (["admit"], ["admit", "place", "wait"])
    assert any(span.name == "wait" for span in collector.spans)


async def test_while_the_collector_is_down_requests_are_served_and_each_decision_has_a_log_line(
    fleet: Any, collector: Collector
) -> None:
    await collector.stop()
    running = fleet("--replicas", "1", "--endpoints", "1", config=config(collector, sample=1.0))
    headers = {"x-gateway-inference-fairness-id": "tenant-7", "x-gateway-inference-objective": "batch"}
    async with running.client() as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=ASK) for _ in range(10)))
        refused = await client.post("/v1/completions", content=b"{")
        served = await client.post("/v1/completions", json=ASK, headers=headers)
    assert {answer.status_code for answer in answers} == {200}
    assert (served.status_code, refused.status_code) == (200, 400)

    def lines() -> dict[str, Any]:
        """The last log line of each kind of decision, parsed from JSON."""
        log = next(running.state_file.parent.rglob("replica-1.log")).read_text().splitlines()
        parsed = [json.loads(line) for line in log if '"picker_fleet.telemetry.decisions"' in line]
        return {line["decision"]: line for line in parsed}

    found = await running.eventually(
        lines, lambda found: found.get("ok", {}).get("flow") == "tenant-7", what="the last decision"
    )
    assert (found["ok"]["level"], found["ok"]["band"]) == ("debug", "Sheddable")
    assert found["ok"]["endpoints"] == running.state["endpoints"][0]["address"]
    assert found["ok"]["request_id"]
    assert found["bad_request"]["level"] == "info"
