"""A load generator in a process of its own: a closed loop over HTTP/1.1 connections that checks every answer.

`Driver` starts it and talks to it over pipes. Each line on stdin is one `Load` as JSON; the process opens the
connections, warms them up, prints `{"ready": true}`, waits for the line `go`, sends the load, and prints an
`Outcome` as JSON, or `{"fault": why}` and ends. It ends with stdin, and by itself past a limit.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import uvloop

from bench.rig.child import Child, ChildFailed, Orders

MODEL = "llama"
SMALL_BYTES, LARGE_BYTES = 300, 400_000  # of a request's body
_WARM_UP_PER_CONNECTION = 2
_FLOWS = 4
_LIMIT_S = 180.0  # of a load
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` requests to the Envoy at `url` over `connections`, each for a stream of `tokens`."""

    url: str
    connections: int
    requests: int
    tokens: int
    prompt_bytes: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Without the warm-up. Latencies are in microseconds, one a request: to its answer's headers, and to its
    last byte."""

    seconds: float
    first_us: list[int]
    last_us: list[int]


class WrongAnswer(Exception):
    """A wrong answer, or none."""


class Connection(asyncio.Protocol):
    """Sends one request after the other until its pass has none left."""

    def __init__(self, request: bytes, tokens: int) -> None:
        self._request = request
        self._events = tokens + 1  # one a token, then [DONE]
        self._usage = b'"completion_tokens":%d' % tokens
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._pass: Pass | None = None
        self._parts: list[bytes] = []
        self._sent_at_ns = 0
        self._first_us = 0

    def join(self, entered: "Pass") -> None:
        self._pass = entered
        self._next()

    def close(self) -> None:
        self._pass = None
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports have another type

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as fault:
            self._fail(f"not HTTP: {fault}")

    def connection_lost(self, _: Exception | None) -> None:
        self._fail("the connection was closed")

    def on_headers_complete(self) -> None:
        self._first_us = self._since_sent_us()

    def on_body(self, part: bytes) -> None:
        self._parts.append(part)

    def on_message_complete(self) -> None:
        last_us = self._since_sent_us()
        body = b"".join(self._parts)
        self._parts = []
        status = self._parser.get_status_code()
        if status != 200:
            self._fail(f"status {status}: {body[:200].decode(errors='replace')}")
        elif not body.endswith(_DONE) or body.count(b"data: ") != self._events:
            self._fail(f"{body.count(b'data: ')} events came, {self._events} were expected")
        elif self._usage not in body[-1000:]:
            self._fail("the usage is missing or wrong")
        elif self._pass is not None:
            self._pass.took(self._first_us, last_us)
            self._next()

    def _next(self) -> None:
        if self._pass is not None and self._transport is not None and self._pass.issue():
            self._sent_at_ns = time.perf_counter_ns()
            self._transport.write(self._request)

    def _since_sent_us(self) -> int:
        return (time.perf_counter_ns() - self._sent_at_ns) // 1000

    def _fail(self, why: str) -> None:
        if self._pass is not None:
            self._pass.fail(WrongAnswer(why))


class Pass:
    """`requests` requests, shared by the connections that joined."""

    def __init__(self, requests: int) -> None:
        self._left = self._open = requests
        self.first_us: list[int] = []
        self.last_us: list[int] = []
        self._over = asyncio.get_running_loop().create_future()

    def issue(self) -> bool:
        """Whether one more request is to be sent; it is counted."""
        if not self._left or self._over.done():
            return False
        self._left -= 1
        return True

    def took(self, first_us: int, last_us: int) -> None:
        self.first_us.append(first_us)
        self.last_us.append(last_us)
        self._open -= 1
        if not self._open and not self._over.done():
            self._over.set_result(None)

    def fail(self, fault: WrongAnswer) -> None:
        if not self._over.done():
            self._over.set_exception(fault)

    async def run(self, connections: list[Connection]) -> None:
        for connection in connections:
            connection.join(self)
        await self._over


def request_bytes(load: Load, number: int) -> bytes:
    """The request that connection `number` repeats: one of a few flows and workloads."""
    tree = {"model": MODEL, "prompt": "", "max_tokens": load.tokens, "stream": True}
    room = load.prompt_bytes - len(json.dumps(tree))
    tree["prompt"] = ("the quick brown fox jumps over the lazy dog " * (room // 44 + 1))[: max(0, room)]
    body = json.dumps(tree).encode()
    workload = json.dumps({"workload_id": f"workload-{number % _FLOWS}", "criticality": 3})
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {urlsplit(load.url).netloc}\r\n"
        "user-agent: bench\r\naccept: text/event-stream\r\ncontent-type: application/json\r\n"
        f"x-gateway-inference-fairness-id: flow-{number % _FLOWS}\r\nx-workload-context: {workload}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def serve_load(load: Load, orders: Orders) -> Outcome:
    """Connect, warm up, report readiness, wait for `go`, send the load."""
    loop, address = asyncio.get_running_loop(), urlsplit(load.url)
    connections: list[Connection] = []
    try:
        async with asyncio.timeout(_LIMIT_S):
            for number in range(load.connections):
                make = partial(Connection, request_bytes(load, number), load.tokens)
                _, connection = await loop.create_connection(make, address.hostname, address.port)
                connections.append(connection)
            warm_up = Pass(_WARM_UP_PER_CONNECTION * load.connections)
            await warm_up.run(connections)
        print(json.dumps({"ready": True}), flush=True)
        if await orders.next() != "go":
            raise WrongAnswer("no go came")
        async with asyncio.timeout(_LIMIT_S):
            measured = Pass(load.requests)
            started = time.perf_counter()
            await measured.run(connections)
            seconds = time.perf_counter() - started
    finally:
        for connection in connections:
            connection.close()
    return Outcome(seconds, measured.first_us, measured.last_us)


async def main() -> None:
    orders = await Orders.of_stdin()
    while line := await orders.next():
        try:
            outcome = await serve_load(Load(**json.loads(line)), orders)
        except (WrongAnswer, OSError) as fault:  # OSError: TimeoutError too
            print(json.dumps({"fault": str(fault) or "the time ran out"}), flush=True)
            return
        print(json.dumps(asdict(outcome)), flush=True)


_STARTS_S = 30.0
_MARGIN_S = 5.0  # past its own limit, then it hangs


class Driver:
    """One client process. Loads run one at a time: `prepare`, then `go`."""

    def __init__(self, child: Child) -> None:
        self._child = child

    @classmethod
    @contextlib.asynccontextmanager
    async def started(cls) -> AsyncIterator["Driver"]:
        """A load generator for the `with` block."""
        child = await Child.started("the client", "bench.rig.load")
        try:
            yield cls(child)
        finally:
            await child.end()

    async def prepare(self, load: Load) -> None:
        """Open and warm up the connections.

        Raises:
            WrongAnswer: with the generator's error.
        """
        self._child.send(json.dumps(asdict(load)))
        await self._reply(_STARTS_S + _LIMIT_S)

    async def go(self) -> Outcome:
        """Send the prepared load. Raises WrongAnswer as `prepare` does."""
        self._child.send("go")
        return Outcome(**await self._reply(_LIMIT_S))

    async def _reply(self, within_s: float) -> dict[str, Any]:
        try:
            reply: dict[str, Any] = json.loads(await self._child.line(within_s + _MARGIN_S))
        except TimeoutError:
            raise WrongAnswer("the client hangs") from None
        except ChildFailed as fault:
            raise WrongAnswer(str(fault)) from None
        if "fault" in reply:
            raise WrongAnswer(reply["fault"])
        return reply


if __name__ == "__main__":
    uvloop.run(main())
