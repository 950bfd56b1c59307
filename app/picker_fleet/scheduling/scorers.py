"""How good each candidate is. A scorer is a pure function: the ask and the candidates in, a score in [0, 1]
for each candidate out, in the same order, 1 the best.

A new scorer is one function and one line in `SCORERS`. What is unknown of an endpoint counts against it
and never keeps it from being picked; the one exception is `latency`, where the unexplored comes first.
"""

from collections.abc import Callable, Mapping, Sequence

from picker_fleet.scheduling.ask import PickAsk
from picker_fleet.scheduling.signals import Signals

Scorer = Callable[[PickAsk, Sequence[Signals]], list[float]]

# Of the Gateway API's picker (PROTOCOL, "Model-server metrics"): loaded, a slot free, waiting; else 0.
_ADAPTER_ACTIVE = 1.0
_ADAPTER_SLOT = 0.8
_ADAPTER_WAITING = 0.6


def queue_depth(ask: PickAsk, candidates: Sequence[Signals]) -> list[float]:
    """Fewest waiting requests 1, most 0; unknown as the most."""
    return _fewest([candidate.waiting for candidate in candidates])


def running_requests(ask: PickAsk, candidates: Sequence[Signals]) -> list[float]:
    """Fewest running requests 1, most 0; unknown as the most."""
    return _fewest([candidate.running for candidate in candidates])


def in_flight(ask: PickAsk, candidates: Sequence[Signals]) -> list[float]:
    """Fewest of the fleet's requests in flight, as last known, 1, most 0."""
    return _fewest([candidate.in_flight for candidate in candidates])


def kv_cache(ask: PickAsk, candidates: Sequence[Signals]) -> list[float]:
    """The free part of the KV cache; unknown 0."""
    return [
        0.0 if used is None else 1.0 - used if 0.0 <= used <= 1.0 else float(used < 0.0)
        for used in [candidate.kv_utilisation for candidate in candidates]
    ]


def lora_affinity(ask: PickAsk, candidates: Sequence[Signals]) -> list[float]:
    """Adapter running 1, a slot free for it 0.8, waiting 0.6, else 0; a base model is at home anywhere."""
    name = ask.adapter
    if not name:
        return [1.0] * len(candidates)
    return [
        _ADAPTER_ACTIVE
        if name in candidate.active_adapters
        else _ADAPTER_SLOT
        if candidate.has_adapter_slot
        else _ADAPTER_WAITING
        if name in candidate.waiting_adapters
        else 0.0
        for candidate in candidates
    ]


def latency(ask: PickAsk, candidates: Sequence[Signals]) -> list[float]:
    """Least alpha·mean + beta·load + gamma·std 1, most 0 (specs/004).

    Without statistics only the load costs: the unexplored comes first while it is idle, but does not get
    everything until its first request ends.
    """
    weights = ask.latency
    alpha, beta, gamma = weights.alpha, weights.beta, weights.gamma
    costs = [
        beta * candidate.in_flight
        if (stats := candidate.latency) is None
        else alpha * stats.mean_s + beta * candidate.in_flight + gamma * stats.std_s
        for candidate in candidates
    ]
    return _fewest(costs)


def prefix_affinity(ask: PickAsk, candidates: Sequence[Signals]) -> list[float]:
    """The part of the prompt's blocks, from the first on, that the endpoint has served before."""
    blocks, matches = ask.blocks, ask.matches
    if not blocks or not matches:
        return [0.0] * len(candidates)
    served = [matches.get(candidate.address, 0) / blocks for candidate in candidates]
    return [min(1.0, part) for part in served] if max(served, default=0.0) > 1.0 else served


def session_affinity(ask: PickAsk, candidates: Sequence[Signals]) -> list[float]:
    """1 for the endpoint that served the session, 0 for the others."""
    return [1.0 if candidate.address == ask.session_endpoint else 0.0 for candidate in candidates]


def by_chance(ask: PickAsk, candidates: Sequence[Signals]) -> list[float]:
    """Any number for anyone."""
    chance = ask.chance
    return [chance() for _ in candidates]


IN_FLIGHT = "in-flight"

SCORERS: Mapping[str, Scorer] = {
    "queue-depth": queue_depth,
    "kv-cache": kv_cache,
    "running-requests": running_requests,
    IN_FLIGHT: in_flight,
    "lora-affinity": lora_affinity,
    "latency": latency,
    "prefix-affinity": prefix_affinity,
    "session-affinity": session_affinity,
    "random": by_chance,
}

# Those that look at the candidates alone and not at the ask: for the same candidates they say the same.
# Those that go by what model servers' metrics pages tell.
FROM_PAGES = frozenset({"queue-depth", "kv-cache", "running-requests", "lora-affinity"})
STANDING = frozenset({"queue-depth", "kv-cache", "running-requests", IN_FLIGHT})


def scorer_name(value: str) -> str:
    """`value` if a scorer has that name.

    Raises:
        ValueError: none has; the message lists the valid names.
    """
    if value not in SCORERS:
        raise ValueError(f"no scorer is named {value[:40]!r}; valid: {', '.join(SCORERS)}")
    return value


def _fewest(figures: Sequence[float | None]) -> list[float]:
    """Least 1, greatest 0, the others in between by their distance; all 1 if all are equal, None 0."""
    known = [figure for figure in figures if figure is not None]
    if not known:
        return [0.0] * len(figures)
    least, most = min(known), max(known)
    spread = most - least
    if spread <= 0.0:
        return [0.0 if figure is None else 1.0 for figure in figures]
    if len(known) == len(figures):
        return [(most - figure) / spread for figure in known]
    return [0.0 if figure is None else (most - figure) / spread for figure in figures]
