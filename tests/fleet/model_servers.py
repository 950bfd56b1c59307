"""Model servers for tests and benches.

`listening` runs any server in the test's process, `counting_servers` count requests there, `failing_servers`
fail there; `simulators` run in separate processes.
"""

import asyncio
import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from picker_tools.local_fleet.network import LOOPBACK, free_port, get
from picker_tools.local_fleet.processes import Child, picker_command


class Received(NamedTuple):
    """A request as a server received it; header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


async def read_request(reader: asyncio.StreamReader) -> Received:
    """Read one request. Raises IncompleteReadError if the client leaves before the request's end."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if headers.get("transfer-encoding") != "chunked":
        return Received(
            method, path, headers, await reader.readexactly(int(headers.get("content-length", 0)))
        )
    chunks = []  # bodies that pass through the picker are chunked
    while size := int(await reader.readline(), 16):
        chunks.append((await reader.readexactly(size + 2))[:-2])
    while await reader.readline() != b"\r\n":  # trailers
        pass
    return Received(method, path, headers, b"".join(chunks))


def http_answer(
    body: bytes, status: int = 200, kind: str = "application/json", *, headers: str = ""
) -> bytes:
    """A whole HTTP/1.1 answer; each line of `headers` ends with CRLF."""
    length = f"content-length: {len(body)}\r\n"
    return f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\n{length}{headers}\r\n".encode() + body


