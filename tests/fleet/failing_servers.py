"""Model servers in the test's own process that fail as the test configures, and clients for them."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple

import httpx
from counting_servers import read_request

_ANSWER = {"choices": [{"text": "ok"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
_ERROR = {"error": {"message": "the engine is dead", "type": "InternalServerError", "code": 500}}


def _whole(status: int, body: object, kind: str = "application/json", more: str = "") -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\ncontent-length: {len(data)}\r\n{more}\r\n"
    return head.encode() + data


def _chunk(data: bytes) -> bytes:
    """The only event of a chunked stream, and the end of the stream."""
    return b"%x\r\n%s\n\n\r\n0\r\n\r\n" % (len(data) + 2, data)


_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_WELL = _whole(200, _ANSWER)


class Kind(NamedTuple):
    """How a server fails: its answer, whether it then resets the connection, and the status of `/health`."""

    answer: bytes
    resets: bool = False
    health: int = 503
    hangs: bool = False  # the server never answers
    cuts: bool = False  # the client has the response head already, so no retry is possible


KINDS: Mapping[str, Kind] = {
    "500": Kind(_whole(500, _ERROR)),
    "503, well by its page": Kind(_whole(503, _ERROR), health=200),
    "307": Kind(_whole(307, b"", more="location: http://127.0.0.1:1/\r\n")),
    "429": Kind(_whole(429, _ERROR, more="retry-after: 1\r\n"), health=200),
    "reset": Kind(b"", resets=True),
    "reset after the head": Kind(_STREAM + b"5\r\nhello\r\n", resets=True, cuts=True),
    "error in 200": Kind(_whole(200, _ERROR), cuts=True),
    "error in a stream": Kind(_STREAM + _chunk(b"data: " + json.dumps(_ERROR).encode()), cuts=True),
    "empty stream": Kind(_STREAM + b"0\r\n\r\n", cuts=True),
    "empty answer": Kind(_whole(200, b""), cuts=True),
}  # fmt: skip


HANGS = Kind(b"", hangs=True, health=200)


class FailingServers:
    """Servers that fail as `failing` says for their address; others answer after `service_s`. `hits` counts
    requests by address. A prompt with the word `poison` fails on every server as `poison` says."""

    def __init__(self, service_s: float) -> None:
        self.service_s = service_s
        self.failing: dict[str, Kind] = {}
        self.poison = KINDS["500"]
        self.hits: Counter[str] = Counter()
        self.addresses: list[str] = []

    async def serve(self, stack: contextlib.AsyncExitStack) -> None:
        server: Any = None

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._one(address, reader, writer):
                    pass
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=512)
        await stack.enter_async_context(server)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self.addresses.append(address)

    async def _one(self, address: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, _, body = await read_request(reader)
        failing = self.failing.get(address)
        if first.startswith("GET"):
            is_health = first.startswith("GET /health")
            status = failing.health if failing is not None and is_health else 200
            writer.write(_whole(status, b"" if is_health else _PAGE, "text/plain"))
        else:
            self.hits[address] += 1
            if b"poison" in body:
                failing = self.poison
            if failing is None:
                await asyncio.sleep(self.service_s)
            elif failing.hangs:
                await asyncio.Event().wait()
            writer.write(_WELL if failing is None else failing.answer)
            if failing is not None and failing.resets:
                await writer.drain()
                writer.transport.abort()
                return False
        await writer.drain()
        return True


_PAGE = b"vllm:num_requests_waiting 0\nvllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0.1\n"


@contextlib.asynccontextmanager
async def failing_servers(count: int, service_s: float) -> AsyncIterator[FailingServers]:
    servers = FailingServers(service_s)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            await servers.serve(stack)
        yield servers


class Clients:
    """`count` clients that repeat a request, each with its own flow unless `flow` is given. `answered` counts
    good answers; `failed` counts failures by status or error."""

    def __init__(self, url: str, count: int, *, prompt: str = "hi", flow: str = "") -> None:
        self._url, self._count, self._prompt, self._flow = url, count, prompt, flow
        self.answered = 0
        self.failed: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Clients":
        self._client = httpx.AsyncClient(
            base_url=self._url, timeout=60, limits=httpx.Limits(max_connections=self._count)
        )
        self._tasks = [asyncio.create_task(self._ask(self._flow or f"flow {n}")) for n in range(self._count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.aclose()

    async def until_asked(self, more: int, within_s: float = 60.0) -> None:
        """Wait until `more` further requests have been answered or have failed."""
        goal = self.asked + more
        async with asyncio.timeout(within_s):
            while self.asked < goal:  # noqa: ASYNC110 - two counters of every client
                await asyncio.sleep(0.02)

    @property
    def asked(self) -> int:
        return self.answered + self.failed.total()

    async def _ask(self, flow: str) -> None:
        ask = {"model": "llama", "prompt": self._prompt, "max_tokens": 4}
        headers = {"x-gateway-inference-fairness-id": flow}
        while True:
            try:
                reply = await self._client.post("/v1/completions", json=ask, headers=headers)
                well = reply.status_code == 200 and b'"ok"' in reply.content
                fault = "" if well else f"{reply.status_code} {reply.text[:80]}"
            except httpx.HTTPError as error:
                fault = type(error).__name__
            if fault:
                self.failed[fault] += 1
            else:
                self.answered += 1
