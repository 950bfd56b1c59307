"""The admin API's HTTP server: uvicorn inside the replica's own event loop."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from fastapi import FastAPI

from picker_fleet.admin.connection import BOUNDS, Bounds, Config, Connection
from picker_fleet.config import split_host_port
from picker_fleet.errors import StartupError

_GRACE_S = 2
_LOOK_S = 1.0  # between two looks at the connections, and how old the date in answers may be


class _Server(uvicorn.Server):
    """A server that leaves signals to the replica, and tells when it accepts.

    Once a second it looks at the time and at its connections; uvicorn looks ten times whether it is to end,
    which this one is told by `leave`.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()
        self._leaving = asyncio.Event()

    def leave(self) -> None:
        """End, once what is being sent is sent or the grace is over."""
        self.should_exit = True
        self._leaving.set()

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            now_s = asyncio.get_running_loop().time()
            for connection in tuple(self.server_state.connections):
                if isinstance(connection, Connection):
                    connection.look(now_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._leaving.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()


@contextlib.asynccontextmanager
async def serving(app: FastAPI, listen: str, bounds: Bounds = BOUNDS) -> AsyncIterator[str]:
    """Serve `app` at `listen` (`host:port`; port 0: a free one); the value is the bound `host:port`.

    Leaving waits up to 2 s for answers that are being sent.

    Raises:
        StartupError: the address cannot be bound.
    """
    bound = _bind(listen)
    config = Config(
        app,
        bounds,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",  # or it imports whichever WebSocket package it finds
        server_header=False,
        proxy_headers=False,  # whose words about a client count is the guard's to say
        timeout_graceful_shutdown=_GRACE_S,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[bound]), name="admin-server")
    accepting = asyncio.create_task(server.accepting.wait())
    try:
        await asyncio.wait((task, accepting), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            raise StartupError(f"the admin API at {listen} ended before it accepted: {task.exception()}")
        host, port = bound.getsockname()[:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        accepting.cancel()
        server.leave()
        await asyncio.wait((task,), timeout=_GRACE_S + 2)
        task.cancel()
        bound.close()


def _bind(listen: str) -> socket.socket:
    host, port = split_host_port(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as fault:
        raise StartupError(f"the admin API cannot listen on {listen}: {fault.strerror or fault}") from fault
