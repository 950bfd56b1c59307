"""An HTTP/1.1 client for one host: as many connections as there are open requests, kept for the next.

The load generator sends with it, and so do the clients of the fault tests. It costs little CPU, so that the
load does not slow the fleet on the same machine.
"""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Self, cast
from urllib.parse import urlsplit

import httptools


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request to send. `answer_tokens` is what it asks for."""

    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    streamed: bool
    answer_tokens: int


class Kind(StrEnum):
    """How a request ended for its client."""

    SERVED = "served"  # a whole answer
    REFUSED = "refused"  # 503 or 429 of the picker, with its reason
    FAILED = "failed"  # anything else: an error, half an answer, none in time
    LEFT = "left"  # the run was interrupted and the client hung up


@dataclass(frozen=True, slots=True)
class Answer:
    """Times are seconds; `due_s` and `sent_s` since the load began, the others since the request was sent.

    `due_s` is the planned time of sending. `head_s` is when the answer's head arrived, `first_s` the
    first byte of its body (None: never). `served_by` is the address that the endpoint itself gives.
    `tokens` is from the answer's usage, `asked_tokens` from the request. `turn` counts within a
    conversation, from 0.
    """

    source: str
    number: int
    turn: int
    streamed: bool
    prompt_bytes: int
    asked_tokens: int
    due_s: float
    sent_s: float
    head_s: float | None
    first_s: float | None
    last_s: float
    status: int
    reason: str
    retry_after_s: float | None
    served_by: str
    tokens: int | None
    answers: int
    fault: str
    left: bool = False

    @property
    def kind(self) -> Kind:
        if self.left:
            return Kind.LEFT
        if self.fault:
            return Kind.FAILED
        if self.status == 200:
            return Kind.SERVED
        return Kind.REFUSED if self.status in (429, 503) else Kind.FAILED

    @property
    def outcome(self) -> str:
        """How it ended, in a few words, to count by."""
        if self.kind is Kind.SERVED or self.left:
            return self.kind.value
        if self.fault:
            return self.fault
        return f"{self.status} {self.reason or 'without a reason'}"

    def __str__(self) -> str:
        turn = f" turn {self.turn}" if self.turn else ""
        return (
            f"{self.source} #{self.number}{turn}: sent at {self.sent_s:.3f} s, {self.outcome} after "
            f"{self.last_s:.3f} s"
        )


_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
_DONE = b"data: [DONE]"
HUNG_UP = "the client hung up"
_TAIL_BYTES = 2048  # of an answer; its end says whether it is whole


class Exchange:
    """An answer while it arrives. `over` is set at its end, good or bad; times are of `perf_counter`."""

    def __init__(self, kept_bytes: int = _TAIL_BYTES) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent_at = time.perf_counter()
        self.head_at: float | None = None
        self.first_at: float | None = None
        self.last_at = self.sent_at
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.tail = bytearray()  # the last `kept_bytes` of the body
        self.kept_bytes = kept_bytes
        self.answers = 0
        self.fault = ""
        self.timed_out = False

    def end(self, fault: str = "") -> None:
        if not self.over.done():
            self.last_at = time.perf_counter()
            self.fault = fault
            self.over.set_result(None)

    @property
    def tokens(self) -> int | None:
        """The last completion tokens in the answer's usage; None if there are none."""
        counts = _USAGE.findall(self.tail)
        return int(counts[-1]) if counts else None

    @property
    def is_done(self) -> bool:
        """Whether a stream of events has its final event."""
        return _DONE in self.tail


class Connection(asyncio.Protocol):
    """Carries one request at a time; `surplus` is called for each answer beyond one a request."""

    def __init__(self, surplus: Callable[[], None]) -> None:
        self._surplus = surplus
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self.reusable = True

    def send(self, request: bytes, exchange: Exchange) -> None:
        """Write `request`; its answer arrives in `exchange`."""
        self._exchange = exchange
        if self._transport is None or self._transport.is_closing():
            self.reusable = False
            exchange.end("the connection was closed before the request was sent")
        else:
            self._transport.write(request)

    def hang_up(self) -> None:
        """Close, as a client that leaves."""
        self._fail(HUNG_UP)
        self.close()

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are not typed as such

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as fault:
            self._fail(f"the answer is not HTTP: {fault}")
            self.close()

    def connection_lost(self, _: Exception | None) -> None:
        self.reusable = False
        self._fail("the connection was closed without a whole answer")

    def on_message_begin(self) -> None:
        if self._exchange is None or self._exchange.answers:
            self._surplus()
            self.reusable = False
        else:
            self._exchange.answers = 1

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None and not self._exchange.over.done():
            self._exchange.headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._exchange is not None and not self._exchange.over.done():
            self._exchange.status = self._parser.get_status_code()
            self._exchange.head_at = time.perf_counter()
            if not self._parser.should_keep_alive():
                self.reusable = False

    def on_body(self, part: bytes) -> None:
        exchange = self._exchange
        if exchange is None or exchange.over.done():
            return
        if exchange.first_at is None:
            exchange.first_at = time.perf_counter()
        exchange.tail += part
        del exchange.tail[: -exchange.kept_bytes]

    def on_message_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.end()

    def _fail(self, why: str) -> None:
        if self._exchange is not None:
            self._exchange.end(why)


