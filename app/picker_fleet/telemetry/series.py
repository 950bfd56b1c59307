"""Labelled counters, gauges and histograms that are cheap enough for every request, and their text;
metrics.py declares the families.

prometheus-client's own instruments take a lock for each update and visit every bucket: 1 µs a count and up to
3 µs an observation; and the text of a thousand models takes more than half a second. These belong to one
event loop, find the bucket by bisection, and keep the text of each series until its value changes.
"""

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any, Protocol

from prometheus_client.utils import floatToGoString

OTHER = "other"
_MAX_VALUE_CHARS = 128
# Of a family: several labels that are capped separately still multiply.
_MAX_SERIES = 10_000
_MAX_HISTOGRAMS = 2_500

Labels = tuple[str, ...]


METER_WINDOW_S = 10  # whole seconds, without the present one
_MAX_METERED_FLOWS = 5000  # a second
_MAX_LISTED = 200
_MAX_LISTED_BYTES = 16_000  # of names, about


class Family(Protocol):
    """A metric family with its part of the text."""

    def pieces(self) -> Iterator[bytes]:
        """Its text, in pieces that take microseconds each."""


class Page:
    """The families of a text, in the order in which they were added."""

    def __init__(self) -> None:
        self._families: list[Family] = []

    def add(self, family: Family) -> None:
        self._families.append(family)

    def pieces(self) -> Iterator[bytes]:
        """Prometheus's text format. A series that changes meanwhile has its old or its new value."""
        for family in self._families:
            yield from family.pieces()


class LabelCap:
    """Keeps the first `limit` values of a label; any further one becomes `other`.

    Clients choose some labels (model names): without a cap they would choose how much memory and how long a
    text this process needs. `known` values keep their names whatever clients send first.
    """

    def __init__(self, limit: int = 1000, known: Iterable[str] = ()) -> None:
        self._limit = limit
        self._names: dict[str, str] = {}
        for value in known:
            self(value)

    def __call__(self, value: str) -> str:
        if len(value) > _MAX_VALUE_CHARS:
            value = value[:_MAX_VALUE_CHARS]
        name = self._names.get(value)
        if name is not None:
            return name
        if len(self._names) >= self._limit:
            return OTHER
        # A lone surrogate cannot be encoded, and one bad name must not cost the whole text.
        name = value.encode("utf-8", "replace").decode("utf-8")
        self._names[value] = name
        return name


