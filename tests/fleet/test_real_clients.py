"""In every mode, requests of many APIs reach a model server unchanged, and tokens in answers are counted."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import brotli
import httpx
import pytest
import pytest_asyncio
import zstandard
from crowd import http_client
from edge_envoy import edge, http_manager
from fleet_load import at_rest, counts, fresh, total
from http2_client import upload
from model_servers import COMPLETION, Ends, Received, http_answer, listening, static
from whole_fleet import running

from picker_fleet.ingress.headers import REQUEST_TIMEOUT, SESSION_HEADERS, SLO, TTL
from picker_tools.local_fleet.parts import MODES

pytestmark = pytest.mark.asyncio(loop_scope="module")
JSON, EVENTS = "application/json", "text/event-stream"
ASK = b'{"model": "llama", "prompt": "x"}'
ORIGIN = "https://app.example.org"
CONFIG: dict[str, Any] = {
    "default_model": "llama",
    "models": [{"name": "big", "target_models": [{"name": "big-v2"}]}],
    "extproc": {"paths": ["POST /team-a/generate"], "unknown_paths": "pass", "max_body_bytes": 4_000_000},
}


class RecordingServer:
    """A model server that keeps the `last` request and counts requests in `served`. The server sends
    `answer`, of content type `kind`, and header lines; in pieces of `piece` bytes if set. After an
    upgrade the server echoes all bytes."""

    def __init__(self) -> None:
        self.last: Received
        self.served = 0
        self.answer, self.kind, self.headers, self.piece = COMPLETION, JSON, "", 0

    async def serve(self, request: Received, ends: Ends) -> bool:
        reader, writer = ends
        if request.headers.get("user-agent") == "picker":  # this request is a scrape or a health probe
            writer.write(http_answer(b""))
            return True
        self.last = request
        self.served += 1
        if "upgrade" in request.headers:
            writer.write(b"HTTP/1.1 101 OK\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
            while data := await reader.read(65536):
                writer.write(data)
            return False
        whole = http_answer(self.answer, kind=self.kind, headers=self.headers)
        whole = whole.removesuffix(self.answer) if request.method == "HEAD" else whole
        for at in range(0, len(whole), self.piece or len(whole)):
            writer.write(whole[at : at + (self.piece or len(whole))])
            await asyncio.sleep(0.001)
        return True


@dataclass
class Behind:
    """A fleet in `mode` in front of a recording server."""

    fleet: Any
    server: RecordingServer
    mode: Any


@pytest_asyncio.fixture(params=MODES, scope="module", loop_scope="module")
async def behind(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Behind]:
    server, folder = RecordingServer(), tmp_path_factory.mktemp("clients")
    async with listening(server.serve) as address:
        config = {"discovery": static([address]), **CONFIG}
        options = ("--mode", request.param, "--endpoints", "0", "--replicas", "1")
        async with running(folder, *options, config=config) as fleet:
            yield Behind(fleet, server, request.param)


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
# Each request has method, path, content-type, content-encoding and body.
SERVED: dict[str, tuple[str, str, str, str, bytes]] = {
    "a path with a prefix": ("POST", "/team-a/v1/chat/completions", JSON, "", ASK),
    "an Azure deployment": (
        "POST",
        "/openai/deployments/llama/chat/completions?api-version=1",
        JSON,
        "",
        b"{}",
    ),
    "a trailing slash": ("POST", "/v1/completions/", JSON, "", ASK),
    "a configured path": ("POST", "/team-a/generate", JSON, "", b'{"text": "x"}'),
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
    "an unknown path": ("PATCH", "/no/such/api", "text/plain", "", b"x"),
    "an unknown path without a body": ("GET", "/no/such/api", "", "", b""),
    **{name: ("POST", "/v1/completions", JSON, name, pack(ASK)) for name, pack in PACKED.items()},
    "a long body in zstd": ("POST", "/v1/completions", JSON, "zstd", PACKED["zstd"](ASK.ljust(3_000_000))),
}


@pytest.mark.parametrize("name", SERVED)
async def test_each_request_reaches_a_model_server_unchanged(behind: Behind, name: str) -> None:
    method, path, content_type, encoding, body = SERVED[name]
    fields = {"content-type": content_type, "content-encoding": encoding, "x-request-id": "the client's"}
    async with behind.fleet.client() as client:
        answer = await client.request(
            method, path, content=body or None, headers={key: value for key, value in fields.items() if value}
        )
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == "the client's"
    came = behind.server.last
    assert (came.method, came.path, came.body) == (method, path.removesuffix("/") or "/", body)
    assert came.headers.get("content-encoding", "") == encoding
    if body:
        assert came.headers.get("content-length") == str(len(body))
    await at_rest(behind.fleet)


REFUSED: dict[str, tuple[str, str, bytes, int, str]] = {  # path, encoding, body, status, text of the refusal
    "an unknown encoding": ("/v1/completions", "lzma", ASK, 415, "lzma"),
    "a damaged body": ("/v1/completions", "gzip", ASK, 415, "gzip"),
    "a decompression bomb": ("/v1/completions", "gzip", gzip.compress(bytes(8_000_000)), 413, "4000000"),
    "an admin path": ("/team-a/Sleep/", "", ASK, 404, ""),
    "an encoded admin path": ("/v1/%73leep", "", ASK, 404, ""),
    "an admin path of Triton": ("/v2/repository/models/m/load", "", b"{}", 404, ""),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_request_that_cannot_be_served_is_refused_with_its_reason(behind: Behind, name: str) -> None:
    path, encoding, body, status, says = REFUSED[name]
    fields = {"content-encoding": encoding} if encoding else {}
    async with behind.fleet.client() as client:
        answer = await client.post(path, content=body, headers={"x-request-id": "its own", **fields})
    assert answer.status_code == status, answer.text
    assert says in answer.json()["error"]["message"]
    assert answer.headers["x-request-id"] == "its own"


async def test_an_answer_with_97_headers_becomes_503_only_in_mode_standard(behind: Behind) -> None:
    behind.server.headers = "".join(f"x-{number}: v\r\n" for number in range(97))
    async with behind.fleet.client() as client:
        answer = await client.post("/v1/completions", content=ASK)
    behind.server.headers = ""
    assert answer.status_code == (503 if behind.mode == "standard" else 200)


async def test_a_client_of_http_1_0_is_served(behind: Behind) -> None:
    at = httpx.URL(behind.fleet.url)
    reader, writer = await asyncio.open_connection(at.host, at.port)
    writer.write(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(ASK), ASK))
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.0 200"))
    assert b"usage" in answer


async def test_a_web_socket_is_in_flight_until_it_is_closed(behind: Behind) -> None:
    at = httpx.URL(behind.fleet.url)
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


async def test_a_request_of_known_length_is_answered_before_its_stream_ends(behind: Behind) -> None:
    if behind.mode == "http":
        pytest.skip("in mode `http` Envoy waits for the end of the body")
    async with upload(behind.fleet.url) as client:
        await client.send_open(ASK, [("content-length", str(len(ASK)))])
        assert await asyncio.wait_for(client.answered(), 5) == "200"
    assert behind.server.last.body == ASK
    await at_rest(behind.fleet)


async def test_envoy_answers_a_browsers_cors_preflight(behind: Behind, tmp_path: Path) -> None:
    if behind.mode == "http":
        pytest.skip("mode `http` has the same CORS filter")
    with edge(behind.fleet, tmp_path, mode=behind.mode, origins=[ORIGIN]) as envoy:
        async with http_client(envoy.url) as client:
            asked = {"origin": ORIGIN, "access-control-request-method": "POST"}
            answer = await client.options("/v1/chat/completions", headers=asked)
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
            allowed = answer.headers["access-control-allow-headers"].split(",")
            assert {"authorization", *SLO, TTL, REQUEST_TIMEOUT, *SESSION_HEADERS} <= set(allowed)
            answer = await client.post("/v1/completions", content=ASK, headers={"origin": ORIGIN})
            assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
        await at_rest(behind.fleet)  # this Envoy must report the request's end before it stops


LUA = """function envoy_on_request(handle)
  handle:headers():remove("content-encoding")
  handle:body():setBytes('{"model": "llama", "prompt": "a longer prompt"}')
