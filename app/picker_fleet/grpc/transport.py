"""The interface of handlers for gRPC streams, the gRPC health service, and a transport on grpcio.

A handler serves one stream: it receives and sends messages as bytes, and returns its last message, which the
transport sends with the stream's end. The replica's `Server` gives its handlers to `GrpcioTransport` or to
`native.NativeTransport`, which have the same methods.
"""

import asyncio
import contextlib
import enum
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
from grpc_health.v1 import health_pb2

from picker_fleet.domain.errors import StartupError
from picker_fleet.grpc.certificates import Certificates

HEALTH: Final = "grpc.health.v1.Health"

_WINDOW_BYTES = 512 * 1024
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Status(enum.IntEnum):
    """The gRPC status codes with which handlers and transports answer."""

    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the peers of one transport.

    All `connections` together may have `streams` open streams. At most `silent` open streams, and
    `silent_here` of one connection, may wait for their first message, each for `silent_s` seconds; the
    transport refuses further streams. Up to `unsent_replies` replies to frames wait for a peer that does not
    read, and up to `unread_bytes` of all peers' data wait to be read. A peer may send `idle_frames` frames
    without effect, and more as its connection ages, opens streams and receives data.

    The transport pings a peer that has sent nothing for `silence_s` seconds, and cuts it off if it does not
    answer within `answer_s` seconds, unless this process itself was paused for `pause_s` seconds meanwhile.

    One step of the event loop does `step_work` units of work (connections.py) for all peers. A connection
    is trusted for `trusted_s` seconds after a handler has answered it or called `Stream.trust`; all untrusted
    connections together get `strangers_work` units a second.
    """

    streams: int = 20_000
    connections: int = 4096
    silent: int = 4096
    silent_here: int = 1024
    silent_s: float = 10.0
    unsent_replies: int = 10_000
    unread_bytes: int = 64 * 1024 * 1024
    idle_frames: int = 2000
    silence_s: float = 20.0
    answer_s: float = 10.0
    pause_s: float = 1.0
    step_work: int = 256
    strangers_work: int = 10_000
    trusted_s: float = 60.0


class RpcError(Exception):
    """A handler raises this error to end its stream with an error status."""

    def __init__(self, status: Status, why: str) -> None:
        super().__init__(why)
        self.status = status


class Stream(Protocol):
    """One gRPC stream as its handler sees it. A reset, or the end of the client, cancels the handler."""

    @property
    def has_message(self) -> bool:
        """Whether a message is known to be ready for the next `read`; always False with grpcio."""

    async def read(self) -> bytes | None:
        """The next message; None once the client has ended its side of the stream."""

    def interrupt(self, error: Exception) -> None:
        """Let a pending `read` raise `error`; without a pending `read` this has no effect."""

    def trust(self) -> None:
        """Report that the peer has sent a token that only a gateway can know; no effect with grpcio."""

    def charge(self, work: int) -> None:
        """Charge `work` units of about 5 µs to the peer (connections.py); no effect with grpcio."""

    async def write(self, message: bytes) -> None:
        """Send a message; waits while the client's flow control allows no message."""

    async def relay(self, answer: "Relay") -> bytes | None:
        """Send the answers that `answer` returns for each message, until it reports the last message or the
        client ends its side. Returns the very last answer instead of sending it; None if there is none."""


# A function that takes a message; returns the answers, and whether the message was the last one.
Relay = Callable[[bytes], tuple[Sequence[bytes], bool]]
Handler = Callable[[Stream], Awaitable[bytes | None]]


class Streaming:
    """A handler that writes all its answers to the stream, and returns no last answer. grpcio registers such
    a handler as a stream-stream method, and any other handler as a stream-unary method."""

    def __init__(self, handler: Callable[[Stream], Awaitable[object]]) -> None:
        self._handler = handler

    async def __call__(self, stream: Stream) -> bytes | None:
        await self._handler(stream)
        return None


class ByMetadata(NamedTuple):
    """A gRPC method whose handler is chosen for each call, by the call's metadata (header fields by name)."""

    choose: Callable[[Mapping[bytes, bytes]], Handler]


