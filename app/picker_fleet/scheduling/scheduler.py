"""Ranks the endpoints for one request: filters, then weighted scorers. Pure; the script that reserves has
the last word, since only it knows the load of this moment (DESIGN, "Endpoints")."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from operator import mul
from typing import NamedTuple

from picker_fleet.scheduling.ask import PickAsk
from picker_fleet.scheduling.filters import sift
from picker_fleet.scheduling.scorers import IN_FLIGHT, SCORERS, STANDING, scorer_name
from picker_fleet.scheduling.signals import Signals

_FEW = 100  # sorting up to here is cheaper than a heap, which stays linear


class Candidate(NamedTuple):
    """An endpoint that may be picked. `score` in [0, 1] has every part; `base` lacks that of the load in
    flight, for whoever adds it from a fresher figure (`Scheduler.live_weight`).

    A tuple, since each pick makes several and a frozen dataclass takes three times as long to make.
    """

    address: str
    score: float
    base: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """What came of one ask: the `best` candidates, best first, and how it came to that.

    `kept` are all endpoints that passed the filters, with `totals` and, for each scorer in `parts`, its
    unweighted scores, in the same order. `excluded` says why the others did not pass; `waived` names the
    soft filters that would have left nobody. `live_weight` is what the bases of `best` lack.
    """

    best: tuple[Candidate, ...]
    kept: Sequence[Signals]
    totals: Sequence[float]
    parts: Mapping[str, Sequence[float]]
    weights: Mapping[str, float]
    excluded: Mapping[str, str]
    waived: tuple[str, ...]
    live_weight: float


class Scheduler:
    """Ranks under one set of weights (scorer name -> weight, from the configuration).

    Weights are normalised: totals stay in [0, 1]. Without any, all candidates are equal.

    Raises:
        ValueError: a name is no scorer's (the message lists the valid ones), or a weight is negative or
            not finite.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        for name, weight in weights.items():
            scorer_name(name)
            if not 0.0 <= weight < math.inf:
                raise ValueError(f"the weight of scorer {name} must be a number from zero up, not {weight}")
        whole = math.fsum(weights.values())
        self.weights: Mapping[str, float] = {
            name: float(weight) / whole for name, weight in weights.items() if weight > 0.0
        }
        self.live_weight = self.weights.get(IN_FLIGHT, 0.0)
        self._scorers = [(name, SCORERS[name]) for name in self.weights]
        self._seen: Sequence[Signals] = ()
        self._standing: dict[str, list[float]] = {}
        self._shares = tuple(self.weights.values())

    def rank(self, ask: PickAsk, endpoints: Sequence[Signals], *, most: int = 8) -> Ranking:
        """The `most` best endpoints for `ask`, ties in random order; none if no endpoint may be picked."""
        sifted = sift(ask, endpoints)
        kept = sifted.kept
        shares, chance = self._shares, ask.chance
        if kept != self._seen:
            # A replica learns of its endpoints ten times a second and picks more often than that.
            self._standing = {name: scorer(ask, kept) for name, scorer in self._scorers if name in STANDING}
            self._seen = kept
        standing = self._standing
        parts = {name: standing.get(name) or scorer(ask, kept) for name, scorer in self._scorers}
        totals = [0.0] * len(kept)
        if parts:
            totals = [sum(map(mul, shares, scores)) for scores in zip(*parts.values(), strict=True)]
        drawn = [(total, chance(), at) for at, total in enumerate(totals)]
        first = nlargest(most, drawn) if len(drawn) > _FEW else sorted(drawn, reverse=True)[:most]
        live, live_scores = self.live_weight, parts.get(IN_FLIGHT)
        best: list[Candidate] = []
        for total, _, at in first:
            score = total if total < 1.0 else 1.0  # rounding may carry a sum of parts just past it
            base = score if live_scores is None else total - live * live_scores[at]
            best.append(Candidate(kept[at].address, score, base if base > 0.0 else 0.0))
        return Ranking(
            tuple(best), kept, totals, parts, self.weights, sifted.excluded, sifted.waived, self.live_weight
        )
