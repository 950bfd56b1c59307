"""A connection to Redis that hands each reply over the moment it is read.

redis-py connects: addresses, TLS, authentication and database are its work. Then its stream is taken over,
because a coroutine that waits for each reply costs a turn of the event loop and about 60 µs a message,
which a decision can't spare (docs/decisions.md).
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, cast

import hiredis
from redis import exceptions as redis_errors
from redis.asyncio.connection import Connection, ConnectionPool

from picker_fleet.state import cancelling

DOWN = (redis_errors.RedisError, OSError, TimeoutError, EOFError)


class Wire(asyncio.Protocol):
    """An open connection. `on_reply` gets each reply in order, errors as `hiredis.ReplyError`; `on_lost` is
    called once, if the connection ends other than by `close`."""

    def __init__(
        self,
        connection: Connection,
        on_reply: Callable[[Any], None],
        on_lost: Callable[[str], None],
        *,
        text: bool,
    ) -> None:
        self._connection = connection
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._reader = hiredis.Reader(encoding="utf-8", errors="replace") if text else hiredis.Reader()
        self._closed = False
        self._transport = cast(asyncio.Transport, connection._writer.transport)  # type: ignore[union-attr]
        self._transport.set_protocol(self)

    @classmethod
    async def connect(
        cls,
        pool: ConnectionPool,
        on_reply: Callable[[Any], None],
        on_lost: Callable[[str], None],
        *,
        text: bool = True,
    ) -> "Wire":
        """A new connection of `pool`, whose protocol must be RESP2; replies as str, or as bytes.

        Raises:
            one of DOWN: it cannot be had.
        """
        connection: Connection = pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            cancelling.heed()
        except BaseException:
            with contextlib.suppress(*DOWN):
                await connection.disconnect(nowait=True)
            raise
        return cls(connection, on_reply, on_lost, text=text)

    def write(self, message: bytes) -> None:
        self._transport.write(message)

    async def close(self) -> None:
        """Drop the connection at once; nothing is reported of it any more."""
        self._closed = True
        self._transport.abort()
        with contextlib.suppress(*DOWN):
            await self._connection.disconnect(nowait=True)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while not self._closed:
            try:
                reply = self._reader.gets()
            except hiredis.ProtocolError as fault:
                self._lose(f"not a Redis reply: {fault}")
                return
            if reply is False:  # no script returns a boolean over RESP2
                return
            self._on_reply(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(str(exc) if exc else "the connection was closed")

    def _lose(self, why: str) -> None:
        if not self._closed:
            self._closed = True
            self._transport.abort()
            self._on_lost(why)
