"""Readings of endpoints' metrics pages: the class of a reading, its JSON form, and each endpoint's newest
reading. scraper.py makes readings, metrics_channel.py shares them, scheduling/ uses them.

A reading has a time in milliseconds: by the replica's own monotonic clock in memory, by Redis's clock in
messages. Adding `shift_ms` converts a time from clock to clock; clocks of two replicas are never compared.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from picker_fleet.domain.errors import MALFORMED, PickerError

NONE: frozenset[str] = frozenset()
ASLEEP: Final = "asleep"  # the value of `unready` while the engine sleeps
_ADAPTERS = ("active_adapters", "waiting_adapters", "idle_adapters")
_SETS = (*_ADAPTERS, "models")
_Count = Annotated[int, Meta(ge=0)]
_Amount = Annotated[float, Meta(ge=0)]


class BadReading(PickerError):
    """A text is not a valid encoded reading; the message says why."""


class EndpointMetrics(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    rename={
        "scraped_ms": "at",
        "kv_utilisation": "kv",
        "active_adapters": "active",
        "idle_adapters": "idle",
        "interval_ms": "every",
        "before_ms": "before",
        "kv_tokens": "tokens",
        "prefix_queries": "queries",
        "prefix_hits": "hits",
        "started_s": "started",
    },
):
    """An endpoint's load according to its metrics page (docs/protocol.md).

    A value of None is unknown: not on the page, not a number, or the scrape failed. `fault` is the reason why
    the last scrape failed, `failures` the number of failed scrapes in a row; after a successful scrape,
    `fault` is None and `failures` 0. `remark` names the unreadable parts of the page. `unready` is the reason
    why the endpoint takes no requests although it answers. `kv_utilisation` is between 0 and 1. `preemptions`
    counts the requests that the engine has interrupted for want of KV cache, from 0 again after a restart;
    likewise `prefix_queries` counts the prompts' tokens looked up in the prefix cache, and `prefix_hits` the
    tokens found. The KV cache has `kv_tokens` tokens. `started_s` is when the engine's process started, by
    the engine's clock. Adapters are names of LoRA adapters; `active` ones have running requests, `waiting`
    ones only waiting requests, `idle` ones are loaded but have no requests; at most `max_adapters` adapters
    are active at once.
    `models` has the model names in the labels of the series, adapters excluded.

    `interval_ms` is the endpoint's current scrape interval, None if unknown. `before_ms` and `before_load`
    are the time and the load of the previous page; None after a failed scrape.

    As JSON a reading has no unknown or empty fields; keys of newer versions are ignored.
    """

    scraped_ms: _Count
    waiting: _Amount | None = None
    running: _Amount | None = None
    kv_utilisation: Annotated[float, Meta(ge=0, le=1)] | None = None
    preemptions: _Amount | None = None
    kv_tokens: _Amount | None = None
    prefix_queries: _Amount | None = None
    prefix_hits: _Amount | None = None
    started_s: _Amount | None = None
    max_adapters: _Count | None = None
    active_adapters: frozenset[str] = NONE
    waiting_adapters: frozenset[str] = NONE
    idle_adapters: frozenset[str] = NONE
    models: frozenset[str] = NONE
    fault: str | None = None
    failures: _Count = 0
    remark: str | None = None
    unready: str | None = None
    interval_ms: _Count | None = None
    before_ms: _Count | None = None
    before_load: _Amount | None = None

    @property
    def load(self) -> float | None:
        """The number of running and waiting requests; None if either number is unknown."""
        return None if self.waiting is None or self.running is None else self.waiting + self.running

    def without_amounts(self) -> "EndpointMetrics":
        """A copy of this reading without loads, preemptions and adapters."""
        adapters = dict.fromkeys(_ADAPTERS, NONE)
        amounts = dict.fromkeys(("waiting", "running", "kv_utilisation", "preemptions", "max_adapters"))
        return replace(self, **adapters, **amounts)


def _shifted(metrics: EndpointMetrics, shift_ms: int) -> EndpointMetrics:
    """A copy of this reading with `shift_ms` added to all times."""
    before_ms = None if metrics.before_ms is None else metrics.before_ms + shift_ms
    return replace(metrics, scraped_ms=metrics.scraped_ms + shift_ms, before_ms=before_ms)


def encode_reading(metrics: EndpointMetrics, shift_ms: int) -> bytes:
    """Encode a reading as JSON; adds `shift_ms` to its times."""
    # msgspec omits a set from JSON only if the set is the default object.
    sets = {name: getattr(metrics, name) or NONE for name in _SETS}
    return msgspec.json.encode(replace(_shifted(metrics, shift_ms), **sets), order="deterministic")


def decode_reading(text: bytes | str | msgspec.Raw, shift_ms: int) -> EndpointMetrics:
    """Decode the reading in `text`; adds `shift_ms` to its times.

    Raises:
        BadReading: the encoded reading `text` is not a JSON object, or has a value of the wrong type.
    """
    try:
        return _shifted(msgspec.json.decode(text, type=EndpointMetrics), shift_ms)
    except msgspec.ValidationError as fault:
        raise BadReading(f"not a reading: {fault}") from None
    except MALFORMED as fault:
        raise BadReading(f"a reading is no JSON: {fault}") from None


_GRAIN_S = 0.01
# Without a configured age, a reading is stale after this many scrape intervals of its endpoint, but not
# before two seconds: a busy server may take a second for a page, and another second for the next page.
_INTERVALS = 3
_SOONEST_STALE_S = 2.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The newest `metrics` of an endpoint, `age_s` seconds old.

    After a failed scrape `metrics` are from the last successful scrape, but have the new `fault` and
    `failures`. If not `known`, `metrics` are missing or stale; stale metrics have no amounts and no adapters.
    """

    metrics: EndpointMetrics
    age_s: float
    known: bool


