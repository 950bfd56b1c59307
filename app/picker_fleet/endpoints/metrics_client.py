"""One endpoint's metrics page over one HTTP/1.1 connection that is kept alive.

A client of its own, since a general one costs several times the CPU of everything else in a scrape: there is
one question, always the same bytes, and nothing to do with the answer's headers.
"""

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from picker_fleet.errors import PickerError
from picker_fleet.state.connection import raise_if_cancelled
from picker_fleet.units import split_host_port

MAX_PAGE_BYTES = 512 * 1024  # a vLLM page has 53 KB


class FetchError(PickerError):
    """There is no page; `kind` is `connection`, `status` or `page`, and the message says more."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _ClosedUnused(FetchError):
    """A connection that was kept alive ended before a byte of the answer came: its idle time was over."""


class Connection:
    """Asks `address` (`ip:port`) for its page at `path`, or for a sign of life at `probe_path`, one question
    after the other. One event loop.

    It connects when first asked, and again after whatever ended the connection. `close` is final. `lost` is
    set when the server has ended the connection between two questions.
    """

    def __init__(
        self, address: str, path: str, *, probe_path: str = "/health", max_page_bytes: int = MAX_PAGE_BYTES
    ) -> None:
        self._host, self._port = split_host_port(address)
        self._max_page_bytes = max_page_bytes
        self._exchange: _Exchange | None = None
        self.unreached = 0  # attempts to connect, in a row, that have not succeeded
        self.unanswered = 0  # questions, in a row, that not one byte came back to
        self.lost = asyncio.Event()
        # Compressing a page takes longer than sending it: none is asked for.
        headers = f"Host: {address}\r\nAccept: text/plain\r\nUser-Agent: picker\r\n\r\n"
        self._page = f"GET {path} HTTP/1.1\r\n{headers}".encode("ascii")
        self._probe = f"GET {probe_path} HTTP/1.1\r\n{headers}".encode("ascii")

    async def fetch(self) -> bytes:
        """The page. Waits without end for it: the deadline is the caller's.

        Raises:
            FetchError: no connection, an answer other than 200, or a page too large or cut short.
        """
        status, page = await self._question(self._page)
        if status != 200:
            self.close()
            raise FetchError("status", f"answered {status}")
        return page

    async def probe(self) -> None:
        """Wait, without end, for any answer: it shows that the server takes its turns.

        Raises:
            FetchError: no connection, or an answer too large or cut short.
        """
        await self._question(self._probe)

    async def _question(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer."""
        self.unanswered += 1
        try:
            exchange = self._exchange
            if exchange is not None and exchange.usable:
                try:
                    return await self._ask(exchange, request)
                except _ClosedUnused:
                    pass  # the server may close an idle connection at any time: that is no fault of its own
            return await self._ask(await self._connect(), request)
        except BaseException as fault:
            if isinstance(fault, FetchError) or (self._exchange is not None and self._exchange.some_came):
                self.unanswered = 0
            # What is still to come on this connection belongs to nobody.
            self.close()
            raise

    def close(self) -> None:
        """End the connection, if there is one. Idempotent."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.abort()

    async def _ask(self, exchange: "_Exchange", request: bytes) -> tuple[int, bytes]:
        answer = await exchange.ask(request)
        self.unanswered = 0
        return answer

    async def _connect(self) -> "_Exchange":
        self.close()
        loop = asyncio.get_running_loop()
        made = _Exchange(loop, self._max_page_bytes, self.lost.set)
        # Known before it is connected, so that a cancellation on the way cannot leave it open.
        self._exchange = made
        self.unreached += 1
        try:
            await loop.create_connection(lambda: made, self._host, self._port)
        except OSError as fault:
            raise_if_cancelled()
            raise FetchError("connection", f"no connection: {fault.strerror or fault}") from None
        raise_if_cancelled()
        self.unreached = 0
        return made


class _Exchange(asyncio.Protocol):
    """The bytes of one connection: a question out, an answer in."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, max_page_bytes: int, on_idle_loss: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._on_idle_loss = on_idle_loss
        self._max_page_bytes = max_page_bytes
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._aborted = False
        self._used = False
        self._begin()

    @property
    def usable(self) -> bool:
        """Whether another question may be sent."""
        return self._transport is not None and not self._transport.is_closing() and self._answer is None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        transport = self._transport
        if transport is None:
            raise FetchError("connection", "the connection closed at once")
        self._answer = self._loop.create_future()
        transport.write(request)
        return await self._answer

    def abort(self) -> None:
        self._aborted = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._aborted:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self.some_came = True
        try:
            if self._answer is None:
                raise httptools.HttpParserError("bytes that nobody asked for")
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as fault:
            self._fail(FetchError("page", f"no HTTP answer: {fault}"))

    def connection_lost(self, fault: Exception | None) -> None:
        self._transport = None
        if self._used and self._answer is None and not self._aborted:
            self._on_idle_loss()
        if self._until_close and self._in_body and fault is None:
            # Without a length the end of the connection is the end of the page.
            self.on_message_complete()
        elif not self.some_came and self._used:
            self._fail(_ClosedUnused("connection", "closed while idle"))
        else:
            self._fail(FetchError("connection", "the connection closed before the page was complete"))

    # The parser's calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._until_close = False

    def on_headers_complete(self) -> None:
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > self._max_page_bytes:
            self._fail(FetchError("page", f"the page has more than {self._max_page_bytes} bytes"))
        else:
            self._parts.append(body)

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._begin()
            return
        page = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        keep = self._transport is not None and self._parser.should_keep_alive()
        self._begin()
        self._used = True
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result((status, page))
        if not keep:
            self.abort()

    def _begin(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self.some_came = False
        self._in_body = False
        self._until_close = True

    def _fail(self, fault: FetchError) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(fault)
        self.abort()
