"""Readings of endpoints' metrics pages: one reading, its JSON form, and the newest reading of each endpoint.
scraper.py makes them, metrics_channel.py shares them, scheduling/ reads them.

A reading carries its time as milliseconds of some clock: in memory the holder's own monotonic clock, on the
wire Redis's. `shift_ms` is what to add to convert from one to the other; two replicas' clocks are never
compared.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from picker_fleet.errors import PickerError

NONE: frozenset[str] = frozenset()


class BadReading(PickerError):
    """A text that is no encoded reading; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class EndpointMetrics:
    """An endpoint's load as its own metrics page gives it (docs/protocol.md).

    None means unknown: not on the page, not a number, or the scrape failed. `fault` says why the last scrape
    failed and `failures` how many have in a row; None and 0 after one that worked. `kv_utilisation` is
    between 0 and 1. Adapters are LoRA names; `max_adapters` is how many can be active at once.

    `interval_ms` is how far apart pages of the endpoint are at present, None if that is not known. `before`
    is the moment and the load of the page before this one, None after a fault: both pages were read.
    """

    scraped_ms: int
    waiting: float | None = None
    running: float | None = None
    kv_utilisation: float | None = None
    max_adapters: int | None = None
    active_adapters: frozenset[str] = NONE
    waiting_adapters: frozenset[str] = NONE
    fault: str | None = None
    failures: int = 0
    interval_ms: int | None = None
    before: tuple[int, float] | None = None

    @property
    def load(self) -> float | None:
        """Requests that the endpoint has, running or waiting; None if one is unknown."""
        return None if self.waiting is None or self.running is None else self.waiting + self.running


def encode_reading(metrics: EndpointMetrics, shift_ms: int) -> bytes:
    """A JSON object without what is unknown or empty; `at` is `scraped_ms` + `shift_ms`."""
    fields: dict[str, Any] = {"at": metrics.scraped_ms + shift_ms}
    if metrics.waiting is not None:
        fields["waiting"] = metrics.waiting
    if metrics.running is not None:
        fields["running"] = metrics.running
    if metrics.kv_utilisation is not None:
        fields["kv"] = metrics.kv_utilisation
    if metrics.max_adapters is not None:
        fields["max_adapters"] = metrics.max_adapters
    if metrics.active_adapters:
        fields["active"] = sorted(metrics.active_adapters)
    if metrics.waiting_adapters:
        fields["waiting_adapters"] = sorted(metrics.waiting_adapters)
    if metrics.fault is not None:
        fields["fault"], fields["failures"] = metrics.fault, metrics.failures
    if metrics.interval_ms is not None:
        fields["every"] = metrics.interval_ms
    if metrics.before is not None:
        fields["before"], fields["before_load"] = metrics.before[0] + shift_ms, metrics.before[1]
    return orjson.dumps(fields)


def decode_reading(text: bytes | str, shift_ms: int) -> EndpointMetrics:
    """The reading in `text`, its moment shifted. Keys it does not know are a newer version's and ignored.

    Raises:
        BadReading: not JSON, not an object, or a value of the wrong kind.
    """
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError as fault:
        raise BadReading(f"a reading is no JSON: {fault}") from None
    return reading_of_json(fields, shift_ms)


def reading_of_json(fields: object, shift_ms: int) -> EndpointMetrics:
    """`decode_reading` of parsed JSON.

    Raises:
        BadReading: not an object, or a value of the wrong kind.
    """
    if not isinstance(fields, dict):
        raise BadReading(f"a reading is an object, not {_short(fields)}")
    return EndpointMetrics(
        scraped_ms=_whole(fields, "at") + shift_ms,
        waiting=_amount(fields, "waiting", math.inf),
        running=_amount(fields, "running", math.inf),
        kv_utilisation=_amount(fields, "kv", 1.0),
        max_adapters=_whole(fields, "max_adapters") if "max_adapters" in fields else None,
        active_adapters=_names(fields, "active"),
        waiting_adapters=_names(fields, "waiting_adapters"),
        fault=_fault(fields),
        failures=_whole(fields, "failures") if "failures" in fields else 0,
        interval_ms=_whole(fields, "every") if "every" in fields else None,
        before=_before(fields, shift_ms),
    )


def _before(fields: dict[str, Any], shift_ms: int) -> tuple[int, float] | None:
    load = _amount(fields, "before_load", math.inf)
    return None if load is None else (_whole(fields, "before") + shift_ms, load)


def _whole(fields: dict[str, Any], key: str) -> int:
    value = fields.get(key)
    if type(value) is not int or value < 0:
        raise BadReading(f"{key} of a reading is a whole number, not {_short(value)}")
    return value


