"""How many requests a second each source sends: its load, by what the fleet can serve. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from picker_tools.load.scenario import Scenario, Source


@dataclass(frozen=True, slots=True)
class Pace:
    """`rates_per_s` are each source's arrivals outside its wave. `capacity_per_s` is load 1."""

    rates_per_s: tuple[float, ...]
    capacity_per_s: float


def pace(scenario: Scenario, lower: float, answers_s: Sequence[float]) -> Pace:
    """For a fleet that dispatches while its stock is below `lower`, where an answer takes each source
    `answers_s` seconds. Dispatch stops with the request that reaches the bound: one more than fit below it.
    """
    each = [_alone(scenario, source, lower) / answer_s for source, answer_s in _pairs(scenario, answers_s)]
    return _of(scenario, each)


def fixed(scenario: Scenario, rate_per_s: float, answers_s: Sequence[float]) -> Pace:
    """`rate_per_s` requests in all, mixed as they would be in a fleet of any size."""
    each = [_alone(scenario, source, 1e6) / answer_s for source, answer_s in _pairs(scenario, answers_s)]
    total = sum(source.load * rate for source, rate in zip(scenario.sources, each, strict=True))
    return _of(scenario, [rate * rate_per_s / total for rate in each])


def _of(scenario: Scenario, alone_per_s: Sequence[float]) -> Pace:
    rates = [source.load * rate for source, rate in zip(scenario.sources, alone_per_s, strict=True)]
    capacity = sum(rates) / sum(source.load for source in scenario.sources)
    arrivals = [
        rate / (source.talk.turns if source.talk else 1)
        for source, rate in zip(scenario.sources, rates, strict=True)
    ]
    return Pace(tuple(arrivals), capacity)


def _alone(scenario: Scenario, source: Source, lower: float) -> float:
    """Requests of `source` in flight if it had the fleet for itself."""
    return lower / source.cost_tokens if scenario.in_tokens else math.ceil(lower)


def _pairs(scenario: Scenario, answers_s: Sequence[float]) -> Iterable[tuple[Source, float]]:
    return zip(scenario.sources, answers_s, strict=True)
