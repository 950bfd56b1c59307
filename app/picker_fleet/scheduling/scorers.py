"""Scorers, which rate the candidate endpoints for one request, and their inputs `PickRequest` and
`EndpointState`.

A scorer is a pure function. A scorer takes the pick request and the candidates, and returns one score in [0,
1] for each candidate, in the same order; 1 is the best. The class `Scheduler` adds up the scores by weight.

A new scorer needs one function, one line in `SCORERS` and one in domain/scheduling.py; a scorer from
outside is an extension (picker_fleet/extensions.py). An endpoint whose metric is unknown gets the mean of the
known scores, so that it is neither preferred nor avoided. The exception is `latency`, where endpoints without
statistics are preferred."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import msgspec

from picker_fleet.domain.bands import NAMED
from picker_fleet.domain.request import ANY_LATENCY, InferenceRequest, LatencyObjective, Workload
from picker_fleet.domain.scheduling import BUILT_IN, IN_FLIGHT, SLO_HEADROOM, TOPOLOGY, Latency
from picker_fleet.scheduling.latency_model import UNKNOWN, Forecast


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Mean and population standard deviation, in seconds, of the last `count` (at least 1) completions."""

    count: int
    mean_s: float
    std_s: float


_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})
_NO_MATCHES: Final[Mapping[str, int]] = MappingProxyType({})
_NO_FORECASTS: Final[Mapping[str, Forecast]] = MappingProxyType({})
_LATENCY: Final = Latency()
_NO_REQUEST: Final = InferenceRequest(
    id="", model="", target_model="", stream=False, flow="", band=NAMED[1], weight=1.0,
    workload=Workload("", 3), cost=1.0, ttl_s=30.0, subset=None,
)  # fmt: skip


class PickRequest(NamedTuple):
    """One request as filters and scorers see it.

    `request` is the whole request; metrics show the scores for an empty request. Only addresses in `subset`
    may be picked (None: any). `adapter` is the target model if it is a LoRA adapter, '' for a base model. An
    endpoint must have the labels in `selector`. `session_endpoint` is the address of the request's session,
    '' for none. The prompt has `prefix_blocks` blocks; `prefix_matches` has the number of these blocks,
    counted from the first, that each address has served. `objective` is the request's latency objective;
    `forecasts` has its predicted times on each address, empty if no scorer reads them. An endpoint should
    have the labels in `preferred`. `random` returns numbers in [0, 1), for ties and for the scorer `random`.
    """

    subset: frozenset[str] | None = None
    adapter: str = ""
    selector: Mapping[str, str] = _NO_LABELS
    session_endpoint: str = ""
    prefix_blocks: int = 0
    prefix_matches: Mapping[str, int] = _NO_MATCHES
    latency_weights: Latency = _LATENCY
    objective: LatencyObjective = ANY_LATENCY
    forecasts: Mapping[str, Forecast] = _NO_FORECASTS
    preferred: Mapping[str, str] = _NO_LABELS
    request: InferenceRequest = _NO_REQUEST
    random: Callable[[], float] = random.random


class EndpointState(msgspec.Struct, frozen=True):
    """The state of one endpoint at the time of a pick; `address` is its `ip:port`.

    The scraped fields are (None if unknown) `waiting` and `running` requests, `kv_utilisation` (0 to 1),
    `max_adapters` (slots for LoRA adapters, shared by running and waiting adapters; idle adapters give up
    their slots). All scraped fields are unknown if the endpoint is `stale`. Fields from the fleet: requests
    `in_flight` as last read (the script that reserves has the live number), and `latency` of the last
    completions, None without completions.

    The class is a struct, since large pools have thousands of states, and making a frozen dataclass takes
    several times as long.
    """

    address: str
    labels: Mapping[str, str] = _NO_LABELS
    draining: bool = False
    healthy: bool = True
    waiting: float | None = None
    running: float | None = None
    kv_utilisation: float | None = None
    max_adapters: int | None = None
    active_adapters: frozenset[str] = frozenset()
    waiting_adapters: frozenset[str] = frozenset()
    idle_adapters: frozenset[str] = frozenset()
    stale: bool = False
    in_flight: float = 0.0
    latency: LatencyStats | None = None

    @property
    def has_adapter_slot(self) -> bool:
        """Whether an adapter slot is free beside the running and waiting adapters; False if unknown."""
        if self.max_adapters is None:
            return False
        return len(self.active_adapters) + len(self.waiting_adapters) < self.max_adapters


class Scorer(Protocol):
    def __call__(self, pick: PickRequest, candidates: Sequence[EndpointState], /) -> Sequence[float]:
        """One score from 0 to 1 for each candidate, in the same order; 1 is the best."""


# Scores of the scorer `lora-affinity`, as in the Gateway API's endpoint picker (docs/protocol.md): adapter
# loaded, a free slot for it, adapter waiting; otherwise 0.
_ADAPTER_LOADED = 1.0
_ADAPTER_SLOT = 0.8
_ADAPTER_WAITING = 0.6

_STEEPNESS = 4.0  # slope of `slo-headroom`: score 0.94 at half of the objective, 0.06 at twice the objective


