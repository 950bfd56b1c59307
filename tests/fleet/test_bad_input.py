"""Any input from a client gets a clear answer and harms no other client (G10)."""

import asyncio
import json
from typing import Any

import pytest
from fleet_load import at_rest, complete, post_while_reading

JSON = {"content-type": b"application/json"}
GOOD = {"model": "llama", "prompt": "x", "max_tokens": 1}
HUGE = b'{"model": "llama", "prompt": "' + b"x" * 20_000_000 + b'"}'

ASK = json.dumps(GOOD).encode()
WORKLOAD, FAIRNESS = "x-workload-context", "x-gateway-inference-fairness-id"
REFUSED: dict[str, tuple[bytes, dict[str, bytes], str]] = {  # body, headers, and a word in the error message
    "truncated JSON": (b'{"model":', {}, "JSON"),
    "not JSON": (b"not json", {}, "JSON"),
    "not UTF-8": (b"\xff\xfe\x00", {}, "JSON"),
    "model not a string": (b'{"model": 7, "prompt": "x"}', {}, "model"),
    "blank model": (b'{"model": " ", "prompt": "x"}', {}, "model"),
    "model with a control character": (b'{"model": "a\\u001fb", "prompt": "x"}', {}, "model"),
    "not an object": (b'["model"]', {}, ""),
    "workload not UTF-8": (ASK, {WORKLOAD: b"\xff\xfe"}, WORKLOAD),
    "flow not UTF-8": (ASK, {FAIRNESS: b"\xff\xfe"}, FAIRNESS),
    "flow of 300 characters": (ASK, {FAIRNESS: b"f" * 300}, FAIRNESS),
    "TTL not a duration": (ASK, {"x-llm-d-inference-ttl": b"soon"}, "x-llm-d-inference-ttl"),
}
WORKLOADS = {
    "long id": b'{"workload_id": "' + b"w" * 40_000 + b'"}',
    "NUL": json.dumps({"workload_id": "a\0b"}).encode(),
    "nested": b'{"workload_id": ' * 50 + b"1" + b"}" * 50,
    "criticality NaN": b'{"workload_id": "w", "criticality": NaN}',
    "criticality 9e99": b'{"workload_id": "w", "criticality": 9e99}',
    "criticality a string": b'{"workload_id": "w", "criticality": "5"}',
    "malformed JSON": b"[1, 2",
}


@pytest.fixture(params=["lean", "standard", "http"], scope="module")
def small(request: pytest.FixtureRequest, shared_fleet: Any) -> Any:
    quick = ("--replicas", "1", "--endpoints", "1", "--sim-ttft", "1", "--sim-itl", "1")
    return shared_fleet("--mode", request.param, *quick)


async def assert_serves(fleet: Any) -> None:
    """Assert that the next request is served and that nothing stays in flight."""
    assert (await complete(fleet.url, "x", 1)).served
    await at_rest(fleet)


@pytest.mark.parametrize("name", REFUSED)
async def test_bad_input_is_refused_with_a_reason_and_the_next_request_served(small: Any, name: str) -> None:
    body, headers, named = REFUSED[name]
    async with small.client() as client:
        answer = await client.post("/v1/completions", content=body, headers={**JSON, **headers})
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]["message"]
    await assert_serves(small)


async def test_a_request_without_a_model_is_placed_if_the_metrics_pages_name_one_model(small: Any) -> None:
    async with small.client() as client:
        for body in ({"prompt": "x", "max_tokens": 1}, {**GOOD, "model": None}, {**GOOD, "model": ""}):

            async def placed(body: object = body) -> bool:
                answer = await client.post("/v1/completions", json=body)
                return "default_model" not in answer.text  # only the picker's refusal names this setting

            await small.eventually(placed, bool, what="the model's name from a metrics page")
    await assert_serves(small)


async def test_a_body_of_20_mb_is_refused_before_it_is_fully_received(small: Any) -> None:
    status, body = await post_while_reading(small.url, HUGE)
    assert status == 413, body
    assert "larger" in json.loads(body)["error"]["message"]
    await assert_serves(small)


@pytest.mark.parametrize("name", WORKLOADS)
async def test_a_request_with_a_hostile_workload_is_served_as_anonymous(small: Any, name: str) -> None:
    async with small.client() as client:
        headers = {**JSON, WORKLOAD: WORKLOADS[name]}
        answer = await client.post("/v1/completions", content=ASK, headers=headers)
    assert answer.status_code == 200, answer.text
    await assert_serves(small)


async def test_envoy_itself_refuses_a_workload_header_of_1_mb(small: Any) -> None:
    workload = b'{"workload_id": "' + b"w" * 1_000_000 + b'"}'
    try:
        status, _ = await post_while_reading(small.url, ASK, workload)
    except (asyncio.IncompleteReadError, ConnectionError):
        status = 431  # Envoy may reset the connection before the client reads the answer
    assert status == 431
    await assert_serves(small)


async def test_unknown_paths_do_not_reach_the_model_server(small: Any) -> None:
    async with small.client() as client:
        for answer in (await client.get("/no/such/path"), await client.post("/no/such/path", json=GOOD)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_path")
    await at_rest(small)
