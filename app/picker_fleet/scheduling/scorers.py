"""How good each candidate endpoint is for one request, and the two inputs of that: the request and the
endpoints.

A scorer is a pure function. It takes the pick request and the candidates and returns one score in [0, 1] for
each candidate, in the same order; 1 is the best. `Scheduler` adds them up by weight.

A new scorer is one function and one line in `SCORERS`. An endpoint whose figure is unknown scores as the
mean of those that are known: it is neither preferred nor shunned. The one exception is `latency`, where
endpoints without statistics come first."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import force_setattr


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Mean and population standard deviation, in seconds, of the last `count` (at least 1) completions."""

    count: int
    mean_s: float
    std_s: float


@dataclass(frozen=True, slots=True)
class LatencyWeights:
    """Of spec 004: cost = `alpha`·mean + `beta`·load + `gamma`·std, in seconds and requests in flight."""

    alpha: float = 1.0
    beta: float = 0.5
    gamma: float = 0.5


DEFAULT_LATENCY_WEIGHTS: Final = LatencyWeights()


_NO_LABELS: Final[Mapping[str, str]] = MappingProxyType({})
_NO_MATCHES: Final[Mapping[str, int]] = MappingProxyType({})


class PickRequest(NamedTuple):
    """One request as filters and scorers see it.

    Only addresses in `subset` may be picked (None: any). `adapter` is the target model if it is a LoRA
    adapter, '' for a base model. An endpoint must have the labels in `selector`. `session_endpoint` is the
    address that served the session before, '' for none. The prompt has `prefix_blocks` blocks;
    `prefix_matches` says how many of them, from the first on, each address has served. `random` returns
    numbers in [0, 1): it breaks ties and is the scorer `random`.
    """

    subset: frozenset[str] | None = None
    adapter: str = ""
    selector: Mapping[str, str] = _NO_LABELS
    session_endpoint: str = ""
    prefix_blocks: int = 0
    prefix_matches: Mapping[str, int] = _NO_MATCHES
    latency_weights: LatencyWeights = DEFAULT_LATENCY_WEIGHTS
    random: Callable[[], float] = random.random


class EndpointState(msgspec.Struct, frozen=True):
    """What is known of one endpoint (`address`: `ip:port`) at the moment of a pick.

    Scraped, None if unknown: `waiting` and `running` requests, `kv_utilisation` (0 to 1), `max_adapters`
    (LoRA adapters that fit at once, running and waiting ones together; idle ones give up their slots). The
    scraped figures of a `stale` endpoint are dropped here, and so is a figure that is not finite. Known to
    the fleet: `in_flight` requests as last read (the script that reserves has the live figure), and
    `latency` of the last completions, None without any.

    A struct: a large pool has thousands, and a frozen dataclass takes several times as long to make.
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
        """Whether another adapter fits beside the running and the waiting ones; False if unknown."""
        if self.max_adapters is None:
            return False
        return len(self.active_adapters) + len(self.waiting_adapters) < self.max_adapters

    def __post_init__(self) -> None:
        if self.stale:
            for name in ("waiting", "running", "kv_utilisation", "max_adapters"):
                force_setattr(self, name, None)
            for name in ("active_adapters", "waiting_adapters", "idle_adapters"):
                force_setattr(self, name, frozenset())
            return
        for name in ("waiting", "running", "kv_utilisation"):
            figure = getattr(self, name)
            if figure is not None and not math.isfinite(figure):
                force_setattr(self, name, None)


Scorer = Callable[[PickRequest, Sequence[EndpointState]], list[float]]

# Of the Gateway API's endpoint picker (docs/protocol.md): loaded, a free slot, waiting; else
# 0.
_ADAPTER_LOADED = 1.0
_ADAPTER_SLOT = 0.8
_ADAPTER_WAITING = 0.6


def queue_depth(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """Fewest waiting requests 1, most 0; unknown counts as the mean."""
    return _fewest_first([candidate.waiting for candidate in candidates])


def running_requests(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """Fewest running requests 1, most 0; unknown counts as the mean."""
    return _fewest_first([candidate.running for candidate in candidates])


def in_flight(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """Fewest requests of the fleet in flight, as last known, 1, most 0."""
    return _fewest_first([candidate.in_flight for candidate in candidates])


def kv_cache(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """The free share of the KV cache; unknown counts as the mean."""
    return _with_means(
        [
            None if used is None else 1.0 - used if 0.0 <= used <= 1.0 else float(used < 0.0)
            for used in [candidate.kv_utilisation for candidate in candidates]
        ]
    )


def lora_affinity(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """Adapter loaded 1, a free slot for it 0.8, waiting 0.6, else 0; a stale endpoint counts as the mean.
    For a base model every endpoint scores 1."""
    name = pick.adapter
    if not name:
        return [1.0] * len(candidates)
    # One that may have the adapter comes behind one that has it.
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
    """Least alpha·mean + beta·load + gamma·std 1, most 0 (spec 004).

    Without statistics only the load counts. An unexplored endpoint is preferred while it is idle, but does
    not get every request until its first one ends.
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
    """The share of the prompt's blocks, from the first on, that the endpoint has served before."""
    blocks, matches = pick.prefix_blocks, pick.prefix_matches
    if not blocks or not matches:
        return [0.0] * len(candidates)
    served = [matches.get(candidate.address, 0) / blocks for candidate in candidates]
    return [min(1.0, share) for share in served] if max(served, default=0.0) > 1.0 else served