COMPLETION = json.dumps(
    {"choices": [{"text": "ok"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}}
).encode()
_LIMIT_BYTES = 1 << 20  # size limit of a request's headers
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Serve = Callable[[Received, Ends], Awaitable[bool]]


@contextlib.asynccontextmanager
async def listening(serve: Serve, host: str = LOOPBACK, port: int = 0) -> AsyncIterator[str]:
    """Run a server, by default on a free port of the loopback; yields its address. The server passes requests
    to `serve`, and closes the connection if `serve` returns False. The end of the `with` block cancels open
    requests."""
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await serve(await read_request(reader), (reader, writer)):
                    await writer.drain()
        finally:
            handlers.discard(task)
            writer.close()

    # Envoy opens one connection for each request in flight.
    server = await asyncio.start_server(handle, host, port, limit=_LIMIT_BYTES, backlog=512)
    try:
        yield f"{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


class CountingServers:
    """Count requests `in_flight` and their `peak` since `forget_peak`; a request takes `service_s`."""

    def __init__(self, service_s: float) -> None:
        self.service_s = service_s
        self.in_flight = 0
        self.peak = 0
        self.served = 0
        self._one_served = asyncio.Condition()
        self.addresses: list[str] = []

    def forget_peak(self) -> None:
        self.peak = self.in_flight

    async def until_served(self, more: int, within_s: float = 60.0) -> None:
        """Wait until `more` requests have been served after this call."""
        goal = self.served + more
        async with asyncio.timeout(within_s), self._one_served:
            await self._one_served.wait_for(lambda: self.served >= goal)

    async def serve(self, request: Received, ends: Ends) -> bool:
        _, writer = ends
        if request.method == "GET":
            writer.write(http_answer(b"", kind="text/plain"))
            return True
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            await asyncio.sleep(self.service_s)
        finally:
            self.in_flight -= 1
        async with self._one_served:
            self.served += 1
            self._one_served.notify_all()
        writer.write(http_answer(COMPLETION))
        return True


@contextlib.asynccontextmanager
async def counting_servers(count: int, service_s: float) -> AsyncIterator[CountingServers]:
    servers = CountingServers(service_s)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            servers.addresses.append(await stack.enter_async_context(listening(servers.serve)))
        yield servers


_ERROR = json.dumps(
    {"error": {"message": "the engine is dead", "type": "InternalServerError", "code": 500}}
).encode()
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_PAGE = b"vllm:num_requests_waiting 0\nvllm:num_requests_running 0\nvllm:kv_cache_usage_perc 0.1\n"


def _chunk(event: bytes) -> bytes:
    return b"%x\r\n%s\n\n\r\n" % (len(event) + 2, event)


class Failure(NamedTuple):
    """How a server fails: its answer, whether it then resets the connection, and the status of `/health`."""

    answer: bytes
    resets: bool = False
    health: int = 503
    hangs: bool = False  # the server never answers
    cuts: bool = False  # the client has the response head already, so no retry is possible


FAILURES: Mapping[str, Failure] = {
    "500": Failure(http_answer(_ERROR, 500)),
    "503 with a healthy page": Failure(http_answer(_ERROR, 503), health=200),
    "307": Failure(http_answer(b"", 307, headers="location: http://127.0.0.1:1/\r\n")),
    "429": Failure(http_answer(_ERROR, 429, headers="retry-after: 1\r\n"), health=200),
    "reset": Failure(b"", resets=True),
    "reset after the head": Failure(_STREAM + b"5\r\nhello\r\n", resets=True, cuts=True),
    "error in 200": Failure(http_answer(_ERROR), cuts=True),
    "error in a stream": Failure(_STREAM + _chunk(b"data: " + _ERROR) + _LAST_CHUNK, cuts=True),
    "empty stream": Failure(_STREAM + _LAST_CHUNK, cuts=True),
    "empty answer": Failure(http_answer(b""), cuts=True),
    "no content": Failure(http_answer(b"", 204), cuts=True),
    "a web page": Failure(http_answer(b"<html>welcome</html>" * 50, kind="text/html"), health=200, cuts=True),
    "an error as text in 200": Failure(http_answer(b'{"error": "out of memory"}'), health=200, cuts=True),
    "half an answer": Failure(http_answer(COMPLETION[:40]), health=200, cuts=True),
    "404": Failure(http_answer(_ERROR, 404), health=200, cuts=True),
}
HANGS = Failure(b"", hangs=True, health=200)


class FailingServers:
    """Servers with an address in `failing` fail as it says; others answer after `service_s` seconds. `hits`
    counts requests by address. A prompt with the word `poison` fails on every server as `poison` says."""

    def __init__(self, service_s: float) -> None:
        self.service_s = service_s
        self.failing: dict[str, Failure] = {}
        self.poison = FAILURES["500"]
        self.hits: Counter[str] = Counter()
        self.addresses: list[str] = []

    async def serve(self, request: Received, ends: Ends) -> bool:
        _, writer = ends
        address = "{}:{}".format(*writer.get_extra_info("sockname"))
        failure = self.failing.get(address)
        if request.method == "GET":
            is_health = request.path == "/health"
            status = failure.health if failure is not None and is_health else 200
            writer.write(http_answer(b"" if is_health else _PAGE, status, "text/plain"))
            return True
        self.hits[address] += 1
        if b"poison" in request.body:
            failure = self.poison
        if failure is None:
            await asyncio.sleep(self.service_s)
            writer.write(http_answer(COMPLETION))
            return True
        if failure.hangs:
            await asyncio.Event().wait()
        writer.write(failure.answer)
        if failure.resets:
            await writer.drain()
            writer.transport.abort()
        return not failure.resets


@contextlib.asynccontextmanager
async def failing_servers(count: int, service_s: float) -> AsyncIterator[FailingServers]:
    servers = FailingServers(service_s)
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            servers.addresses.append(await stack.enter_async_context(listening(servers.serve)))
        yield servers


def static(addresses: list[str]) -> dict[str, Any]:
    """The configuration's section `discovery` with these endpoints."""
    return {"static": [{"address": address} for address in addresses]}


_READY_S, _GRACE_S = 60.0, 10.0


@contextlib.asynccontextmanager
async def process_at(url: str, command: Sequence[str]) -> AsyncIterator[Child]:
    """Run a process, ready once `url` answers 200, until the block ends. Raises StartupError if the process
    never gets ready."""
    with tempfile.TemporaryDirectory() as folder:
        child = await Child.start(command[0], command, Path(folder) / "log")

        async def answers() -> bool:
            reply = await get(url)
            return reply is not None and reply.status == 200

        try:
            await child.until(answers, within_s=_READY_S, what=f"an answer of {url}")
            yield child
        finally:
            await child.stop(_GRACE_S)


@contextlib.asynccontextmanager
async def simulators(hosts: Sequence[str], *options: str) -> AsyncIterator[dict[str, Child]]:
    """Run a `picker sim` at each loopback address in `hosts`, all on one port; yields them by `ip:port`."""
    port = free_port()
    running: dict[str, Child] = {}
    async with contextlib.AsyncExitStack() as stack:
        for host in hosts:
            command = picker_command("sim", "--host", host, "--port", str(port), *options)
            started = process_at(f"http://{host}:{port}/metrics", command)
            running[f"{host}:{port}"] = await stack.enter_async_context(started)
        yield running
