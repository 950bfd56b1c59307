"""One connection of the admin API, and what it may hold.

uvicorn bounds neither the time that a request takes to come, nor the size of its headers, nor how many
requests wait behind one another; all of that is bounded here.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


@dataclass(frozen=True, slots=True)
class Bounds:
    """What clients may hold. Times are seconds, and are looked at once a second."""

    connections: int = 256  # half of them from one address
    request_s: float = 15.0  # from the last answer, or the connection's begin, to the end of a request
    stalled_s: float = 15.0  # for which a client may leave its answer unread
    overhead_bytes: int = 64 * 1024  # of a request, besides its body
    pipelined: int = 8  # requests that wait for the answer to an earlier one


BOUNDS = Bounds()


class Config(uvicorn.Config):
    """uvicorn's, with the bounds of each connection."""

    def __init__(self, app: Any, bounds: Bounds, **options: Any) -> None:
        super().__init__(app, http=Connection, **options)
        self.bounds = bounds


class Connection(HttpToolsProtocol):
    """A connection that ends when it exceeds `Config.bounds`. `look` is to be called once a second."""

    def __init__(self, config: Config, *more: Any, **named: Any) -> None:
        super().__init__(config, *more, **named)
        self._bounds = config.bounds
        self._waits_since_s = self.loop.time()
        self._stalled_since_s: float | None = None
        self._overhead_bytes = 0

    @property
    def _waits(self) -> bool:
        """Whether it is the client's turn to send."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def look(self, now_s: float) -> None:
        """End it if the client has taken too long."""
        waits = self._waits and now_s - self._waits_since_s > self._bounds.request_s
        stalled = self._stalled_since_s is not None and now_s - self._stalled_since_s > self._bounds.stalled_s
        if waits or stalled:
            self.transport.abort()
        elif self._stalled_since_s is None and self._unread:
            self._stalled_since_s = now_s
        elif not self._unread:
            self._stalled_since_s = None

    @property
    def _unread(self) -> bool:
        return self.transport.get_write_buffer_size() > 0

    # What uvicorn calls, or the loop

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        others = [
            each
            for each in self.connections
            if isinstance(each, Connection) and each is not self and not each.transport.is_closing()
        ]
        if len(others) < self._bounds.connections // 2:
            return
        host = self._host
        if Counter(each._host for each in others)[host] >= self._bounds.connections // 2:
            others = [each for each in others if each._host == host]
        elif len(others) < self._bounds.connections:
            return
        # Whoever waits longest without a whole request, or without reading, makes room.
        holds = [each for each in others if each._waits or each._stalled_since_s is not None]
        (min(holds, key=lambda each: each._waits_since_s) if holds else self).transport.abort()

    @property
    def _host(self) -> str:
        return "" if self.client is None else self.client[0]

    def data_received(self, data: bytes) -> None:
        self._overhead_bytes += len(data)
        super().data_received(data)
        if self._overhead_bytes > self._bounds.overhead_bytes and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def on_message_begin(self) -> None:
        self._overhead_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if len(self.pipeline) > self._bounds.pipelined:
            raise ValueError("too many requests wait on one connection")  # which ends it

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes -= len(body)
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._waits_since_s = self.loop.time()
        super().on_response_complete()
