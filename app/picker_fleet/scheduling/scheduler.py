"""Ranks the endpoints for one request: filters, then weighted scorers. Pure.

The script that reserves an endpoint makes the final choice, since only that script knows the live load.

A filter is a pure function. A filter returns for each endpoint a reason to exclude that endpoint, or None; if
the filter does not apply to the request, it returns a single None. Hard filters, that is, all but the soft
ones, always apply. A soft filter (listed in `SOFT_FILTERS`) is waived if it would leave no endpoint. Filters
run in the order of `FILTERS`; the first filter that rejects an endpoint gives the reason.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from types import MappingProxyType
from typing import NamedTuple, Protocol

from picker_fleet.domain.scheduling import IN_FLIGHT, use_of
from picker_fleet.scheduling.scorers import SCORERS, EndpointState, PickRequest

_SORT_LIMIT = 100  # up to this many endpoints a full sort is faster than `nlargest`

Reasons = list[str | None]


class Filter(Protocol):
    def __call__(self, pick: PickRequest, endpoints: Sequence[EndpointState], /) -> Reasons | None:
        """For each endpoint the reason to exclude it, or None; a single None keeps all."""


# A `Scorer`, or an extension, which returns None while it is suspended (scheduling/extension_calls.py).
AnyScorer = Callable[[PickRequest, Sequence[EndpointState]], Sequence[float] | None]


def subset(pick: PickRequest, endpoints: Sequence[EndpointState]) -> Reasons | None:
    """Keep only endpoints that the gateway's subset hint names."""
    wanted = pick.subset
    if wanted is None:
        return None
    return [None if endpoint.address in wanted else "not in the subset hint" for endpoint in endpoints]


def health(pick: PickRequest, endpoints: Sequence[EndpointState]) -> Reasons | None:
    """Keep only healthy endpoints: neither down nor ejected."""
    return [None if endpoint.healthy else "unhealthy" for endpoint in endpoints]


def drain(pick: PickRequest, endpoints: Sequence[EndpointState]) -> Reasons | None:
    """Keep only endpoints that take new requests."""
    return ["draining" if endpoint.draining else None for endpoint in endpoints]


def label(pick: PickRequest, endpoints: Sequence[EndpointState]) -> Reasons | None:
    """Keep only endpoints that have every label of the selector."""
    if not pick.selector:
        return None
    wanted = pick.selector.items()
    return [
        next((f"label {name} is not {value}" for name, value in wanted if labels.get(name) != value), None)
        for labels in [endpoint.labels for endpoint in endpoints]
    ]


def adapter(pick: PickRequest, endpoints: Sequence[EndpointState]) -> Reasons | None:
    """Keep only endpoints with the adapter loaded, a free slot for it, or an unknown number of slots."""
    wanted = pick.adapter
    if not wanted:
        return None
    full = f"no adapter slot free for {wanted}"
    return [
        None
        if endpoint.has_adapter_slot
        or endpoint.max_adapters is None
        or wanted in endpoint.active_adapters
        or wanted in endpoint.idle_adapters
        else full
        for endpoint in endpoints
    ]


FILTERS: Mapping[str, Filter] = {
    "subset": subset,
    "health": health,
    "drain": drain,
    "label": label,
    "adapter": adapter,
}
SOFT_FILTERS = frozenset({"adapter"})


@dataclass(frozen=True, slots=True)
class Filtered:
    """The result of the filters: the `eligible` endpoints in their original order, the `excluded` endpoints
    with reasons, and the soft filters that were `waived`."""

    eligible: list[EndpointState]
    excluded: dict[str, str]  # address -> reason
    waived: tuple[str, ...]


def apply_filters(
    pick: PickRequest, endpoints: Sequence[EndpointState], filters: Mapping[str, Filter] = FILTERS
) -> Filtered:
    """Separate the endpoints that may serve `pick` from the others."""
    eligible = list(endpoints)
    excluded: dict[str, str] = {}
    waived: list[str] = []
    for name, reasons_against in filters.items():
        reasons = reasons_against(pick, eligible)
        if reasons is None or not any(reasons):
            continue
        if name in SOFT_FILTERS and all(reasons):
            waived.append(name)
            continue
        passed = []
        for endpoint, reason in zip(eligible, reasons, strict=True):
            if reason:
                excluded[endpoint.address] = reason
            else:
                passed.append(endpoint)
        eligible = passed
    return Filtered(eligible, excluded, tuple(waived))


class Candidate(NamedTuple):
    """An endpoint that may be picked. The field `score` is the total in [0, 1]; `base` is the total without
    the part of the scorer `in-flight`, which the script replaces by the live load (`Scheduler.live_weight`).
    """

    address: str
    score: float
    base: float


class Ranking(NamedTuple):
    """The result of one pick: the `best` candidates, best first, and the data behind the ranking.

    The field `eligible` has all endpoints that passed the filters; in the same order, `totals` has the total
    scores, and `parts` the unweighted scores by scorer. The field `excluded` has the reasons against the
    other endpoints; `waived` names the soft filters that would have left no endpoint. The field `live_weight`
    is the weight of the load in flight, which the `base` of each candidate in `best` leaves out.
    """

    best: tuple[Candidate, ...]
    eligible: Sequence[EndpointState]
    totals: Sequence[float]
    parts: Mapping[str, Sequence[float]]
    weights: Mapping[str, float]
    excluded: Mapping[str, str]
    waived: tuple[str, ...]
    live_weight: float

    @property
    def values(self) -> int:
        """The number of scores and reasons in this ranking, to bound memory."""
        return len(self.eligible) * (len(self.parts) + 2) + 2 * len(self.excluded) + 1