class Health:
    """The gRPC health service, where `Check` and `Watch` report whether a named service is serving."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {}
        self._changed = asyncio.Event()

    def set(self, names: Sequence[str], serving: bool) -> None:
        self._serving.update(dict.fromkeys(names, serving))
        self._changed.set()
        self._changed = asyncio.Event()

    def handlers(self) -> Mapping[str, Handler]:
        return {f"/{HEALTH}/Check": self._check, f"/{HEALTH}/Watch": Streaming(self._watch)}

    async def _check(self, stream: Stream) -> bytes:
        name = await self._name(stream)
        if name not in self._serving:
            raise RpcError(Status.NOT_FOUND, "unknown service")
        return self._answer(name)

    async def _watch(self, stream: Stream) -> None:
        name = await self._name(stream)
        sent = b""
        while True:
            answer, changed = self._answer(name), self._changed
            if answer != sent:
                await stream.write(answer)
                sent = answer
            await changed.wait()

    def _answer(self, name: str) -> bytes:
        serving = self._serving.get(name)
        status = _SERVICE_UNKNOWN if serving is None else _SERVING if serving else _NOT_SERVING
        data: bytes = health_pb2.HealthCheckResponse(status=status).SerializeToString()
        return data

    async def _name(self, stream: Stream) -> str:
        try:
            name: str = health_pb2.HealthCheckRequest.FromString(await stream.read() or b"").service
        except DecodeError:
            raise RpcError(Status.INVALID_ARGUMENT, "no HealthCheckRequest") from None
        return name


class _GrpcioStream:
    """The implementation of `Stream` on the library grpc.aio."""

    __slots__ = ("_context", "_interrupted", "write")
    has_message = False

    def __init__(self, context: Any) -> None:
        self._context = context
        self._interrupted: asyncio.Future[None] | None = None
        self.write = context.write

    async def read(self) -> bytes | None:
        self._interrupted = asyncio.get_running_loop().create_future()
        reading = asyncio.ensure_future(self._context.read())
        try:
            await asyncio.wait((reading, self._interrupted), return_when=asyncio.FIRST_COMPLETED)
            if self._interrupted.done():
                self._interrupted.result()  # raises
            message = await reading
        finally:
            self._interrupted = None
            reading.cancel()
        return None if message is grpc.aio.EOF else message

    def trust(self) -> None:
        pass

    def charge(self, work: int) -> None:
        pass

    def interrupt(self, error: Exception) -> None:
        if self._interrupted is not None and not self._interrupted.done():
            self._interrupted.set_exception(error)

    async def relay(self, answer: Relay) -> bytes | None:
        while (message := await self.read()) is not None:
            answers, is_last = answer(message)
            now, last = (answers[:-1], answers[-1:]) if is_last else (answers, ())
            for each in now:
                await self.write(each)
            if is_last:
                return last[0] if last else None
        return None


class GrpcioTransport:
    """A transport on the library grpc.aio; `handlers` maps paths to handlers.

    A handler that calls `read` and `write` takes about 60 µs less for a request than an async generator.
    Handlers that return a last message are registered as `stream_unary`: gRPC then sends this message with
    the stream's end, which saves another 60 µs. A `stream_unary` method's `write` takes bytes as they are.
    """

    full = ""  # always empty: grpcio does not report whether it refuses streams

    def __init__(
        self,
        handlers: Mapping[str, Handler | ByMetadata],
        message_bytes: int,
        certificates: Certificates | None = None,
    ) -> None:
        self._certificates = certificates
        self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),  # two replicas that share one port are a mistake, not a cluster
                ("grpc.max_receive_message_length", message_bytes),
                ("grpc.max_send_message_length", -1),
                # The byte budget does not cover unread data in grpcio, which on a fast network would open a
                # window of megabytes for each stream. A small window costs one message for each 64 KB.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
                # Accept the pings of Envoy on idle connections, which a strict server answers with GOAWAY.
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_ping_strikes", 0),
                # Ping silent peers, since the streams of a vanished Envoy would stay open for ever.
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
            )
        )
        self._refused: set[str] = set()
        by_service: dict[str, dict[str, Any]] = {}
        for path, handler in handlers.items():
            _, service, method = path.split("/")
            methods = by_service.setdefault(service, {})
            if isinstance(handler.choose({}) if isinstance(handler, ByMetadata) else handler, Streaming):
                methods[method] = grpc.stream_stream_rpc_method_handler(self._served(path, handler))
            else:
                methods[method] = grpc.stream_unary_rpc_method_handler(self._served(path, handler))
        services = [grpc.method_handlers_generic_handler(*each) for each in by_service.items()]
        self._server.add_generic_rpc_handlers(services)

    async def start(self, listen: str) -> int:
        try:
            port: int
            if self._certificates is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, self._certificates.grpc_credentials())
        except RuntimeError as fault:
            raise StartupError(f"extproc.listen {listen}: cannot be bound; is the port in use?") from fault
        await self._server.start()
        _let_loop_run()
        return port

    def refuse(self, path: str, wanted: bool = True) -> None:
        """Like `NativeTransport.refuse`, but with UNAVAILABLE: grpcio itself sets the HTTP/2 error code."""
        (self._refused.add if wanted else self._refused.discard)(path)

    def streams_by_peer(self) -> Counter[str]:
        return Counter()  # grpcio does not report the number of streams

    async def stop(self, grace_s: float | None) -> None:
        await self._server.stop(grace_s)

    def _served(
        self, path: str, found: Handler | ByMetadata
    ) -> Callable[[Any, Any], Awaitable[bytes | None]]:
        async def serve(_: Any, context: Any) -> bytes | None:
            try:
                if path in self._refused:
                    raise RpcError(Status.UNAVAILABLE, "this replica is not ready")
                handler = found.choose(_metadata(context)) if isinstance(found, ByMetadata) else found
                # No last message: the client has all answers or is gone, and ignores an empty message.
                last = await handler(_GrpcioStream(context))
                return last if last or isinstance(handler, Streaming) else b""
            except RpcError as fault:
                code = next(code for code in grpc.StatusCode if code.value[0] == fault.status)
                await context.abort(code, str(fault))
                raise AssertionError("context.abort always raises") from fault

        return serve


def _metadata(context: Any) -> Mapping[bytes, bytes]:
    fields = context.invocation_metadata() or ()
    return {key.encode(): value.encode() if isinstance(value, str) else value for key, value in fields}


def _let_loop_run() -> None:
    """Keep grpcio's threads from preempting the event loop's thread when they wake.

    grpcio polls and reads in threads of its own, which wake ten times a request. In the scheduling class
    SCHED_BATCH (sched(7)) its threads wait for a free core, get the same share of CPU, and find more work
    each time they run, while the event loop keeps its CPU caches (docs/decisions.md, 18). Threads that
    grpcio's threads start inherit this scheduling class.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return  # not Linux
    loop_thread, threads = threading.get_native_id(), []
    with contextlib.suppress(OSError):  # a sandbox may have no directory /proc
        threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    for thread in threads:
        if thread != loop_thread:
            with contextlib.suppress(OSError):  # the thread has ended, or a sandbox refuses the call
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
