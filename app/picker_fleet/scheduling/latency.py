"""Completion times of endpoints: the last 100 of the whole fleet (specs/004).

Every replica feeds its rings from the one stream of completions (`scheduling.feed`), in the stream's
order, so that all of them hold the same window without asking each other.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

WINDOW = 100


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Mean and population standard deviation, in seconds, of the `count` (at least 1) last completions."""

    count: int
    mean_s: float
    std_s: float


@dataclass(frozen=True, slots=True)
class LatencyWeights:
    """Of specs/004: cost = `alpha`·mean + `beta`·load + `gamma`·std, seconds and requests in flight."""

    alpha: float = 1.0
    beta: float = 0.5
    gamma: float = 0.5


SPECIFIED = LatencyWeights()


class LatencyRing:
    """The last `window` completion times of one endpoint; adding one and reading `stats` take O(1)."""

    __slots__ = ("_at", "_base_s", "_seconds", "_squares", "_sum", "_window")

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._seconds: list[float] = []
        self._at = 0
        self._base_s = 0.0  # sums are of distances from it, which keeps a small spread exact
        self._sum = 0.0
        self._squares = 0.0

    def add(self, seconds: float) -> None:
        """Take in one completion time. What is no time (negative, infinite, not a number) is left out."""
        if not 0.0 <= seconds < math.inf:
            return
        if len(self._seconds) < self._window:
            self._seconds.append(seconds)
        else:
            gone = self._seconds[self._at] - self._base_s
            self._sum -= gone
            self._squares -= gone * gone
            self._seconds[self._at] = seconds
        self._at = (self._at + 1) % self._window
        if self._at == 0 or len(self._seconds) == 1:
            self._recount()  # once a round: rounding faults cannot pile up, and the mean cost stays O(1)
        else:
            come = seconds - self._base_s
            self._sum += come
            self._squares += come * come

    @property
    def stats(self) -> LatencyStats | None:
        """Of the completions in the window; None without any."""
        count = len(self._seconds)
        if not count:
            return None
        mean = self._sum / count
        variance = self._squares / count - mean * mean
        return LatencyStats(count, self._base_s + mean, math.sqrt(max(0.0, variance)))

    def _recount(self) -> None:
        base_s = self._base_s = math.fsum(self._seconds) / len(self._seconds)
        away = [seconds - base_s for seconds in self._seconds]
        self._sum = math.fsum(away)
        self._squares = math.fsum(distance * distance for distance in away)


class LatencyBook:
    """A ring for each endpoint, for at most `most` endpoints; the one longest without news makes room."""

    def __init__(self, *, window: int = WINDOW, most: int = 4096) -> None:
        self._window = window
        self._most = most
        self._rings: dict[str, LatencyRing] = {}

    def add(self, address: str, seconds: float) -> None:
        """Take in one completion time of `address`."""
        ring = self._rings.pop(address, None)
        if ring is None:
            ring = LatencyRing(self._window)
            if len(self._rings) >= self._most:
                del self._rings[next(iter(self._rings))]
        self._rings[address] = ring
        ring.add(seconds)

    def stats(self, address: str) -> LatencyStats | None:
        """Of `address`; None without completions."""
        ring = self._rings.get(address)
        return ring.stats if ring else None

    def keep(self, addresses: Collection[str]) -> None:
        """Forget every endpoint that is not in `addresses`."""
        for gone in self._rings.keys() - set(addresses):
            del self._rings[gone]
