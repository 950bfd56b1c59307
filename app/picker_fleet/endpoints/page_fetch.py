"""The scraper's HTTP/1.1 client: it fetches a server's metrics page over one keep-alive connection.

A general HTTP client takes several times the CPU of the rest of a scrape; this client sends constant bytes
and reads only the headers that it needs. Bodies are streamed, so that a body of any length takes little
memory and no long turn of the event loop; the caller sets the deadline.
"""

import asyncio
import contextlib
import math
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Self, cast
from urllib.parse import urlsplit

import httptools

from picker_fleet.domain.engines import Engine
from picker_fleet.domain.errors import PickerError
from picker_fleet.domain.request import METRICS_PATH, METRICS_PORT, METRICS_SCHEME, Endpoint
from picker_fleet.domain.scraping import Scraping
from picker_fleet.domain.sections import url_path
from picker_fleet.domain.units import split_host_port
from picker_fleet.state.primary import raise_if_cancelled

_MOST_HEAD_BYTES = 64 * 1024
_PART_BYTES = 32 * 1024  # bytes of a body handled in one turn of the event loop
_MOST_UNREAD = 256 * 1024  # bytes of a body to buffer before reading pauses
_REDIRECTS: Final = (301, 302, 303, 307, 308)
_ENCODINGS: Final = ("gzip", "x-gzip", "deflate")
_KEPT_HEADERS: Final = (b"location", b"content-encoding")
_REREAD_S = 5.0  # seconds after which the CA and token files are read again


