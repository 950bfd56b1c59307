"""Labelled counters, gauges and histograms cheap enough for every request.

prometheus-client's own instruments take a lock an update and walk every bucket: 1 µs a count and up to 3 µs
an observation. These are written by one event loop only, so they need no lock, and find the bucket by
bisection: a fraction of that. prometheus-client still keeps the registry and writes the page. Reading is
safe from another thread: every collection works on a copy taken in one step of the interpreter.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

OTHER = "other"
_LONGEST_VALUE = 128

Labels = tuple[str, ...]


class LabelCap:
    """Lets the first `limit` values of one label through; every later one becomes `other`.

    Clients choose some labels (model names), so without a cap they would choose how much memory and how
    long a page this process needs. Values passed as `known` keep their names whatever clients send first.
    """

    def __init__(self, limit: int = 1000, known: Iterable[str] = ()) -> None:
        self._limit = limit
        self._names: dict[str, str] = {}
        for value in known:
            self(value)

    def __call__(self, value: str) -> str:
        if len(value) > _LONGEST_VALUE:
            value = value[:_LONGEST_VALUE]
        name = self._names.get(value)
        if name is not None:
            return name
        if len(self._names) >= self._limit:
            return OTHER
        # A lone surrogate cannot be written to the page, and one bad name must not cost the whole page.
        name = value.encode("utf-8", "replace").decode("utf-8")
        self._names[value] = name
        return name


class PairCap:
    """A model and its variant as two label values, the pairs capped as well as each of the two.

    Each label capped by itself would still let a client that sends both make a million pairs. Past `limit`
    pairs a model's new variants are `other`, so there are at most `limit` + 1 pairs more than `known` ones.
    """

    def __init__(self, limit: int = 1000, known: Iterable[tuple[str, str]] = ()) -> None:
        self._limit = limit
        known = tuple(known)
        self._first = LabelCap(limit, (first for first, _ in known))
        self._second = LabelCap(limit, ("", *(second for _, second in known)))
        self._pairs: dict[tuple[str, str], tuple[str, str]] = {}
        for first, second in known:
            self._pairs[first, second] = self._first(first), self._second(second)

    def __call__(self, first: str, second: str) -> tuple[str, str]:
        pair = self._pairs.get((first, second))
        if pair is not None:
            return pair
        name = self._first(first)
        if name == OTHER:
            return OTHER, ""
        if len(self._pairs) >= self._limit:
            return name, OTHER if second else ""
        pair = self._pairs[first, second] = name, self._second(second)
        return pair


class Counters(Collector):
    """A counter family. `name` goes without `_total`; label values come in the order of `labels`."""

    def __init__(self, registry: CollectorRegistry, name: str, about: str, labels: Labels = ()) -> None:
        self._name, self._about, self._labels = name, about, labels
        self._values: dict[Labels, float] = {}
        if not labels:
            self._values[()] = 0.0
        registry.register(self)

    def add(self, labels: Labels = (), amount: float = 1) -> None:
        values = self._values
        values[labels] = values.get(labels, 0.0) + amount

    def follow(self, total: float) -> None:
        """Show a count that is kept elsewhere, and so may begin anew at 0."""
        self._values = {(): total}

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._about, labels=self._labels)
        for labels, value in list(self._values.items()):
            family.add_metric(labels, value)
        yield family


class Gauges(Collector):
    """A gauge family; `replace` sets all of its series at once, so that none outlives what it describes."""

    def __init__(self, registry: CollectorRegistry, name: str, about: str, labels: Labels = ()) -> None:
        self._name, self._about, self._labels = name, about, labels
        self._values: dict[Labels, float] = {}
        self._read: Callable[[], float] | None = None
        if not labels:
            self._values[()] = 0.0
        registry.register(self)

    def follow(self, read: Callable[[], float]) -> None:
        """Show what `read`, which may be called from another thread, says when a page is made."""
        self._read = read

    def set(self, value: float) -> None:
        self._values = {(): value}

    def add(self, labels: Labels, change: float) -> None:
        values = self._values
        values[labels] = values.get(labels, 0.0) + change

    def replace(self, values: dict[Labels, float]) -> None:
        self._values = values

    def collect(self) -> Iterator[Metric]:
        if self._read is not None:
            self._values = {(): self._read()}
        family = GaugeMetricFamily(self._name, self._about, labels=self._labels)
        for labels, value in list(self._values.items()):
            family.add_metric(labels, value)
        yield family


class _Cell:
    __slots__ = ("counts", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.total = 0.0


class Histograms(Collector):
    """A histogram family over ascending upper bounds `bounds`; the bucket `+Inf` is added."""

    def __init__(
        self,
        registry: CollectorRegistry,
        name: str,
        about: str,
        bounds: tuple[float, ...],
        labels: Labels = (),
    ) -> None:
        self._name, self._about, self._labels = name, about, labels
        self._bounds = bounds
        self._size = len(bounds) + 1
        self._edges = (*map(floatToGoString, bounds), "+Inf")
        self._cells: dict[Labels, _Cell] = {}
        registry.register(self)

    def observe(self, value: float, labels: Labels = ()) -> None:
        cell = self._cells.get(labels)
        if cell is None:
            cell = self._cells[labels] = _Cell(self._size)
        cell.counts[bisect_left(self._bounds, value)] += 1
        cell.total += value

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._about, labels=self._labels)
        for labels, cell in list(self._cells.items()):
            buckets = list(zip(self._edges, accumulate(list(cell.counts)), strict=True))
            family.add_metric(labels, buckets, cell.total)
        yield family
