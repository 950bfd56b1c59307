"""All runs one after the other, and the claims that they must meet; the worst run decides."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from bench.fairness import readings, scenarios
from bench.fairness.fleet import Fleet
from bench.fairness.readings import Bands, Run, Split, Starvation, Tokens, Trickle, Weights
from picker_tools.audit.log import Entry

GUARD_SHARE = 0.1  # the default


@dataclass(frozen=True, slots=True)
class Plan:
    """How many replicas, which seeds, and how many dispatches of each scenario."""

    replicas: tuple[int, ...]
    seeds: tuple[int, ...]
    ttl_s: float
    weights: int
    trickle: int
    starvation: int
    bands: int
    tokens: int


FULL = Plan((1, 2, 4, 8), (1, 2, 3), 3.0, 5000, 2000, 2600, 2000, 12_000)
QUICK = Plan((1, 4), (1,), 1.0, 2000, 600, 1000, 1000, 8000)


@dataclass(slots=True)
class Results:
    weights: list[Weights] = field(default_factory=list)
    control: list[Weights] = field(default_factory=list)
    split: list[Split] = field(default_factory=list)
    trickle: list[Trickle] = field(default_factory=list)
    guarded: list[Starvation] = field(default_factory=list)
    unguarded: list[Starvation] = field(default_factory=list)
    bands: list[Bands] = field(default_factory=list)
    tokens: list[Tokens] = field(default_factory=list)


async def measured(plan: Plan, fleet: Fleet, log: Callable[[str], None]) -> Results:
    """Make all runs. Raises RunFailed as `Fleet.run` does."""
    results = Results()
    for run in _runs(plan):
        for separate, into in ((False, results.weights), (True, results.control)):
            of = Run(run.replicas, run.seed, separate)
            entries = await fleet.run(
                scenarios.weights(plan.weights), of.seed, of.replicas, separate=separate
            )
            into.append(readings.weights(of, entries))
        fleet_run, control = results.weights[-1], results.control[-1]
        log(f"{_name(run)}: min/max {fleet_run.min_by_max:.4f}, one queue a replica {control.min_by_max:.4f}")
    run = Run(plan.replicas[-1], plan.seeds[0])
    entries = await fleet.run(scenarios.split_flows(plan.weights), run.seed, run.replicas, separate=False)
    results.split.append(readings.split(run, entries))
    for run in _runs(plan):
        await _rest(plan, run, fleet, results)
        log(
            f"{_name(run)}: trickle {results.trickle[-1].ratio:.4f}, expired {results.guarded[-1].expired}"
            f" (unguarded {results.unguarded[-1].expired}), inversions"
            f" {results.bands[-1].order.inverted_turns}, tokens {results.tokens[-1].min_by_max:.4f}"
        )
    return results


async def _rest(plan: Plan, run: Run, fleet: Fleet, results: Results) -> None:
    async def log_of(scenario: scenarios.Scenario) -> list[Entry]:
        return await fleet.run(scenario, run.seed, run.replicas, separate=False)

    results.trickle.append(readings.trickle(run, await log_of(scenarios.trickle(plan.trickle))))
    for share, into in ((GUARD_SHARE, results.guarded), (0.0, results.unguarded)):
        entries = await log_of(scenarios.starvation(plan.starvation, plan.ttl_s, share))
        into.append(readings.starvation(run, entries, plan.ttl_s, share))
    results.bands.append(readings.bands(run, await log_of(scenarios.bands(plan.bands, 2 * plan.ttl_s / 3))))
    results.tokens.append(readings.tokens(run, await log_of(scenarios.tokens(plan.tokens))))


def _runs(plan: Plan) -> Iterator[Run]:
    return (Run(replicas, seed) for replicas in plan.replicas for seed in plan.seeds)


def _name(run: Run) -> str:
    return f"{run.replicas} replica{'s' if run.replicas > 1 else ''}, seed {run.seed}"


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
