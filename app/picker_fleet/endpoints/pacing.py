"""Decides how often the scraper reads a metrics page and probes a server.

A page is read no more often than its metrics are used, and takes at most 1 % of the server's and of this
replica's time (a page takes a real vLLM 8 ms in the process that streams its answers). `scraping.interval:
auto` keeps to both limits.
"""

from collections import deque
from dataclasses import dataclass

from picker_fleet.domain.known_fleet import KnownFleet

PROBE_S = 0.2  # seconds between requests (probes or pages) to a server
REST_PROBE_S = 0.5  # seconds between requests to a server while the fleet has no requests in flight
_USED_S = 0.1  # seconds between pages whose metrics decide where requests go
_LIMITS_S = 0.5  # seconds between pages whose metrics decide the endpoints' limits
_SHOWN_S = 5.0  # seconds between pages whose metrics only views and health checks use
_SUSPECT_S = 0.1  # seconds between pages while requests in flight at the endpoint may be gone
_LONGEST_S = 30.0
_SHARE = 0.01  # largest fraction of the server's, and of this replica's, time that pages take
_FETCH_CPU_S = 0.0002  # this replica's CPU seconds to fetch a page, without parsing
_PROBE_CPU_S = 0.0001
_KEPT = 8
_LEAST_PAGES = 3  # one slow page on a busy host must not postpone the next page by `_LONGEST_S`
_LONGEST_PAUSE_S = 5.0
_DOUBLINGS = 30  # a pause doubles at most this many times, far beyond the longest pause


class ScrapeCost:
    """The cost of an endpoint's page in seconds: the lowest of the last few measurements."""

    def __init__(self) -> None:
        self._pages: deque[float] = deque(maxlen=_KEPT)
        self._probes: deque[float] = deque(maxlen=_KEPT)
        self._read_s: deque[float] = deque(maxlen=_KEPT)

    def add_page(self, answered_s: float, read_s: float) -> None:
        """Record a page: `answered_s` from request to response, then `read_s` of this replica's CPU time."""
        self._pages.append(answered_s)
        self._read_s.append(read_s)

    def add_probe(self, answered_s: float) -> None:
        self._probes.append(answered_s)

    @property
    def server_s(self) -> float:
        """The server's time for a page: how much longer a page takes than a probe; 0 until it is known."""
        if len(self._pages) < _LEAST_PAGES:
            return 0.0
        return max(0.0, min(self._pages) - min(self._probes, default=0.0))

    @property
    def own_s(self) -> float:
        """This replica's CPU time for one page, in seconds."""
        return _FETCH_CPU_S + min(self._read_s, default=0.0)


@dataclass(frozen=True, slots=True)
class IntervalPolicy:
    """Computes scrape intervals from the fleet's use of metrics pages. `fixed_s` is the configured interval,
    None for `auto`."""

    fixed_s: float | None
    fleet: KnownFleet

    def interval_s(self, cost: ScrapeCost, targets: int, *, suspect: bool = False) -> float:
        """Seconds between two reads of an endpoint's page, if this replica scrapes `targets` endpoints.
        `suspect`: requests in flight at the endpoint may be gone."""
        if self.fixed_s is not None:
            return self.fixed_s
        wanted_s = _LIMITS_S if self.fleet.limits_by_metrics else _SHOWN_S
        if self.fleet.busy and self.fleet.picks_by_metrics:
            wanted_s = _USED_S
        if suspect:
            wanted_s = min(wanted_s, _SUSPECT_S)
        return min(max(wanted_s, cost.server_s / _SHARE, cost.own_s * targets / _SHARE), _LONGEST_S)

    def tick_s(self, interval_s: float, targets: int) -> float:
        """Seconds between requests (probes or pages) to an endpoint whose page is read every `interval_s`."""
        probe_s = PROBE_S if self.fleet.busy else REST_PROBE_S
        return min(interval_s, max(probe_s, _PROBE_CPU_S * targets / _SHARE))

    def publish_s(self, shown_s: float) -> float:
        """Seconds between two batches of readings: short if a scorer uses readings, else at least `shown_s`,
        which suffices for views. Each batch of readings is one Redis message, which wakes every replica."""
        soonest_s = self.fixed_s or PROBE_S / 2
        return soonest_s if self.fleet.picks_by_metrics else max(soonest_s, shown_s)


def pause_s(failures: int, interval_s: float, variation: float) -> float:
    """The pause before the next request to an endpoint after `failures` failures in a row: doubles up to 5 s.

    `variation`, 0 to 1, shortens the pause by up to a quarter, so that retries do not come all at once.
    """
    doubled_s = interval_s * 2.0 ** min(failures, _DOUBLINGS)
    return min(doubled_s, _LONGEST_PAUSE_S) * (1 - variation / 4)
