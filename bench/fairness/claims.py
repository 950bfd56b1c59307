"""What is claimed, measured, and whether it holds. The worst of all runs decides."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from bench.fairness.readings import Weights
from bench.fairness.suite import GUARD_SHARE, Results

_JAIN = 0.99
_MIN_BY_MAX = 0.95
_AS_ALONE = 0.01
_SPLIT_GAIN = 1.01
_TRICKLE = 0.05


@dataclass(frozen=True, slots=True)
class Claim:
    """`measured` must be at least, at most, below or exactly `limit`."""

    what: str
    measured: float
    sign: Literal["≥", "≤", "<", ">", "="]
    limit: float

    @property
    def met(self) -> bool:
        return {
            "≥": self.measured >= self.limit,
            "≤": self.measured <= self.limit,
            "<": self.measured < self.limit,
            ">": self.measured > self.limit,
            "=": self.measured == self.limit,
        }[self.sign]


def claims(results: Results) -> list[Claim]:
    return [*_of_weights(results), *_of_control(results), *_of_others(results)]


def _of_weights(results: Results) -> Iterator[Claim]:
    fleet = results.weights
    intervals = sum(each.intervals for each in fleet)
    violations = sum(each.violations for each in fleet)
    yield Claim(f"weights 1:2:4:1: violations of G2 in {intervals} intervals", violations, "=", 0)
    yield Claim("weights 1:2:4:1: Jain's index, lowest", min(each.jain for each in fleet), "≥", _JAIN)
    lowest = min(each.min_by_max for each in fleet)
    yield Claim("weights 1:2:4:1: min/max of service, lowest", lowest, "≥", _MIN_BY_MAX)
    alone = {each.run.seed: each for each in fleet if each.run.replicas == 1}
    apart = max(each.deviation(alone[each.run.seed]) for each in fleet)
    what = "weights 1:2:4:1: difference from one replica (Jain's index, min/max, any flow), largest"
    yield Claim(what, apart, "≤", _AS_ALONE)
    gain = max(each.split_gain for each in fleet)
    yield Claim("50 workload ids in place of one: service gained, highest", gain, "≤", _SPLIT_GAIN)


def _of_control(results: Results) -> Iterator[Claim]:
    control = _split_queues(results)
    highest = max(each.min_by_max for each in control)
    yield Claim("control, one queue a replica: min/max, highest", highest, "<", _MIN_BY_MAX)
    yield Claim("control: Jain's index, highest", max(each.jain for each in control), "<", _JAIN)
    fewest = min(each.violations for each in control)
    yield Claim("control: violations of G2 in a run, fewest", fewest, ">", 0)


def _split_queues(results: Results) -> list[Weights]:
    """With one replica the control is the fleet itself."""
    return [each for each in results.control if each.run.replicas > 1]


def _of_others(results: Results) -> Iterator[Claim]:
    trickle = results.trickle
    yield Claim("trickle: its mean wait by the bulk's, highest", max(e.ratio for e in trickle), "≤", _TRICKLE)
    overload = min(each.overload for each in trickle)
    yield Claim("trickle: arrivals by dispatches, lowest", overload, "≥", 1.9)
    intervals, violations = (sum(getattr(e, name) for e in trickle) for name in ("intervals", "violations"))
    yield Claim(f"trickle: violations of G2 in {intervals} intervals", violations, "=", 0)
    guarded, unguarded = results.guarded, results.unguarded
    yield Claim(
        "criticality 1: demand by dispatches, highest", max(e.demand for e in guarded), "<", GUARD_SHARE
    )
    yield Claim("criticality 1, guarded: expired", sum(e.expired for e in guarded), "=", 0)
    yield Claim("criticality 1, guarded: highest wait by TTL", max(e.highest for e in guarded), "<", 1)
    fewest = min(each.expired for each in unguarded)
    yield Claim("criticality 1, control without guard: expired in a run, fewest", fewest, ">", 0)
    turns = sum(each.order.low_turns for each in results.bands)
    inverted = sum(each.order.inverted_turns for each in results.bands)
    yield Claim(f"strict bands: inversions in {turns} turns below Critical", inverted, "=", 0)
    lowest = min(each.min_by_max for each in results.tokens)
    yield Claim("tokens, 100 beside 10 000: min/max of real tokens, lowest", lowest, "≥", _MIN_BY_MAX)
