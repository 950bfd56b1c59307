"""Bodies that are under way, and the end of those that do not come.

A client that vanishes amid its upload leaves no trace, and Envoy has no deadline for it in every mode: one of
its own would count the wait in the queue too. Each would hold its part of `extproc.max_buffered_bytes` for
ever, and every drain up.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from picker_fleet.extproc.exchange import Exchange

STALLED_S = 30.0  # without a byte; whoever uploads slowly sends some
_LOOKS = 6  # within that time


class Uploads:
    """Exchanges that wait for more of their request, each with the task that reads it.

    `clock` is in seconds. A wait ends after `stalled_s` without a byte, and when the upload has taken
    `whole_s` in all.
    """

    def __init__(self, clock: Callable[[], float], whole_s: float, stalled_s: float = STALLED_S) -> None:
        self._clock = clock
        self._whole_s = whole_s
        self._stalled_s = min(stalled_s, whole_s)
        self._waiting: dict[Exchange, tuple[float, asyncio.Task[Any]]] = {}
        self._ended: set[Exchange] = set()

    def wait(self, exchange: Exchange, task: asyncio.Task[Any]) -> None:
        """`task` is about to read more of the request; it may be cancelled from now on."""
        self._waiting[exchange] = self._clock(), task

    def came(self, exchange: Exchange) -> None:
        """It has read something, or is over."""
        self._waiting.pop(exchange, None)

    def has_ended(self, exchange: Exchange) -> bool:
        """Whether its task was cancelled because the rest does not come; asked once."""
        ended = exchange in self._ended
        self._ended.discard(exchange)
        return ended

    async def run(self) -> None:
        """End waits that are too long, until cancelled."""
        while True:
            await asyncio.sleep(self._stalled_s / _LOOKS)
            now_s = self._clock()
            silent_since_s, begun_before_s = now_s - self._stalled_s, now_s - self._whole_s
            for exchange, (at_s, task) in list(self._waiting.items()):
                if at_s < silent_since_s or exchange.upload_began_s < begun_before_s:
                    del self._waiting[exchange]
                    self._ended.add(exchange)
                    task.cancel()