end"""
_EXTENSIONS = "type.googleapis.com/envoy.extensions"
GZIP = {"@type": f"{_EXTENSIONS}.compression.gzip.decompressor.v3.Gzip"}
CHANGES: dict[str, dict[str, Any]] = {  # Envoy's filters that change a request's body
    "decompressor.v3.Decompressor": {"decompressorLibrary": {"name": "gzip", "typedConfig": GZIP}},
    "lua.v3.Lua": {"defaultSourceCode": {"inlineString": LUA}},
}


@pytest.mark.parametrize("name", CHANGES)
async def test_a_body_that_a_filter_of_envoy_has_changed_reaches_its_server_whole(
    behind: Behind, tmp_path: Path, name: str
) -> None:
    def change(tree: Any) -> None:
        config = {"@type": f"{_EXTENSIONS}.filters.http.{name}", **CHANGES[name]}
        http_manager(tree)["httpFilters"].insert(0, {"name": "change", "typedConfig": config})

    with edge(behind.fleet, tmp_path, mode=behind.mode, edit=change) as envoy:
        async with http_client(envoy.url) as client:
            headers = {"content-type": JSON, "content-encoding": "gzip"}
            answer = await client.post("/v1/completions", content=gzip.compress(ASK), headers=headers)
        assert answer.status_code == 200, answer.text
        assert json.loads(behind.server.last.body)["model"] == "llama"
        await at_rest(behind.fleet)  # this Envoy must report the request's end before it stops


SMALL = json.dumps({"model": "llama", "prompt": "x"}).encode()
LARGE = json.dumps({"model": "llama", "prompt": "x" * 3_000_000}).encode()


@pytest.mark.parametrize("trailers", [[], [("x-checksum", "7")]], ids=["bare", "trailers"])
@pytest.mark.parametrize("sized", [False, True], ids=["unsized", "sized"])
@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
async def test_a_body_in_any_framing_reaches_its_model_server_once(
    behind: Behind, body: bytes, sized: bool, trailers: list[tuple[str, str]]
) -> None:
    if behind.mode == "http" and trailers:
        pytest.skip("in mode `http` Envoy waits for the trailers")
    before = behind.server.served
    async with upload(behind.fleet.url) as client:
        length = [("content-length", str(len(body)))] if sized else []
        await client.send(body, length, trailers)
        assert await client.answered() == "200"
    assert behind.server.last.body == body
    assert behind.server.served == before + 1
    await at_rest(behind.fleet)


CLAUDE = {"input_tokens": 150, "cache_read_input_tokens": 700, "cache_creation_input_tokens": 50}
INPUT = {"usage": {"input_tokens": 1}, "model": "big-v2"}  # a tool call's input, not the answer's usage
ECHOED = {"instructions": '": 1, "usage": {"input_tokens": 1}} \\', "tools": [INPUT]}
RESPONSE = {**ECHOED, "id": "resp_1", "usage": {"input_tokens": 7, "output_tokens": 9}}
ANSWERS: dict[str, tuple[str, list[object], tuple[int, int]]] = {
    "chat": (JSON, [{"usage": {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}}], (7, 9)),
    "not encoded": (JSON, [{"usage": {"prompt_tokens": 7, "completion_tokens": 9}}], (7, 9)),
    "embeddings": (JSON, [{"data": [], "usage": {"prompt_tokens": 7, "total_tokens": 7}}], (7, 0)),
    "rerank": (JSON, [{"results": [], "usage": {"total_tokens": 7}}], (7, 0)),
    "Responses": (JSON, [RESPONSE], (7, 9)),
    "Responses, streamed": (EVENTS, [{"response": ECHOED}, {"delta": INPUT}, {"response": RESPONSE}], (7, 9)),
    "Anthropic": (JSON, [{"content": [{"input": INPUT}], "usage": {**CLAUDE, "output_tokens": 9}}], (900, 9)),
    "Anthropic, streamed": (
        EVENTS,
        [
            {
                "type": "message_start",
                "message": {"model": "big-v2", "usage": {**CLAUDE, "output_tokens": 1}},
            },
            {"type": "content_block_start", "content_block": {"type": "tool_use", "input": INPUT}},
            {"type": "message_delta", "usage": {"input_tokens": 0, "output_tokens": 9}},
        ],
        (900, 9),
    ),
    "comments and a damaged event, streamed": (
        EVENTS,
        [
            b': 6" {\n\ndata: {"choices": [{"text": "cut\r\n\r\n',
            b'data: {"error": {\n\n',
            {"usage": {"prompt_tokens": 7, "completion_tokens": 9, "total_tokens": 16}},
            b'data: {"usage": "\n\ndata: [DONE]\n\n',
        ],
        (7, 9),
    ),
    "Ollama": (JSON, [{"done": True, "prompt_eval_count": 7, "eval_count": 9}], (7, 9)),
    "TGI, streamed": (
        EVENTS,
        [{"token": {}}, {"details": {"generated_tokens": 9, "input_length": 7}}],
        (7, 9),
    ),
}


TOKENS = ("epp_input_tokens_total", "epp_output_tokens_total")


def all_have_ended(page: str) -> bool:
    return all(total(page, "epp_completions_total", model=name) for name in ANSWERS)


def written(kind: str, documents: list[object]) -> bytes:
    """The body of an answer of content type `kind` with these JSON documents, or bytes of a stream."""
    if kind == JSON:
        return json.dumps(documents[0]).encode()
    return b"".join(
        each if isinstance(each, bytes) else b"data: %s\n\n" % json.dumps(each).encode() for each in documents
    )


@pytest.fixture
def answering(behind: Behind) -> Iterator[Callable[[str], bytes]]:
    """Sets the model server's answer to one of ANSWERS, and returns its bytes."""

    def answer(name: str) -> bytes:
        kind, documents, _ = ANSWERS[name]
        behind.server.answer, behind.server.kind = written(kind, documents), kind
        behind.server.headers = "content-encoding: identity\r\n" if name == "not encoded" else ""
        return behind.server.answer

    yield answer
    behind.server.answer, behind.server.kind, behind.server.piece = COMPLETION, JSON, 0
    behind.server.headers = ""


