"""The figures of each kind of run, read from its decision log. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from bench.fairness.scenarios import TOKENS, WEIGHTS, source_of
from picker_tools.audit import measures
from picker_tools.audit.log import Entry

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
        return measures.jain(self.shares.values())

    @property
    def min_by_max(self) -> float:
        return measures.min_by_max(self.shares.values())

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
    order: measures.Order
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
        return measures.min_by_max(self.served.get(name, 0.0) for name in TOKENS)

    @property
    def estimated_min_by_max(self) -> float:
        """Of the estimates: what equal charges would have left equal, had nothing been corrected."""
        return measures.min_by_max(self.estimated.get(name, 0.0) for name in TOKENS)


def weights(run: Run, entries: Sequence[Entry]) -> Weights:
    window = measures.window(entries, WEIGHTS.keys(), source_of)
    gaps = measures.gaps(entries)
    return Weights(
        run,
        measures.normalised(window.served, WEIGHTS),
        window.grants,
        len(gaps),
        sum(gap.violated for gap in gaps),
        max((gap.widest / gap.bound for gap in gaps), default=0.0),
    )


def split(run: Run, entries: Sequence[Entry]) -> Split:
    served = measures.window(entries, _UNSPLIT, source_of).served
    return Split(run, served["split"] / sum(served.values()), WEIGHTS["split"] / sum(WEIGHTS.values()))


def trickle(run: Run, entries: Sequence[Entry]) -> Trickle:
    found, bulk = (
        measures.waits_ms(entries, "trickle", source_of),
        measures.waits_ms(entries, "bulk", source_of),
    )
    gaps = measures.gaps(entries)
    ends = [measures.events(entries, name, source_of) for name in ("trickle", "bulk")]
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
    low, high = measures.events(entries, "low", source_of), measures.events(entries, "high", source_of)
    ttl_ms = ttl_s * 1000
    return Starvation(
        run,
        guard_share,
        (low["queued"] + low["bypassed"]) / (low["granted"] + high["granted"]),
        low["granted"] + low["bypassed"],
        low["expired"],
        measures.highest_wait_ms(entries, "low", source_of) / ttl_ms,
        measures.highest_wait_ms(entries, "high", source_of) / ttl_ms,
    )


def bands(run: Run, entries: Sequence[Entry]) -> Bands:
    names = ("critical", "default", "sheddable")
    waits = {name: measures.waits_ms(entries, name, source_of) for name in names}
    return Bands(run, measures.order(entries), {name: mean(each) for name, each in waits.items()})


def tokens(run: Run, entries: Sequence[Entry]) -> Tokens:
    def real(entry: Entry) -> int:
        return TOKENS[source_of(entry.request)]

    guesses = [entry.cost / real(entry) for entry in entries if entry.event == "granted"]
    served = measures.window(entries, TOKENS.keys(), source_of, real).served
    estimated = measures.window(entries, TOKENS.keys(), source_of).served
    return Tokens(run, dict(served), dict(estimated), min(guesses), max(guesses))
