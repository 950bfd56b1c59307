"""What clients say of themselves has no effect behind the Envoy that `picker envoy-config` describes."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h2.config
import h2.connection
import h2.events
import httpx
import pytest
from edge_envoy import Edge, edge
from fleet_load import at_rest, decisions

from picker_tools.local_fleet.parts import Mode

ASK = {"model": "llama", "prompt": "x", "max_tokens": 1}
GATEWAY, OTHER = "x-gateway-inference-fairness-id", "x-llm-d-inference-fairness-id"
CONFIG = {
    "decision_log": {"enabled": True},
    "objectives": [{"name": "gold", "criticality": "Critical", "weight": 9.0}],
}
# What a client might say to be somebody else, in the ways in which headers can be written.
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
    return shared_fleet("--replicas", "1", "--endpoints", "1", "--sim-ttft", "20", config=CONFIG)


@pytest.fixture(params=["lean", "standard", "headers"], scope="module")
def strangers(
    request: pytest.FixtureRequest, here: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Edge]:
    with edge(here, tmp_path_factory.mktemp("edge"), mode=request.param) as running:
        yield running


async def placed(fleet: Any) -> tuple[str, int]:
    """Flow and band of the request that was let in last."""
    await at_rest(fleet)
    last = [entry for entry in await decisions(fleet) if entry.flow][-1]
    return last.flow, last.band


async def test_what_a_client_says_of_itself_is_taken_from_its_headers(here: Any, strangers: Edge) -> None:
    # When a client claims to be somebody else, in every spelling, twice, and in trailers
    body = json.dumps(ASK).encode()
    claims = "".join(f"{name}: {value}\r\n" for name, value in CLAIMS)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{claims}"
        f"content-type: application/json\r\ntransfer-encoding: chunked\r\n"
        f"trailer: {GATEWAY}\r\n\r\n{len(body):x}\r\n"
    )
    answer = (await strangers.says(head.encode() + body + f"\r\n0\r\n{claims}\r\n".encode())).decode()
    # Then it is served as anyone: its flow is its model's, its band the default, its model its own
    assert answer.startswith("HTTP/1.1 200"), answer
    assert '"model":"llama"' in answer.replace(" ", "")
    assert "x-picker-request-id: mine" not in answer
    assert await placed(here) == ("llama", 1)


def trailed(url: str, claims: list[tuple[str, str]]) -> None:
    """A request over HTTP/2 whose headers and trailers make `claims`, until it is answered."""
    at = httpx.URL(url)
    connection = h2.connection.H2Connection(h2.config.H2Configuration(validate_outbound_headers=False))
    connection.initiate_connection()
    lowered = [(name.lower(), value) for name, value in claims]
    head = [(":method", "POST"), (":path", "/v1/completions"), (":scheme", "http"), (":authority", "x")]
    connection.send_headers(1, [*head, ("content-type", "application/json"), *lowered])
    connection.send_data(1, json.dumps(ASK).encode())
    connection.send_headers(1, lowered, end_stream=True)
    with socket.create_connection((at.host, at.port), timeout=30) as peer:
        while True:
            peer.sendall(connection.data_to_send())
            for event in connection.receive_data(peer.recv(65536)):
                if isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                    return


async def test_trailers_over_http_2_say_no_more_than_headers(here: Any, strangers: Edge) -> None:
    before = len(await decisions(here))
    trailed(strangers.url, CLAIMS)
    assert await placed(here) == ("llama", 1)
    assert len(await decisions(here)) > before


async def test_an_envoy_told_to_trust_a_header_lets_both_its_spellings_through_and_no_more(
    here: Any, tmp_path: Path
) -> None:
    with edge(here, tmp_path, trusted=(GATEWAY, OTHER)) as running:
        async with httpx.AsyncClient(base_url=running.url, trust_env=False, verify=False) as client:
            for name in (GATEWAY, OTHER):
                headers = {name: f"by-{name}", "x-gateway-inference-objective": "gold"}
                assert (await client.post("/v1/completions", json=ASK, headers=headers)).status_code == 200
                assert await placed(here) == (f"by-{name}", 1)


SERVED = [
    ("POST", "/v1/completions?user=/../metrics"),
    ("POST", "/v1//completions"),  # a base URL that ends in a slash makes these
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
    ("POST", "/v1/completions/"),
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
    """A request as it goes over the wire, the last on its connection."""
    body = (json.dumps(ASK).encode() if method == "POST" else b"") if body is None else body
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def test_model_servers_are_asked_for_listed_paths_alone_however_others_are_spelt(
    here: Any, strangers: Edge
) -> None:
    for method, path in SERVED:
        assert (await strangers.says(request(method, path))).startswith(b"HTTP/1.1 200"), path
    await at_rest(here)
    before = len(await decisions(here))
    # (at once: Envoy leaves a refused client a second to read why)
    answers = await asyncio.gather(*(strangers.says(request(*each)) for each in NOT_SERVED))
    for (_, path), answer in zip(NOT_SERVED, answers, strict=True):
        # Envoy says so itself, in the form of any other refusal; what is no HTTP at all it may hang up on
        refusals = (b"HTTP/1.1 404", b"HTTP/1.1 400")
        assert answer.startswith(refusals) or (answer == b"" and path.startswith("\\")), (path, answer)
        assert b"x-served-by" not in answer, path
        if answer.startswith(b"HTTP/1.1 404") and path != "*":
            head, _, said = answer.partition(b"\r\n\r\n")
            assert b"content-type: application/json" in head, path
            assert json.loads(said)["error"]["code"] == "unknown_path", path
    # And no picker is asked
    assert len(await decisions(here)) == before


@pytest.fixture(params=["lean", "standard", "headers"])
def gateway(request: pytest.FixtureRequest, here: Any, tmp_path: Path) -> Iterator[Edge]:
    """Somebody else's: it sends every path to the pool, as it comes."""

    def edit(tree: dict[str, Any]) -> None:
        manager = tree["staticResources"]["listeners"][0]["filterChains"][0]["filters"][0]["typedConfig"]
        manager.update(normalizePath=False, mergeSlashes=False)
        host = manager["routeConfig"]["virtualHosts"][0]
        host["routes"] = [{"match": {"prefix": "/"}, "route": {"cluster": "pool", "timeout": "0s"}}]

    with edge(here, tmp_path, mode=request.param, edit=edit) as running:
        yield running


