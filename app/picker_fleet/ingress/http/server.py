"""The HTTP/1.1 server of mode `http`, which Envoy's `ext_authz` filter asks about each request.

    GET /healthz            200 while the replica takes requests, else 503; for health checks
    ANY /check/PATH         the check of a client's request for PATH, with its body (check.py)

Envoy puts `/check` before each client's path, so clients cannot reach the server's other paths.

A connection carries one request at a time. When a client leaves, Envoy closes the connection, which cancels
the waiting request. One periodic task closes connections that stall within a request or an answer, so no
request needs a timer of its own. docs/protocol.md lists the headers.
"""

import asyncio
import logging
import socket
from collections.abc import Iterable
from typing import Final, cast

import httptools

from picker_fleet.domain.allowlist import SUBSET
from picker_fleet.domain.budgets import POOL_HEADER, ByPool, most_connections
from picker_fleet.domain.errors import BadRequest, BodyStalled, RequestError, StartupError
from picker_fleet.grpc.certificates import MAX_TLS_CONNECTIONS, Certificates, address_of, serve
from picker_fleet.grpc.connections import Connections
from picker_fleet.ingress.context import STALLED_S, ExchangeContext
from picker_fleet.ingress.http.check import Answer, Check

PREFIX: Final = b"/check"  # Envoy puts this prefix before each client's path
HEALTH_PATH: Final = b"/healthz"
_MAX_NAMES, _LONGEST_NAME = 1000, 64  # maximum cached header names, and maximum bytes of a name
_MAX_HEAD_BYTES = 64 * 1024  # maximum bytes of request line, headers and trailers
_HEADER_BYTES = 32  # a header counts as this many bytes more: an empty one takes as long as a short one
_VERSIONS = ("1.0", "1.1")
_IDLE_S = 300.0  # a connection without a request is closed after this many seconds
_KEEPALIVE_S = 20
_CHECKS = 6  # number of checks for stalled connections per STALLED_S
_REASONS = {200: "OK", 503: "Service Unavailable"}

_log = logging.getLogger(__name__)