class FetchError(PickerError):
    """The page could not be fetched; the reason `kind` is `connection`, `status` or `page`. `connection`
    means that the server accepts no new connections, or closes connections without a byte."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class _ClosedUnused(FetchError):
    """The server closed an idle keep-alive connection, and sent no byte of the response."""


class Access:
    """Credentials for metrics pages: the CA for TLS, and the token in `scraping.token_file`. The CA file and
    the token file are read again every `_REREAD_S`."""

    def __init__(self, scraping: Scraping) -> None:
        self._ca, self._token_file = scraping.ca, scraping.token_file
        self._context: ssl.SSLContext | None = None
        self._token = b""
        self._context_s = self._token_s = -math.inf

    def context(self) -> ssl.SSLContext:
        """The client's TLS context. Servers are known by IP address, so host names are not checked; without
        `scraping.ca` certificates are not checked either.

        Raises:
            FetchError: the CA file `scraping.ca` cannot be read.
        """
        now_s = time.monotonic()
        if self._context is None or now_s - self._context_s >= _REREAD_S:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE if self._ca is None else ssl.CERT_REQUIRED
            try:
                if self._ca is not None:
                    context.load_verify_locations(self._ca)
            except OSError as fault:  # includes SSLError
                raise FetchError("page", f"{self._ca} cannot be used: {fault.strerror or fault}") from None
            self._context, self._context_s = context, now_s
        return self._context

    def header(self) -> bytes:
        """The header line with the bearer token; empty if no token is configured.

        Raises:
            FetchError: the token file cannot be read, or does not contain a token.
        """
        now_s = time.monotonic()
        if self._token_file is not None and now_s - self._token_s >= _REREAD_S:
            try:
                token = self._token_file.read_bytes().strip()
            except OSError as fault:
                raise FetchError("page", f"{self._token_file} cannot be read: {fault.strerror}") from None
            if not token or len(token) > _MOST_HEAD_BYTES or any(not 32 < byte < 127 for byte in token):
                raise FetchError("page", f"{self._token_file} has no token")
            self._token, self._token_s = b"Authorization: Bearer " + token + b"\r\n", now_s
        return self._token


@dataclass(frozen=True, slots=True)
class Place:
    """Where to probe one endpoint, and where to find its metrics page."""

    address: str  # the address that probes use
    scheme: str
    page_address: str
    page_scheme: str
    page_paths: tuple[str, ...]  # candidate paths of the metrics page
    engines: tuple[Engine, ...]  # engines that the endpoint may run

    @property
    def is_one(self) -> bool:
        """Whether one connection serves for both probes and metrics pages."""
        return (self.address, self.scheme) == (self.page_address, self.page_scheme)


def place_of(endpoint: Endpoint, engines: tuple[Engine, ...], scraping: Scraping) -> Place:
    """Where the metrics page of `endpoint` is, by the endpoint's labels, else by the configuration. Labels
    with unusable values are ignored."""
    labels = endpoint.labels
    port, scheme = labels.get(METRICS_PORT, ""), labels.get(METRICS_SCHEME, "")
    path = labels.get(METRICS_PATH, "")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65536
    page_port = int(port) if is_port else scraping.port
    host = endpoint.address.rpartition(":")[0]
    return Place(
        endpoint.address,
        scraping.probe_scheme or scraping.scheme,
        endpoint.address if page_port is None else f"{host}:{page_port}",
        scheme if scheme in ("http", "https") else scraping.scheme,
        (path,) if _is_path(path) else tuple(dict.fromkeys(engine.path for engine in engines)),
        engines,
    )


def _is_path(path: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(url_path(path))
    return False


class Connection:
    """Sends requests to `address` (`ip:port`), one at a time. One event loop.

    The client connects at the first request, and again after the connection has ended. If a keep-alive
    connection ends without a byte of the response, the request is sent once more on a new connection. `close`
    closes the connection. `lost` is set when the server closes the connection between two requests.
    """

    def __init__(self, address: str, *, tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        self.peer = split_host_port(address)
        self.scheme = "http" if tls is None else "https"
        self._tls = tls
        self._exchange: Exchange | None = None
        self.unreached = 0  # failed attempts to connect, in a row
        self.unanswered = 0  # requests in a row that got no byte of response
        self.lost = asyncio.Event()
        # Ask for no compression: compressing a page takes longer than sending it.
        self._headers = (
            f" HTTP/1.1\r\nHost: {address}\r\nAccept: text/plain\r\nAccept-Encoding: identity\r\n"
            "User-Agent: picker\r\n"
        ).encode("ascii")

    async def ask(self, path: str, header: bytes = b"", body: bytes | None = None) -> "Exchange":
        """Send GET `path`, or POST if there is a `body`. Returns when the head of the response, of any
        status, has arrived. There is no timeout: the caller sets the deadline.

        Raises:
            FetchError: the server does not accept a connection, or its response is truncated or not HTTP.
        """
        head = path.encode("ascii") + self._headers + header
        request = b"GET " + head + b"\r\n"
        if body is not None:
            request = b"POST %sContent-Length: %d\r\n\r\n%s" % (head, len(body), body)
        self.unanswered += 1
        try:
            exchange = await self._sent(request)
        except BaseException as fault:
            if isinstance(fault, FetchError) or (self._exchange is not None and self._exchange.some_came):
                self.unanswered = 0
            # Close the connection: a late response would be taken for the response to the next request.
            self.close()
            raise
        self.unanswered = 0
        return exchange

    async def _sent(self, request: bytes) -> "Exchange":
        """Send `request`. Returns the exchange when the head of the response has arrived."""
        exchange = self._exchange
        if exchange is not None and exchange.usable:
            try:
                await exchange.ask(request)
                return exchange
            except _ClosedUnused:
                pass  # no fault: a server may close an idle connection at any time
        exchange = await self._connect()
        await exchange.ask(request)
        return exchange

    def close(self) -> None:
        """Close the connection, if there is one. Idempotent."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.abort()

    async def _connect(self) -> "Exchange":
        self.close()
        context = self._tls() if self._tls is not None else None
        loop = asyncio.get_running_loop()
        made = Exchange(loop, self.lost.set)
        # Set before connecting, so that `close` also ends a connection that was cancelled while connecting.
        self._exchange = made
        self.unreached += 1
        try:
            await loop.create_connection(lambda: made, *self.peer, ssl=context)
        except ssl.SSLError as fault:
            self.unreached = 0
            raise FetchError("page", f"no TLS: {fault.reason or fault}") from None
        except OSError as fault:
            raise_if_cancelled()
            raise FetchError("connection", f"no connection: {fault.strerror or fault}") from None
        raise_if_cancelled()
        self.unreached = 0
        return made


