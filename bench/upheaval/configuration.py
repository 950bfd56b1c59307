"""How the run's pool is configured, and what is changed of it on the way."""

import random
from collections.abc import Mapping
from typing import Any

from bench.upheaval.asking import FLOWS

POOL = "upheaval"
LOG = 4_000_000  # more entries than a run writes
_LEASE_S = 3.0
_ENDPOINTS = 4


def configuration(url: str) -> dict[str, Any]:
    """Small bounds and capacities, so that everything there is to refuse and preempt happens."""
    return {
        "pool": POOL,
        "redis": {"url": url, "silence": _LEASE_S / 2, "connect_timeout": 5.0},
        "discovery": {"static": [{"address": f"10.0.0.{n + 1}:8000"} for n in range(_ENDPOINTS)]},
        "request_queue_controller": {"watermark_per_backend": 200, "unit": "tokens"},
        "fair_request_queue": {"total_capacity": 200, "flow_capacity": 60, "queue_ttl": 30.0},
        "leases": {
            "heartbeat": 0.5, "replica_silence": 1.5, "inflight": _LEASE_S, "access_log_interval": 1.0,
        },
        "decision_log": {"enabled": True, "max_entries": LOG},
    }  # fmt: skip


def change(dice: random.Random) -> Mapping[str, Any]:
    """A live change, by the names of docs/redis-schema.md; None takes one back."""
    per = dice.choice((75, 200, 200, 400))
    return dice.choice(
        (
            {"upper_per": per * 1.1, "lower_per": per * 0.9},
            {"upper_per": None, "lower_per": None},
            {"weights": {dice.choice(FLOWS): dice.choice((0.5, 2.0, 8.0))}},
            {"weights": None},
            {"total_capacity": dice.choice((100, 150, 400))},
            {"flow_capacity": dice.choice((20, 60))},
            {"overload": dice.choice(("preempt", "reject-noncritical"))},
            {"guard_share": dice.choice((0.05, 0.1, 0.5))},
            {"starvation_ms": dice.choice((0, 100, 1000))},
            {"band_policy": dice.choice(("strict", "weighted"))},
            # These move what waits: until the sweep has come by, a lane keeps its order.
            {"ordering": dice.choice(("fcfs", "edf", "workload-aware"))},
            {"fairness": dice.choice(("weighted-fair", "round-robin", "none"))},
            {"wait_signal": dice.choice(("request", "workload_average"))},
            {"ordering": None, "fairness": None, "wait_signal": None},
            {"total_capacity": None, "overload": None, "band_policy": None, "flow_capacity": None},
        )
    )
