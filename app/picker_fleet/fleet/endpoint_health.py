"""Marks endpoints down or up for the whole fleet, by scrapes and probes, and reinstates ejected endpoints."""

import asyncio
import logging
from collections.abc import Callable, Mapping

from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.endpoints.readings import EndpointMetrics, MetricsCache
from picker_fleet.endpoints.scraper import SILENCE
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.scheduling.cache_feedback import CacheWatch
from picker_fleet.state.replies import MarkReply
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics

_WELL_AGAIN = 3  # successful probes or scrapes in a row that remove the mark `down`
_UNANSWERED = ("timeout", "silent")
_SERVER_FAULTS = (*_UNANSWERED, "connection")  # other failed scrapes concern only the metrics page
_STANDS_STILL_S = 5.0  # an endpoint is stuck if its metrics stay the same for this long under load
_NO_SUCH_PAGE = (404, 405)  # such a status means that the engine has no health page, so it counts as healthy
_STUCK = "stuck"

_log = logging.getLogger(__name__)


class Probes:
    """The scraper's `Meter`: counts scrapes in `metrics`. Marks an endpoint down that refuses connections, is
    silent or reports itself unready. Each further timeout confirms the mark; three good answers in a row
    remove the mark. A probe's status decides whether an ejected endpoint is reinstated. An endpoint whose
    metrics stay the same while requests run is stuck. `caches` gets the scraped pages. `readings` has the
    fleet's last scraped metrics."""

    def __init__(
        self,
        store: Store,
        endpoints: SnapshotCell,
        metrics: Metrics,
        readings: MetricsCache,
        fleet: KnownFleet,
        clock: Callable[[], float],
        caches: CacheWatch,
    ) -> None:
        self._store, self._endpoints, self._metrics = store, endpoints, metrics
        self._readings, self._fleet, self._clock = readings, fleet, clock
        self._caches = caches
        self._figures: dict[str, tuple[tuple[float | None, ...], float]] = {}  # load figures, when changed
        self._stuck: set[str] = set()
        self._well: dict[str, int] = {}  # endpoint marked down -> its good answers in a row
        self._version = ""
        # The marks in the endpoint snapshot `_version`.
        self._down: frozenset[str] = frozenset()
        self._ejected: frozenset[str] = frozenset()

    def scraped(self, address: str, seconds: float, reading: EndpointMetrics) -> None:
        self._metrics.scraped(address, seconds, reading)
        self._caches.read(address, reading)
        self._answered(address, reading.unready is None)
        self._watch(address, reading)

    def probed(self, address: str, status: int, ready: bool) -> None:
        self._metrics.probed(address, status, ready)
        self._answered(address, ready)
        if self._is_ejected(address):
            is_well = ready and (200 <= status < 300 or status in _NO_SUCH_PAGE)
            self._mark(address, not is_well or address in self._stuck, "ejected")

    def _watch(self, address: str, reading: EndpointMetrics) -> None:
        """Report an endpoint as stuck if its metrics page stays the same while requests run there."""
        now_s = self._clock()
        if not self._fleet.in_flight.get(address):
            self._moves(address)
            return
        figures = (reading.waiting, reading.running, reading.kv_utilisation)
        former, since_s = self._figures.get(address, ((), now_s))
        # A metrics page without cache utilisation may stay the same for as long as a request runs.
        if figures != former or reading.kv_utilisation is None:
            self._moves(address)
            self._figures[address] = figures, now_s
        elif now_s - since_s >= _STANDS_STILL_S:
            self._stuck.add(address)
            self._mark(address, True, _STUCK)

    def _moves(self, address: str) -> None:
        self._figures.pop(address, None)
        if address in self._stuck:
            self._stuck.discard(address)
            self._mark(address, False, _STUCK)

    def _answered(self, address: str, ready: bool) -> None:
        if not ready:
            self._well.pop(address, None)
            self._mark(address, True)
            return
        if not self._is_down(address):
            return
        self._well[address] = self._well.get(address, 0) + 1
        if self._well[address] >= _WELL_AGAIN:
            del self._well[address]
            self._mark(address, False)

    def scrape_failed(self, address: str, kind: str, seconds: float) -> None:
        self._metrics.scrape_failed(address, kind, seconds)
        self._well.pop(address, None)
        if kind == "connection":
            self._caches.refused(address)
        if kind in _SERVER_FAULTS and self._is_ejected(address):
            self._mark(address, True, "ejected")
        confirmed = kind in _UNANSWERED and self._is_down(address)
        if kind == "connection" or confirmed or (kind == "silent" and not self._most_are_silent()):
            self._mark(address, True)

    def scrape_published(self, readings: int, seconds: float) -> None:
        self._metrics.scrape_published(readings, seconds)

    def scrape_unpublished(self, readings: int) -> None:
        self._metrics.scrape_unpublished(readings)

    def scrape_ages(self, owned: int, ages_s: Callable[[], Mapping[str, float]]) -> None:
        self._metrics.scrape_ages(owned, ages_s)

    def _is_down(self, address: str) -> bool:
        self._follow()
        return address in self._down

    def _is_ejected(self, address: str) -> bool:
        self._follow()
        return address in self._ejected

    def _follow(self) -> None:
        snapshot = self._endpoints.current
        if snapshot.version != self._version:
            self._version = snapshot.version
            self._down = frozenset(each.address for each in snapshot.endpoints if each.down)
            self._ejected = frozenset(each.address for each in snapshot.endpoints if each.ejected)
            listed = {each.address for each in snapshot.endpoints}
            self._figures = {address: kept for address, kept in self._figures.items() if address in listed}
            self._stuck &= listed

    def _most_are_silent(self) -> bool:
        """Whether most endpoints give no answer: then late scraping or high load is the cause, and marking
        silent endpoints down would leave too few."""
        readings = self._readings.snapshot()
        up = [each.address for each in self._endpoints.current.endpoints if not each.down]
        silent = sum(
            (readings[address].metrics.fault or "").startswith(SILENCE)
            for address in up
            if address in readings
        )
        return 2 * silent > len(up)

    def _mark(self, address: str, on: bool, what: str = "down") -> None:
        def marked(done: asyncio.Future[MarkReply]) -> None:
            # Ignore a failed call to Redis: the next probe sends the mark again.
            if not done.cancelled() and done.exception() is None and done.result() == "ejected":
                _log.warning("endpoint %s is ejected, reason: %s", address, what)
                self._metrics.endpoint_ejected(address, what)

        self._store.mark_endpoint(address, what, on).add_done_callback(marked)
