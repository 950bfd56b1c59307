"""`extproc.transport: native`: gRPC on an HTTP/2 layer of our own (`http2.py`), without other threads."""

import asyncio
import contextlib
from collections.abc import Mapping

from picker_fleet.errors import StartupError
from picker_fleet.extproc.http2 import Connection
from picker_fleet.extproc.limits import BodyBudget
from picker_fleet.extproc.transport import Handler
from picker_fleet.units import split_host_port

_KEEPALIVE_S = 20.0  # a peer that sent nothing for so long is pinged
_ANSWER_S = 10.0  # it has so long to answer
_BACKLOG = 1024
_OTHERS_BYTES = 64 * 1024 * 1024  # unread, of all streams that have no budget
_STEP_S = 0.01


class NativeTransport:
    """`handlers` are by path; `budgets`, by path, count data that their handlers have not read yet.

    Handlers without a budget share one, so that large bodies delay no access log. `message_bytes` is the
    largest message that a client may send.
    """

    def __init__(
        self, handlers: Mapping[str, Handler], budgets: Mapping[str, BodyBudget], message_bytes: int
    ) -> None:
        others = BodyBudget(_OTHERS_BYTES)
        self._handlers = {
            path.encode(): (handler, budgets.get(path, others)) for path, handler in handlers.items()
        }
        self._message_bytes = message_bytes
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._keepalive: asyncio.Task[None] | None = None

    async def start(self, listen: str) -> int:
        host, port = split_host_port(listen)
        try:
            self._server = await asyncio.get_running_loop().create_server(
                self._connection, host.strip("[]"), port, backlog=_BACKLOG
            )
        except OSError as fault:
            raise StartupError(f"extproc.listen {listen}: cannot be bound; is the port in use?") from fault
        self._keepalive = asyncio.create_task(self._keep_alive(), name="keepalive")
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def stop(self, grace_s: float | None) -> None:
        """As `Transport.stop`. A GOAWAY sends the peers' next streams elsewhere."""
        if self._server is None:
            return
        self._server.close()
        if grace_s is not None:
            for connection in self._connections:
                connection.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    while not all(connection.drained for connection in self._connections):  # noqa: ASYNC110
                        await asyncio.sleep(_STEP_S)
        for connection in list(self._connections):
            connection.close()
        for connection in list(self._connections):
            await connection.ended()
        if self._keepalive is not None:
            self._keepalive.cancel()

    def _connection(self) -> Connection:
        return Connection(self._handlers, self._message_bytes, self._connections)

    async def _keep_alive(self) -> None:
        """Find peers that vanished without a word, whose streams would stay open for ever."""
        while True:
            for connection in self._connections:
                connection.received = False
            await asyncio.sleep(_KEEPALIVE_S)
            silent = [connection for connection in self._connections if not connection.received]
            for connection in silent:
                connection.ping()
            if silent:
                await asyncio.sleep(_ANSWER_S)
            for connection in silent:
                if not connection.received:
                    connection.abort()
