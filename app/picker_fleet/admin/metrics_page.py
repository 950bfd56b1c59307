"""The metrics page as its readers get it: one text for all of them, made once a second at most."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from picker_fleet.admin.problems import Refused
from picker_fleet.telemetry.metrics import Metrics

EVERY_S = 1.0  # one page and the next are this far apart at least
MOST_READS = 8  # of one page by one address; who asks more often waits for the next page
LONGEST_S = 4.0  # that one page is good for
_SHARE = 0.05  # of the event loop's time that making pages takes at most, if LONGEST_S allows it
_SLICE_S = 0.001  # after which requests have their turn


class MetricsPage:
    """Makes the page of `metrics` in slices, between which the event loop goes on. `clock` is in seconds."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._text = b""
        self._good_until_s = float("-inf")
        self._reads = Counter[str]()
        self._making: asyncio.Task[None] | None = None

    async def read(self, reader: str) -> bytes:
        """The page for `reader` (an address): the present one, or the next if it is old or read often.

        Raises:
            Refused: 429, too many of this address waited for it.
        """
        if self._reads[reader] >= MOST_READS or self._clock() >= self._good_until_s:
            if self._making is None:
                self._making = asyncio.create_task(self._make(), name="metrics-page")
            await asyncio.shield(self._making)
            if self._reads[reader] >= MOST_READS:
                detail = f"one address may read a page {MOST_READS} times, and the next comes in a second"
                raise Refused(429, "too_many_calls", detail, retry_after_s=1)
        self._reads[reader] += 1
        return self._text

    async def _make(self) -> None:
        try:
            await asyncio.sleep(self._good_until_s - self._clock())
            took_s, pieces = 0.0, []
            begun_s = self._clock()
            for piece in self._metrics.pieces():
                pieces.append(piece)
                if (spent_s := self._clock() - begun_s) >= _SLICE_S:
                    took_s += spent_s
                    await asyncio.sleep(0)
                    begun_s = self._clock()
            took_s += self._clock() - begun_s
            self._text = b"".join(pieces)
            self._reads.clear()
            self._good_until_s = self._clock() + min(max(EVERY_S, took_s / _SHARE), LONGEST_S)
        finally:
            self._making = None
