"""What listeners are told as it happens (server-sent events): one look at the shared state a second for all
of a replica's listeners, and only while there are any. Everyone is sent the same bytes.

A listener that does not keep up is dropped: at most BACKLOG events wait for it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import orjson

from picker_fleet.errors import RequestError

MOST_LISTENERS = 64
BACKLOG = 4
_EVERY_S = 1.0
_LOOK_S = 2.0
_PING_S = 10.0
_GREETING = b"retry: 1000\n\n"
_PING = b": ping\n\n"

Look = Callable[[], Awaitable[list[tuple[str, Any]]]]


def event(name: str, data: Any) -> bytes:
    """An event as it goes over the wire; `data` becomes one line of JSON."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), orjson.dumps(data))


def _bytes(events: list[tuple[str, Any]]) -> bytes:
    return b"".join(event(name, data) for name, data in events)


class Listener:
    """One open stream. `dropped` is set when it must end, whether or not it is being read."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[bytes | None] = asyncio.Queue(BACKLOG + 1)
        self.dropped = asyncio.Event()

    def tell(self, said: bytes | None) -> None:
        """Add what is to be sent, None for the end; one with BACKLOG unread events is dropped instead."""
        if said is not None and self._waiting.qsize() >= BACKLOG:
            self.dropped.set()
        if not self.dropped.is_set():
            self._waiting.put_nowait(said)

    async def events(self) -> AsyncIterator[bytes]:
        """What is to be sent, until the end; a comment when there was nothing for long."""
        yield _GREETING
        while True:
            try:
                async with asyncio.timeout(_PING_S):
                    said = await self._waiting.get()
            except TimeoutError:
                yield _PING
                continue
            if said is None:
                return
            yield said


class Events:
    """The listeners of one replica. `look` reads what there is to tell, as (event, data); `recent` says what
    a listener is told first that joins others.
    """

    def __init__(self, look: Look, recent: Callable[[], list[tuple[str, Any]]] = list) -> None:
        self._look, self._recent = look, recent
        self._listeners: set[Listener] = set()
        self._wanted = asyncio.Event()
        self._closed = False

    @property
    def listening(self) -> int:
        """How many streams are open."""
        return len(self._listeners)

    def join(self) -> Listener | None:
        """A new listener; None when there are MOST_LISTENERS, or the replica is going."""
        if self._closed or len(self._listeners) >= MOST_LISTENERS:
            return None
        listener = Listener()
        if recent := _bytes(self._recent()):
            listener.tell(recent)
        self._listeners.add(listener)
        self._wanted.set()
        return listener

    def leave(self, listener: Listener) -> None:
        self._listeners.discard(listener)
        if not self._listeners:
            self._wanted.clear()

    async def run(self) -> None:
        """Tell listeners until cancelled; then every stream ends."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._wanted.wait()
                begun = loop.time()
                self._tell(await self._said())
                await asyncio.sleep(max(0.0, begun + _EVERY_S - loop.time()))
        finally:
            self._closed = True
            self._tell(None)

    async def _said(self) -> bytes:
        try:
            async with asyncio.timeout(_LOOK_S):
                return _bytes(await self._look())
        except TimeoutError:
            detail = f"the shared state did not answer within {_LOOK_S:g} s"
        except RequestError as fault:
            detail = str(fault)
        return event("unavailable", {"at": time.time(), "detail": detail})

    def _tell(self, said: bytes | None) -> None:
        for listener in tuple(self._listeners):
            listener.tell(said)