_CONNECT_S = 5.0
_PAGE_BYTES = 8 * 1024 * 1024


class Client:
    """A client of one `http://host:port`; close it with `with`. One event loop."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._netloc = parts.netloc
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self.surplus_answers = 0  # beyond one a request

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """Close all connections. Open requests end as left by their client."""
        for connection in list(self._all):
            connection.hang_up()

    async def get(self, path: str, *, within_s: float) -> tuple[int, bytes] | None:
        """Status and body of the answer; None if none came."""
        head = f"GET {path} HTTP/1.1\r\nhost: {self._netloc}\r\n\r\n"
        exchange = Exchange(_PAGE_BYTES)
        try:
            async with asyncio.timeout(within_s):
                connection = await self._connection()
        except (OSError, TimeoutError):
            return None
        await self._exchange(connection, head.encode(), exchange, within_s)
        return None if exchange.fault else (exchange.status, bytes(exchange.tail))

    async def send(self, ask: HttpRequest, *, within_s: float, kept_bytes: int = _TAIL_BYTES) -> Exchange:
        """Send `ask` and wait for the end of its answer. After `within_s` the connection is closed,
        as by a client that leaves.
        """
        lines = [f"POST {ask.path} HTTP/1.1", f"host: {self._netloc}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in ask.headers]
        request = "\r\n".join([*lines, f"content-length: {len(ask.body)}", "", ""]).encode() + ask.body
        exchange = Exchange(kept_bytes)  # its time includes connecting
        try:
            async with asyncio.timeout(_CONNECT_S):
                connection = await self._connection()
        except (OSError, TimeoutError) as fault:
            exchange.end(f"no connection: {str(fault) or f'not within {_CONNECT_S:g} s'}")
            return exchange
        await self._exchange(connection, request, exchange, within_s)
        return exchange

    async def _exchange(
        self, connection: Connection, request: bytes, exchange: Exchange, within_s: float
    ) -> None:
        connection.send(request, exchange)
        try:
            # Not awaited itself: a timeout would cancel it, which would look like an answer.
            await asyncio.wait([exchange.over], timeout=within_s)
            exchange.timed_out = not exchange.over.done()
            exchange.end(f"no whole answer within {within_s:g} s")
        finally:
            self._give_back(connection, exchange)

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
            self._all.discard(connection)
        loop = asyncio.get_running_loop()
        make = partial(Connection, self._count_surplus)
        _, connection = await loop.create_connection(make, self._host, self._port)
        self._all.add(connection)
        return connection

    def _count_surplus(self) -> None:
        self.surplus_answers += 1

    def _give_back(self, connection: Connection, exchange: Exchange) -> None:
        if exchange.over.done() and not exchange.fault and connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
            self._all.discard(connection)


def answer_of(
    exchange: Exchange, ask: HttpRequest, *, source: str, number: int, turn: int, due_s: float, began: float
) -> Answer:
    """The `Answer` of `exchange`. `began` is the start of the load, by `perf_counter`."""
    fault = exchange.fault
    if not fault and exchange.status == 200 and ask.streamed and not exchange.is_done:
        fault = "a stream that ended without [DONE]"
    retry_after = exchange.headers.get(b"retry-after", b"").decode("latin-1")
    return Answer(
        source=source,
        number=number,
        turn=turn,
        streamed=ask.streamed,
        prompt_bytes=len(ask.body),
        asked_tokens=ask.answer_tokens,
        due_s=due_s,
        sent_s=exchange.sent_at - began,
        head_s=_since(exchange, exchange.head_at),
        first_s=_since(exchange, exchange.first_at),
        last_s=exchange.last_at - exchange.sent_at,
        status=exchange.status,
        reason=exchange.headers.get(b"x-llm-d-request-dropped-reason", b"").decode("latin-1"),
        retry_after_s=float(retry_after) if retry_after.isdecimal() else None,
        served_by=exchange.headers.get(b"x-served-by", b"").decode("latin-1"),
        tokens=exchange.tokens,
        answers=exchange.answers,
        fault=fault,
        left=exchange.fault == HUNG_UP,
    )


def _since(exchange: Exchange, at: float | None) -> float | None:
    return None if at is None else at - exchange.sent_at
