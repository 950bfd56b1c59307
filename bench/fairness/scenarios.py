"""What is asked of the queue, and how it is configured for it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.fairness.job import Source

_ENDPOINTS = 4
_LOG = 1_000_000
_ROOM = 4000  # places in the queue where capacity is not what is measured


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run: it lasts until `grants` requests have been dispatched from the queue."""

    name: str
    sources: tuple[Source, ...]
    config: Mapping[str, Any]
    service_ms: tuple[float, float]
    grants: int


def _config(in_flight: float, *, unit: str = "requests", **queue: Any) -> dict[str, Any]:
    """Up to `in_flight` at a time, the rest as `queue` says; the decision log is on."""
    each = in_flight / _ENDPOINTS
    wait_cap = queue.pop("wait_cap_s", 60.0)
    return {
        "discovery": {"static": [{"address": f"10.0.0.{number + 1}:8000"} for number in range(_ENDPOINTS)]},
        "request_queue_controller": {
            "watermark_per_backend": each,
            "lower_bound_per_backend": each,
            "upper_bound_per_backend": each,
            "unit": unit,
        },
        "fair_request_queue": {"total_capacity": _ROOM, "flow_capacity": _ROOM, **queue},
        "workloads": {"wait_cap": wait_cap},
        # A busy machine is not a dead replica.
        "leases": {"replica_silence": 30.0, "inflight": 60.0},
        "decision_log": {"enabled": True, "max_entries": _LOG},
    }


WEIGHTS: Mapping[str, float] = {"one": 1.0, "two": 2.0, "four": 4.0, "split": 1.0}
SPLIT_IDS = 50


def weights(grants: int) -> Scenario:
    """Weights 1:2:4, and a fourth flow of weight 1 that spreads its requests over 50 workload ids."""
    sources = tuple(
        Source(name, weight=weight, callers=64, workloads=SPLIT_IDS if name == "split" else 1)
        for name, weight in WEIGHTS.items()
    )
    return Scenario("weights", sources, _config(16, ordering="workload-aware"), (4, 20), grants)


def split_flows(grants: int) -> Scenario:
    """The same, but the fourth may choose its fairness id: 50 flows of weight 1."""
    sources = tuple(
        Source(
            name,
            weight=weight,
            callers=200 if name == "split" else 64,
            ids=SPLIT_IDS if name == "split" else 1,
        )
        for name, weight in WEIGHTS.items()
    )
    return Scenario("split", sources, _config(16, ordering="workload-aware"), (4, 20), grants)


def trickle(grants: int) -> Scenario:
    """Twice what 8 in flight at 20 ms each can serve, nearly all of it from one flow."""
    sources = (Source("trickle", rate_per_s=20), Source("bulk", rate_per_s=780))
    return Scenario("trickle", sources, _config(8, flow_capacity=200), (10, 30), grants)


def starvation(grants: int, ttl_s: float, guard_share: float) -> Scenario:
    """One flow; its criticality-5 requests alone keep all endpoints busy, few are of criticality 1.

    The TTL is 30 s and the cap of waits 60 s, both scaled by the same factor. Criticality 5 comes from 40
    workloads: a single one would soon be so busy that its rate outweighs the rest of its score.
    """
    sources = (
        Source("low", rate_per_s=16, workloads=1, criticality=1, ttl_s=ttl_s, fairness_id="both"),
        Source("high", callers=100, workloads=40, criticality=5, ttl_s=ttl_s, fairness_id="both"),
    )
    config = _config(8, ordering="workload-aware", guard_share=guard_share, wait_cap_s=2 * ttl_s)
    return Scenario("starvation", sources, config, (10, 30), grants)


def bands(grants: int, ttl_s: float) -> Scenario:
    """Critical at 0.3 and Default at 0.6 of what can be served, in bursts; Sheddable takes all it gets."""
    sources = (
        Source("critical", band=0, rate_per_s=120),
        Source("default", band=1, rate_per_s=220),
        Source("sheddable", band=2, callers=150, ttl_s=ttl_s),
    )
    return Scenario("bands", sources, _config(8), (10, 30), grants)


TOKENS: Mapping[str, int] = {"small": 100, "large": 10_000}


def tokens(grants: int) -> Scenario:
    """Two flows of equal weight whose requests are a hundred times apart, and badly estimated."""
    sources = tuple(
        Source(name, callers=300 if name == "small" else 16, tokens=size, guess_factor=4.0)
        for name, size in TOKENS.items()
    )
    return Scenario("tokens", sources, _config(20_000, unit="tokens"), (4, 12), grants)