class Page:
    """The metrics page at `path` on the server of `connection`."""

    def __init__(self, connection: Connection, path: str, access: Access) -> None:
        self._connection, self._access = connection, access
        self._path = self._configured = path

    async def read(self, take: Callable[[bytes], bool]) -> None:
        """Pass the page in decoded parts to the function `take`, until `take` returns False. There is no
        timeout: the caller sets the deadline.

        Follows one redirect, only to another path of the same server; later reads begin with that path.

        Raises:
            FetchError: as for `Connection.ask`; or the status is not 200, the encoding is unknown, or the
                encoded page is malformed or truncated.
        """
        if not await self._read(take, may_move=True):
            await self._read(take, may_move=False)

    async def _read(self, take: Callable[[bytes], bool], *, may_move: bool) -> bool:
        """Read the page once. Returns False if the page has moved; then `_path` is its new path."""
        with await self._connection.ask(self._path, self._access.header()) as answer:
            if answer.status in _REDIRECTS and may_move:
                self._path = self._moved_to(answer)
                return False
            if answer.status != 200:
                self._path = self._configured
                more = ", the second redirect" if answer.status in _REDIRECTS else ""
                raise FetchError("status", f"answered {answer.status}{more}")
            encoding = answer.headers.get(b"content-encoding", b"identity").decode("latin-1").strip().lower()
            if encoding == "identity":
                async for part in answer.parts():
                    if not take(part):
                        return True
                return True
            async for part in _decoded(answer.parts(), encoding):
                if not take(part):
                    return True
            return True

    def _moved_to(self, answer: "Exchange") -> str:
        """The path that a redirect leads to. Raises FetchError if the redirect leads to another server."""
        location = answer.headers.get(b"location", b"").decode("latin-1")
        try:
            there = urlsplit(location)
            here = not there.netloc or split_host_port(there.netloc) == self._connection.peer
        except ValueError:
            here = False
        path = there.path + (f"?{there.query}" if there.query else "") if here else ""
        if not _is_path(path) or there.scheme not in ("", self._connection.scheme):
            self._path = self._configured
            raise FetchError(
                "status",
                f"answered {answer.status}, a redirect to {location[:60]!r}: only another path of the same "
                "server is followed",
            )
        return path


async def _decoded(parts: AsyncIterator[bytes], encoding: str) -> AsyncIterator[bytes]:
    """Decode `parts` from their content encoding, into parts of at most `_PART_BYTES`.

    Raises:
        FetchError: the encoding is unknown, or the encoded data are malformed or truncated.
    """
    if encoding not in _ENCODINGS:
        raise FetchError("page", f"the page is encoded as {encoding[:30]!r}; gzip and deflate are known")
    decoder, begun = None, b""
    try:
        async for part in parts:
            if decoder is None:
                part = begun = begun + part
                if len(part) < 2:
                    continue
                # Some servers send `deflate` without the zlib header that HTTP requires.
                is_bare = encoding == "deflate" and (part[0] & 15 != 8 or (part[0] << 8 | part[1]) % 31)
                decoder = zlib.decompressobj(-zlib.MAX_WBITS if is_bare else zlib.MAX_WBITS | 32)
            while part and not decoder.eof:
                plain, part = decoder.decompress(part, _PART_BYTES), decoder.unconsumed_tail
                yield plain
                await asyncio.sleep(0)
    except zlib.error as fault:
        raise FetchError("page", f"the page is no {encoding}: {fault}") from None
    if decoder is None or not decoder.eof:
        raise FetchError("page", f"the page's {encoding} data is truncated")


