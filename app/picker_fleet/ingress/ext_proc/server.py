"""The replica's gRPC server: it serves exchanges, health and Envoy's other services, and drains.

`serve.py` makes and runs the server, on the transport that the setting `extproc.transport` names.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from picker_fleet.domain.budgets import POOL_HEADER, BodyBudget, ByPool
from picker_fleet.domain.sections import ExtProc
from picker_fleet.grpc.certificates import Certificates
from picker_fleet.grpc.native import NativeTransport
from picker_fleet.grpc.transport import (
    ByMetadata,
    GrpcioTransport,
    Handler,
    Health,
    RpcError,
    Status,
    Stream,
    Streaming,
)
from picker_fleet.ingress.ext_proc.exchange import ExchangeService

Transport = NativeTransport | GrpcioTransport

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
PROCESS = f"/{SERVICE}/Process"

# Health checks may ask for each of these names; Helm charts of standalone pickers ask for the last one.
_READY = ("", SERVICE, "readiness", "inference-extension")
_ALIVE = ("liveness",)

_MESSAGE_MARGIN_BYTES = 1024 * 1024  # bytes for headers and framing around the largest body
_MOST_ENDLESS = 2048  # maximum streams of a method whose streams never end: health watches, access logs, EDS
_FLUSH_S = 1.0  # seconds for sending answers before a drain cuts access-log and EDS streams, which never end
_STOP_S = 0.25


class Server:
    """Serves exchanges, health and the handlers of `services` on `settings.listen`.

    `own_listeners` maps pools to further addresses: a request that names no pool belongs to the pool at whose
    address it arrives. The server is not ready until `set_ready(True)` is called.
    """

    def __init__(
        self,
        exchanges: ByPool[ExchangeService],
        settings: ExtProc,
        services: Mapping[str, Handler | ByPool[Handler]],
        certificates: Certificates | None = None,
        own_listeners: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._exchanges = exchanges.all
        self._open_requests = self._exchanges[0].context.open_requests  # one counter for all pools
        self._settings = settings
        self._health = Health()
        self._draining = False
        self._logs = [path for path in services if path.endswith("/StreamAccessLogs")]
        processes: ByPool[Handler] = exchanges.each(lambda service: service.process)
        budgets: dict[Handler, BodyBudget] = {each.process: each.context.bodies for each in self._exchanges}
        largest = settings.max_body_bytes + _MESSAGE_MARGIN_BYTES

        def transport(pool: str) -> Transport:
            handlers: dict[str, Handler | ByMetadata] = {
                PROCESS: _by_pool(processes.where(pool)),
                **{path: _bounded(each) for path, each in self._health.handlers().items()},
                **{
                    path: _by_pool(each.where(pool).each(_bounded))
                    if isinstance(each, ByPool)
                    else _bounded(each)
                    for path, each in services.items()
                },
            }
            if settings.transport == "native":
                return NativeTransport(handlers, budgets, largest, certificates)
            return GrpcioTransport(handlers, largest, certificates)

        self._transports = [(settings.listen, transport(""))]
        self._transports += [(listen, transport(pool)) for pool, listen in own_listeners.items()]
        self._health_transport: Transport | None = None
        if settings.health_listen is not None:
            self._health_transport = NativeTransport(self._health.handlers(), {}, _MESSAGE_MARGIN_BYTES)

    async def start(self) -> int:
        """Bind and listen. Returns the bound port of `settings.listen`.

        Raises:
            StartupError: an address cannot be bound.
        """
        self.set_ready(False)
        self._health.set(_ALIVE, True)
        ports = [await transport.start(listen) for listen, transport in self._transports]
        if self._health_transport is not None and self._settings.health_listen is not None:
            await self._health_transport.start(self._settings.health_listen)
        return ports[0]

    @property
    def full(self) -> str:
        """The reason why the server refuses new streams; '' while it accepts them."""
        return self._transports[0][1].full

    def set_ready(self, ready: bool) -> None:
        """Report readiness to Envoy's health checks; a draining server stays not ready. An unready server
        refuses exchanges and access logs, so that Envoy uses another replica: an unready replica could not
        release the stock of the requests whose completions it reads (G8)."""
        self._health.set(_READY, ready and not self._draining)
        if not self._draining:
            for _, transport in self._transports:
                for path in (PROCESS, *self._logs):
                    transport.refuse(path, wanted=not ready)

    def streams_by_peer(self) -> Counter[str]:
        """The number of open streams by peer address, on all listeners."""
        return sum((transport.streams_by_peer() for _, transport in self._transports), Counter())

    async def drain(self) -> None:
        """Stop gracefully: report not ready, wait for health checks to notice, let waiting requests finish.

        A drain takes at most `drain_grace` + `drain_timeout` and about a second. The drain refuses requests
        that still wait after `drain_timeout`.
        """
        self._draining = True
        self.set_ready(False)
        await asyncio.sleep(self._settings.drain_grace)
        self._open_requests.closed = True
        for _, transport in self._transports:
            transport.refuse(PROCESS)
        await self._quiet(self._settings.drain_timeout)
        for exchanges in self._exchanges:
            exchanges.context.gate.shut_down()
        await self._quiet(_FLUSH_S)
        await asyncio.gather(*(transport.stop(_STOP_S) for _, transport in self._transports))

    async def stop(self) -> None:
        await asyncio.gather(*(transport.stop(None) for _, transport in self._transports))
        if self._health_transport is not None:
            await self._health_transport.stop(None)

    async def _quiet(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._open_requests.none()


def _bounded(handler: Handler) -> Handler:
    """A handler that refuses streams beyond `_MOST_ENDLESS`, to leave room for streams of other methods."""
    open_streams = 0

    async def handle(stream: Stream) -> bytes | None:
        nonlocal open_streams
        if open_streams >= _MOST_ENDLESS:
            raise RpcError(Status.UNAVAILABLE, f"more than {_MOST_ENDLESS} streams of this method are open")
        open_streams += 1
        try:
            return await handler(stream)
        finally:
            open_streams -= 1

    return Streaming(handle) if isinstance(handler, Streaming) else handle


def _by_pool(handlers: ByPool[Handler]) -> ByMetadata:
    named = POOL_HEADER.encode()
    return ByMetadata(lambda metadata: handlers.of(metadata.get(named, b"")))
