"""An HTTP/1.1 client for one host: as many connections as there are requests open, kept for the next."""

import asyncio
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

from picker_tools.load.answer import Answer
from picker_tools.load.connection import HUNG_UP, Connection, Exchange
from picker_tools.load.payload import Ask

_CONNECT_S = 5.0
_PAGE_BYTES = 8 * 1024 * 1024


class Client:
    """Of one `http://host:port`; to be closed by its user (`with`). One event loop."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._netloc = parts.netloc
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self.surplus_answers = 0  # beyond one a request

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()

    def hang_up(self) -> None:
        """Close all connections. What is still waited for ends as its client's own doing."""
        for connection in list(self._all):
            connection.hang_up()

    async def get(self, path: str, *, within_s: float) -> tuple[int, bytes] | None:
        """Status and body of the answer; None if none came."""
        head = f"GET {path} HTTP/1.1\r\nhost: {self._netloc}\r\n\r\n"
        exchange = Exchange(_PAGE_BYTES)
        try:
            async with asyncio.timeout(within_s):
                connection = await self._connection()
        except (OSError, TimeoutError):
            return None
        await self._exchange(connection, head.encode(), exchange, within_s)
        return None if exchange.fault else (exchange.status, exchange.tail)

    async def send(self, ask: Ask, *, within_s: float) -> Exchange:
        """Send `ask` and wait for the end of its answer, `within_s` at most: then the connection is closed,
        which tells the fleet that the client has gone.
        """
        lines = [f"POST {ask.path} HTTP/1.1", f"host: {self._netloc}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in ask.headers]
        request = "\r\n".join([*lines, f"content-length: {len(ask.body)}", "", ""]).encode() + ask.body
        exchange = Exchange()  # what connecting takes is part of what its client waits
        try:
            async with asyncio.timeout(_CONNECT_S):
                connection = await self._connection()
        except (OSError, TimeoutError) as fault:
            exchange.end(f"no connection: {str(fault) or f'not within {_CONNECT_S:g} s'}")
            return exchange
        await self._exchange(connection, request, exchange, within_s)
        return exchange

    async def _exchange(
        self, connection: Connection, request: bytes, exchange: Exchange, within_s: float
    ) -> None:
        connection.send(request, exchange)
        try:
            # Not awaited itself: a timeout would cancel it, and it would pass for an answer.
            await asyncio.wait([exchange.over], timeout=within_s)
            exchange.end(f"no whole answer within {within_s:g} s")
        finally:
            self._give_back(connection, exchange)

    async def _connection(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
            self._all.discard(connection)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(self._connection_made, self._host, self._port)
        self._all.add(connection)
        return connection

    def _connection_made(self) -> Connection:
        return Connection(self._count_surplus)

    def _count_surplus(self) -> None:
        self.surplus_answers += 1

    def _give_back(self, connection: Connection, exchange: Exchange) -> None:
        if exchange.over.done() and not exchange.fault and connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
            self._all.discard(connection)


def answer_of(
    exchange: Exchange, ask: Ask, *, source: str, number: int, turn: int, due_s: float, began: float
) -> Answer:
    """What `exchange` amounts to. `began` is the load's beginning, of `perf_counter`."""
    fault = exchange.fault
    if not fault and exchange.status == 200 and ask.streamed and not exchange.is_done:
        fault = "a stream that ended without [DONE]"
    retry_after = exchange.headers.get(b"retry-after", b"").decode("latin-1")
    return Answer(
        source=source,
        number=number,
        turn=turn,
        streamed=ask.streamed,
        prompt_bytes=len(ask.body),
        asked_tokens=ask.answer_tokens,
        due_s=due_s,
        sent_s=exchange.sent_at - began,
        head_s=_since(exchange, exchange.head_at),
        first_s=_since(exchange, exchange.first_at),
        last_s=exchange.last_at - exchange.sent_at,
        status=exchange.status,
        reason=exchange.headers.get(b"x-llm-d-request-dropped-reason", b"").decode("latin-1"),
        retry_after_s=float(retry_after) if retry_after.isdecimal() else None,
        served_by=exchange.headers.get(b"x-served-by", b"").decode("latin-1"),
        tokens=exchange.tokens,
        answers=exchange.answers,
        fault=fault,
        left=exchange.fault == HUNG_UP,
    )


def _since(exchange: Exchange, at: float | None) -> float | None:
    return None if at is None else at - exchange.sent_at