async def test_behind_any_gateway_the_picker_lets_no_other_path_through(here: Any, gateway: Edge) -> None:
    for method, path in (("POST", "/v1/completions?user=/../metrics"), ("GET", "/v1/models?x")):
        assert (await gateway.says(request(method, path))).startswith(b"HTTP/1.1 200"), path
    await at_rest(here)
    before = len(await decisions(here))
    refused = [*NOT_SERVED, ("POST", "/v1//completions"), ("GET", "//v1/models"), ("GET", "/v1/models/")]
    answers = await asyncio.gather(*(gateway.says(request(*each)) for each in refused))
    for (_, path), answer in zip(refused, answers, strict=True):
        assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")) or answer == b"", (path, answer)
        assert b"x-served-by" not in answer, path
    assert sum(b'"code":"unknown_path"' in answer for answer in answers) > 10
    # And inference without its body, or a list of models with one, is told what is wrong
    for method, body in (("POST", b""), ("GET", b"{}")):
        path = "/v1/completions" if method == "POST" else "/v1/models"
        answer = await gateway.says(request(method, path, body=body))
        assert answer.startswith(b"HTTP/1.1 400"), answer
        assert b'"code":"bad_request"' in answer
    assert len(await decisions(here)) == before


@pytest.fixture(params=["lean", "standard", "headers"], scope="module")
def impatient(
    request: pytest.FixtureRequest, here: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Edge]:
    """As it is but for its patience, and for three clients at most."""

    def edit(tree: dict[str, Any]) -> None:
        manager = tree["staticResources"]["listeners"][0]["filterChains"][0]["filters"][0]["typedConfig"]
        assert {"requestHeadersTimeout", "requestTimeout"} <= manager.keys()
        manager.update(requestHeadersTimeout="0.3s", requestTimeout="0.6s")

    folder = tmp_path_factory.mktemp("edge")
    with edge(here, folder, mode=request.param, edit=edit, max_connections=3) as running:
        yield running


async def test_what_a_client_only_begins_to_send_is_ended(here: Any, impatient: Edge) -> None:
    # When a client sends half of its headers, Then it is told that it took too long
    assert (await impatient.says(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-half: ")).startswith(
        b"HTTP/1.1 408"
    )
    # When it sends half of its body, likewise, whoever reads the body
    whole = request("POST", "/v1/completions")
    assert (await impatient.says(whole[:-10])).startswith(b"HTTP/1.1 408")
    # And an answer may take longer than a request may
    slow = json.dumps({**ASK, "max_tokens": 70, "stream": True}).encode()
    answer = await impatient.says(request("POST", "/v1/completions", body=slow))
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" in answer
    await at_rest(here)


async def test_clients_beyond_the_limit_are_hung_up_on_and_envoy_says_that_it_is_well(
    impatient: Edge,
) -> None:
    # Given as many connections as may be
    held = [await asyncio.open_connection(impatient.host, impatient.port) for _ in range(3)]
    for _, writer in held:
        writer.write(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
    for reader, _ in held:
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    # When one more comes, Then it is hung up on
    assert await impatient.says(request("GET", "/v1/models")) == b""
    # And whoever looks after Envoy still gets through
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        assert (await client.get(f"{impatient.admin}/ready")).status_code == 200
    for _, writer in held:
        writer.close()


@pytest.mark.parametrize("mode", ["lean", "standard", "headers"])
async def test_a_client_that_invents_models_is_refused_wherever_it_says_it_is(
    shared_fleet: Any, tmp_path: Path, mode: Mode
) -> None:
    config = {**CONFIG, "fair_request_queue": {"new_flows_per_minute": 5}}
    few = shared_fleet("--replicas", "1", "--endpoints", "1", "--sim-ttft", "20", config=config)
    codes = []
    with edge(few, tmp_path, mode=mode) as running:
        async with httpx.AsyncClient(base_url=running.url, trust_env=False, verify=False) as client:
            for n in range(12):
                ask = {**ASK, "model": f"invented-{mode}-{n}"}
                claim = {"x-forwarded-for": f"10.0.0.{n}"}
                answer = await client.post("/v1/completions", json=ask, headers=claim)
                codes.append(answer.json()["error"]["code"])
    # Then few of them reach a model server, which does not have such a model either
    assert codes.count("too_many_flows") >= 6, codes
    assert set(codes) <= {"model_not_found", "too_many_flows"}