class PairCap:
    """Caps a model and its variant, each by itself and as a pair.

    With separate caps only, a client that chooses both could make a million pairs. Past `limit` pairs a
    model's new variants are `other`.
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


class _Writer:
    """Writes the lines of a family. Label values are passed in the order of `labels`, and written sorted by
    label."""

    def __init__(self, name: str, kind: str, help_text: str, labels: Labels) -> None:
        self.head = f"# HELP {name} {help_text}\n# TYPE {name} {kind}\n".encode()
        self._labels = labels

    def line(self, name: str, values: Labels, value: float) -> str:
        """One sample."""
        pairs = ",".join(pair for _, pair in self._pairs(values))
        return f"{name}{{{pairs}}} {_number(value)}\n" if pairs else f"{name} {_number(value)}\n"

    def bucket(self, name: str, values: Labels) -> tuple[str, str]:
        """The text before and after the bound in the line of a bucket."""
        pairs = self._pairs(values)
        before = "".join(f"{pair}," for label, pair in pairs if label < "le")
        after = "".join(f",{pair}" for label, pair in pairs if label > "le")
        return f'{name}_bucket{{{before}le="', f'"{after}}} '

    def _pairs(self, values: Labels) -> list[tuple[str, str]]:
        named = sorted(zip(self._labels, values, strict=True))
        return [(label, f'{label}="{_escaped(text)}"') for label, text in named]


def _number(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


class _Values:
    """Series of one number each. The text of a series is kept until its value changes or it is gone."""

    def __init__(self, page: Page, name: str, kind: str, help_text: str, labels: Labels) -> None:
        self._name = name
        self._writer = _Writer(name, kind, help_text, labels)
        self._values: dict[Labels, float] = {}
        self._texts: dict[Labels, tuple[float, bytes]] = {}
        if not labels:
            self._values[()] = 0.0
        page.add(self)

    def add(self, labels: Labels = (), amount: float = 1) -> None:
        try:
            self._values[labels] += amount
        except KeyError:
            if len(self._values) >= _MAX_SERIES:
                labels = (OTHER,) * len(labels)
            self._values[labels] = self._values.get(labels, 0.0) + amount

    def pieces(self) -> Iterator[bytes]:
        yield self._writer.head
        kept = self._texts
        self._texts = texts = {}
        for labels, value in list(self._values.items()):
            text = kept.get(labels)
            if text is None or text[0] != value:
                text = value, self._writer.line(self._name, labels, value).encode()
            texts[labels] = text
            yield text[1]


class Counters(_Values):
    """A counter family. `name` is without `_total`; label values are in the order of `labels`."""

    def __init__(self, page: Page, name: str, help_text: str, labels: Labels = ()) -> None:
        super().__init__(page, f"{name}_total", "counter", help_text, labels)

    def follow(self, total: float) -> None:
        """Show a total that is counted elsewhere; it may start again at 0."""
        self._values = {(): total}


class Gauges(_Values):
    """A gauge family; `replace` sets all of its series at once, so that none describes what is gone."""

    def __init__(self, page: Page, name: str, help_text: str, labels: Labels = ()) -> None:
        super().__init__(page, name, "gauge", help_text, labels)
        self._read: Callable[[], float] | None = None

    def follow(self, read: Callable[[], float]) -> None:
        """Call `read` for the value when the text is rendered."""
        self._read = read

    def set(self, value: float) -> None:
        self._values = {(): value}

    def replace(self, values: dict[Labels, float]) -> None:
        self._values = values

    def pieces(self) -> Iterator[bytes]:
        if self._read is not None:
            self.set(self._read())
        return super().pieces()


class _Cell:
    __slots__ = ("counts", "text", "total")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.total = 0.0
        self.text: bytes | None = None  # until the next observation


class Histograms:
    """A histogram family over ascending upper bounds `bounds`; the bucket `+Inf` is added."""

    def __init__(
        self, page: Page, name: str, help_text: str, bounds: tuple[float, ...], labels: Labels = ()
    ) -> None:
        self._name = name
        self._writer = _Writer(name, "histogram", help_text, labels)
        self._bounds = bounds
        self._size = len(bounds) + 1
        self._edges = (*map(_number, bounds), "+Inf")
        self._cells: dict[Labels, _Cell] = {}
        page.add(self)

    def observe(self, value: float, labels: Labels = ()) -> None:
        cell = self._cells.get(labels)
        if cell is None:
            if len(self._cells) >= _MAX_HISTOGRAMS:
                labels = (OTHER,) * len(labels)
            cell = self._cells.setdefault(labels, _Cell(self._size))
        cell.counts[bisect_left(self._bounds, value)] += 1
        cell.total += value
        cell.text = None

    def pieces(self) -> Iterator[bytes]:
        yield self._writer.head
        for labels, cell in list(self._cells.items()):
            if cell.text is None:
                cell.text = self._text(labels, cell)
            yield cell.text

    def _text(self, labels: Labels, cell: _Cell) -> bytes:
        line = self._writer.line
        counts = list(accumulate(cell.counts))
        before, after = self._writer.bucket(self._name, labels)
        lines = [f"{before}{edge}{after}{count}.0\n" for edge, count in zip(self._edges, counts, strict=True)]
        lines.append(line(f"{self._name}_count", labels, counts[-1]))
        lines.append(line(f"{self._name}_sum", labels, cell.total))
        return "".join(lines).encode()


class ServiceMeter:
    """Costs of placed requests by band and flow. Recording one is a dictionary entry; memory is bounded.

    A flow beyond 5000 in one second counts for its band only.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._seconds: deque[tuple[int, dict[tuple[int, str], float], list[float]]] = deque()
        self._reported: tuple[int, dict[str, Any]] = (-1, {})  # in which second, and what

    def record(self, band: int, flow: str, cost: float) -> None:
        """A request of `flow` has been placed."""
        second = int(self._clock_s())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, {}, [0.0, 0.0, 0.0]))
            self._forget(second)
        _, flows, bands = self._seconds[-1]
        bands[band] += cost
        key = band, flow
        if key in flows or len(flows) < _MAX_METERED_FLOWS:
            flows[key] = flows.get(key, 0.0) + cost

    def report(self) -> dict[str, Any]:
        """`bands`: cost by band; `flows`: [band, flow, cost] of the busiest; `cut`: there are more.

        Added up once a second, however often it is asked for. Not to be changed.
        """
        second = int(self._clock_s())
        if self._reported[0] != second:
            self._reported = second, self._add_up(second)
        return self._reported[1]

    def _add_up(self, second: int) -> dict[str, Any]:
        self._forget(second)
        bands = [0.0, 0.0, 0.0]
        flows: Counter[tuple[int, str]] = Counter()
        for begun, costs, totals in self._seconds:
            if begun != second:
                flows.update(costs)
                bands = [a + b for a, b in zip(bands, totals, strict=True)]
        listed: list[list[object]] = []
        room = _MAX_LISTED_BYTES
        for (band, flow), cost in flows.most_common(_MAX_LISTED):
            room -= len(flow) + 16
            if room < 0:
                break
            listed.append([band, flow, round(cost, 3)])
        return {"bands": [round(cost, 3) for cost in bands], "flows": listed, "cut": len(listed) < len(flows)}

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] < second - METER_WINDOW_S:
            self._seconds.popleft()
