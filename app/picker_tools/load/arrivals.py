"""When requests come: Poisson arrivals whose rate may change in steps. Pure, seeded.

The load is open: a moment of arrival depends on the seed alone, never on how the fleet answers, so that a
slow fleet cannot slow what is asked of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from random import Random

from picker_tools.load.scenario import Source, Wave


@dataclass(frozen=True, slots=True)
class Arrival:
    """Request (or conversation) `number` of the source at place `source`; `at_s` since the load began."""

    at_s: float
    source: int
    number: int


def arrivals(
    sources: Sequence[Source], rates_per_s: Sequence[float], *, duration_s: float, most: int, seed: int
) -> list[Arrival]:
    """All arrivals before `duration_s` in order, the first `most` of them. `rates_per_s` are
    those outside a wave."""
    each = [
        _of(place, source, rate, duration_s, Random(f"{seed}/{source.name}"))
        for place, (source, rate) in enumerate(zip(sources, rates_per_s, strict=True))
    ]
    return list(islice(merge(*each, key=lambda arrival: arrival.at_s), most))


def _of(
    place: int, source: Source, rate_per_s: float, duration_s: float, chance: Random
) -> Iterator[Arrival]:
    at_s, number = 0.0, 0
    while rate_per_s > 0:
        at_s = _next(at_s, rate_per_s, source.wave, chance.expovariate(1.0))
        if at_s >= duration_s:
            return
        yield Arrival(at_s, place, number)
        number += 1


def _next(at_s: float, rate_per_s: float, wave: Wave | None, need: float) -> float:
    """The moment by which `need` more arrivals were to be expected after `at_s`.

    With `need` exponential of mean 1 these moments are a Poisson process, whatever the rate does between.
    """
    if wave is None:
        return at_s + need / rate_per_s
    # Counted in half periods: a moment rounded to just before an edge must not be taken for the half before.
    period, into_s = divmod(at_s, wave.period_s)
    high = into_s < wave.high_s
    while True:
        rate = rate_per_s * (wave.factor if high else 1.0)
        edge_s = period * wave.period_s + (wave.high_s if high else wave.period_s)
        room = rate * (edge_s - at_s)
        if need <= room:
            return at_s + need / rate
        need -= room
        at_s = edge_s
        period, high = (period, False) if high else (period + 1, True)
