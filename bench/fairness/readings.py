"""Computes the fairness figures of a scenario's run from the run's decision log. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from bench.fairness import measures
from bench.fairness.scenarios import TOKENS, WEIGHTS, source_of
from picker_tools.audit.log import Entry


@dataclass(frozen=True, slots=True)
class Reading:
    """Figures of a run with `replicas` replicas. `seed` determines costs, service times and arrivals."""

    replicas: int
    seed: int


@dataclass(frozen=True, slots=True)
class Intervals(Reading):
    """`gaps`: for each interval in which two flows were backlogged, the gap between their service."""

    gaps: Sequence[measures.Gap]

    @property
    def intervals(self) -> int:
        return len(self.gaps)

    @property
    def violations(self) -> int:
        return sum(gap.violated for gap in self.gaps)


@dataclass(frozen=True, slots=True)
class Weights(Intervals):
    """Figures of the scenario `weights`. `shares`: weight-normalised service by flow; 1 is a fair share."""

    shares: Mapping[str, float]

    @property
    def jain(self) -> float:
        return measures.jain(self.shares.values())

    @property
    def min_by_max(self) -> float:
        return measures.min_by_max(self.shares.values())

    @property
    def split_gain(self) -> float:
        """The service of the flow with 50 workload ids, divided by an equal-weight flow's with one id."""
        return self.shares["split"] / self.shares["one"] if self.shares["one"] else float("inf")

    def deviation(self, alone: "Weights") -> float:
        """The largest relative difference from the run `alone` in Jain's index, min/max or a flow's share."""
        pairs = [(self.jain, alone.jain), (self.min_by_max, alone.min_by_max)]
        pairs += [(self.shares[name], alone.shares[name]) for name in self.shares]
        return max(abs(mine - other) / other if other else float("inf") for mine, other in pairs)


@dataclass(frozen=True, slots=True)
class Trickle(Intervals):
    """Mean waits in a run of the scenario `trickle`. `overload`: arrived requests / dispatched requests."""

    trickle_ms: float
    bulk_ms: float
    overload: float

    @property
    def ratio(self) -> float:
        return self.trickle_ms / self.bulk_ms if self.bulk_ms else float("inf")


@dataclass(frozen=True, slots=True)
class Starvation(Reading):
    """A criticality-1 workload. `demand`: arrivals / all dispatches; `highest`: its longest wait / TTL."""

    demand: float
    expired: int
    highest: float


@dataclass(frozen=True, slots=True)
class Bands(Reading):
    order: measures.Order


@dataclass(frozen=True, slots=True)
class Tokens(Reading):
    """`served`: the real tokens of each flow's dispatched requests."""

    served: Mapping[str, float]

    @property
    def min_by_max(self) -> float:
        return measures.min_by_max(self.served.get(name, 0.0) for name in TOKENS)


def weights(replicas: int, seed: int, entries: Sequence[Entry]) -> Weights:
    window = measures.window(entries, WEIGHTS.keys(), source_of)
    shares = measures.normalised(window.served, WEIGHTS)
    return Weights(replicas, seed, measures.gaps(entries), shares)


def split_part(entries: Sequence[Entry]) -> float:
    """The share of all flows' service that the client with 50 fairness ids gets."""
    served = measures.window(entries, WEIGHTS.keys() - {"split"}, source_of).served
    return served["split"] / sum(served.values())


def trickle(replicas: int, seed: int, entries: Sequence[Entry]) -> Trickle:
    found, bulk = (measures.waits_ms(entries, name, source_of) for name in ("trickle", "bulk"))
    arrived = sum(entry.event in ("queued", "bypassed", "refused") for entry in entries)
    overload = arrived / (len(found) + len(bulk))
    return Trickle(replicas, seed, measures.gaps(entries), mean(found), mean(bulk), overload)


def starvation(replicas: int, seed: int, entries: Sequence[Entry], ttl_s: float) -> Starvation:
    low, high = (measures.events(entries, name, source_of) for name in ("low", "high"))
    highest = measures.highest_wait_ms(entries, "low", source_of) / ttl_s / 1000
    demand = (low["queued"] + low["bypassed"]) / (low["granted"] + high["granted"])
    return Starvation(replicas, seed, demand, low["expired"], highest)


def bands(replicas: int, seed: int, entries: Sequence[Entry]) -> Bands:
    return Bands(replicas, seed, measures.order(entries))


def tokens(replicas: int, seed: int, entries: Sequence[Entry]) -> Tokens:
    def real(entry: Entry) -> int:
        return TOKENS[source_of(entry.request)]

    return Tokens(replicas, seed, measures.window(entries, TOKENS.keys(), source_of, real).served)
