"""Extracts the few needed series from the text of an endpoint's metrics page; scraper.py calls this module.

A vLLM metrics page has hundreds of lines, of which the picker needs six. An endpoint's page may be read ten
times a second. So PageReader does not parse the whole page: it searches for the wanted names, and parses only
lines that begin with a wanted name. Format: Prometheus' text exposition format 0.0.4, without exemplars.

A page is read in parts as it arrives, one part per turn of the event loop. The length of a page is unbounded,
but the work on it is bounded. A malformed line loses only its own metric.
"""

import math
import re
import string
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from picker_fleet.domain.engines import Aggregation, Engine, series_of
from picker_fleet.domain.errors import PickerError
from picker_fleet.domain.units import MAX_NAME_BYTES, has_control
from picker_fleet.endpoints.readings import ASLEEP, NONE, EndpointMetrics

_LABEL = re.compile(
    rb'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"([^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+)"[ \t]*(?:,|$)'
)
_SAMPLE = re.compile(
    # Possessive quantifiers: the match never backtracks, so a hostile line is rejected in linear time.
    rb"(?:[ \t]*+\{(?P<labels>(?:[^\"{}\n]++|\"[^\"\\\n]*+(?:\\[^\n][^\"\\\n]*+)*+\")*+)\}[ \t]*+|[ \t]++)"
    rb"(?P<value>[^ \t\r\n]++)(?:[ \t]++[-+0-9.eE]++)?(?:[ \t]++#[ \t][^\n]*+|[ \t]*+\r?)$"
)
_ESCAPE = re.compile(r'\\([\\n"])')
_ESCAPED = {"\\": "\\", "n": "\n", '"': '"'}
_NAME_GOES_ON = frozenset(bytes((mark,)) for mark in (string.ascii_letters + string.digits + "_:").encode())
_BLANK = b" \t"
_MOST_SERIES = 4000  # maximum series kept per page
_MOST_LINE_BYTES = 256 * 1024
_MOST_ADAPTER_BYTES = 128 * 1024  # maximum bytes of adapter names per page; all replicas get these names
_MOST_WORK = 32 * 1024 * 1024  # maximum work per page, in bytes searched
_SAMPLE_WORK = 256  # parsing a sample takes about as long as searching this many bytes
_CHARACTER_WORK = 16  # work for each character of labels, which are kept until the page's end
_MOST_MARKS = 256  # maximum quotes and backslashes of a sample, each of which takes as long as 100 bytes
_MOST_FAULTS = 3  # maximum faults listed per page
_MOST_DIGITS = 9
_MOST_VALUE = 1e15  # maximum value of a sample; sums and products of lower values are finite
_OVERSHOOT = 1.05  # rounding may raise a share to this; a higher value is not a share
_MODEL_LABELS = frozenset({"model_name", "model"})
_MOST_MODELS = 16
_SIZE_LABELS = ("num_gpu_blocks", "block_size")
_ADAPTER_LABELS = frozenset({"max_lora", "running_lora_adapters", "waiting_lora_adapters"})

Labels = frozenset[tuple[str, str]]


class BadPage(PickerError):
    """A page, or a line of a page, is malformed; the message says why in one line."""


class Sample(NamedTuple):
    """One sample line of a page; `value` may be NaN or infinite."""

    labels: dict[str, str]
    value: float


def samples(lines: bytes, name: bytes, bad: Callable[[str], None]) -> Iterator[Sample]:
    """Every sample of the series `name` in `lines`; each line must be complete. `bad` is called for a line
    that begins with `name` but is not a sample."""
    after = 0
    while (start := lines.find(name, after)) >= 0:
        begin, after = start + len(name), lines.find(b"\n", start)
        line_start = lines.rfind(b"\n", 0, start) + 1
        if lines[begin : begin + 1] in _NAME_GOES_ON or lines[line_start:start].strip(_BLANK):
            continue  # no sample of this series: its name is longer, or does not begin the line
        try:
            yield _sample(lines[begin:after])
        except BadPage as fault:
            bad(f"{name.decode()} {fault}")


def _sample(line: bytes) -> Sample:
    """Parse a sample line after its name. Raises BadPage."""
    if line.count(b'"') + line.count(b"\\") > _MOST_MARKS:
        raise BadPage(f"has more than {_MOST_MARKS} quotes and backslashes")
    match = _SAMPLE.match(line)
    if match is None:
        raise BadPage(f"is followed by {line[:60]!r}")
    text = match["value"]
    try:
        if b"_" in text:  # Python's `float` allows underscores, Prometheus does not
            raise ValueError
        value = float(text)
    except ValueError:
        raise BadPage(f"has the value {text[:60]!r}") from None
    return Sample(_labels((match["labels"] or b"").strip(_BLANK)), value)


