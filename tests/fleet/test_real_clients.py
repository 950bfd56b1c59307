"""Requests of real engines' clients reach a model server unchanged, in every mode."""

import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import brotli
import httpx
import pytest
import pytest_asyncio
import zstandard
from counting_servers import read_request
from edge_envoy import edge
from fleet_load import at_rest, counts
from http2_client import upload
from whole_fleet import running

ASK = b'{"model": "llama", "prompt": "x"}'
ORIGIN = "https://app.example.org"
CONFIG: dict[str, Any] = {
    "default_model": "llama",
    "extproc": {"paths": ["POST /team-a/generate"], "unknown_paths": "pass", "max_body_bytes": 4_000_000},
}


class RecordingServer:
    """A model server that records the last request: first line, headers and body. After an upgrade it echoes
    everything."""

    def __init__(self) -> None:
        self.last: tuple[str, dict[str, str], bytes] = ("", {}, b"")
        self.address = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; return whether the connection stays open."""
        first, headers, body = await read_request(reader)
        if first.startswith(("GET /metrics", "GET /prometheus/metrics", "GET /health", "GET /is_sleeping")):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            return True
        self.last = first, headers, body
        if "upgrade" in headers:
            writer.write(b"HTTP/1.1 101 OK\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
            while data := await reader.read(65536):
                writer.write(data)
            return False
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        answer = b'{"usage": {"prompt_tokens": 1, "completion_tokens": 1}}'
        writer.write(head % len(answer) + (b"" if first.startswith("HEAD") else answer))
        return True


@dataclass
class Behind:
    """A fleet in `mode` in front of a recording server."""

    fleet: Any
    server: RecordingServer
    mode: Any
    url: str


@pytest_asyncio.fixture(params=["lean", "standard", "http"], scope="module", loop_scope="module")
async def behind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Behind]:
    server, folder = RecordingServer(), tmp_path_factory.mktemp("clients")
    listening: Any = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    async with listening:
        server.address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        config = {"discovery": {"static": [{"address": server.address}]}, **CONFIG}
        options = ("--mode", request.param, "--endpoints", "0", "--replicas", "1")
        async with running(folder, *options, config=config) as fleet:
            yield Behind(fleet, server, request.param, fleet.url)


def form(**fields: str) -> bytes:
    head = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n%b\r\n' % (
        b"\0\xff" * 999
    )
    named = "".join(
        f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    return head + named.encode() + b"--b--\r\n"


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "br": brotli.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "gzip, br": lambda text: brotli.compress(gzip.compress(text)),
}
JSON = "application/json"
# Method, path, content-type, content-encoding, body.
SERVED: dict[str, tuple[str, str, str, str, bytes]] = {
    "a prefix": ("POST", "/team-a/v1/chat/completions", JSON, "", ASK),
    "an Azure deployment": (
        "POST",
        "/openai/deployments/llama/chat/completions?api-version=1",
        JSON,
        "",
        b"{}",
    ),
    "a trailing slash": ("POST", "/v1/completions/", JSON, "", ASK),
    "a configured prefix of a short path": ("POST", "/team-a/generate", JSON, "", b'{"text": "x"}'),
    "SGLang": ("PUT", "/v1/rerank", JSON, "", ASK),
    "TGI": ("POST", "/", JSON, "", b'{"inputs": "x"}'),
    "Triton": ("POST", "/v2/models/llama/infer", "application/octet-stream", "", b'{"inputs": []}\xff\0'),
    "Gemini": ("POST", "/v1beta/models/llama:generateContent", JSON, "", b"{}"),
    "no model": ("POST", "/v1/responses", JSON, "", b'{"prompt": {"id": "p"}}'),
    "an empty model": ("POST", "/v1/completions", JSON, "", b'{"model": "", "prompt": "x"}'),
    "an upload": (
        "POST",
        "/v1/audio/transcriptions",
        "multipart/form-data; boundary=b",
        "",
        form(model="llama"),
    ),
    "UTF-16": ("POST", "/v1/completions", JSON, "", ASK.decode().encode("utf-16")),
    "an array": ("POST", "/v1/embeddings", JSON, "", b'["x"]'),
    "a response by id": ("GET", "/v1/responses/resp_1", "", "", b""),
    "a deletion": ("DELETE", "/v1/responses/resp_1", "", "", b""),
    "a cancel": ("POST", "/v1/responses/resp_1/cancel", JSON, "", b"{}"),
    "a cancel without a body": ("POST", "/v1/responses/resp_1/cancel", "", "", b""),
    "HEAD": ("HEAD", "/v1/models", "", "", b""),
    "OPTIONS": ("OPTIONS", "/v1/chat/completions", "", "", b""),
    "a path of no API": ("PATCH", "/no/such/api", "text/plain", "", b"x"),
    "a path of no API without a body": ("GET", "/no/such/api", "", "", b""),
    **{f"{name}": ("POST", "/v1/completions", JSON, name, pack(ASK)) for name, pack in PACKED.items()},
    "a long one in zstd": ("POST", "/v1/completions", JSON, "zstd", PACKED["zstd"](ASK.ljust(3_000_000))),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", SERVED)
async def test_what_clients_send_reaches_a_model_server_as_it_came(behind: Behind, name: str) -> None:
    method, path, content_type, encoding, body = SERVED[name]
    fields = {"content-type": content_type, "content-encoding": encoding, "x-request-id": "the client's"}
    async with behind.fleet.client() as client:
        answer = await client.request(
            method, path, content=body or None, headers={key: value for key, value in fields.items() if value}
        )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == "the client's"
    first, headers, came = behind.server.last
    assert first == f"{method} {path.removesuffix('/') or '/'} HTTP/1.1"
    assert came == body
    assert headers.get("content-encoding", "") == encoding
    if body:
        assert headers.get("content-length") == str(len(body))
    await at_rest(behind.fleet)


REFUSED: dict[str, tuple[str, str, bytes, int, str]] = {  # path, encoding, body, status, text of the refusal
    "an unknown encoding": ("/v1/completions", "lzma", ASK, 415, "lzma"),
    "a damaged body": ("/v1/completions", "gzip", ASK, 415, "gzip"),
    "a bomb": ("/v1/completions", "gzip", gzip.compress(bytes(50_000_000)), 413, "4000000"),
    "administration": ("/team-a/Sleep/", "", ASK, 404, ""),
    "encoded administration": ("/v1/%73leep", "", ASK, 404, ""),
    "administration of Triton": ("/v2/repository/models/m/load", "", b"{}", 404, ""),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_served_is_refused_by_name(behind: Behind, name: str) -> None:
    path, encoding, body, status, says = REFUSED[name]
    fields = {"content-encoding": encoding} if encoding else {}
    async with behind.fleet.client() as client:
        answer = await client.post(path, content=body, headers={"x-request-id": "its own", **fields})
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"] == "its own"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_of_http_1_0_is_served(behind: Behind) -> None:
    at = httpx.URL(behind.url)
    reader, writer = await asyncio.open_connection(at.host, at.port)
    writer.write(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(ASK), ASK))
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200"))
    assert b"usage" in answer


@pytest.mark.asyncio(loop_scope="module")
async def test_a_web_socket_is_admitted_and_in_flight_as_long_as_it_is_open(behind: Behind) -> None:
    at = httpx.URL(behind.url)
    reader, writer = await asyncio.open_connection(at.host, at.port)
    writer.write(
        b"GET /v1/realtime?model=llama HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
        assert b" 101 " in head.split(b"\r\n")[0]
        for each in (b"hello", b"again" * 10_000):
            writer.write(each)
            assert await reader.readexactly(len(each)) == each
        state = await behind.fleet.get("state", 0)
        assert sum(counts(state)) > 0
    writer.close()
    await at_rest(behind.fleet)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_whose_stream_does_not_end_is_answered_at_once(behind: Behind) -> None:
    if behind.mode == "http":
        pytest.skip("Envoy itself waits for the end of the body")
    async with upload(behind.url) as client:
        await client.send_open(ASK, [("content-length", str(len(ASK)))])
        assert await asyncio.wait_for(client.answered(), 5) == "200"
    assert behind.server.last[2] == ASK
    await at_rest(behind.fleet)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_browsers_preflight_is_answered(behind: Behind, tmp_path: Path) -> None:
    if behind.mode == "http":
        pytest.skip("the same filter in each mode")
    with edge(behind.fleet, tmp_path, mode=behind.mode, origins=[ORIGIN]) as envoy:
        async with httpx.AsyncClient(base_url=envoy.url, trust_env=False) as client:
            asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
            answer = await client.options("/v1/chat/completions", headers=asked)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
            assert "authorization" in answer.headers["access-control-allow-headers"]
            answer = await client.post("/v1/completions", content=ASK, headers={"origin": ORIGIN})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
        await at_rest(behind.fleet)  # while this Envoy can still report the request's end
