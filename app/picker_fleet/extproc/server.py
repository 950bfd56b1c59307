"""The replica's gRPC server: it drives exchanges, serves health and Envoy's other services, and drains.

Made and run by `serve`, on the transport that `extproc.transport` names.
"""

import asyncio
import contextlib
from collections.abc import Mapping

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]

from picker_fleet.errors import BufferFull
from picker_fleet.extproc.context import BodyBudget, DrainGate, ExchangeContext, UploadDeadlines
from picker_fleet.extproc.exchange import Exchange
from picker_fleet.extproc.native import NativeTransport
from picker_fleet.extproc.transport import (
    GrpcioTransport,
    Handler,
    Health,
    RpcError,
    Status,
    Stream,
    Transport,
)
from picker_fleet.sections import ExtProc

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
PROCESS = f"/{SERVICE}/Process"

_READY = ("", SERVICE, "readiness")
_ALIVE = ("liveness",)

_MESSAGE_MARGIN_BYTES = 1024 * 1024  # headers and framing around the largest body
_FLUSH_S = 1.0  # for answers that are decided; then streams without end (access logs, EDS) are cut
_STOP_S = 0.25


class ExchangeService:
    """Serves exchanges."""

    def __init__(self, context: ExchangeContext, uploads: UploadDeadlines) -> None:
        self._context = context
        self._uploads = uploads

    @property
    def bodies(self) -> BodyBudget:
        """The byte budget of request bodies."""
        return self._context.bodies

    async def quiet(self) -> None:
        """Wait until no request is being handled, in any mode."""
        await self._context.open_requests.none()

    async def process(self, stream: Stream) -> bytes | None:
        """Serve one stream of Envoy's; the last answer, None if there is none."""
        exchange = Exchange(self._context)
        task = asyncio.current_task()
        assert task is not None
        self._context.open_requests.began()
        try:
            # Uploads have a deadline. Other waits have none: Envoy ends the stream when its request ends,
            # which cancels this task, and keepalive ends the streams of an Envoy that vanished.
            while not exchange.done:
                if exchange.uploading:
                    self._uploads.wait(exchange, task)
                try:
                    data = await stream.read()
                except BufferFull as fault:
                    refusal = exchange.abandon(fault)
                    exchange.before_last_write()
                    return refusal
                except asyncio.CancelledError:
                    if not self._uploads.has_ended(exchange) or task.uncancel() > 0:
                        raise  # Envoy ended the stream
                    refusal = exchange.fail_upload()
                    exchange.before_last_write()
                    return refusal
                self._uploads.received(exchange)
                if data is None or exchange.done:
                    break
                try:
                    message = ProcessingRequest.FromString(data)
                except DecodeError:
                    raise RpcError(Status.INVALID_ARGUMENT, "no ProcessingRequest") from None
                work = exchange.receive(message)
                del message, data  # a request that waits must not hold the end of its body twice
                answers = await work
                last = None
                for answer in answers:
                    if last is not None:
                        await stream.write(last)
                    last = answer
                if last is not None:
                    exchange.before_last_write()
                    if exchange.done:
                        return last
                    await stream.write(last)
            return None
        finally:
            self._context.open_requests.ended()
            self._uploads.received(exchange)
            exchange.close()


class Server:
    """Serves exchanges, health and the handlers of `services` on `settings.listen`.

    Not ready until `set_ready(True)`.
    """

    def __init__(
        self,
        service: ExchangeService,
        drain_gate: DrainGate,
        settings: ExtProc,
        services: Mapping[str, Handler],
    ) -> None:
        self._service = service
        self._drain_gate = drain_gate
        self._settings = settings
        self._health = Health()
        self._draining = False
        handlers = {PROCESS: service.process, **self._health.handlers(), **services}
        largest = settings.max_body_bytes + _MESSAGE_MARGIN_BYTES
        self._transport: Transport
        if settings.transport == "native":
            self._transport = NativeTransport(handlers, {PROCESS: service.bodies}, largest)
        else:
            self._transport = GrpcioTransport(handlers, largest)

    async def start(self) -> int:
        """Bind and listen; the bound port.

        Raises:
            StartupError: the address cannot be bound.
        """
        self.set_ready(False)
        self._health.set(_ALIVE, True)
        return await self._transport.start(self._settings.listen)

    def set_ready(self, ready: bool) -> None:
        """Tell Envoy's health checks; a draining server stays not ready."""
        self._health.set(_READY, ready and not self._draining)

    async def drain(self) -> None:
        """Stop without an error for any client: announce it, wait for health checks, finish what waits.

        Takes at most `drain_grace` + `drain_timeout` and about a second; what waits past that is refused.
        """
        self._draining = True
        self.set_ready(False)
        await asyncio.sleep(self._settings.drain_grace)
        self._drain_gate.close()
        await self._quiet(self._settings.drain_timeout)
        self._drain_gate.cancel_waiters()
        await self._quiet(_FLUSH_S)
        await self._transport.stop(_STOP_S)

    async def stop(self) -> None:
        """Cut everything at once."""
        await self._transport.stop(None)

    async def _quiet(self, limit_s: float) -> None:
        """Wait until no request is being handled, at most `limit_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._service.quiet()