class CheckServer:
    """Serves the checks of all pools on `http.listen`; not ready until `set_ready(True)` is called."""

    def __init__(
        self,
        contexts: ByPool[ExchangeContext],
        listen: str,
        certificates: Certificates | None = None,
        max_connections: int = 20_000,
    ) -> None:
        if certificates is not None:
            max_connections = min(max_connections, MAX_TLS_CONNECTIONS)
        self.contexts = contexts
        self.context = contexts.of(b"")
        self._certificates = certificates
        self._listen = listen
        self.connections: Connections[_Connection] = Connections(
            "http mode's port", most_connections(max_connections)
        )
        self._server: asyncio.Server | None = None
        self._ready = False
        self.draining = False
        read = {name for context in contexts.all for name in context.intake.headers}
        self.wanted = _Wanted((*read, POOL_HEADER, SUBSET))

    @property
    def ready(self) -> bool:
        """Whether the server is ready for Envoy's requests."""
        return self._ready and not self.draining

    @property
    def is_open(self) -> bool:
        """Whether the server answers checks: while it is ready, or drains after it was ready."""
        return self._ready

    async def start(self) -> int:
        """Bind the address and listen. Returns the bound port.

        Raises:
            StartupError: the address cannot be bound.
        """
        try:
            self._server = await serve(lambda: _Connection(self), self._listen, self._certificates)
        except OSError as fault:
            raise StartupError(f"http.listen {self._listen}: cannot be bound: {fault}") from fault
        return int(self._server.sockets[0].getsockname()[1])

    async def run(self) -> None:
        """Close stalled and long-idle connections, until cancelled."""
        while True:
            await asyncio.sleep(STALLED_S / _CHECKS)
            self.close_stalled()

    def close_stalled(self) -> None:
        """Close each connection that has stalled or has been idle for more than `_IDLE_S` seconds."""
        now_s = self.context.clock()
        for connection in list(self.connections.all):
            connection.close_if_stalled(now_s)

    def set_ready(self, ready: bool) -> None:
        """Set the state that Envoy's health checks see; a draining server stays not ready."""
        self._ready = ready

    def drain(self) -> None:
        """Fail health checks from now on, and close each connection after its next answer."""
        self.draining = True

    async def stop(self) -> None:
        """Close the listener and every connection."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections.all):
            connection.close()

    @property
    def full(self) -> str:
        """The reason why new connections are refused; '' while they are accepted."""
        return self.connections.full


class _Wanted(dict[bytes, str]):
    """Maps a received header name to its lower-case name if the picker reads that header, else to ''.

    Caches up to `_MAX_NAMES` short names, since Envoy sends the same names with each request.
    """

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__((name.encode(), name) for name in names)

    def __missing__(self, name: bytes) -> str:
        wanted = self.get(name.lower(), "")
        if len(self) < _MAX_NAMES and len(name) <= _LONGEST_NAME:
            self[name] = wanted
        return wanted


class _Connection(asyncio.Protocol):
    """One connection: parses a request, has it checked, writes the answer, and reads the next request."""

    def __init__(self, server: CheckServer) -> None:
        self._server = server
        self._context = server.context
        self._wanted = server.wanted
        self._transport: asyncio.Transport | None = None
        self.address = ""
        self._parser = httptools.HttpRequestParser(self)
        self._task: asyncio.Task[None] | None = None
        self._body = self._context.new_body()
        self._headers: dict[str, bytes] = {}
        self._url = b""
        self._head_bytes = 0  # bytes of the request, without the body, that were parsed
        self._rest_bytes = 0  # bytes of the request, without the body, that were received
        self._in_head = self._arriving = False
        self._is_whole = False  # whether the data that is being parsed had the end of a request
        self._unread_s = 0.0  # the time when the peer stopped reading answers; 0 while the peer reads
        self._began_s = self._last_byte_s = self._context.clock()
        self._failed: RequestError | None = None
        self._refused: RequestError | None = None  # the refusal to send once the whole request has arrived
        self._dropped_bytes = 0

    def close_if_stalled(self, now_s: float) -> None:
        """Close the connection if its request stalls, its answers stay unread, or it is idle too long."""
        if self._unread_s and now_s - self._unread_s > STALLED_S:
            self.abort()
        if self._task is not None:
            return
        if not self._arriving:
            if now_s - self._last_byte_s > _IDLE_S:
                self.close()
            return
        whole_s = self._context.settings.extproc.body_timeout
        if now_s - self._last_byte_s > STALLED_S or now_s - self._began_s > whole_s:
            self._refuse(BodyStalled("the rest of the request did not arrive"))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio calls the following methods.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.address = address_of(transport)
        if not self._server.connections.add(self):
            self._transport.abort()
            return
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # keepalive detects a vanished Envoy
            if hasattr(socket, "TCP_KEEPIDLE"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_S)

    def data_received(self, data: bytes) -> None:
        self._last_byte_s = self._context.clock()
        if self._transport is None or self._transport.is_closing():
            return
        if self._task is not None:
            self.close()  # Envoy never sends a second request before the answer to the first
            return
        self._rest_bytes += len(data)
        self._is_whole = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(BadRequest("this port does not change its protocol"))
        except httptools.HttpParserError as fault:
            self._refuse(self._failed or BadRequest(f"no HTTP/1.1 request: {fault}"))
        else:
            # The limit of the head also bounds an unfinished header, and the overhead of tiny body chunks.
            if self._arriving and self._rest_bytes > _MAX_HEAD_BYTES + self._body.size_bytes:
                self._refuse(_head_too_large())

    def pause_writing(self) -> None:
        """Stop reading requests while the peer does not read its answers."""
        self._unread_s = self._context.clock()
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._unread_s = 0.0
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.remove(self)
        self._transport = None
        self._body.release()
        if self._task is not None:
            self._task.cancel()
        elif self._arriving:
            self._context.open_requests.ended()
        self._arriving = False

    # The HTTP parser calls the following methods; `feed_data` raises HttpParserCallbackError if one fails.

    def on_message_begin(self) -> None:
        if self._task is not None or self._is_whole:
            self._fail(BadRequest("a second request came before the first was answered"))
        self._in_head = self._arriving = True
        self._head_bytes = 0
        self._server.connections.busy(self)
        self._context.open_requests.began()
        self._began_s = self._last_byte_s
        self._headers, self._url = {}, b""
        self._body.reset()

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header if the picker reads it; ignore trailers."""
        self._head_bytes += len(name) + len(value) + _HEADER_BYTES
        self._check_head()
        known = self._wanted[name]
        if known and self._in_head:
            self._headers.setdefault(known, value)

    def _check_head(self) -> None:
        """Refuse headers or trailers that are too large; `data_received` refuses an endless header."""
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._fail(_head_too_large())

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._check_head()
        version = self._parser.get_http_version()
        if version not in _VERSIONS:
            self._fail(BadRequest(f"HTTP/{version} is not supported; use HTTP/1.1"))
        self._enter(self._headers.pop(POOL_HEADER, b""))
        try:
            self._body.expect(self._headers.get("content-length", b""))
        except RequestError as error:
            self._refused = error

    def on_body(self, chunk: bytes) -> None:
        self._rest_bytes -= len(chunk)
        if self._refused is None:
            try:
                self._body.add(chunk)
            except RequestError as error:
                self._body.release()
                self._refused = error
        else:
            # Envoy reads an answer only after it has sent the whole body, so drop the rest of the body.
            self._dropped_bytes += len(chunk)
            if self._dropped_bytes > 2 * self._context.settings.extproc.max_body_bytes:
                self._fail(self._refused)

    def on_message_complete(self) -> None:
        self._check_head()
        self._arriving, self._is_whole = False, True
        self._rest_bytes = 0
        keep = self._parser.should_keep_alive()
        refused, self._refused, self._dropped_bytes = self._refused, None, 0
        if refused is not None:
            self._context.open_requests.ended()
            self._body.release()
            self._write_answer(Check(self._context, self._url).refuse(refused), keep=keep)
            return
        method, url = self._parser.get_method(), self._url
        if url == HEALTH_PATH:
            self._context.open_requests.ended()
            self._write(200 if self._server.ready else 503, "", b"", keep=keep)
        elif not url.startswith(PREFIX + b"/"):
            self._arriving = True
            self._refuse(BadRequest("the request is no check: its path does not begin with /check/"))
        elif self._context.open_requests.closed or not self._server.is_open:
            self._context.open_requests.ended()
            self.close()  # without an answer Envoy knows that nothing was done, and so asks another replica
        else:
            self._task = asyncio.get_running_loop().create_task(self._answer(method, url, keep))
            self._task.add_done_callback(self._checked)  # also called for a task cancelled before it starts

    def _fail(self, error: RequestError) -> None:
        self._failed = error
        raise error

    # Answer Envoy.

    async def _answer(self, method: bytes, url: bytes, keep: bool) -> None:
        check, headers, body = Check(self._context, url), self._headers, self._body
        try:
            answer = await check.decide(method, url[len(PREFIX) :], headers, body)
        finally:
            body.release()
        if self._transport is None or self._transport.is_closing():
            if answer.status == 200:
                check.decision.client_left()
            return
        self._task = None  # Envoy's next request may arrive before the callbacks of this task run
        check.decision.placed()
        self._write_answer(answer, keep=keep)

    def _checked(self, task: asyncio.Task[None]) -> None:
        if self._task is task:
            self._task = None
        self._context.open_requests.ended()
        if not task.cancelled() and (fault := task.exception()) is not None:
            _log.error("an answer failed", exc_info=fault)
            self.close()

    def _refuse(self, error: RequestError) -> None:
        """Refuse an invalid or incomplete request, then close the connection."""
        self._body.release()
        if self._arriving:
            self._arriving = False
            self._context.open_requests.ended()
        if self._task is not None:  # an earlier request has no answer yet, so write no later answer
            self.close()
            return
        self._write_answer(Check(self._context, self._url).refuse(error), keep=False)

    def _write_answer(self, answer: Answer, *, keep: bool) -> None:
        self._write(answer.status, answer.lines, answer.body, keep=keep)

    def _write(self, status: int, lines: str, body: bytes, *, keep: bool) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        self._server.connections.idle(self)
        keep = keep and not self._server.draining
        close = "" if keep else "connection: close\r\n"
        reason = _REASONS.get(status, "Refused")
        if self._parser.get_method() == b"HEAD":
            body = b""  # a check has the client's method, and an answer to HEAD has no body
        head = f"HTTP/1.1 {status} {reason}\r\n{lines}{close}content-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)
        if not keep:
            self._transport.close()

    def _enter(self, pool: bytes) -> None:
        """Switch to the context of `pool`, which Envoy names for the request."""
        context = self._server.contexts.of(pool)
        if context is not self._context:
            self._context = context
            self._body = context.new_body()


def _head_too_large() -> BadRequest:
    return BadRequest(f"the headers are longer than {_MAX_HEAD_BYTES} bytes")