class Readings(Mapping[str, Reading]):
    """A mapping from endpoint addresses to the endpoints' readings at one moment. Each reading is made at its
    first use: in a large pool, a pick uses only a few of thousands of readings."""

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

    def with_adapters(self) -> list[str]:
        """The addresses whose pages name adapters."""
        return [
            address
            for address, page in self._pages.items()
            if page.active_adapters or page.waiting_adapters or page.idle_adapters
        ]


class MetricsCache:
    """The newest reading of each endpoint. One event loop.

    Ages are measured by this replica's monotonic `clock` (seconds): a reading from another replica carries
    its age when sent (endpoints/metrics_channel.py), to which the time since its arrival is added. Readings
    are stale after `stale_after_s`; if None, after three scrape intervals of the endpoint, but at least 2 s.
    """

    def __init__(self, stale_after_s: float | None, clock: Callable[[], float]) -> None:
        self._stale_after_s = stale_after_s
        self._clock = clock
        self._newest: dict[str, EndpointMetrics] = {}
        self._worked: dict[str, EndpointMetrics] = {}  # address -> newest reading of a good scrape
        self._snapshot: Readings | None = None  # the cached snapshot; None after an update
        self._snapshot_s = 0.0

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(self._newest)

    def now_ms(self) -> int:
        return int(self._clock() * 1000)

    def update(self, readings: Mapping[str, EndpointMetrics]) -> None:
        """Store each of `readings` (`scraped_ms` by this replica's clock) unless a newer one is stored."""
        now_ms = self.now_ms()
        for address, metrics in readings.items():
            if metrics.scraped_ms > now_ms:
                # Redis's clock was set back, or another Redis server took over. A reading with a time in the
                # future would hide all newer readings.
                metrics = replace(metrics, scraped_ms=now_ms)
            newest = self._newest.get(address)
            if newest is None or metrics.scraped_ms >= newest.scraped_ms:
                self._newest[address] = metrics
                if metrics.fault is None:
                    self._worked[address] = metrics
        self._snapshot = None

    def last_read(self, address: str) -> EndpointMetrics | None:
        """The reading of the last successful scrape of `address`; None without a successful scrape."""
        return self._worked.get(address)

    def retain(self, addresses: Iterable[str]) -> None:
        for address in self._newest.keys() - frozenset(addresses):
            del self._newest[address]
            self._worked.pop(address, None)
        self._snapshot = None

    def snapshot(self, now_s: float | None = None) -> Readings:
        """The reading of each endpoint by address, at the time `now_s` of the clock (default: now).

        Many picks share one snapshot, which is at most 10 ms old and replaced after each update."""
        now_s = self._clock() if now_s is None else now_s
        if self._snapshot is None or not 0 <= now_s - self._snapshot_s < _GRAIN_S:
            newest, worked = dict(self._newest), dict(self._worked)
            self._snapshot = Readings(
                newest | worked, lambda address: self._reading(worked.get(address), newest[address], now_s)
            )
            self._snapshot_s = now_s
        return self._snapshot

    def models(self) -> frozenset[str]:
        """The models that any endpoint's page names."""
        return NONE.union(*(page.models for page in (self._newest | self._worked).values()))

    def ages_s(self) -> dict[str, float]:
        """By address, the age of the endpoint's last successful scrape, else of its newest reading."""
        now_s = self._clock()
        pages = self._newest | self._worked
        return {address: max(0.0, now_s - page.scraped_ms / 1000) for address, page in pages.items()}

    def _reading(self, worked: EndpointMetrics | None, newest: EndpointMetrics, now_s: float) -> Reading:
        metrics = worked = worked or newest
        if newest.fault is not None:
            metrics = replace(worked, fault=newest.fault, failures=newest.failures, unready=newest.unready)
        age_s = max(0.0, now_s - worked.scraped_ms / 1000)
        if age_s <= self._stale_s(worked):
            return Reading(metrics, age_s, known=worked.fault is None)
        return Reading(metrics.without_amounts(), age_s, known=False)

    def _stale_s(self, newest: EndpointMetrics) -> float:
        if self._stale_after_s is not None:
            return self._stale_after_s
        return max(_INTERVALS * (newest.interval_ms or 0) / 1000, _SOONEST_STALE_S)
