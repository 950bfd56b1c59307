"""How often a model server's metrics page is read: no more often than its figures are used, and at a cost of
at most 1 % of either side.

A page costs its server (a real vLLM spends 8 ms of the process that streams its answers) and this replica, so
the interval of `scraping.interval: auto` follows both. Whether a server stands still is found by probes:
requests for a path that costs it next to nothing.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

PROBE_S = 0.2  # between two signs of life of a server
_USED_S = 0.1  # while requests are placed by figures of the page
_SHOWN_S = 5.0  # while only views and health use them
_SUSPECT_S = 0.25  # while requests in flight at the endpoint have given no sign of life
_LONGEST_S = 30.0
_SHARE = 0.01  # of either side's time, at most
_FETCH_CPU_S = 0.0002  # of this replica for a page, beside reading it
_PROBE_CPU_S = 0.0001
_KEPT = 8


class PageCost:
    """What the last pages of one endpoint cost, in seconds. The least of a few counts: the others waited."""

    def __init__(self) -> None:
        self._pages: deque[float] = deque(maxlen=_KEPT)
        self._probes: deque[float] = deque(maxlen=_KEPT)
        self._read_s: deque[float] = deque(maxlen=_KEPT)

    def add_page(self, answered_s: float, read_s: float) -> None:
        """A page came `answered_s` after it was asked for, and took `read_s` of this replica's CPU to
        read."""
        self._pages.append(answered_s)
        self._read_s.append(read_s)

    def add_probe(self, answered_s: float) -> None:
        self._probes.append(answered_s)

    @property
    def server_s(self) -> float:
        """What a page costs its server: how much later it comes than the answer to a probe; 0 if unknown."""
        if not self._pages:
            return 0.0
        return max(0.0, min(self._pages) - min(self._probes, default=0.0))

    @property
    def own_s(self) -> float:
        """CPU of this replica for one page."""
        return _FETCH_CPU_S + min(self._read_s, default=0.0)


@dataclass(frozen=True, slots=True)
class Pacing:
    """`fixed_s` is the configured interval, None for `auto`. `used` says whether requests are being placed by
    what pages tell."""

    fixed_s: float | None
    used: Callable[[], bool]

    def interval_s(self, cost: PageCost, owned: int, *, suspect: bool = False) -> float:
        """Between two pages of an endpoint, one of `owned` that this replica scrapes; `suspect` if requests
        in flight there have given no sign of life."""
        if self.fixed_s is not None:
            return self.fixed_s
        wanted_s = _USED_S if self.used() else _SHOWN_S
        if suspect:
            wanted_s = min(wanted_s, _SUSPECT_S)
        return min(max(wanted_s, cost.server_s / _SHARE, cost.own_s * owned / _SHARE), _LONGEST_S)

    def tick_s(self, interval_s: float, owned: int) -> float:
        """Between two signs of life of an endpoint whose page is read every `interval_s`."""
        return min(interval_s, max(PROBE_S, _PROBE_CPU_S * owned / _SHARE))
