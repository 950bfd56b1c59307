"""What scraping says of endpoints' health, made known to the whole fleet."""

from collections.abc import Mapping

from app.endpoints.snapshot import SnapshotCell
from app.scraping.scraper import Meter
from app.state.store import Store

_WELL_AGAIN = 3  # scrapes in a row that work


class Probes:
    """A `Meter` of the scraper that also marks endpoints: down when they cannot be connected to, which each
    failed probe confirms, and up again after three probes that worked. Counting is `meter`'s."""

    def __init__(self, store: Store, endpoints: SnapshotCell, meter: Meter) -> None:
        self._store = store
        self._endpoints = endpoints
        self._meter = meter
        self._well: dict[str, int] = {}  # down -> scrapes in a row that worked
        self._version = ""
        self._down: frozenset[str] = frozenset()  # as of that version of the endpoints

    def scraped(self, address: str, seconds: float) -> None:
        self._meter.scraped(address, seconds)
        if not self._is_down(address):
            return
        self._well[address] = self._well.get(address, 0) + 1
        if self._well[address] >= _WELL_AGAIN:
            del self._well[address]
            self._mark(address, False)

    def scrape_failed(self, address: str, kind: str, seconds: float) -> None:
        self._meter.scrape_failed(address, kind, seconds)
        self._well.pop(address, None)
        if kind == "connection":
            self._mark(address, True)

    def scrape_published(self, readings: int, seconds: float) -> None:
        self._meter.scrape_published(readings, seconds)

    def scrape_unpublished(self, readings: int) -> None:
        self._meter.scrape_unpublished(readings)

    def scrape_ages(self, owned: int, ages_s: Mapping[str, float]) -> None:
        self._meter.scrape_ages(owned, ages_s)

    def _is_down(self, address: str) -> bool:
        snapshot = self._endpoints.current
        if snapshot.version != self._version:
            self._version = snapshot.version
            self._down = frozenset(each.address for each in snapshot.endpoints if each.down)
        return address in self._down

    def _mark(self, address: str, down: bool) -> None:
        # What Redis does not take, the next probe says again.
        done = self._store.mark(address, "down", down)
        done.add_done_callback(lambda done: done.cancelled() or done.exception())