async def test_the_tokens_of_each_apis_answer_are_counted(
    behind: Behind, answering: Callable[[str], bytes]
) -> None:
    here = behind.fleet

    async def page() -> str:
        return str((await here.admin("/metrics")).text)

    async with here.client() as client:
        for name in ANSWERS:
            sent, behind.server.piece = answering(name), 9
            answer = await client.post("/v1/messages", json={"model": name, "messages": []})
            assert answer.content == sent
    await here.eventually(page, all_have_ended)
    after = await fresh(page)
    for name, (_, _, tokens) in ANSWERS.items():
        assert tuple(total(after, each, model=name) for each in TOKENS) == tokens, name


USAGES = (
    b'1 null "x" [1] {1} {"prompt_tokens":{"a":[1]}} {"prompt_tokens":-1} {"prompt_tokens":1e999}'.split()
)
NASTY = [
    *(b"", b" ", b"\0", b"\xef\xbb\xbf{}", *b'1 null true "x" [1] [] {} } " {{ {"usage"'.split()),
    *(b'{"usage":%s,"usage":{"prompt_tokens":%s}}' % (each, b"9" * 999) for each in USAGES),
    *(b'{"%s":1,"id":"%s","error":[1]}' % (each, each) for each in (b"k" * 9999, b"\xff\xfe", b'\\"', b"\\")),
    *(each * 99_999 for each in (b"\n", *b'[ { {"a": " {"error": {"usage":{ \\ \\" []'.split())),
    b"[" * 99_999 + b"]" * 99_999,
    b'{"data":"' + b"x" * 33_000_000 + b'"}',
]