def with_in_flight(scorers: Mapping[str, float]) -> dict[str, float]:
    """The weights `scorers` (by name) with the scorer `in-flight` added if missing: without `in-flight` all
    replicas would pick the same endpoint at once."""
    return {IN_FLIGHT: 1.0, **scorers}


def live_weight(weights: Mapping[str, float]) -> float:
    """The normalised weight of the scorer `in-flight`, whose part the script computes."""
    return weights.get(IN_FLIGHT, 0.0) / math.fsum(weights.values())


class Scheduler:
    """Ranks endpoints by one set of weights (scorer name -> weight, from the configuration).

    Weights are normalised, so that totals stay in [0, 1]. Without weights all candidates score 0. The
    arguments `scorers` and `filters` are installed extensions.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        scorers: Mapping[str, AnyScorer] = MappingProxyType({}),
        filters: Mapping[str, Filter] = MappingProxyType({}),
    ) -> None:
        total = math.fsum(weights.values())
        self.weights: Mapping[str, float] = {
            name: float(weight) / total for name, weight in weights.items() if weight > 0.0
        }
        self.live_weight = self.weights.get(IN_FLIGHT, 0.0)
        self._is_random = "random" in self.weights
        known: Mapping[str, AnyScorer] = {**SCORERS, **scorers}
        self._scorers = [(name, known[name]) for name in self.weights]
        self._filters = {**FILTERS, **filters} if filters else FILTERS
        self._has_outside = bool(filters) or not self.weights.keys() <= SCORERS.keys()
        # Caches: for the endpoints `_known` the filters' result for a request without preferences; for
        # `_eligible` the scores that do not depend on the request, and their weighted sums.
        self._known: Sequence[EndpointState] = ()
        self._plain = Filtered([], {}, ())
        self._eligible: Sequence[EndpointState] = ()
        self._fixed_scores: dict[str, Sequence[float]] = {}
        self._fixed_totals: list[float] = []

    def can_share(self, pick: PickRequest) -> bool:
        """Whether other requests with the same inputs for all scorers may reuse the ranking for `pick`."""
        if self._has_outside:  # installed scorers may read anything of the request
            return False
        return pick.subset is None and not pick.selector and not pick.forecasts and not self._is_random

    def rank(self, pick: PickRequest, endpoints: Sequence[EndpointState], *, limit: int = 8) -> Ranking:
        """The `limit` best endpoints for `pick`, ties in random order; none if no endpoint may be picked.

        The caller must not change `endpoints`, since later picks reuse the cached scores of the same list.
        """
        if pick.subset is None and not pick.selector and not pick.adapter and self._filters is FILTERS:
            if endpoints is not self._known:
                self._known, self._plain = endpoints, apply_filters(pick, endpoints)
            filtered = self._plain
        else:
            filtered = apply_filters(pick, endpoints, self._filters)
        eligible = filtered.eligible
        if eligible is not self._eligible:
            # Cache the scores: states change only ten times a second, and a replica picks more often.
            self._score_fixed(pick, eligible)
        fixed, draw = self._fixed_scores, pick.random
        totals = self._fixed_totals
        parts: dict[str, Sequence[float]] = {}
        for name, scorer in self._scorers:
            scores = fixed.get(name)
            if scores is None:
                scores = scorer(pick, eligible)
                if scores is None:
                    continue
                if any(scores):
                    weight = self.weights[name]
                    totals = [total + weight * score for total, score in zip(totals, scores, strict=True)]
            parts[name] = scores
        drawn = [(total, draw(), at) for at, total in enumerate(totals)]
        first = nlargest(limit, drawn) if len(drawn) > _SORT_LIMIT else sorted(drawn, reverse=True)[:limit]
        live, live_scores = self.live_weight, parts.get(IN_FLIGHT)
        excluded, waived = filtered.excluded, filtered.waived
        best: list[Candidate] = []
        for total, _, at in first:
            score = total if total < 1.0 else 1.0  # rounding may raise a sum of parts slightly above 1
            base = score if live_scores is None else total - live * live_scores[at]
            best.append(Candidate(eligible[at].address, score, base if base > 0.0 else 0.0))
        return Ranking(tuple(best), eligible, totals, parts, self.weights, excluded, waived, live)

    def _score_fixed(self, pick: PickRequest, eligible: Sequence[EndpointState]) -> None:
        """Score `eligible` by the scorers that ignore the request, and cache the scores."""
        fixed = {name: SCORERS[name](pick, eligible) for name in self.weights if not use_of(name).request}
        totals = [0.0] * len(eligible)
        for name, scores in fixed.items():
            weight = self.weights[name]
            totals = [total + weight * score for total, score in zip(totals, scores, strict=True)]
        self._fixed_totals = totals
        self._fixed_scores, self._eligible = fixed, eligible
