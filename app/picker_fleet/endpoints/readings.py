"""Readings of endpoints' metrics pages: one reading, its JSON form, and the newest reading of each endpoint.
scraper.py makes them, metrics_channel.py shares them, scheduling/ reads them.

A reading carries its time as milliseconds of some clock: in memory the holder's own monotonic clock, on the
wire Redis's. `shift_ms` is what to add to convert from one to the other; two replicas' clocks are never
compared.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from picker_fleet.errors import PickerError

NONE: frozenset[str] = frozenset()
_Count = Annotated[int, Meta(ge=0)]
_Amount = Annotated[float, Meta(ge=0)]


class BadReading(PickerError):
    """A text that is no encoded reading; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class EndpointMetrics:
    """An endpoint's load as its own metrics page gives it (docs/protocol.md).

    None means unknown: not on the page, not a number, or the scrape failed. `fault` says why the last scrape
    failed and `failures` how many have in a row; None and 0 after one that worked. `remark` names what of a
    page could not be read. `unready` says why the endpoint takes no requests although it answers.
    `kv_utilisation` is between 0 and 1. Adapters are LoRA names: those with requests that run, or only
    wait, and those that were loaded for others and are idle; `max_adapters` is how many can be active at
    once. `models` are named in the labels of its series, without adapters.

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
    idle_adapters: frozenset[str] = NONE
    models: frozenset[str] = NONE
    fault: str | None = None
    failures: int = 0
    remark: str | None = None
    unready: str | None = None
    interval_ms: int | None = None
    before: tuple[int, float] | None = None

    @property
    def load(self) -> float | None:
        """Requests that the endpoint has, running or waiting; None if one is unknown."""
        return None if self.waiting is None or self.running is None else self.waiting + self.running

    def without_amounts(self) -> "EndpointMetrics":
        """The same without loads and adapters."""
        kept = ("models", "fault", "failures", "remark", "unready", "interval_ms", "before")
        return EndpointMetrics(self.scraped_ms, **{name: getattr(self, name) for name in kept})


class _Wire(msgspec.Struct, omit_defaults=True):
    """A reading as a JSON object, without what is unknown or empty. Further keys are a newer version's."""

    at: _Count
    waiting: _Amount | None = None
    running: _Amount | None = None
    kv: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_adapters: _Count | None = None
    active: list[str] = []
    waiting_adapters: list[str] = []
    idle: list[str] = []
    models: list[str] = []
    fault: str | None = None
    failures: _Count = 0
    remark: str | None = None
    unready: str | None = None
    every: _Count | None = None
    before: _Count | None = None
    before_load: _Amount | None = None


def encode_reading(metrics: EndpointMetrics, shift_ms: int) -> bytes:
    """A JSON object without what is unknown or empty; `at` is `scraped_ms` + `shift_ms`."""
    before_ms, before_load = (None, None) if metrics.before is None else metrics.before
    return msgspec.json.encode(
        _Wire(
            at=metrics.scraped_ms + shift_ms,
            waiting=metrics.waiting,
            running=metrics.running,
            kv=metrics.kv_utilisation,
            max_adapters=metrics.max_adapters,
            active=sorted(metrics.active_adapters),
            waiting_adapters=sorted(metrics.waiting_adapters),
            idle=sorted(metrics.idle_adapters),
            models=sorted(metrics.models),
            fault=metrics.fault,
            failures=metrics.failures,
            remark=metrics.remark,
            unready=metrics.unready,
            every=metrics.interval_ms,
            before=None if before_ms is None else before_ms + shift_ms,
            before_load=before_load,
        )
    )


def decode_reading(text: bytes | str, shift_ms: int) -> EndpointMetrics:
    """The reading in `text`, its moment shifted.

    Raises:
        BadReading: not JSON, not an object, or a value of the wrong kind.
    """
    try:
        return reading_of_json(msgspec.json.decode(text), shift_ms)
    except msgspec.DecodeError as fault:
        raise BadReading(f"a reading is no JSON: {fault}") from None


def reading_of_json(fields: object, shift_ms: int) -> EndpointMetrics:
    """`decode_reading` of parsed JSON.

    Raises:
        BadReading: not an object, or a value of the wrong kind.
    """
    try:
        wire = msgspec.convert(fields, _Wire)
    except msgspec.ValidationError as fault:
        raise BadReading(f"not a reading: {fault}") from None
    before, load = wire.before, wire.before_load or 0.0
    return EndpointMetrics(
        scraped_ms=wire.at + shift_ms,
        waiting=wire.waiting,
        running=wire.running,
        kv_utilisation=wire.kv,
        max_adapters=wire.max_adapters,
        active_adapters=frozenset(wire.active),
        waiting_adapters=frozenset(wire.waiting_adapters),
        idle_adapters=frozenset(wire.idle),
        models=frozenset(wire.models),
        fault=wire.fault,
        failures=wire.failures,
        remark=wire.remark,
        unready=wire.unready,
        interval_ms=wire.every,
        before=None if before is None else (before + shift_ms, load),
    )


