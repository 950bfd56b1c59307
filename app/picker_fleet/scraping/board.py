"""What a replica knows of every endpoint's load, whoever scraped it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from picker_fleet.scraping.metrics import NONE, EndpointMetrics

_GRAIN_S = 0.01
# Without a configured age, a reading is stale once so many of its endpoint's pages are missing, and not
# before a second: a busy machine may stand still for half of one.
_INTERVALS = 3
_SOONEST_STALE_S = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """`metrics` as last heard of, `age_s` seconds old.

    One that is not `known` is stale or tells of a failed scrape: its amounts are None and its adapters empty,
    so that nothing can be picked by them, while `fault` and `failures` stay as they were.
    """

    metrics: EndpointMetrics
    age_s: float
    known: bool


class MetricsBoard:
    """The newest reading of each endpoint. One event loop.

    Ages are of this replica's own monotonic `clock` (seconds): what others send says how old it was when sent
    (scraping/feed.py), and the time since it came is added here. Readings are stale after
    `stale_after_s`; None: after three of their endpoint's intervals.
    """

    def __init__(self, stale_after_s: float | None, clock: Callable[[], float]) -> None:
        self._stale_after_s = stale_after_s
        self._clock = clock
        self._held: dict[str, EndpointMetrics] = {}
        self._snapshot: Mapping[str, Reading] = {}
        self._snapshot_s = -1.0

    @property
    def addresses(self) -> frozenset[str]:
        """The endpoints it has a reading of."""
        return frozenset(self._held)

    def now_ms(self) -> int:
        """The moment a reading taken now has."""
        return int(self._clock() * 1000)

    def take(self, readings: Mapping[str, EndpointMetrics]) -> None:
        """Note `readings`, whose `scraped_ms` is of this replica's clock, unless a newer one is held."""
        now_ms = self.now_ms()
        for address, metrics in readings.items():
            if metrics.scraped_ms > now_ms:
                # Redis's clock was set back, or another server took over: it would hide all later readings.
                metrics = dataclasses.replace(metrics, scraped_ms=now_ms)
            held = self._held.get(address)
            if held is None or metrics.scraped_ms >= held.scraped_ms:
                self._held[address] = metrics
        self._snapshot_s = -1.0

    def keep(self, addresses: Iterable[str]) -> None:
        """Forget every endpoint that is not one of `addresses`."""
        for address in self._held.keys() - frozenset(addresses):
            del self._held[address]
        self._snapshot_s = -1.0

    def snapshot(self, now_s: float | None = None) -> Mapping[str, Reading]:
        """Address -> its reading at `now_s` of the clock (default: now). Not to be changed.

        Many picks share one snapshot: it is made anew after news, else every 10 ms, and ages are that exact.
        """
        now_s = self._clock() if now_s is None else now_s
        if self._snapshot_s < 0 or not 0 <= now_s - self._snapshot_s < _GRAIN_S:
            self._snapshot = {address: self._reading(held, now_s) for address, held in self._held.items()}
            self._snapshot_s = now_s
        return self._snapshot

    def _reading(self, held: EndpointMetrics, now_s: float) -> Reading:
        age_s = max(0.0, now_s - held.scraped_ms / 1000)
        if age_s <= self._stale_s(held):
            return Reading(held, age_s, known=held.fault is None)
        return Reading(_without_amounts(held), age_s, known=False)

    def _stale_s(self, held: EndpointMetrics) -> float:
        if self._stale_after_s is not None:
            return self._stale_after_s
        return max(_INTERVALS * (held.interval_ms or 0) / 1000, _SOONEST_STALE_S)


def _without_amounts(held: EndpointMetrics) -> EndpointMetrics:
    if held.fault is not None:
        return held
    return dataclasses.replace(
        held,
        waiting=None,
        running=None,
        kv_utilisation=None,
        max_adapters=None,
        active_adapters=NONE,
        waiting_adapters=NONE,
    )
