"""The few series that matter of the text of one endpoint's metrics page. scraper.py is the caller.

A vLLM page has hundreds of lines, of which five are needed, ten times a second an endpoint. So the page is
not parsed: the wanted names are searched for, and only the lines that they begin are read. On those lines the
result is that of a full parser. Format: Prometheus' text exposition format 0.0.4.
"""

import itertools
import math
import re
import string
from collections.abc import Iterator
from dataclasses import dataclass

from picker_fleet.endpoints.readings import NONE, EndpointMetrics
from picker_fleet.errors import PickerError
from picker_fleet.sections import Engine

_LABEL = re.compile(rb'[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\\n]|\\[^\n])*+)"[ \t]*(?:,|$)')
_SAMPLE = re.compile(
    # No part gives back what it took: a hostile line is refused in one pass.
    rb"(?:[ \t]*+\{(?P<labels>(?:[^\"{}\n]|\"(?:[^\"\\\n]|\\[^\n])*+\")*+)\}[ \t]*+|[ \t]++)"
    rb"(?P<value>[^ \t\r\n]++)(?:[ \t]++[-+0-9.eE]++)?[ \t]*+\r?$"
)
_ESCAPE = re.compile(r'\\([\\n"])')
_ESCAPED = {"\\": "\\", "n": "\n", '"': '"'}
_NAME_GOES_ON = frozenset(bytes((mark,)) for mark in (string.ascii_letters + string.digits + "_:").encode())
_BLANK = b" \t"
_MOST_SERIES = 1000  # of one name
_MOST_MENTIONS = 4000  # of one name, where it begins no line or a longer name
_MOST_LINE_BYTES = 64 * 1024
_MOST_DIGITS = 9
MAX_PAGE_BYTES = 512 * 1024  # a vLLM page has 53 KB
_OVERSHOOT = 1.05  # a share may pass 1 by rounding; what is far above is something else


class BadPage(PickerError):
    """A page that cannot be believed; the message says why in one line."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One line of the page: the text between its braces and its value, which may be NaN or infinite."""

    label_text: bytes
    value: float

    def labels(self) -> dict[str, str]:
        """Label values with escapes resolved.

        Raises:
            BadPage: not `name="value"` pairs.
        """
        found: dict[str, str] = {}
        at, text = 0, self.label_text.strip(_BLANK)
        while at < len(text):
            match = _LABEL.match(text, at)
            if match is None:
                raise BadPage(f"labels {text[:60]!r} are no name=value pairs")
            value = match[2].decode("utf-8", "replace")
            if "\\" in value:
                value = _ESCAPE.sub(lambda escape: _ESCAPED[escape[1]], value)
            found[match[1].decode()] = value
            at = match.end()
        return found


def read(page: bytes, engine: Engine, scraped_ms: int) -> EndpointMetrics:
    """What `page` says in the names of `engine`. Several series of a name: counts add up, utilisation is the
    highest. A last line without its line feed is cut off and does not count.

    Raises:
        BadPage: a wanted line is malformed, or there is none of them at all.
    """
    waiting = _samples(page, engine.waiting)
    running = _samples(page, engine.running)
    utilisation = _samples(page, engine.kv_utilisation)
    adapters = _samples(page, engine.adapters)
    if not (waiting or running or utilisation):
        raise BadPage(f"the page has none of the series of {engine.name}")
    max_adapters, active, queued = _adapters(adapters)
    return EndpointMetrics(
        scraped_ms=scraped_ms,
        waiting=_sum(waiting, engine.part_label),
        running=_sum(running, engine.part_label),
        kv_utilisation=_highest(utilisation),
        max_adapters=max_adapters,
        active_adapters=active,
        waiting_adapters=queued,
    )


def samples(page: bytes, name: bytes) -> Iterator[Sample]:
    """Every sample of the series `name`, in the page's order.

    Raises:
        BadPage: a line that begins with `name` is no sample, or the page names it without end.
    """
    after = mentions = 0
    while (start := page.find(name, after)) >= 0:
        mentions += 1
        if mentions > _MOST_MENTIONS:
            raise BadPage(f"{name.decode()} is mentioned more than {_MOST_MENTIONS} times")
        after = start + len(name)
        line_start = page.rfind(b"\n", 0, start) + 1
        line_end = page.find(b"\n", after)
        if line_end < 0:
            return
        if page[after : after + 1] in _NAME_GOES_ON or page[line_start:start].strip(_BLANK):
            after = line_end  # a line that begins otherwise is no sample of it, however often it names it
            continue
        if line_end - after > _MOST_LINE_BYTES:
            raise BadPage(f"{name.decode()} has a line of more than {_MOST_LINE_BYTES} bytes")
        line = page[after:line_end]
        match = _SAMPLE.match(line)
        if match is None:
            raise BadPage(f"{name.decode()} is followed by {line[:60]!r}")
        yield Sample(match["labels"] or b"", _value(name, match["value"]))
        after = line_end


def _samples(page: bytes, names: tuple[str, ...]) -> list[Sample]:
    for name in names:
        found = list(itertools.islice(samples(page, name.encode()), _MOST_SERIES + 1))
        if len(found) > _MOST_SERIES:
            raise BadPage(f"{name} has more than {_MOST_SERIES} series")
        if found:
            return found
    return []


def _value(name: bytes, text: bytes) -> float:
    try:
        if b"_" in text:  # legal in Python's numbers only
            raise ValueError
        return float(text)
    except ValueError:
        raise BadPage(f"{name.decode()} has the value {text[:60]!r}") from None


def _sum(found: list[Sample], part_label: str | None) -> float | None:
    """The total of the known values, None if there is none. Of equal series the last counts."""
    if len(found) > 1:
        by_labels = {frozenset((labels := one.labels()).items()): (one, labels) for one in found}
        kept = [one for one, labels in by_labels.values() if not (part_label and labels.get(part_label))]
        found = kept or [one for one, _ in by_labels.values()]
    known = [one.value for one in found if 0 <= one.value < math.inf]
    return sum(known) if known else None


def _highest(found: list[Sample]) -> float | None:
    """The highest share, at most 1; None if none of the values is a share."""
    known = [one.value for one in found if 0 <= one.value <= _OVERSHOOT]
    return min(max(known), 1.0) if known else None


def _adapters(found: list[Sample]) -> tuple[int | None, frozenset[str], frozenset[str]]:
    """vLLM leaves old label sets on its page; the value is a time, and the latest is what holds."""
    dated = [one for one in found if math.isfinite(one.value)]
    if not dated:
        return None, NONE, NONE
    labels = max(dated, key=lambda one: one.value).labels()
    most = labels.get("max_lora", "")
    return (
        int(most) if most.isascii() and most.isdecimal() and len(most) <= _MOST_DIGITS else None,
        _names(labels.get("running_lora_adapters", "")),
        _names(labels.get("waiting_lora_adapters", "")),
    )


def _names(listed: str) -> frozenset[str]:
    return frozenset(name for part in listed.split(",") if (name := part.strip())) if listed else NONE
