"""The admin API's HTTP server: uvicorn inside the replica's event loop, with bounds on each connection.

uvicorn limits neither how long a request takes to arrive, nor the size of its headers, nor the number of
pipelined requests; `Connection` limits all three.
"""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from picker_fleet.domain.errors import StartupError
from picker_fleet.domain.units import split_host_port
from picker_fleet.grpc.certificates import Certificates, handshakes

_GRACE_S = 2
_CHECK_INTERVAL_S = 1.0  # interval of connection checks; also the largest age of an answer's Date


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits for clients' connections. The server checks the time limits once a second."""

    connections: int = 256  # maximum open connections; one address may have half of them
    request_s: float = 15.0  # longest time from the connection's start or last answer to a complete request
    stalled_s: float = 15.0  # longest time that a client may leave an answer unread
    overhead_bytes: int = 16 * 1024  # largest size of a request without its body
    headers: int = 128  # maximum headers of a request: a short header takes as long as a long one
    pipelined: int = 8  # maximum requests on one connection that wait for an earlier answer


LIMITS = ConnectionLimits()


class Connection(HttpToolsProtocol):
    """A connection that is closed when it exceeds its limits. `_watch` calls `check` once a second."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._waits_since_s = self.loop.time()
        self._stalled_since_s: float | None = None
        self._overhead_bytes = self._head_bytes = self._headers = 0

    @property
    def _waits_for_client(self) -> bool:
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def check(self, now_s: float) -> None:
        limits = self._limits
        late = self._waits_for_client and now_s - self._waits_since_s > limits.request_s
        stalled = self._stalled_since_s is not None and now_s - self._stalled_since_s > limits.stalled_s
        if late or stalled:
            self.transport.abort()
        elif self.transport.get_write_buffer_size() == 0:
            self._stalled_since_s = None
        elif self._stalled_since_s is None:
            self._stalled_since_s = now_s

    # The methods below are called by uvicorn or the event loop.

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        others = [
            each
            for each in cast("set[Connection]", self.connections)
            if each is not self and not each.transport.is_closing()
        ]
        if len(others) < self._limits.connections // 2:
            return
        host = self._host
        if Counter(each._host for each in others)[host] >= self._limits.connections // 2:
            others = [each for each in others if each._host == host]
        elif len(others) < self._limits.connections:
            return
        # Make room: abort the connection that has waited longest for its client, or else this connection.
        idle = [each for each in others if each._waits_for_client or each._stalled_since_s is not None]
        (min(idle, key=lambda each: each._waits_since_s) if idle else self).transport.abort()

    @property
    def _host(self) -> str:
        return "" if self.client is None else self.client[0]

    def data_received(self, data: bytes) -> None:
        self._overhead_bytes += len(data)
        super().data_received(data)
        if self._overhead_bytes > self._limits.overhead_bytes and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def on_message_begin(self) -> None:
        self._overhead_bytes = self._head_bytes = self._headers = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers += 1
        self._count_head(name + value)
        super().on_header(name, value)

    def _count_head(self, text: bytes) -> None:
        self._head_bytes += len(text)
        if self._headers > self._limits.headers or self._head_bytes > self._limits.overhead_bytes:
            raise ValueError("the head is too large")  # makes uvicorn answer 400 and close the connection

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if len(self.pipeline) > self._limits.pipelined:
            raise ValueError("too many requests wait on one connection")  # makes uvicorn close the connection

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes -= len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._waits_since_s = self.loop.time()
        super().on_response_complete()


async def _watch(server: uvicorn.Server) -> None:
    """Check the connections and update the Date header once a second, until cancelled."""
    while True:
        await server.on_tick(0)
        now_s = asyncio.get_running_loop().time()
        for connection in tuple(cast("set[Connection]", server.server_state.connections)):
            connection.check(now_s)
        await asyncio.sleep(_CHECK_INTERVAL_S)


@contextlib.asynccontextmanager
async def serving(
    app: FastAPI,
    listen: str,
    limits: ConnectionLimits = LIMITS,
    certificates: Certificates | None = None,
) -> AsyncIterator[str]:
    """Serve `app` at `listen` (`host:port`; port 0 is any free port); yields the bound `host:port`.

    When the block ends, `serve_admin` waits up to 2 s for answers in progress.

    Raises:
        StartupError: the address cannot be bound.
    """
    bound = _bind(listen)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",  # by default uvicorn imports any WebSocket package it finds
        server_header=False,
        proxy_headers=False,  # do not trust the header X-Forwarded-For
        timeout_graceful_shutdown=_GRACE_S,
    )
    config.load()
    agree = None if certificates is None else handshakes(certificates)

    def connect(**options: Any) -> asyncio.Protocol:
        connection = partial(Connection, limits=limits, **options)
        return connection() if agree is None else agree(connection)

    config.http_protocol_class = cast(Any, connect)
    # Repeat the steps of `uvicorn.Server.serve`, which would also take over the process's signals.
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[bound])
    watching = asyncio.create_task(_watch(server), name="admin-server")
    try:
        host, port = bound.getsockname()[:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        watching.cancel()
        await server.shutdown(sockets=[bound])


def _bind(listen: str) -> socket.socket:
    host, port = split_host_port(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as fault:
        raise StartupError(f"the admin API cannot listen on {listen}: {fault.strerror or fault}") from fault
