"""What is read off the log of each kind of run. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from bench.fairness import measure
from bench.fairness.job import source_of
from bench.fairness.log import Entry
from bench.fairness.scenarios import TOKENS, WEIGHTS

_UNSPLIT = WEIGHTS.keys() - {"split"}


@dataclass(frozen=True, slots=True)
class Run:
    """Which run. `separate`: the control, one queue a replica."""

    replicas: int
    seed: int
    separate: bool = False


@dataclass(frozen=True, slots=True)
class Weights:
    """`shares` are of weight-normalised service, 1 a fair one; `widest` is the largest gap by its bound."""

    run: Run
    shares: Mapping[str, float]
    dispatches: int
    intervals: int
    violations: int
    widest: float

    @property
    def jain(self) -> float:
        return measure.jain(self.shares.values())

    @property
    def min_by_max(self) -> float:
        return measure.min_by_max(self.shares.values())

    @property
    def split_gain(self) -> float:
        """Service of the flow with 50 workload ids, by that of the flow of the same weight with one."""
        return self.shares["split"] / self.shares["one"] if self.shares["one"] else float("inf")

    def deviation(self, alone: "Weights") -> float:
        """The largest difference from another run: of Jain's index, of min/max, of any flow's share."""
        pairs = [(self.jain, alone.jain), (self.min_by_max, alone.min_by_max)]
        pairs += [(self.shares[name], alone.shares[name]) for name in self.shares]
        return max(abs(mine - other) / other if other else float("inf") for mine, other in pairs)


@dataclass(frozen=True, slots=True)
class Split:
    """`taken` is the fourth flow's part of all service, `due` what its weight entitles it to."""

    run: Run
    taken: float
    due: float


@dataclass(frozen=True, slots=True)
class Trickle:
    """`overload` is how many requests arrived for each that was dispatched."""

    run: Run
    trickle_ms: float
    bulk_ms: float
    served: int
    overload: float
    intervals: int
    violations: int

    @property
    def ratio(self) -> float:
        return self.trickle_ms / self.bulk_ms if self.bulk_ms else float("inf")


@dataclass(frozen=True, slots=True)
class Starvation:
    """Of the criticality-1 workload: `demand` is arrivals by all dispatches. Waits are parts of the TTL."""

    run: Run
    guard_share: float
    demand: float
    served: int
    expired: int
    highest: float
    others_highest: float


@dataclass(frozen=True, slots=True)
class Bands:
    run: Run
    order: measure.Order
    wait_ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Tokens:
    """Real and estimated tokens of each flow's dispatched requests, and how far estimates were off."""

    run: Run
    served: Mapping[str, float]
    estimated: Mapping[str, float]
    lowest_guess: float
    highest_guess: float

    @property
    def min_by_max(self) -> float:
        return measure.min_by_max(self.served.get(name, 0.0) for name in TOKENS)

    @property
    def estimated_min_by_max(self) -> float:
        """Of the estimates: what equal charges would have left equal, had nothing been corrected."""
        return measure.min_by_max(self.estimated.get(name, 0.0) for name in TOKENS)


def weights(run: Run, entries: Sequence[Entry]) -> Weights:
    window = measure.window(entries, WEIGHTS.keys())
    gaps = measure.gaps(entries)
    return Weights(
        run,
        measure.normalised(window.served, WEIGHTS),
        window.grants,
        len(gaps),
        sum(gap.violated for gap in gaps),
        max((gap.widest / gap.bound for gap in gaps), default=0.0),
    )


def split(run: Run, entries: Sequence[Entry]) -> Split:
    served = measure.window(entries, _UNSPLIT).served
    return Split(run, served["split"] / sum(served.values()), WEIGHTS["split"] / sum(WEIGHTS.values()))


def trickle(run: Run, entries: Sequence[Entry]) -> Trickle:
    found, bulk = measure.waits_ms(entries, "trickle"), measure.waits_ms(entries, "bulk")
    gaps = measure.gaps(entries)
    ends = [measure.events(entries, name) for name in ("trickle", "bulk")]
    arrived = sum(each[event] for each in ends for event in ("queued", "bypassed", "refused"))
    return Trickle(
        run,
        mean(found),
        mean(bulk),
        len(found),
        arrived / (len(found) + len(bulk)),
        len(gaps),
        sum(gap.violated for gap in gaps),
    )


def starvation(run: Run, entries: Sequence[Entry], ttl_s: float, guard_share: float) -> Starvation:
    low, high = measure.events(entries, "low"), measure.events(entries, "high")
    ttl_ms = ttl_s * 1000
    return Starvation(
        run,
        guard_share,
        (low["queued"] + low["bypassed"]) / (low["granted"] + high["granted"]),
        low["granted"] + low["bypassed"],
        low["expired"],
        measure.highest_wait_ms(entries, "low") / ttl_ms,
        measure.highest_wait_ms(entries, "high") / ttl_ms,
    )


def bands(run: Run, entries: Sequence[Entry]) -> Bands:
    names = ("critical", "default", "sheddable")
    waits = {name: measure.waits_ms(entries, name) for name in names}
    return Bands(run, measure.order(entries), {name: mean(each) for name, each in waits.items()})


def tokens(run: Run, entries: Sequence[Entry]) -> Tokens:
    def real(entry: Entry) -> int:
        return TOKENS[source_of(entry.request)]

    guesses = [entry.cost / real(entry) for entry in entries if entry.event == "granted"]
    served = measure.window(entries, TOKENS.keys(), real).served
    estimated = measure.window(entries, TOKENS.keys()).served
    return Tokens(run, dict(served), dict(estimated), min(guesses), max(guesses))
