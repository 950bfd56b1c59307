"""Whatever a client sends gets a clear answer, and harms no other (G10)."""

import asyncio
import json
from typing import Any

import pytest
from fleet_load import at_rest, complete, post_while_reading

MODES = ["lean", "standard", "headers"]
JSON = {"content-type": "application/json"}
GOOD = {"model": "llama", "prompt": "x", "max_tokens": 1}
HUGE = b'{"model": "llama", "prompt": "' + b"x" * 20_000_000 + b'"}'

BODIES = [
    pytest.param(b'{"model":', 400, "JSON", id="cut off"),
    pytest.param(b"not json", 400, "JSON", id="no JSON"),
    pytest.param(b"\xff\xfe\x00", 400, "JSON", id="no UTF-8"),
    pytest.param(b'{"prompt": "x"}', 400, "model", id="no model"),
    pytest.param(b'{"model": 7, "prompt": "x"}', 400, "model", id="model no string"),
    pytest.param(b'{"model": "", "prompt": "x"}', 400, "model", id="model empty"),
    pytest.param(b'{"model": "a\\u001fb", "prompt": "x"}', 400, "model", id="model with a control character"),
    pytest.param(b'["model"]', 400, "", id="no object"),
]

WORKLOADS = [
    pytest.param(b'{"workload_id": "' + b"w" * 40_000 + b'"}', id="long id"),
    pytest.param(json.dumps({"workload_id": "a\0b"}).encode(), id="NUL"),
    pytest.param(b'{"workload_id": ' * 50 + b"1" + b"}" * 50, id="nested"),
    pytest.param(b'{"workload_id": "w", "criticality": NaN}', id="criticality NaN"),
    pytest.param(b'{"workload_id": "w", "criticality": 9e99}', id="criticality 9e99"),
    pytest.param(b'{"workload_id": "w", "criticality": "5"}', id="criticality a string"),
    pytest.param(b"[1, 2", id="broken"),
]


@pytest.fixture(params=MODES, scope="module")
def small(request: pytest.FixtureRequest, shared_fleet: Any) -> Any:
    return shared_fleet("--mode", request.param, "--sim-ttft", "1", "--sim-itl", "1")


@pytest.mark.parametrize(("body", "status", "named"), BODIES)
async def test_bad_bodies_are_named(small: Any, body: bytes, status: int, named: str) -> None:
    # When a client sends it
    async with small.client() as client:
        answer = await client.post("/v1/completions", content=body, headers=JSON)
        # Then it is told what is wrong, and the next one is served
        assert answer.status_code == status, answer.text
        assert named in answer.json()["error"]["message"]
        assert (await complete(client, "x", 1)).whole
    await at_rest(small)


async def test_a_body_of_20_mb_is_refused_before_it_has_all_come(small: Any) -> None:
    # When a client sends far too much, Then it is told so while it still sends
    status, body = await post_while_reading(small.url, HUGE)
    assert status == 413, body
    assert "larger" in json.loads(body)["error"]["message"]
    async with small.client() as client:
        assert (await complete(client, "x", 1)).whole
    await at_rest(small)


@pytest.mark.parametrize("workload", WORKLOADS)
async def test_hostile_workloads_are_served_as_anonymous(small: Any, workload: bytes) -> None:
    # When a client sends a workload context that makes no sense
    async with small.client() as client:
        headers = [(b"content-type", b"application/json"), (b"x-workload-context", workload)]
        answer = await client.post("/v1/completions", content=json.dumps(GOOD), headers=headers)
        # Then its request is served all the same
        assert answer.status_code == 200, answer.text
        assert (await complete(client, "x", 1)).whole
    await at_rest(small)


async def test_a_workload_of_1_mb_is_refused_by_envoy_itself(small: Any) -> None:
    # When a client sends a header past Envoy's own limit
    workload = b'{"workload_id": "' + b"w" * 1_000_000 + b'"}'
    try:
        status, _ = await post_while_reading(small.url, json.dumps(GOOD).encode(), workload)
    except (asyncio.IncompleteReadError, ConnectionError):
        status = 431  # Envoy hangs up while the client still writes, which can overtake its own answer
    # Then Envoy refuses it, and the next one is served
    assert status == 431
    async with small.client() as client:
        assert (await complete(client, "x", 1)).whole
    await at_rest(small)


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-workload-context", b"\xff\xfe"),
        ("x-gateway-inference-fairness-id", b"\xff\xfe"),
        ("x-gateway-inference-fairness-id", b"f" * 300),
        ("x-llm-d-inference-ttl", b"soon"),
    ],
)
async def test_bad_headers_are_named(small: Any, header: str, value: bytes) -> None:
    async with small.client() as client:
        headers = [(b"content-type", b"application/json"), (header.encode(), value)]
        answer = await client.post("/v1/completions", content=json.dumps(GOOD), headers=headers)
        assert answer.status_code == 400, answer.text
        assert header in answer.json()["error"]["message"]


async def test_unknown_paths_do_not_reach_the_model_server(small: Any) -> None:
    async with small.client() as client:
        for answer in (await client.get("/no/such/path"), await client.post("/no/such/path", json=GOOD)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_path")
    await at_rest(small)
