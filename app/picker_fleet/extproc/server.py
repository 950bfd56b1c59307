"""The replica's gRPC server: ext_proc, health, and what else is given to it; and its way down."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from picker_fleet.errors import StartupError
from picker_fleet.extproc.door import Door
from picker_fleet.extproc.service import SERVICE, Service
from picker_fleet.sections import ExtProc

_READY = ("", SERVICE, "readiness")
_ALIVE = "liveness"
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

_MESSAGE_MARGIN_BYTES = 1024 * 1024  # headers and framing around the largest body
_WINDOW_BYTES = 512 * 1024
_FLUSH_S = 1.0  # for answers that are decided; then streams without end (access logs, EDS) are cut
_STOP_S = 0.25


class Server:
    """Serves on `settings.listen`; not ready until `set_ready(True)`."""

    def __init__(
        self, service: Service, door: Door, settings: ExtProc, extra: Sequence[grpc.GenericRpcHandler] = ()
    ) -> None:
        self._service = service
        self._door = door
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
        self._door.close()
        await self._quiet(self._settings.drain_timeout)
        self._door.show_out()
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