class Exchange(asyncio.Protocol):
    """One connection to a server: writes requests and parses responses, one at a time.

    Once the head of a response has arrived, `status` is set, and `headers` has the headers that the scraper
    needs by lower-case name. Use an exchange in a `with` statement, which closes the connection unless the
    whole body has arrived.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_idle_loss: Callable[[], None]) -> None:
        self._loop = loop
        self._on_idle_loss = on_idle_loss
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._more: asyncio.Future[None] | None = None
        self._aborted = self._used = False
        self._came = 0  # bytes received since the request
        self._begin()
        self.is_complete = True  # no request is open on this connection

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing() and self.is_complete

    async def ask(self, request: bytes) -> None:
        """Send `request`, and wait for the head of the response. Raises FetchError."""
        if self._transport is None:
            raise FetchError("connection", "the connection closed at once")
        self._begin()
        self._came = 0
        self._transport.resume_reading()  # the last page may have ended while reading was paused
        self._transport.write(request)
        while not self.status and self._fault is None:
            await self._next()
        if self._fault is not None and not self.status:
            raise self._fault

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        if not self.is_complete:
            self.abort()

    async def parts(self) -> AsyncIterator[bytes]:
        """The body in parts, as they arrive: each of at most `_PART_BYTES`, one per turn of the event loop.

        Raises:
            FetchError: the body is truncated or malformed.
        """
        while True:
            body = b"".join(self._parts)
            self._parts.clear()
            self._unread = 0
            if self._transport is not None and not self._transport.is_closing() and not self.is_complete:
                self._transport.resume_reading()
            for at in range(0, len(body), _PART_BYTES):
                yield body[at : at + _PART_BYTES]
                await asyncio.sleep(0)
            if self._parts:
                continue
            if self._fault is not None:
                raise self._fault
            if self.is_complete:
                return
            await self._next()

    async def _next(self) -> None:
        self._more = self._loop.create_future()
        await self._more

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
        self._came += len(data)
        try:
            if self.is_complete:
                raise httptools.HttpParserError("bytes without a request")
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as fault:
            self._fail(FetchError("page", f"no HTTP answer: {fault}"))
        if not self.status and self._came > _MOST_HEAD_BYTES:
            self._fail(FetchError("page", f"the head of the answer has more than {_MOST_HEAD_BYTES} bytes"))

    def connection_lost(self, fault: Exception | None) -> None:
        self._transport = None
        if self._used and self.is_complete and not self._aborted:
            self._on_idle_loss()
        if self._until_close and self.status and fault is None and not self.is_complete:
            # The body has no length: the end of the connection ends the body.
            self.on_message_complete()
        elif self.some_came:
            self._fail(FetchError("page", "the connection closed before the page was complete"))
        elif self._used:
            self._fail(_ClosedUnused("connection", "closed while idle"))
        else:
            self._fail(FetchError("connection", "the connection closed without an answer"))

    # Callbacks of the HTTP parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower()
        if lower in (b"content-length", b"transfer-encoding"):
            self._until_close = False
        elif lower in _KEPT_HEADERS and not self.status:
            self.headers[lower] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
            self._wake()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._unread += len(body)
        if self._unread > _MOST_UNREAD and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        if not self.status:  # skip an interim (1xx) response
            self.headers.clear()
            self._until_close = True
            return
        keep = self._transport is not None and self._parser.should_keep_alive()
        self.is_complete = self._used = True
        self._wake()
        if not keep:
            self.abort()

    def _begin(self) -> None:
        self._parts: list[bytes] = []
        self._unread = self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self._fault: FetchError | None = None
        self.some_came = self.is_complete = False
        self._until_close = True

    def _fail(self, fault: FetchError) -> None:
        if self._fault is None and not self.is_complete:
            self._fault = fault
        self._wake()
        self.abort()

    def _wake(self) -> None:
        more, self._more = self._more, None
        if more is not None and not more.done():
            more.set_result(None)
