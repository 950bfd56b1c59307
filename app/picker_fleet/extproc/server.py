"""The replica's gRPC server: it carries ext_proc streams to their exchanges, serves health, and drains."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from picker_fleet.errors import StartupError
from picker_fleet.extproc.context import DrainGate, ExchangeContext
from picker_fleet.extproc.exchange import Exchange
from picker_fleet.extproc.limits import UploadDeadlines
from picker_fleet.sections import ExtProc

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"

# Ends a stream whose last answer is sent already, or that has none. Envoy has its answer or has closed its
# side by then, and ignores what still comes.
_NOTHING = ProcessingResponse()

_READY = ("", SERVICE, "readiness")
_ALIVE = "liveness"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_MESSAGE_MARGIN_BYTES = 1024 * 1024  # headers and framing around the largest body
_WINDOW_BYTES = 512 * 1024
_FLUSH_S = 1.0  # for answers that are decided; then streams without end (access logs, EDS) are cut
_STOP_S = 0.25


class ExchangeService:
    """Serves exchanges, and knows when none is open.

    A handler that calls `read` and `write` costs about 60 µs less a request than an async generator, and one
    that ends the stream itself after the answer about 40 µs less than one that waits for Envoy to do it. Most
    streams have one answer. The handler returns it, as one of a method that answers once (`stream_unary`):
    gRPC then sends it together with the stream's end, another 60 µs less. On the wire there is no difference.
    What comes before it is written, as bytes: in such a handler `write` serialises nothing.
    """

    def __init__(self, context: ExchangeContext, uploads: UploadDeadlines) -> None:
        self._context = context
        self._uploads = uploads
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def quiet(self) -> None:
        """Wait, without end, until no exchange is open."""
        await self._idle.wait()

    def handler(self) -> grpc.GenericRpcHandler:
        """The service, to be added to a `grpc.aio` server."""
        process = grpc.stream_unary_rpc_method_handler(
            self._process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    async def _process(self, _: object, stream: Any) -> ProcessingResponse:
        exchange = Exchange(self._context)
        task = asyncio.current_task()
        assert task is not None
        self._open += 1
        self._idle.clear()
        try:
            # Uploads have a deadline. Other waits have none: Envoy ends the stream when its request ends,
            # which cancels this, and the server's keepalive ends the streams of an Envoy that vanished.
            while not exchange.done:
                if exchange.uploading:
                    self._uploads.wait(exchange, task)
                try:
                    message = await stream.read()
                except DecodeError:
                    await stream.abort(grpc.StatusCode.INVALID_ARGUMENT, "no ProcessingRequest")
                except asyncio.CancelledError:
                    if not self._uploads.has_ended(exchange) or task.uncancel() > 0:
                        raise  # Envoy's doing
                    refusal = exchange.fail_upload()
                    exchange.before_last_write()
                    return refusal
                self._uploads.received(exchange)
                if message is grpc.aio.EOF or exchange.done:
                    break
                work = exchange.receive(message)
                del message  # a request that waits must not hold the end of its body twice
                answers = await work
                last = None
                for answer in answers:
                    if last is not None:
                        await stream.write(last.SerializeToString())
                    last = answer
                if last is not None:
                    exchange.before_last_write()
                    if exchange.done:
                        return last
                    await stream.write(last.SerializeToString())
            return _NOTHING
        finally:
            self._open -= 1
            if not self._open:
                self._idle.set()
            self._uploads.received(exchange)
            exchange.close()


class Server:
    """Serves on `settings.listen`; not ready until `set_ready(True)`."""

    def __init__(
        self,
        service: ExchangeService,
        drain_gate: DrainGate,
        settings: ExtProc,
        extra: Sequence[grpc.GenericRpcHandler] = (),
    ) -> None:
        self._service = service
        self._drain_gate = drain_gate
        self._settings = settings
        self._health = health_aio.HealthServicer()
        self._draining = False
        self._server = grpc.aio.server(
            options=(
                ("grpc.so_reuseport", 0),  # two replicas on one port are a mistake, not a cluster
                ("grpc.max_receive_message_length", settings.max_body_bytes + _MESSAGE_MARGIN_BYTES),
                ("grpc.max_send_message_length", -1),
                # What has come and is not read yet counts nowhere: by itself gRPC opens windows of megabytes
                # for each stream where the network is fast. A small one costs a message for each 64 KB.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", _WINDOW_BYTES),
                # Envoy pings idle connections; a strict server would answer with GOAWAY
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_ping_strikes", 0),
                # and this side notices an Envoy that vanished, whose streams would stay open for ever
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
            )
        )
        self._server.add_generic_rpc_handlers((service.handler(), *extra))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self) -> int:
        """Bind and listen; the bound port.

        Raises:
            StartupError: the address cannot be bound.
        """
        listen = self._settings.listen
        await self.set_ready(False)
        await self._health.set(_ALIVE, _SERVING)
        try:
            port: int = self._server.add_insecure_port(listen)
        except RuntimeError as fault:
            raise StartupError(f"extproc.listen {listen}: cannot be bound; is the port in use?") from fault
        await self._server.start()
        _let_loop_run()
        return port

    async def set_ready(self, ready: bool) -> None:
        """Tell Envoy's health checks; a draining server stays not ready."""
        status = _SERVING if ready and not self._draining else _NOT_SERVING
        for name in _READY:
            await self._health.set(name, status)

    async def drain(self) -> None:
        """Go down without harm to a client: say so, give Envoy time to hear it, finish what waits, stop.

        Takes at most `drain_grace` + `drain_timeout` and about a second; what waits past that is refused.
        """
        self._draining = True
        await self.set_ready(False)
        await asyncio.sleep(self._settings.drain_grace)
        self._drain_gate.close()
        await self._quiet(self._settings.drain_timeout)
        self._drain_gate.cancel_waiters()
        await self._quiet(_FLUSH_S)
        await self._server.stop(_STOP_S)

    async def stop(self) -> None:
        """Cut everything at once."""
        await self._server.stop(None)

    async def _quiet(self, limit_s: float) -> None:
        """Wait until no exchange is open, at most `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._service.quiet()


def _let_loop_run() -> None:
    """Have this process's other threads, gRPC's above all, not interrupt the event loop's when they wake.

    gRPC polls and reads in threads of its own, which wake ten times a request. As a batch class (sched(7))
    they wait for a core, have as much of it as before, and find more to do at once; the loop keeps its
    caches (docs/decisions.md, 18). Threads that they begin are as they are.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return  # another system than Linux
    loop_thread, threads = threading.get_native_id(), []
    with contextlib.suppress(OSError):  # a sandbox may have no /proc
        threads = [int(task.name) for task in Path("/proc/self/task").iterdir()]
    for thread in threads:
        if thread != loop_thread:
            with contextlib.suppress(OSError):  # it has ended, or a sandbox refuses
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