def queue_depth(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """Score 1 for the fewest waiting requests, 0 for the most; the mean score if unknown."""
    return _fewest_first([candidate.waiting for candidate in candidates])


def running_requests(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """Score 1 for the fewest running requests, 0 for the most; the mean score if unknown."""
    return _fewest_first([candidate.running for candidate in candidates])


def in_flight(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """Score 1 for the fewest of the fleet's requests in flight, as last read, 0 for the most."""
    return _fewest_first([candidate.in_flight for candidate in candidates])


def kv_cache(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """Score the free share of the KV cache; the mean score if unknown."""
    return _with_means(
        [
            None if candidate.kv_utilisation is None else 1.0 - candidate.kv_utilisation
            for candidate in candidates
        ]
    )


def lora_affinity(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """Score 1 if the adapter is loaded, 0.8 for a free slot, 0.6 if the adapter waits, otherwise 0; a stale
    endpoint gets the mean score, at most 0.8. For a base model every endpoint scores 1."""
    name = pick.adapter
    if not name:
        return [1.0] * len(candidates)
    # At most 0.8: a stale endpoint, which may have the adapter, ranks behind endpoints that have it.
    return _with_means(
        [
            None
            if candidate.stale
            else _ADAPTER_LOADED
            if name in candidate.active_adapters or name in candidate.idle_adapters
            else _ADAPTER_SLOT
            if candidate.has_adapter_slot
            else _ADAPTER_WAITING
            if name in candidate.waiting_adapters
            else 0.0
            for candidate in candidates
        ],
        most=_ADAPTER_SLOT,
    )


def latency(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """Score 1 for the lowest cost alpha·mean + beta·load + gamma·std, 0 for the highest (spec 004).

    Without statistics only the load counts. So a new endpoint is preferred while it is idle, but does not get
    every request until its first request ends.
    """
    weights = pick.latency_weights
    alpha, beta, gamma = weights.alpha, weights.beta, weights.gamma
    costs = [
        beta * candidate.in_flight
        if (stats := candidate.latency) is None
        else alpha * stats.mean_s + beta * candidate.in_flight + gamma * stats.std_s
        for candidate in candidates
    ]
    return _fewest_first(costs)


def prefix_affinity(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """Score the share of the prompt's blocks, counted from the first, that the endpoint has served."""
    blocks, matches = pick.prefix_blocks, pick.prefix_matches
    if not blocks or not matches:
        return [0.0] * len(candidates)
    return [matches.get(candidate.address, 0) / blocks for candidate in candidates]


def session_affinity(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """Score 1 for the endpoint of the session, 0 for all others."""
    return [1.0 if candidate.address == pick.session_endpoint else 0.0 for candidate in candidates]


def slo_headroom(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """Score near 1 if the predicted p90 is far below the latency objective, 0.5 at the objective, near 0 far
    above; the mean score if unknown. The worse of TTFT and TPOT counts. Without an objective all score 0.
    """
    forecasts, objective = pick.forecasts, pick.objective
    if not forecasts or objective == ANY_LATENCY:
        return [0.0] * len(candidates)
    return _with_means(
        [_headroom(objective, forecasts.get(candidate.address, UNKNOWN)) for candidate in candidates]
    )


def _headroom(objective: LatencyObjective, forecast: Forecast) -> float | None:
    times = zip(forecast, objective, strict=True)
    ratios = [prediction.p90_s / most_s for prediction, most_s in times if prediction is not None]
    return 1.0 / (1.0 + max(ratios) ** _STEEPNESS) if ratios else None


def topology(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """Score the share of the preferred labels that the endpoint has."""
    wanted = pick.preferred.items()
    if not wanted:
        return [0.0] * len(candidates)
    return [len(wanted & candidate.labels.items()) / len(wanted) for candidate in candidates]


def random_score(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    draw = pick.random
    return [draw() for _ in candidates]


SCORERS: Mapping[str, Scorer] = {
    "queue-depth": queue_depth,
    "kv-cache": kv_cache,
    "running-requests": running_requests,
    IN_FLIGHT: in_flight,
    "lora-affinity": lora_affinity,
    "latency": latency,
    "prefix-affinity": prefix_affinity,
    "session-affinity": session_affinity,
    SLO_HEADROOM: slo_headroom,
    TOPOLOGY: topology,
    "random": random_score,
}
assert SCORERS.keys() == BUILT_IN.keys()


def _fewest_first(figures: Sequence[float | None]) -> list[float]:
    """Linear scores: 1 for the least figure, 0 for the greatest, the mean for None; 1 if all are equal."""
    known = [figure for figure in figures if figure is not None]
    if not known:
        return [0.0] * len(figures)
    least, greatest = min(known), max(known)
    spread = greatest - least
    if spread <= 0.0:
        return [1.0] * len(figures)
    if len(known) == len(figures):
        return [(greatest - figure) / spread for figure in known]
    return _with_means([None if figure is None else (greatest - figure) / spread for figure in figures])


def _with_means(scores: Sequence[float | None], most: float = 1.0) -> list[float]:
    """The `scores`, with each None replaced by the mean score, at most `most`; by 0 if all are None."""
    known = [score for score in scores if score is not None]
    mean = min(sum(known) / len(known), most) if known else 0.0
    return [mean if score is None else score for score in scores]
