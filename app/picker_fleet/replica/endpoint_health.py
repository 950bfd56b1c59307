"""Marks endpoints down and up again for the whole fleet, by what scraping finds."""

from collections.abc import Callable, Mapping

from picker_fleet.endpoints.readings import EndpointMetrics, Reading
from picker_fleet.endpoints.scraper import SILENCE, Meter
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.state.store import Store

_WELL_AGAIN = 3  # answers in a row
_UNANSWERED = ("timeout", "silent")


class Probes:
    """A `Meter` of the scraper, around `meter`, that also marks endpoints: down when they refuse connections
    or are silent, which each unanswered request confirms, or answer that they take no requests; up again
    after three other answers. `readings` returns what any replica has scraped last."""

    def __init__(
        self,
        store: Store,
        endpoints: SnapshotCell,
        meter: Meter,
        readings: Callable[[], Mapping[str, Reading]],
    ) -> None:
        self._store = store
        self._endpoints = endpoints
        self._meter = meter
        self._readings = readings
        self._well: dict[str, int] = {}  # down -> answers in a row
        self._version = ""
        self._down: frozenset[str] = frozenset()  # as of that version of the endpoints

    def scraped(self, address: str, seconds: float, reading: EndpointMetrics) -> None:
        self._meter.scraped(address, seconds, reading)
        self._answered(address, reading.unready is None)

    def probed(self, address: str, status: int, ready: bool) -> None:
        self._meter.probed(address, status, ready)
        self._answered(address, ready)

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
        self._meter.scrape_failed(address, kind, seconds)
        self._well.pop(address, None)
        confirmed = kind in _UNANSWERED and self._is_down(address)
        if kind == "connection" or confirmed or (kind == "silent" and not self._most_are_silent()):
            self._mark(address, True)

    def scrape_published(self, readings: int, seconds: float) -> None:
        self._meter.scrape_published(readings, seconds)

    def scrape_unpublished(self, readings: int) -> None:
        self._meter.scrape_unpublished(readings)

    def scrape_ages(self, owned: int, ages_s: Callable[[], Mapping[str, float]]) -> None:
        self._meter.scrape_ages(owned, ages_s)

    def _is_down(self, address: str) -> bool:
        snapshot = self._endpoints.current
        if snapshot.version != self._version:
            self._version = snapshot.version
            self._down = frozenset(each.address for each in snapshot.endpoints if each.down)
        return address in self._down

    def _most_are_silent(self) -> bool:
        """Whether most endpoints are silent: then the scraping or the load is the cause, and marking the
        silent ones would leave no endpoint."""
        readings = self._readings()
        up = [each.address for each in self._endpoints.current.endpoints if not each.down]
        silent = sum(
            (readings[address].metrics.fault or "").startswith(SILENCE)
            for address in up
            if address in readings
        )
        return 2 * silent > len(up)

    def _mark(self, address: str, down: bool) -> None:
        # A mark that is lost is repeated by the next probe.
        done = self._store.mark_endpoint(address, "down", down)
        done.add_done_callback(lambda done: done.cancelled() or done.exception())