async def test_an_answer_of_any_bytes_reaches_its_client_unchanged_and_its_request_ends(
    behind: Behind, answering: Callable[[str], bytes]
) -> None:
    async with behind.fleet.client() as client:
        for kind in (JSON, EVENTS):
            for nasty in NASTY:
                behind.server.answer = nasty if kind == JSON else b"data: %s\n\n" % nasty
                behind.server.kind = kind
                answer = await client.post("/v1/completions", content=ASK)
                assert answer.content == behind.server.answer, nasty[:50]
    await at_rest(behind.fleet)  # Envoy has reported the end of each request


async def test_a_rename_changes_only_the_model_name_in_the_request_and_the_answer(
    behind: Behind, answering: Callable[[str], bytes]
) -> None:
    tool = {"role": "assistant", "content": [{"type": "tool_use", "input": {"model": "big", "m": "big-v2"}}]}
    ask = {"messages": [tool], "metadata": {"model": "big"}, "tools": [{"input_schema": {"model": "big"}}]}
    sent = answering("Anthropic, streamed")
    async with behind.fleet.client() as client:
        headers = {"accept-encoding": "gzip"}
        answer = await client.post("/v1/messages", json={**ask, "model": "big"}, headers=headers)
    if behind.mode == "http":  # mode `http` cannot change a body
        assert (answer.status_code, answer.json()["type"]) == (500, "error")
        return
    assert json.loads(behind.server.last.body) == {**ask, "model": "big-v2"}
    assert "accept-encoding" not in behind.server.last.headers
    # Only mode `standard` processes the answer.
    renamed = sent.replace(b'"model": "big-v2"', b'"model": "big"', 1)
    assert answer.content == (renamed if behind.mode == "standard" else sent)
    async with behind.fleet.client() as client:
        answer = await client.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert (answer.json()["type"], answer.json()["error"]["type"]) == ("error", "invalid_request_error")