_GRAIN_S = 0.01
# Without a configured age, a reading is stale once so many of its endpoint's pages are missing, and not
# before two seconds: a busy server may take a second for a page, and then another one for the next.
_INTERVALS = 3
_SOONEST_STALE_S = 2.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The newest `metrics` of an endpoint, `age_s` seconds old.

    After a failed scrape they are those of the last one that worked, with the `fault` and the `failures`
    since. If not `known`, they are stale: amounts are None and adapters empty, so that no pick uses them.
    """

    metrics: EndpointMetrics
    age_s: float
    known: bool


class Readings(Mapping[str, Reading]):
    """Address -> its reading at one moment. Each is made of its page when it is first asked for: a pick asks
    for few of the thousands of a large pool."""

    def __init__(self, pages: Mapping[str, EndpointMetrics], reading_of: Callable[[str], Reading]) -> None:
        self._pages, self._reading_of = pages, reading_of
        self._made: dict[str, Reading] = {}

    def __getitem__(self, address: str) -> Reading:
        reading = self._made.get(address)
        if reading is None:
            if address not in self._pages:
                raise KeyError(address)
            reading = self._made[address] = self._reading_of(address)
        return reading

    def __iter__(self) -> Iterator[str]:
        return iter(self._pages)

    def __len__(self) -> int:
        return len(self._pages)

    def models(self) -> frozenset[str]:
        """Those that any endpoint's page names."""
        return NONE.union(*(page.models for page in self._pages.values()))

    def with_adapters(self) -> list[str]:
        """The addresses whose pages name adapters."""
        return [
            address
            for address, page in self._pages.items()
            if page.active_adapters or page.waiting_adapters or page.idle_adapters
        ]


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
        self._worked: dict[str, EndpointMetrics] = {}  # the newest of a scrape that did not fail
        self._snapshot: Readings | None = None  # None: to be made anew
        self._snapshot_s = 0.0

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(self._newest)

    def now_ms(self) -> int:
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
                if metrics.fault is None:
                    self._worked[address] = metrics
        self._snapshot = None

    def last_read(self, address: str) -> EndpointMetrics | None:
        """What the newest page of `address` that could be read said; None if there is none."""
        return self._worked.get(address)

    def retain(self, addresses: Iterable[str]) -> None:
        for address in self._newest.keys() - frozenset(addresses):
            del self._newest[address]
            self._worked.pop(address, None)
        self._snapshot = None

    def snapshot(self, now_s: float | None = None) -> Readings:
        """Address -> its reading at `now_s` of the clock (default: now).

        Many picks share one snapshot: it is made after each update, else every 10 ms, and ages are that
        exact."""
        now_s = self._clock() if now_s is None else now_s
        if self._snapshot is None or not 0 <= now_s - self._snapshot_s < _GRAIN_S:
            newest, worked = dict(self._newest), dict(self._worked)
            self._snapshot = Readings(
                newest | worked, lambda address: self._reading(worked.get(address), newest[address], now_s)
            )
            self._snapshot_s = now_s
        return self._snapshot

    def ages_s(self) -> dict[str, float]:
        """Address -> how old its newest reading is now."""
        now_s = self._clock()
        pages = self._newest | self._worked
        return {address: max(0.0, now_s - page.scraped_ms / 1000) for address, page in pages.items()}

    def _reading(self, worked: EndpointMetrics | None, newest: EndpointMetrics, now_s: float) -> Reading:
        metrics = worked = worked or newest
        if newest.fault is not None:
            metrics = dataclasses.replace(
                worked, fault=newest.fault, failures=newest.failures, unready=newest.unready
            )
        age_s = max(0.0, now_s - worked.scraped_ms / 1000)
        if age_s <= self._stale_s(worked):
            return Reading(metrics, age_s, known=worked.fault is None)
        return Reading(metrics.without_amounts(), age_s, known=False)

    def _stale_s(self, newest: EndpointMetrics) -> float:
        if self._stale_after_s is not None:
            return self._stale_after_s
        return max(_INTERVALS * (newest.interval_ms or 0) / 1000, _SOONEST_STALE_S)
