"""The gRPC transport that runs in the event loop's thread, on `http2.py` and `streams.py`.

`server.Server` makes this transport if the setting `extproc.transport` is `native`.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import cast

from picker_fleet.background import keep
from picker_fleet.domain.budgets import BodyBudget, most_connections
from picker_fleet.domain.errors import StartupError
from picker_fleet.grpc.certificates import MAX_TLS_CONNECTIONS, Certificates, serve
from picker_fleet.grpc.http2 import Connection, Open, open_stream
from picker_fleet.grpc.streams import OK_BLOCK, GrpcStream, Peers, status_block
from picker_fleet.grpc.transport import ByMetadata, Handler, Limits, Status

_OTHERS_BYTES = 64 * 1024 * 1024  # maximum unread bytes of all streams without a budget of their own
_OTHERS_MESSAGE_BYTES = 256 * 1024  # largest message to a stream without a budget; Envoy sends 16 KiB
_STEP_S = 0.01
_CLOSE_S = 0.25
_CANCEL_S = 5.0  # seconds to wait for cancelled handlers to end
_OVERDUE_S = 1.0  # seconds between checks for overdue streams

_BAD_TYPE_BLOCK = b"\x08\x03415"  # encodes `:status: 415`, the answer to a request that is not gRPC


class NativeTransport:
    """Serves gRPC. `handlers` maps paths to handlers; `budgets` limit the unread data of each handler.

    Handlers without a budget of their own share a separate one, so that large bodies delay no access log.
    `message_bytes` is the maximum size of a message to a handler with a budget of its own.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler | ByMetadata],
        budgets: Mapping[Handler, BodyBudget],
        message_bytes: int,
        certificates: Certificates | None = None,
        limits: Limits = Limits(),  # noqa: B008 - a Limits object is frozen
    ) -> None:
        self._certificates = certificates
        self._handlers = {path.encode(): handler for path, handler in handlers.items()}
        self._budgets, self._others = budgets, BodyBudget(_OTHERS_BYTES)
        self._message_bytes = message_bytes
        self._refused: set[bytes] = set()  # paths whose new streams are refused
        most = limits.connections if certificates is None else min(limits.connections, MAX_TLS_CONNECTIONS)
        self.peers = Peers(replace(limits, connections=most_connections(most)))
        self._connections = cast(set[Connection], self.peers.connections.all)
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def full(self) -> str:
        """The reason why new streams are refused; '' while new streams are accepted."""
        return self.peers.full

    async def start(self, listen: str) -> int:
        """Bind the address `listen` and serve. Returns the bound port.

        Raises:
            StartupError: the address cannot be bound.
        """
        try:
            self._server = await serve(
                partial(Connection, self._find, self.peers), listen, self._certificates
            )
        except OSError as fault:
            raise StartupError(f"extproc.listen {listen}: cannot be bound; is the port in use?") from fault
        for name, work in (("keepalive", self._ping_silent_peers), ("overdue", self._end_overdue)):
            self._tasks.append(asyncio.create_task(keep(name, work), name=name))
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def streams_by_peer(self) -> Counter[str]:
        """The number of open streams by peer address."""
        found: Counter[str] = Counter()
        for connection in self._connections:
            address, count = connection.peer
            found[address] += count
        return found

    def refuse(self, path: str, wanted: bool = True) -> None:
        """Refuse new streams of `path` with REFUSED_STREAM, so that the peer sends the requests elsewhere;
        with `wanted` False, accept such streams again."""
        (self._refused.add if wanted else self._refused.discard)(path.encode())

    async def stop(self, grace_s: float | None) -> None:
        """Accept no new streams, wait at most `grace_s` seconds for open streams to end, then cut the rest. A
        GOAWAY frame makes peers open their next streams at other replicas."""
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
        if self.peers.cancelled:
            await asyncio.wait(self.peers.cancelled, timeout=_CANCEL_S)
        with contextlib.suppress(TimeoutError):  # let connections send their last bytes and close TLS
            async with asyncio.timeout(_CLOSE_S):
                while self._connections:  # noqa: ASYNC110
                    await asyncio.sleep(_STEP_S)
        for connection in list(self._connections):
            connection.abort()
        for task in self._tasks:
            task.cancel()

    async def _end_overdue(self) -> None:
        while True:
            await asyncio.sleep(_OVERDUE_S)
            self.peers.end_overdue()

    def _find(self, fields: Mapping[bytes, bytes]) -> Open | bytes:
        """A function that opens a stream for a request with the header `fields`, or, for a request that gets
        no stream, the header block of its answer."""
        if fields[b":method"] != b"POST" or not fields.get(b"content-type", b"").startswith(
            b"application/grpc"
        ):
            return _BAD_TYPE_BLOCK
        path = fields[b":path"]
        handler = self._handlers.get(path)
        if handler is None:
            return OK_BLOCK + status_block(Status.UNIMPLEMENTED, "unknown method")
        if isinstance(handler, ByMetadata):
            handler = handler.choose(fields)
        budget, most_bytes = self._budgets.get(handler), self._message_bytes
        if budget is None:
            budget, most_bytes = self._others, min(most_bytes, _OTHERS_MESSAGE_BYTES)
        length = int(fields.get(b"content-length", b"")[:20] or -1)

        make = partial(
            GrpcStream,
            handler=handler,
            budget=budget,
            content_length=length,
            message_bytes=most_bytes,
        )
        return partial(open_stream, path, self._refused, make)

    async def _ping_silent_peers(self) -> None:
        """Cut off peers that answer no ping: else the streams of a vanished peer would stay open for ever."""
        limits = self.peers.limits
        while True:
            for connection in self._connections:
                connection.received = False
            await asyncio.sleep(limits.silence_s)
            silent = [connection for connection in self._connections if not connection.received]
            for connection in silent:
                connection.ping()
            if not silent:
                continue
            clock = asyncio.get_running_loop().time
            pinged_s = clock()
            await asyncio.sleep(limits.answer_s)
            if clock() - pinged_s > limits.answer_s + limits.pause_s:
                continue  # this process paused: answers to pings may have arrived but are not yet read
            for connection in silent:
                if not connection.received:
                    connection.abort()
