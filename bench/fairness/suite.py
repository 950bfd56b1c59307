"""All runs, one after the other."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench.fairness import readings, scenarios
from bench.fairness.fleet import Fleet
from bench.fairness.log import Entry
from bench.fairness.readings import Bands, Run, Split, Starvation, Tokens, Trickle, Weights

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


async def measured(plan: Plan, fleet: Fleet, tell: Callable[[str], None]) -> Results:
    """Raises RunFailed as `Fleet.run` does."""
    results = Results()
    for run in _runs(plan):
        for separate, into in ((False, results.weights), (True, results.control)):
            of = Run(run.replicas, run.seed, separate)
            entries = await fleet.run(
                scenarios.weights(plan.weights), of.seed, of.replicas, separate=separate
            )
            into.append(readings.weights(of, entries))
        told, control = results.weights[-1], results.control[-1]
        tell(f"{_name(run)}: min/max {told.min_by_max:.4f}, one queue a replica {control.min_by_max:.4f}")
    run = Run(plan.replicas[-1], plan.seeds[0])
    entries = await fleet.run(scenarios.split_flows(plan.weights), run.seed, run.replicas, separate=False)
    results.split.append(readings.split(run, entries))
    for run in _runs(plan):
        await _rest(plan, run, fleet, results)
        tell(
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