def _labels(text: bytes) -> dict[str, str]:
    """Parse labels, resolving escapes in their values. Raises BadPage."""
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None:
            raise BadPage(f"has labels {text[:60]!r}, which are no name=value pairs")
        value = match[2].decode("utf-8", "replace")
        if "\\" in value:
            value = _ESCAPE.sub(lambda escape: _ESCAPED[escape[1]], value)
        found[match[1].decode()] = value
        at = match.end()
    return found


class PageReader:
    """Reads a page as the page arrives, from one of `engines`; `result` sets `engine` to that engine.

    If several samples have the same labels, the last counts. Malformed lines are skipped and listed in
    `remark`. A last line without a line feed is truncated and does not count.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines
        self.engine: Engine | None = None
        self.tells_sleep = False  # whether the page shows if the engine sleeps
        self.cpu_s = 0.0  # CPU time for reading the page, in seconds
        counts = {
            series_of(text).name
            for engine in engines
            for texts in (
                engine.waiting, engine.running, engine.kv_utilisation, engine.preemptions, engine.awake,
                engine.kv_size, engine.prefix_queries, engine.prefix_hits, engine.started,
            )
            for text in texts
        }  # fmt: skip
        self._counts: dict[str, dict[Labels, float]] = {name: {} for name in counts}
        # For each set of labels (without `_ADAPTER_LABELS`) the sample with the highest value, which is a
        # timestamp: vLLM leaves outdated label sets on its page.
        self._adapters: dict[str, dict[Labels, Sample]] = {
            series_of(text).name: {} for engine in engines for text in engine.adapters
        }
        self._names = [(name, name.encode()) for name in (*self._counts, *self._adapters)]
        self._rest = b""  # an incomplete line
        self._in_long_line = False
        self._work = self._series = self._adapter_bytes = self._fault_count = 0
        self._faults: list[str] = []

    @property
    def remark(self) -> str | None:
        """The faults of the page in one line; None without faults."""
        more = self._fault_count - len(self._faults)
        return "; ".join((*self._faults, *([f"{more} more"] if more else []))) or None

    def feed(self, part: bytes) -> bool:
        """Read the next `part`. Returns False once the page exceeds a limit: feed no further part."""
        began_s = time.thread_time()
        self._work += len(part)
        if self._in_long_line:
            _, ended, part = part.partition(b"\n")
            self._in_long_line = not ended
        end = part.rfind(b"\n") + 1
        lines, self._rest = (self._rest + part[:end], part[end:]) if end else (b"", self._rest + part)
        if len(self._rest) > _MOST_LINE_BYTES:
            if any(self._rest.lstrip(_BLANK).startswith(name) for _, name in self._names):
                self._bad(f"a line of more than {_MOST_LINE_BYTES} bytes begins with {self._rest[:60]!r}")
            self._rest, self._in_long_line = b"", True
        if lines:
            self._read(lines)
        self.cpu_s += time.thread_time() - began_s
        if self._work <= _MOST_WORK and self._series <= _MOST_SERIES:
            return True
        self._bad("the page is too long: its rest is left out")
        last = lines[lines.rfind(b"\n", 0, -1) + 1 :].lstrip(_BLANK)
        for name, encoded in self._names:
            if last.startswith(encoded) and last[len(encoded) : len(encoded) + 1] not in _NAME_GOES_ON:
                # The unread rest of the page may have more samples of this series: the sum would be too low.
                self._counts.pop(name, None)
                self._adapters.pop(name, None)
        return False

    def _read(self, lines: bytes) -> None:
        for name, encoded in self._names:
            counts, adapters = self._counts.get(name), self._adapters.get(name)
            for sample in samples(lines, encoded, self._bad):
                self._work += _SAMPLE_WORK + _CHARACTER_WORK * _length(sample)
                if counts is not None:
                    self._series -= len(counts)
                    counts[frozenset(sample.labels.items())] = sample.value
                    self._series += len(counts)
                if adapters is not None and math.isfinite(sample.value):
                    key = frozenset(pair for pair in sample.labels.items() if pair[0] not in _ADAPTER_LABELS)
                    latest = adapters.get(key)
                    self._series += latest is None
                    if latest is None or latest.value <= sample.value:
                        more = _length(sample) - (_length(latest) if latest is not None else 0)
                        if self._adapter_bytes + more > _MOST_ADAPTER_BYTES:
                            self._bad(f"{name} names more adapters than are read")
                            continue
                        self._adapter_bytes += more
                        adapters[key] = sample

    def _bad(self, fault: str) -> None:
        self._fault_count += 1
        self._work += _SAMPLE_WORK
        if len(self._faults) < _MOST_FAULTS:
            self._faults.append(fault)

    def result(self, scraped_ms: int) -> EndpointMetrics:
        """The metrics that the page shows.

        Raises:
            BadPage: the page has no series of any of `engines`.
        """
        told = 0
        for engine in self._engines:
            figures = [
                self._first(texts) for texts in (engine.waiting, engine.running, engine.kv_utilisation)
            ]
            if sum(map(bool, figures)) > told:
                told, self.engine = sum(map(bool, figures)), engine
                waiting, running, utilisation = figures
        if self.engine is None:
            names = ", ".join(engine.name for engine in self._engines)
            raise BadPage(self.remark or f"the page has none of the series of {names}")
        awake = self._first(self.engine.awake)
        self.tells_sleep = bool(awake)
        most, active, queued = self._adapters_of(self.engine)
        sizes = [_size(self._first((text,)), self.engine.aggregation) for text in self.engine.kv_size]
        return EndpointMetrics(
            scraped_ms=scraped_ms,
            waiting=_total(waiting, self.engine.aggregation),
            running=_total(running, self.engine.aggregation),
            kv_utilisation=_highest(utilisation),
            preemptions=_total(self._first(self.engine.preemptions), self.engine.aggregation),
            kv_tokens=(math.prod(sizes) or None) if sizes else None,
            prefix_queries=_total(self._first(self.engine.prefix_queries), self.engine.aggregation),
            prefix_hits=_total(self._first(self.engine.prefix_hits), self.engine.aggregation),
            started_s=_total(self._first(self.engine.started), self.engine.aggregation),
            max_adapters=most,
            active_adapters=active,
            waiting_adapters=queued - active,
            models=_models(running or waiting or utilisation),
            unready=ASLEEP if 0 in awake.values() else None,
            remark=self.remark,
        )

    def _first(self, texts: tuple[str, ...]) -> Mapping[Labels, float]:
        """The samples of the first among the series `texts` that the page has."""
        for text in texts:
            name, wanted = series_of(text)
            found = {
                labels: value for labels, value in self._counts.get(name, {}).items() if wanted <= labels
            }
            if found:
                return found
        return {}

    def _adapters_of(self, engine: Engine) -> tuple[int | None, frozenset[str], frozenset[str]]:
        """The number of adapter slots and the names of running and of waiting adapters, of all label sets."""
        most, active, queued = None, NONE, NONE
        for text in engine.adapters:
            for labels, _ in self._adapters.get(series_of(text).name, {}).values():
                limit = labels.get("max_lora", "")
                if limit.isascii() and limit.isdecimal() and len(limit) <= _MOST_DIGITS:
                    most = max(most or 0, int(limit))
                active |= _listed(labels.get("running_lora_adapters", ""))
                queued |= _listed(labels.get("waiting_lora_adapters", ""))
        return most, active, queued


def _models(found: Mapping[Labels, float]) -> frozenset[str]:
    """The models in the labels of samples, without names that no request can have; empty if there are more
    than `_MOST_MODELS`."""
    values = {value for labels in found for name, value in labels if name in _MODEL_LABELS}
    names = frozenset(filter(_is_name, values))
    return names if len(names) <= _MOST_MODELS else NONE


def _is_name(text: str) -> bool:
    return bool(text.strip()) and len(text.encode()) <= MAX_NAME_BYTES and not has_control(text)


def _total(found: Mapping[Labels, float], aggregation: Mapping[str, Aggregation]) -> float | None:
    """Combine samples into one number, by the `aggregation` of the labels; None without a valid value."""
    figures: dict[Labels, dict[Labels, float]] = {}
    for labels, value in found.items():
        if 0 <= value <= _MOST_VALUE:
            parts = figures.setdefault(frozenset(pair for pair in labels if pair[0] not in aggregation), {})
            part = frozenset(pair for pair in labels if pair[1] and aggregation.get(pair[0]) == "total")
            parts[part] = max(parts.get(part, 0.0), value)
    whole: Labels = frozenset()
    return sum(parts.get(whole, sum(parts.values())) for parts in figures.values()) if figures else None


def _size(found: Mapping[Labels, float], aggregation: Mapping[str, Aggregation]) -> float:
    """The total of `found`, in which a sample with the labels `num_gpu_blocks` and `block_size` counts as
    their product. 0 if the size is unknown."""
    sizes = {}
    for labels, value in found.items():
        named = dict(labels)
        texts = [named.get(name, "") for name in _SIZE_LABELS]
        if all(text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS for text in texts):
            value = math.prod(map(int, texts))
        elif any(texts):
            continue
        sizes[labels] = value
    return _total(sizes, aggregation) or 0.0


def _highest(found: Mapping[Labels, float]) -> float | None:
    """The highest of the values that are shares (0 to 1); None if no value is a share."""
    known = [value for value in found.values() if 0 <= value <= _OVERSHOOT]
    return min(max(known), 1.0) if known else None


def _length(sample: Sample) -> int:
    return sum(map(len, (*sample.labels, *sample.labels.values())))


def _listed(text: str) -> frozenset[str]:
    return frozenset(name for part in text.split(",") if (name := part.strip())) if text else NONE
