"""What a decision log says of fairness. Pure."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from bench.fairness.job import source_of
from bench.fairness.log import Entry, Lane, Waiting

_ROUNDING = 1e-6  # sums of shares, not shares, are compared
_BANDS = 3


@dataclass(frozen=True, slots=True)
class Gap:
    """A longest interval in which two flows of a band were both backlogged.

    `widest` is the largest difference of weight-normalised service over any interval within it, `bound` what
    G2 allows: c_f/w_f + c_g/w_g.
    """

    flows: tuple[str, str]
    widest: float
    bound: float

    @property
    def violated(self) -> bool:
        return self.widest > self.bound + _ROUNDING


@dataclass(slots=True)
class _Pair:
    """Two flows while both are backlogged: how far apart their service has been, from an arbitrary zero."""

    apart: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def move(self, by: float) -> None:
        self.apart += by
        self.low, self.high = min(self.low, self.apart), max(self.high, self.apart)


def gaps(entries: Sequence[Entry]) -> list[Gap]:
    """Every doubly backlogged interval, by the dispatches in it (Goyal et al., SFQ, theorem 1)."""
    largest: dict[Lane, float] = defaultdict(float)
    for entry in entries:
        if entry.event == "granted":
            largest[entry.lane] = max(largest[entry.lane], entry.cost / entry.weight)
    found: list[Gap] = []
    waiting = Waiting()
    pairs: dict[tuple[Lane, Lane], _Pair] = {}

    def close(which: Iterable[tuple[Lane, Lane]]) -> None:
        for pair in which:
            ended = pairs.pop(pair)
            one, other = pair
            found.append(Gap((one[1], other[1]), ended.high - ended.low, largest[one] + largest[other]))

    for entry in entries:
        lane = entry.lane
        if entry.event == "granted":
            share = entry.cost / entry.weight
            for (one, other), pair in pairs.items():
                if lane in (one, other):
                    pair.move(share if lane == one else -share)
        change = waiting.take(entry)
        length = waiting.of_lane[lane]
        if change == -1 and length == 0:
            close([pair for pair in pairs if lane in pair])
        elif change == 1 and length == 1:
            for other, others in waiting.of_lane.items():
                if others > 0 and other != lane and other[0] == lane[0]:
                    pairs[min(lane, other), max(lane, other)] = _Pair()
    close(list(pairs))
    return found


@dataclass(slots=True)
class Window:
    """Dispatches while all of the asked-for flows were backlogged. `served` is by source."""

    grants: int = 0
    served: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def window(
    entries: Iterable[Entry], flows: Set[str], size: Callable[[Entry], float] = lambda entry: entry.cost
) -> Window:
    """The one with the most dispatches. `size` is what serving a request counts for."""
    best, now = Window(), Window()
    waiting = Waiting()
    backlogged: set[str] = set()
    for entry in entries:
        all_wait = len(backlogged) == len(flows)
        if entry.event == "granted" and all_wait:
            now.grants += 1
            now.served[source_of(entry.request)] += size(entry)
        waiting.take(entry)
        if entry.flow in flows:
            (backlogged.add if waiting.of_lane[entry.lane] else backlogged.discard)(entry.flow)
        if all_wait and len(backlogged) < len(flows):
            best, now = max(best, now, key=lambda each: each.grants), Window()
    return max(best, now, key=lambda each: each.grants)


def normalised(served: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Service by weight, as a part of what each would have if all had the same: 1 is a fair share."""
    by_weight = {name: served.get(name, 0.0) / weight for name, weight in weights.items()}
    mean = sum(by_weight.values()) / len(by_weight)
    return {name: each / mean if mean else 0.0 for name, each in by_weight.items()}


def jain(shares: Iterable[float]) -> float:
    """Jain's index: 1 if all are equal, 1/n if one has all."""
    found = list(shares)
    squares = sum(each * each for each in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else 0.0


def min_by_max(shares: Iterable[float]) -> float:
    found = list(shares)
    return min(found) / max(found) if max(found) > 0 else 0.0


def waits_ms(entries: Iterable[Entry], source: str) -> list[float]:
    """How long each served request of a source waited; 0 for those that found room."""
    return [
        entry.wait_ms if entry.event == "granted" else 0.0
        for entry in entries
        if entry.event in ("granted", "bypassed") and source_of(entry.request) == source
    ]


def highest_wait_ms(entries: Iterable[Entry], source: str) -> float:
    """The longest wait of a source's requests so far, whether it ended in service or has not ended."""
    since_us: dict[str, int] = {}
    highest_us = now_us = 0
    for entry in entries:
        now_us = entry.time_us
        if source_of(entry.request) != source:
            continue
        if entry.event == "queued":
            since_us[entry.request] = entry.arrived_us
        elif entry.request in since_us:
            highest_us = max(highest_us, now_us - since_us.pop(entry.request))
    return max([highest_us, *(now_us - arrived_us for arrived_us in since_us.values())]) / 1000


def events(entries: Iterable[Entry], source: str) -> Counter[str]:
    return Counter(entry.event for entry in entries if source_of(entry.request) == source)


@dataclass(slots=True)
class Order:
    """Dispatches across bands. One is inverted if a request of a higher band waited at that moment."""

    turns: int = 0
    inverted_turns: int = 0
    guards: int = 0
    inverted_guards: int = 0
    low_turns: int = 0  # below the highest band, so that they could have been inverted


def order(entries: Iterable[Entry]) -> Order:
    found = Order()
    waiting = Waiting()
    for entry in entries:
        if entry.event == "granted":
            inverted = any(waiting.of_band[band] for band in range(min(entry.band, _BANDS)))
            if entry.by == "guard":
                found.guards += 1
                found.inverted_guards += inverted
            else:
                found.turns += 1
                found.inverted_turns += inverted
                found.low_turns += entry.band > 0
        waiting.take(entry)
    return found
