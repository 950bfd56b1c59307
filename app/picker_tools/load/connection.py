"""One HTTP/1.1 connection that carries one request at a time. Cheap: the load must not weigh on the fleet."""

import asyncio
import re
import time
from collections.abc import Callable
from typing import cast

import httptools

_USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
_DONE = b"data: [DONE]"
HUNG_UP = "the client hung up"
_TAIL_BYTES = 2048  # of an answer; its end says whether it is whole


class Exchange:
    """An answer as it comes in. `over` is set at its end, whatever that is; times are of `perf_counter`."""

    __slots__ = (
        "answers",
        "fault",
        "first_at",
        "head_at",
        "headers",
        "kept_bytes",
        "last_at",
        "over",
        "sent_at",
        "status",
        "tail",
    )

    def __init__(self, kept_bytes: int = _TAIL_BYTES) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent_at = time.perf_counter()
        self.head_at: float | None = None
        self.first_at: float | None = None
        self.last_at = self.sent_at
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.tail = b""
        self.kept_bytes = kept_bytes
        self.answers = 0
        self.fault = ""

    def end(self, fault: str = "") -> None:
        if not self.over.done():
            self.last_at = time.perf_counter()
            self.fault = fault
            self.over.set_result(None)

    @property
    def tokens(self) -> int | None:
        """Of the answer's usage, the last that it tells; None if it tells none."""
        told = _USAGE.findall(self.tail)
        return int(told[-1]) if told else None

    @property
    def is_done(self) -> bool:
        """Whether a stream of events came to its own end."""
        return _DONE in self.tail


class Connection(asyncio.Protocol):
    """Sends what it is told and reads one answer to each; `surplus` is called at any answer beyond that."""

    def __init__(self, surplus: Callable[[], None]) -> None:
        self._surplus = surplus
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self.reusable = True

    def send(self, request: bytes, exchange: Exchange) -> None:
        """Write `request` and go on; its answer comes into `exchange`."""
        self._exchange = exchange
        if self._transport is None or self._transport.is_closing():
            self.reusable = False
            exchange.end("the connection was closed before the request was sent")
        else:
            self._transport.write(request)

    def hang_up(self) -> None:
        """Close, as a client does that no longer wants its answer."""
        self._fail(HUNG_UP)
        self.close()

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by type

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
        exchange.tail = (exchange.tail + part)[-exchange.kept_bytes :]

    def on_message_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.end()

    def _fail(self, why: str) -> None:
        if self._exchange is not None:
            self._exchange.end(why)
