"""Measures of fairness from a decision log: service gaps, shares, waits, inversions of bands. Pure.

The auditor's replay shows which requests wait. `SourceOf` maps a request id to the source (a kind of client)
that sent the request.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from picker_tools.audit.log import GUARD, Entry
from picker_tools.audit.replay import Replay

FlowKey = tuple[int, str]  # band, flow
SourceOf = Callable[[str], str]

_ROUNDING = 1e-6  # tolerance for rounding errors in sums of shares


def flow_key(entry: Entry) -> FlowKey:
    return entry.band, entry.flow


class Backlog:
    """The number of waiting requests by flow and by priority, after all entries applied so far."""

    def __init__(self) -> None:
        self._replay = Replay()
        self.of_flow: Counter[FlowKey] = Counter()
        self.of_priority: Counter[int] = Counter()

    def apply(self, entry: Entry) -> int:
        """Apply `entry`. Returns the change in length of the entry's flow queue: -1, 0 or 1."""
        step = self._replay.step(entry)
        self._replay.advance(step)
        change = step.enters_queue - step.leaves_queue
        self.of_flow[flow_key(entry)] += change
        self.of_priority[entry.priority] += change
        return change


@dataclass(frozen=True, slots=True)
class Gap:
    """A maximal interval in which two flows of a band were both backlogged.

    `widest` is the largest difference of weight-normalised service over any subinterval. `bound` is the
    bound of G2: c_f/w_f + c_g/w_g.
    """

    flows: tuple[str, str]
    widest: float
    bound: float

    @property
    def violated(self) -> bool:
        return self.widest > self.bound + _ROUNDING


@dataclass(slots=True)
class _Pair:
    """The service difference of two flows while both are backlogged, and its extremes."""

    apart: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def move(self, by: float) -> None:
        self.apart += by
        self.low, self.high = min(self.low, self.apart), max(self.high, self.apart)


def gaps(entries: Sequence[Entry]) -> list[Gap]:
    """The gap of every interval in which two flows are backlogged (Goyal et al., SFQ, theorem 1)."""
    largest: dict[FlowKey, float] = defaultdict(float)
    for entry in entries:
        if entry.event == "granted":
            largest[flow_key(entry)] = max(largest[flow_key(entry)], entry.cost / entry.weight)
    found: list[Gap] = []
    backlog = Backlog()
    pairs: dict[tuple[FlowKey, FlowKey], _Pair] = {}

    def close(which: Iterable[tuple[FlowKey, FlowKey]]) -> None:
        for pair in which:
            ended = pairs.pop(pair)
            one, other = pair
            found.append(Gap((one[1], other[1]), ended.high - ended.low, largest[one] + largest[other]))

    for entry in entries:
        key = flow_key(entry)
        if entry.event == "granted":
            share = entry.cost / entry.weight
            for (one, other), pair in pairs.items():
                if key in (one, other):
                    pair.move(share if key == one else -share)
        change = backlog.apply(entry)
        length = backlog.of_flow[key]
        if change == -1 and length == 0:
            close([pair for pair in pairs if key in pair])
        elif change == 1 and length == 1:
            for other, others in backlog.of_flow.items():
                if others > 0 and other != key and other[0] == key[0]:
                    pairs[min(key, other), max(key, other)] = _Pair()
    close(list(pairs))
    return found


@dataclass(slots=True)
class Window:
    """The dispatches of an interval in which all given flows were backlogged. `served`: service by source."""

    grants: int = 0
    served: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def window(
    entries: Iterable[Entry],
    flows: Set[str],
    source_of: SourceOf,
    size: Callable[[Entry], float] = lambda entry: entry.cost,
) -> Window:
    """The interval with most dispatches in which all `flows` are backlogged, by the requests' `size`."""
    best, now = Window(), Window()
    backlog = Backlog()
    backlogged: set[str] = set()
    for entry in entries:
        all_wait = len(backlogged) == len(flows)
        if entry.event == "granted" and all_wait:
            now.grants += 1
            now.served[source_of(entry.request)] += size(entry)
        backlog.apply(entry)
        if entry.flow in flows:
            (backlogged.add if backlog.of_flow[flow_key(entry)] else backlogged.discard)(entry.flow)
        if all_wait and len(backlogged) < len(flows):
            best, now = max(best, now, key=lambda each: each.grants), Window()
    return max(best, now, key=lambda each: each.grants)


def normalised(served: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Each source's service divided by the source's weight, relative to the mean; 1 is a fair share."""
    by_weight = {name: served.get(name, 0.0) / weight for name, weight in weights.items()}
    mean = sum(by_weight.values()) / len(by_weight)
    return {name: each / mean if mean else 0.0 for name, each in by_weight.items()}


def jain(shares: Iterable[float]) -> float:
    """Jain's fairness index: 1 if all shares are equal, 1/n if one source has everything."""
    found = list(shares)
    squares = sum(each * each for each in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 0.0


def min_by_max(shares: Iterable[float]) -> float:
    found = list(shares)
    return min(found) / max(found) if max(found) > 0 else 0.0


def waits_ms(entries: Iterable[Entry], source: str, source_of: SourceOf) -> list[float]:
    """The wait of each served request of `source`; 0 for requests that bypassed the queue."""
    return [
        (entry.time_us - entry.arrived) / 1000 if entry.event == "granted" else 0.0
        for entry in entries
        if entry.event in ("granted", "bypassed") and source_of(entry.request) == source
    ]


def highest_wait_ms(entries: Iterable[Entry], source: str, source_of: SourceOf) -> float:
    """The longest wait among all requests of `source`: served, ended otherwise, or still waiting."""
    since_us: dict[str, int] = {}
    highest_us = now_us = 0
    for entry in entries:
        now_us = entry.time_us
        if source_of(entry.request) != source:
            continue
        if entry.event == "queued":
            since_us[entry.request] = entry.arrived
        elif entry.request in since_us:
            highest_us = max(highest_us, now_us - since_us.pop(entry.request))
    return max([highest_us, *(now_us - arrived_us for arrived_us in since_us.values())]) / 1000


def events(entries: Iterable[Entry], source: str, source_of: SourceOf) -> Counter[str]:
    return Counter(entry.event for entry in entries if source_of(entry.request) == source)


@dataclass(slots=True)
class Order:
    """Counts of dispatches by band order, without the starvation guard's dispatches. A dispatch is inverted
    if a request of a higher band waits then."""

    inverted_turns: int = 0
    low_turns: int = 0  # dispatches so far of bands below the highest


def order(entries: Iterable[Entry]) -> Order:
    found = Order()
    backlog = Backlog()
    for entry in entries:
        if entry.event == "granted" and entry.by != GUARD:
            above = [count for each, count in backlog.of_priority.items() if each > entry.priority]
            found.inverted_turns += any(above)
            found.low_turns += bool(above)
        backlog.apply(entry)
    return found