def _amount(fields: dict[str, Any], key: str, most: float) -> float | None:
    value = fields.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise BadReading(f"{key} of a reading is a number from 0 to {most:g}, not {_short(value)}")
    return float(value)


def _names(fields: dict[str, Any], key: str) -> frozenset[str]:
    value = fields.get(key)
    if value is None:
        return NONE
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise BadReading(f"{key} of a reading is a list of names, not {_short(value)}")
    return frozenset(value)


def _fault(fields: dict[str, Any]) -> str | None:
    value = fields.get("fault")
    if value is not None and not isinstance(value, str):
        raise BadReading(f"fault of a reading is a text, not {_short(value)}")
    return value


def _short(value: object) -> str:
    return repr(value)[:60]


_GRAIN_S = 0.01
# Without a configured age, a reading is stale once so many of its endpoint's pages are missing, and not
# before a second: a busy machine may stand still for half of one.
_INTERVALS = 3
_SOONEST_STALE_S = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The newest `metrics` of an endpoint, `age_s` seconds old.

    If not `known`, it is stale or of a failed scrape: its amounts are None and its adapters empty, so that no
    pick uses them; `fault` and `failures` are kept.
    """

    metrics: EndpointMetrics
    age_s: float
    known: bool


class MetricsCache:
    """The newest reading of each endpoint. One event loop.

    Ages are of this replica's own monotonic `clock` (seconds): what others send says how old it was when sent
    (endpoints/metrics_channel.py), and the time since it came is added here. Readings are stale after
    `stale_after_s`; None: after three of their endpoint's intervals.
    """

    def __init__(self, stale_after_s: float | None, clock: Callable[[], float]) -> None:
        self._stale_after_s = stale_after_s
        self._clock = clock
        self._newest: dict[str, EndpointMetrics] = {}
        self._snapshot: Mapping[str, Reading] = {}
        self._snapshot_s = -1.0

    @property
    def addresses(self) -> frozenset[str]:
        """The endpoints it has a reading of."""
        return frozenset(self._newest)

    def now_ms(self) -> int:
        """The moment a reading taken now has."""
        return int(self._clock() * 1000)

    def update(self, readings: Mapping[str, EndpointMetrics]) -> None:
        """Take `readings`, whose `scraped_ms` is of this replica's clock, unless a newer one is newest."""
        now_ms = self.now_ms()
        for address, metrics in readings.items():
            if metrics.scraped_ms > now_ms:
                # Redis's clock was set back, or another server took over: it would hide all newer readings.
                metrics = dataclasses.replace(metrics, scraped_ms=now_ms)
            newest = self._newest.get(address)
            if newest is None or metrics.scraped_ms >= newest.scraped_ms:
                self._newest[address] = metrics
        self._snapshot_s = -1.0

    def retain(self, addresses: Iterable[str]) -> None:
        """Forget every endpoint that is not one of `addresses`."""
        for address in self._newest.keys() - frozenset(addresses):
            del self._newest[address]
        self._snapshot_s = -1.0

    def snapshot(self, now_s: float | None = None) -> Mapping[str, Reading]:
        """Address -> its reading at `now_s` of the clock (default: now). Not to be changed.

        Many picks share one snapshot: it is made after each update, else every 10 ms, and ages are that
        exact."""
        now_s = self._clock() if now_s is None else now_s
        if self._snapshot_s < 0 or not 0 <= now_s - self._snapshot_s < _GRAIN_S:
            self._snapshot = {
                address: self._reading(newest, now_s) for address, newest in self._newest.items()
            }
            self._snapshot_s = now_s
        return self._snapshot

    def _reading(self, newest: EndpointMetrics, now_s: float) -> Reading:
        age_s = max(0.0, now_s - newest.scraped_ms / 1000)
        if age_s <= self._stale_s(newest):
            return Reading(newest, age_s, known=newest.fault is None)
        return Reading(_without_amounts(newest), age_s, known=False)

    def _stale_s(self, newest: EndpointMetrics) -> float:
        if self._stale_after_s is not None:
            return self._stale_after_s
        return max(_INTERVALS * (newest.interval_ms or 0) / 1000, _SOONEST_STALE_S)


def _without_amounts(newest: EndpointMetrics) -> EndpointMetrics:
    if newest.fault is not None:
        return newest
    return dataclasses.replace(
        newest,
        waiting=None,
        running=None,
        kv_utilisation=None,
        max_adapters=None,
        active_adapters=NONE,
        waiting_adapters=NONE,
    )
