"""Hostile clients attack an Envoy configured by `picker envoy-config`, by headers, paths and connections."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from crowd import http_client
from edge_envoy import Edge, admitted, edge, http_manager
from fleet_load import at_rest, decisions, exchange, metric
from http2_client import upload
from model_servers import Failure, failing_servers, http_answer, static

from picker_tools.local_fleet.network import LOOPBACK
from picker_tools.local_fleet.parts import Mode

MODES = ["lean", "standard", "http"]
SMALL = ("--mode", "http", "--replicas", "1", "--endpoints", "1", "--sim-ttft", "20")
ASK = {"model": "llama", "prompt": "x", "max_tokens": 1}
GATEWAY, OTHER = "x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id"
CONFIG = {"objectives": [{"name": "gold", "criticality": "Critical", "weight": 9.0}]}
# Headers with which a client could claim another identity, in various spellings.
CLAIMS = [
    ("X-Gateway-Inference-Fairness-Id", "invented"),
    ("x-gateway-inference-fairness-id", "again"),
    ("X-LLM-D-INFERENCE-FAIRNESS-ID", "other"),
    ("x-Gateway-Inference-Objective", "gold"),
    ("x-llm-d-inference-objective", "gold"),
    ("x-gateway-model-name-rewrite", "costly"),
    ("x-llm-d-model-name-rewrite", "costly"),
    ("x-gateway-destination-endpoint", "127.0.0.1:1"),
    ("x-gateway-destination-endpoint-subset", "127.0.0.1:1"),
    ("x-gateway-destination-endpoint-served", "127.0.0.1:1"),
    ("x-request-id", "mine"),
    ("x-envoy-internal", "true"),
    ("x-envoy-upstream-rq-timeout-ms", "1"),
    ("x-envoy-max-retries", "100"),
]


@pytest.fixture(scope="module")
def here(shared_fleet: Any) -> Any:
    return shared_fleet(*SMALL, config=CONFIG)


@pytest.fixture(params=MODES, scope="module")
def mode(request: pytest.FixtureRequest) -> Mode:
    found: Mode = request.param
    return found


@pytest.fixture(scope="module")
def strangers(mode: Mode, here: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with edge(here, tmp_path_factory.mktemp("edge"), mode=mode) as running:
        yield running


async def test_a_request_ends_even_if_its_client_never_reads_the_answer(here: Any, strangers: Edge) -> None:
    await at_rest(here)
    since = len(await decisions(here))
    tokens = partial(metric, here, "epp_output_tokens_total")
    before = await tokens()
    async with upload(strangers.url, window=0) as client:
        await client.send_open(json.dumps(ASK).encode())
        await client.end()
        await here.eventually(lambda: decisions(here), lambda found: len(found) > since)
        await at_rest(here)
        # Envoy has reported the request's end; `completed` means that no sweep reclaimed the request.
        assert [entry.event for entry in (await decisions(here))[since:]] == ["bypassed", "completed"]
        await client.open_window(65_535)
        assert await client.answered() == "200"
    # An answer that is read late counts once, with its tokens.
    await here.eventually(tokens, lambda found: found == before + 1)


async def test_identity_claims_in_headers_and_trailers_have_no_effect(here: Any, strangers: Edge) -> None:
    body = json.dumps(ASK).encode()
    claims = "".join(f"{name}: {value}\r\n" for name, value in CLAIMS)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{claims}"
        f"content-type: application/json\r\ntransfer-encoding: chunked\r\n"
        f"trailer: {GATEWAY}\r\n\r\n{len(body):x}\r\n"
    )
    answer = (
        await exchange(strangers.url, head.encode() + body + f"\r\n0\r\n{claims}\r\n".encode())
    ).decode()
    # The flow is named after the model, the band is Default, and no rewrite renames the model.
    assert answer.startswith("HTTP/1.1 200"), answer
    assert '"model":"llama"' in answer.replace(" ", "")
    assert "x-picker-request-id: mine" not in answer
    assert (await admitted(here))[-1] == ("llama", 0)


async def test_identity_claims_in_http_2_trailers_have_no_effect(here: Any, strangers: Edge) -> None:
    before = len(await decisions(here))
    claims = [(name.lower(), value) for name, value in CLAIMS]
    async with upload(strangers.url) as client:
        await client.send(json.dumps(ASK).encode(), claims, trailers=claims)
        await client.answered()
    assert (await admitted(here))[-1] == ("llama", 0)
    assert len(await decisions(here)) > before


async def test_envoy_passes_the_headers_that_it_trusts_and_removes_other_claims(
    here: Any, tmp_path: Path
) -> None:
    with edge(here, tmp_path, trusted=(GATEWAY, OTHER)) as running:
        async with http_client(running.url) as client:
            for name in (GATEWAY, OTHER):
                headers = {name: f"by-{name}", "x-gateway-inference-objective": "gold"}
                assert (await client.post("/v1/completions", json=ASK, headers=headers)).status_code == 200
                assert (await admitted(here))[-1] == (f"by-{name}", 0)


SERVED = [
    ("POST", "/v1/completions?user=/../metrics"),
    ("POST", "/v1//completions"),  # this path is sent by clients whose base URL ends in a slash
    ("POST", "/v1/completions/"),
    ("GET", "/v1/models"),
]
NOT_SERVED = [
    ("GET", "/metrics"),
    ("POST", "/flush_cache"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/models"),
    ("PUT", "/v1/completions"),
    ("GET", "/v1/completions"),
    ("POST", "/v1/completions/../../flush_cache"),
    ("POST", "/v1/completions%2f..%2f..%2fflush_cache"),
    ("POST", "/v1%2fcompletions"),
    ("POST", "/v1/completions;/../../flush_cache"),
    ("POST", "/v1/Completions"),
    ("POST", "/v1/completions/%2e%2e/%2e%2e/flush_cache"),
    ("POST", "/v1/completions/%252e%252e/flush_cache"),
    ("POST", "\\v1\\completions"),
    ("POST", "http://127.0.0.1/flush_cache"),
    ("GET", "/v1/models/../../metrics"),
    ("GET", "/v1/models/..%2f..%2fmetrics"),
    ("GET", "/v1/models/llama/%2e%2e/%2e%2e/metrics"),
    ("GET", "/v1/models/llama%5c..%5cmetrics"),
    ("OPTIONS", "*"),
]


def request(method: str, path: str, *, body: bytes | None = None) -> bytes:
    """The bytes of an HTTP/1.1 request that asks to close the connection."""
    body = (json.dumps(ASK).encode() if method == "POST" else b"") if body is None else body
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def test_envoy_passes_only_listed_paths_however_a_path_is_spelled(here: Any, strangers: Edge) -> None:
    for method, path in SERVED:
        assert (await exchange(strangers.url, request(method, path))).startswith(b"HTTP/1.1 200"), path
    await at_rest(here)
    before = len(await decisions(here))
    # In parallel: Envoy keeps a refused client's connection open for a second.
    answers = await asyncio.gather(*(exchange(strangers.url, request(*each)) for each in NOT_SERVED))
    for (_, path), answer in zip(NOT_SERVED, answers, strict=True):
        # Envoy refuses in the fleet's error format, or closes the connection if the request is not HTTP.
        refusals = (b"HTTP/1.1 404", b"HTTP/1.1 400")
        assert answer.startswith(refusals) or (answer == b"" and path.startswith("\\")), (path, answer)
        assert b"x-served-by" not in answer, path
        if answer.startswith(b"HTTP/1.1 404") and path != "*":
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"content-type: application/json" in head, path
            assert json.loads(body)["error"]["code"] == "unknown_path", path
    assert len(await decisions(here)) == before


@pytest.fixture
def gateway(mode: Mode, here: Any, tmp_path: Path) -> Iterator[Edge]:
    """A third-party gateway that passes every path to the pool unchanged."""

    def edit(tree: dict[str, Any]) -> None:
        manager = http_manager(tree)
        manager.update(normalizePath=False, mergeSlashes=False)
        host = manager["routeConfig"]["virtualHosts"][0]
        host["routes"] = [{"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "0s"}}]

    with edge(here, tmp_path, mode=mode, edit=edit) as running:
        yield running


async def test_behind_any_gateway_the_picker_passes_only_listed_paths(here: Any, gateway: Edge) -> None:
    for method, path in (("POST", "/v1/completions?user=/../metrics"), ("GET", "/v1/models?x")):
        assert (await exchange(gateway.url, request(method, path))).startswith(b"HTTP/1.1 200"), path
    await at_rest(here)
    before = len(await decisions(here))
    refused = [*NOT_SERVED, ("POST", "/v1//completions"), ("GET", "//v1/models")]
    answers = await asyncio.gather(*(exchange(gateway.url, request(*each)) for each in refused))
    for (_, path), answer in zip(refused, answers, strict=True):
        assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")) or answer == b"", (path, answer)
        assert b"x-served-by" not in answer, path
    assert sum(b'"code":"unknown_path"' in answer for answer in answers) > 10
    answer = await exchange(gateway.url, request("POST", "/v1/completions", body=b""))
    assert answer.startswith(b"HTTP/1.1 400"), answer
    assert b'"code":"bad_request"' in answer
    assert len(await decisions(here)) == before


@pytest.fixture(scope="module")
def impatient(mode: Mode, here: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """An Envoy with short timeouts that accepts at most three connections."""

    def edit(tree: dict[str, Any]) -> None:
        manager = http_manager(tree)
        assert {"requestHeadersTimeout", "requestTimeout"} <= manager.keys()
        manager.update(requestHeadersTimeout="0.3s", requestTimeout="0.6s")

    folder = tmp_path_factory.mktemp("edge")
    with edge(here, folder, mode=mode, edit=edit, max_connections=3) as running:
        yield running


async def test_half_sent_requests_time_out_and_slow_answers_do_not(here: Any, impatient: Edge) -> None:
    half_headers = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-half: "
    for half in (half_headers, request("POST", "/v1/completions")[:-10]):
        assert (await exchange(impatient.url, half)).startswith(b"HTTP/1.1 408")
    slow = json.dumps({**ASK, "max_tokens": 70, "stream": True}).encode()
    answer = await exchange(impatient.url, request("POST", "/v1/completions", body=slow))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" in answer
    await at_rest(here)


async def test_connections_beyond_the_limit_are_closed_and_envoys_health_check_passes(
    impatient: Edge,
) -> None:
    open_ones = [await asyncio.open_connection(LOOPBACK, impatient.port) for _ in range(3)]
    for reader, writer in open_ones:
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    assert await exchange(impatient.url, request("GET", "/v1/models")) == b""
    async with http_client() as client:
        assert (await client.get(f"{impatient.admin}/ready")).status_code == 200
    for _, writer in open_ones:
        writer.close()


async def half_http1(url: str, body: bytes) -> None:
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    with contextlib.closing(writer.transport):
        whole = request("POST", "/v1/completions", body=body)
        for at in range(0, len(whole) - 65_536, 65_536):
            writer.write(whole[at : at + 65_536])
            await asyncio.sleep(0.05)
        await reader.read()


async def half_http2(url: str, body: bytes) -> None:
    async with upload(url) as client:
        await client.send_open(body)
        await client.answered()


@pytest.mark.parametrize("send", [half_http1, half_http2])
async def test_half_sent_bodies_that_envoy_keeps_in_mode_http_do_not_keep_other_requests_out(
    here: Any, tmp_path: Path, send: Any
) -> None:
    body = json.dumps({**ASK, "prompt": "x" * 8_000_000}).encode()
    with edge(here, tmp_path, mode="http", max_heap_bytes=64 * 1024 * 1024) as running:
        attacking = [asyncio.create_task(send(running.url, body)) for _ in range(10)]
        ended, _ = await asyncio.wait(attacking, timeout=40, return_when=asyncio.FIRST_COMPLETED)
        assert ended
        whole = request("POST", "/v1/completions", body=json.dumps(ASK).encode())
        await here.eventually(partial(exchange, running.url, whole), lambda answer: b"200 OK" in answer[:20])
        for task in attacking:
            task.cancel()
        await asyncio.wait(attacking)


@pytest.mark.parametrize("mode", MODES)  # from here on, tests end the fleet of the fixture `here`
async def test_a_client_that_invents_models_is_refused_despite_a_forged_x_forwarded_for_header(
    shared_fleet: Any, tmp_path: Path, mode: Mode
) -> None:
    few = shared_fleet(*SMALL, config={**CONFIG, "fair_request_queue": {"new_flows_per_minute": 5}})
    codes = []
    with edge(few, tmp_path, mode=mode) as running:
        async with http_client(running.url) as client:
            for n in range(12):
                ask = {**ASK, "model": f"invented-{mode}-{n}"}
                forged = {"x-forwarded-for": f"10.0.0.{n}"}
                answer = await client.post("/v1/completions", json=ask, headers=forged)
                codes.append(answer.json()["error"]["code"])
    # The model server, which few of the requests reach, does not know the models.
    assert codes.count("too_many_flows") >= 6, codes
    assert set(codes) <= {"model_not_found", "too_many_flows"}


@pytest.mark.parametrize("mode", MODES)
async def test_uploads_that_trickle_do_not_keep_other_bodies_out(
    shared_fleet: Any, tmp_path: Path, mode: Mode
) -> None:
    config = {"extproc": {"max_body_bytes": 1_000_000, "max_buffered_bytes": 4_000_000}}
    tight = shared_fleet(*SMALL, config=config)
    whole = request("POST", "/v1/completions", body=json.dumps({**ASK, "prompt": "x" * 900_000}).encode())

    async def trickle() -> None:
        _, writer = await asyncio.open_connection(LOOPBACK, running.port)
        with contextlib.closing(writer.transport):
            writer.write(whole[:-100])
            for at in range(len(whole) - 100, len(whole) - 1):
                await asyncio.sleep(0.5)
                writer.write(whole[at : at + 1])

    with edge(tight, tmp_path, mode=mode, settings=config) as running:
        attacking = [asyncio.create_task(trickle()) for _ in range(6)]
        if mode != "http":  # in mode `http` Envoy buffers whole bodies
            await tight.eventually(partial(metric, tight, "epp_buffered_bytes"), lambda now: now > 3_000_000)
        await tight.eventually(partial(exchange, running.url, whole), lambda answer: b"200 OK" in answer[:20])
        for task in attacking:
            assert task.cancel()
        await asyncio.wait(attacking)


async def test_requests_end_even_if_clients_never_read_12_mb_answers(fleet: Any, tmp_path: Path) -> None:
    async with failing_servers(1, 0.0) as servers:
        servers.poison = Failure(http_answer(b"x" * 12_000_000, kind="text/event-stream"))
        config = {"discovery": static(servers.addresses)}
        here = await asyncio.to_thread(partial(fleet, *SMALL[:4], "--endpoints", "0", config=config))
        body = json.dumps({**ASK, "prompt": "poison"}).encode()

        async def placements() -> int:
            return [entry.event for entry in await decisions(here)].count("bypassed")

        for number, mode in enumerate(MODES, 1):
            with edge(here, tmp_path / mode, mode=mode) as strangers:
                async with upload(strangers.url, window=0) as client:
                    _, writer = await asyncio.open_connection(LOOPBACK, strangers.port)
                    writer.write(request("POST", "/v1/completions", body=body))
                    await client.send_open(body)
                    await client.end()
                    await here.eventually(placements, (2 * number).__eq__)
                    await at_rest(here, within_s=30)
                    writer.transport.abort()
