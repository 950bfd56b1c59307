"""The control: what N independent pickers do. Each replica has a pool and a queue of its own, and its part
of the bounds, so that all together let through as much as the fleet does."""

from collections.abc import Mapping
from typing import Any

_POOL = "bench"


def fleet_pools(replicas: int) -> list[str]:
    """By replica, the pool it belongs to."""
    return [_POOL] * replicas


def separate_pools(replicas: int) -> list[str]:
    return [f"{_POOL}-{number}" for number in range(replicas)]


def configured(tree: Mapping[str, Any], url: str, pool: str, pools: int) -> dict[str, Any]:
    """The configuration of a replica of `pool`, one of `pools` that share what `tree` gives a single one."""
    controller = dict(tree["request_queue_controller"])
    for bound in ("watermark_per_backend", "lower_bound_per_backend", "upper_bound_per_backend"):
        controller[bound] /= pools
    queue = dict(tree["fair_request_queue"])
    queue["total_capacity"] //= pools
    queue["flow_capacity"] //= pools
    return {
        **tree,
        "pool": pool,
        "redis": {"url": url, "silence": 5.0, "connect_timeout": 5.0},
        "request_queue_controller": controller,
        "fair_request_queue": queue,
    }
