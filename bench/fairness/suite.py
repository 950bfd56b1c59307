"""Runs all fairness scenarios, and checks each claim against the worst run."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from bench.fairness import readings, scenarios
from bench.fairness.fleet import Fleet
from bench.fairness.readings import Bands, Reading, Starvation, Tokens, Trickle, Weights
from picker_tools.audit.log import Entry

GUARD_SHARE = 0.1  # default of `guard_share`


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan: numbers of replicas, seeds, and how many dispatches each scenario makes."""

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
    """Figures of all fairness runs. `split_part`: a client's share of service if it has 50 fairness ids."""

    weights: list[Weights] = field(default_factory=list)
    control: list[Weights] = field(default_factory=list)
    trickle: list[Trickle] = field(default_factory=list)
    guarded: list[Starvation] = field(default_factory=list)
    unguarded: list[Starvation] = field(default_factory=list)
    bands: list[Bands] = field(default_factory=list)
    tokens: list[Tokens] = field(default_factory=list)
    split_part: float = 0.0


async def measured(plan: Plan, fleet: Fleet) -> Results:
    """Run every scenario of `plan`. Raises RunFailed if a run fails."""
    results = Results()
    for replicas, seed in product(plan.replicas, plan.seeds):
        await _take(plan, fleet, results, replicas, seed)
        weights, control = results.weights[-1], results.control[-1]
        print(
            f"{replicas} replicas, seed {seed}: min/max of service {weights.min_by_max:.4f}, separate queues"
            f" {control.min_by_max:.4f}; trickle's wait / bulk's {results.trickle[-1].ratio:.4f}; expired"
            f" {results.guarded[-1].expired}, unguarded {results.unguarded[-1].expired}; band inversions"
            f" {results.bands[-1].order.inverted_turns}; tokens min/max {results.tokens[-1].min_by_max:.4f}",
            flush=True,
        )
    split = scenarios.split_flows(plan.weights)
    results.split_part = readings.split_part(await fleet.run(split, plan.seeds[0], plan.replicas[-1]))
    return results


async def _take(plan: Plan, fleet: Fleet, results: Results, replicas: int, seed: int) -> None:
    """Run each scenario once, and add its figures to `results`."""

    async def log_of(scenario: scenarios.Scenario, *, separate: bool = False) -> list[Entry]:
        return await fleet.run(scenario, seed, replicas, separate=separate)

    for separate, weights in ((False, results.weights), (True, results.control)):
        entries = await log_of(scenarios.weights(plan.weights), separate=separate)
        weights.append(readings.weights(replicas, seed, entries))
    entries = await log_of(scenarios.trickle(plan.trickle))
    results.trickle.append(readings.trickle(replicas, seed, entries))
    for share, starved in ((GUARD_SHARE, results.guarded), (0.0, results.unguarded)):
        entries = await log_of(scenarios.starvation(plan.starvation, plan.ttl_s, share))
        starved.append(readings.starvation(replicas, seed, entries, plan.ttl_s))
    entries = await log_of(scenarios.bands(plan.bands, 2 * plan.ttl_s / 3))
    results.bands.append(readings.bands(replicas, seed, entries))
    results.tokens.append(readings.tokens(replicas, seed, await log_of(scenarios.tokens(plan.tokens))))


_JAIN = 0.99
_MIN_BY_MAX = 0.95
_COMPARE = {"≥": operator.ge, "≤": operator.le, "<": operator.lt, ">": operator.gt, "=": operator.eq}


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim about a figure: `measured`, compared with `limit` by `sign` (a key of _COMPARE)."""

    what: str
    measured: float
    sign: str
    limit: float

    @property
    def met(self) -> bool:
        return bool(_COMPARE[self.sign](self.measured, self.limit))


def _all(runs: Sequence[Reading], name: str) -> list[float]:
    return [getattr(run, name) for run in runs]


def claims(results: Results) -> list[Claim]:
    weights, trickle, guarded = results.weights, results.trickle, results.guarded
    # With one replica the control equals the fleet, so leave such runs out.
    control = [each for each in results.control if each.replicas > 1]
    alone = {each.seed: each for each in weights if each.replicas == 1}
    low_turns, inverted = (
        sum(getattr(each.order, name) for each in results.bands) for name in ("low_turns", "inverted_turns")
    )
    found = (
        (f"weights 1:2:4:1: violations of G2 in {sum(_all(weights, 'intervals'))} intervals",
         sum(_all(weights, "violations")), "=", 0),
        ("weights 1:2:4:1: Jain's index, lowest", min(_all(weights, "jain")), "≥", _JAIN),
        ("weights 1:2:4:1: min/max of service, lowest", min(_all(weights, "min_by_max")), "≥", _MIN_BY_MAX),
        ("weights 1:2:4:1: difference from one replica (Jain's index, min/max, any flow), largest",
         max(each.deviation(alone[each.seed]) for each in weights), "≤", 0.01),
        ("50 workload ids in place of one: service gained by the flow, highest",
         max(_all(weights, "split_gain")), "≤", 1.01),
        ("control, one queue a replica: min/max, highest",
         max(_all(control, "min_by_max")), "<", _MIN_BY_MAX),
        ("control: Jain's index, highest", max(_all(control, "jain")), "<", _JAIN),
        ("control: violations of G2 in a run, fewest", min(_all(control, "violations")), ">", 0),
        ("trickle: its mean wait / mean wait of the bulk, highest", max(_all(trickle, "ratio")), "≤", 0.05),
        ("trickle: arrivals / dispatches, lowest", min(_all(trickle, "overload")), "≥", 1.9),
        (f"trickle: violations of G2 in {sum(_all(trickle, 'intervals'))} intervals",
         sum(_all(trickle, "violations")), "=", 0),
        ("criticality 1: arrivals / all dispatches, highest", max(_all(guarded, "demand")), "<", GUARD_SHARE),
        ("criticality 1, guarded: expired requests", sum(_all(guarded, "expired")), "=", 0),
        ("criticality 1, guarded: longest wait / TTL", max(_all(guarded, "highest")), "<", 1),
        ("criticality 1, control without guard: expired requests in a run, fewest",
         min(_all(results.unguarded, "expired")), ">", 0),
        (f"strict bands: inversions in {low_turns} turns below Critical", inverted, "=", 0),
        ("tokens, 100 beside 10 000: min/max of real tokens, lowest",
         min(_all(results.tokens, "min_by_max")), "≥", _MIN_BY_MAX),
    )  # fmt: skip
    return [Claim(*each) for each in found]