def session_affinity(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    """1 for the endpoint that served the session, 0 for the others."""
    return [1.0 if candidate.address == pick.session_endpoint else 0.0 for candidate in candidates]


def random_score(pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    draw = pick.random
    return [draw() for _ in candidates]


IN_FLIGHT: Final = "in-flight"

SCORERS: Mapping[str, Scorer] = {
    "queue-depth": queue_depth,
    "kv-cache": kv_cache,
    "running-requests": running_requests,
    IN_FLIGHT: in_flight,
    "lora-affinity": lora_affinity,
    "latency": latency,
    "prefix-affinity": prefix_affinity,
    "session-affinity": session_affinity,
    "random": random_score,
}

# Scorers that read figures scraped from model servers.
SCRAPED_SCORERS = frozenset({"queue-depth", "kv-cache", "running-requests", "lora-affinity"})
# Scorers that ignore the request: equal candidates get equal scores, so `Scheduler` keeps their results.
REQUEST_INDEPENDENT_SCORERS = frozenset({"queue-depth", "kv-cache", "running-requests", IN_FLIGHT})


def scorer_name(value: str) -> str:
    """`value` if a scorer has that name.

    Raises:
        ValueError: there is no such scorer; the message lists the valid names.
    """
    if value not in SCORERS:
        raise ValueError(f"no scorer is named {value[:40]!r}; valid: {', '.join(SCORERS)}")
    return value


def weights_by_name(value: Any) -> dict[Any, Any]:
    """Scorers and their weights, unchecked, from either form: `[{name, weight}]`, weight 1 by default, or
    `{name: weight}`.

    Raises:
        ValueError: it has neither form, or lists a scorer twice.
    """
    if isinstance(value, Mapping):
        return dict(value)
    weights: dict[Any, Any] = {}
    for entry in value if isinstance(value, list | tuple) else (value,):
        if not isinstance(entry, Mapping) or not {"name"} <= entry.keys() <= {"name", "weight"}:
            raise ValueError("must map scorers to weights, or list {name, weight}")
        name = str(entry["name"])
        if name in weights:
            raise ValueError(f"scorer {name[:40]} is named twice")
        weights[name] = entry.get("weight", 1)
    return weights


def _fewest_first(figures: Sequence[float | None]) -> list[float]:
    """Least 1, greatest 0, the others linear in between. All 1 if all are equal; None the mean."""
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
    """`scores` with their mean, but not more than `most`, in the place of None; 0 where none is known."""
    known = [score for score in scores if score is not None]
    mean = min(sum(known) / len(known), most) if known else 0.0
    return [mean if score is None else score for score in scores]
