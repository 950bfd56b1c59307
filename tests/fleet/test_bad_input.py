"""Any input from a client gets a clear answer and harms no other client (G10)."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from fleet_load import at_rest, complete, fresh, post_while_reading, total
from http2_client import upload

JSON = {"content-type": b"application/json"}
GOOD = {"model": "llama", "prompt": "x", "max_tokens": 1}
HUGE = b'{"model": "llama", "prompt": "' + b"x" * 20_000_000 + b'"}'

ASK = json.dumps(GOOD).encode()
WORKLOAD, FAIRNESS = "x-workload-context", "x-gateway-inference-fairness-id"
# Bodies, headers, and a word in the error message; tests/unit/test_intake.py has all faults.
REFUSED: list[tuple[bytes, dict[str, bytes], str]] = [
    (b'{"model":', {}, "JSON"),
    (b"\xff\xfe\x00", {}, "JSON"),
    (b'{"model": "a\\u001fb", "prompt": "x"}', {}, "model"),
    (b'["model"]', {}, ""),
    (ASK, {WORKLOAD: b"\xff\xfe"}, WORKLOAD),
    (ASK, {FAIRNESS: b"\xff\xfe"}, FAIRNESS),
    (ASK, {"x-llm-d-inference-ttl": b"soon"}, "x-llm-d-inference-ttl"),
]
WORKLOADS = (
    b'{"workload_id": "' + b"w" * 40_000 + b'"}',
    json.dumps({"workload_id": "a\0b"}).encode(),
    b'{"workload_id": "w", "criticality": 9e99}',
    b"[1, 2",
)


@pytest.fixture(params=["lean", "standard", "http"], scope="module")
def small(request: pytest.FixtureRequest, shared_fleet: Any) -> Any:
    quick = ("--replicas", "1", "--endpoints", "1", "--sim-ttft", "1", "--sim-itl", "1")
    return shared_fleet("--mode", request.param, *quick)


async def assert_serves(fleet: Any) -> None:
    """Assert that the next request is served and that nothing stays in flight."""
    assert (await complete(fleet.url, "x", 1)).served
    await at_rest(fleet)


async def test_bad_input_is_refused_with_a_reason_and_the_next_request_served(small: Any) -> None:
    async with small.client() as client:
        for body, headers, named in REFUSED:
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


async def test_a_request_with_a_hostile_workload_is_served_as_anonymous(small: Any) -> None:
    async with small.client() as client:
        for workload in WORKLOADS:
            headers = {**JSON, WORKLOAD: workload}
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
        answer = await client.post("/team-a/v1/messages/batches", json=GOOD)
        assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
    await at_rest(small)


async def test_envoys_own_refusal_reaches_the_client(small: Any) -> None:
    at = httpx.URL(small.url)
    for header, status in (("transfer-encoding: gzip, chunked", 501), ("content-length: -1", 400)):
        reader, writer = await asyncio.open_connection(at.host, at.port)
        writer.write(f"POST /v1/completions HTTP/1.1\r\nhost: x\r\n{header}\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer


async def test_a_request_gets_431_if_its_headers_and_the_pickers_exceed_envoys_limit(
    small: Any,
) -> None:
    many = {f"x-{number}": "v" for number in range(90)}
    async with small.client() as client:
        answer = await client.post("/v1/completions", json={**GOOD, "model": "many"}, headers=many)
        assert (answer.status_code, answer.text) == (431, "Request Header Fields Too Large")
    await assert_serves(small)

    async def page() -> str:
        return str((await small.admin("/metrics")).text)

    assert total(await fresh(page), "epp_completions_total", model="many", outcome="upstream_failed") == 0


async def test_an_invalid_http2_request_ends_no_other_request_of_its_connection(small: Any) -> None:
    async with upload(small.url) as client:
        await client.send_open(ASK)
        await client.send_invalid()
        await client.end()
        assert await client.answered() == "200"
    await at_rest(small)
