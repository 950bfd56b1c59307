"""Requests and rules for the tests of admission without shared state."""

from typing import Any

from picker_fleet.config import EffectiveConfig, parse
from picker_fleet.failover.local_queue import Rules, rules_of
from picker_fleet.request import Band, InferenceRequest, Workload


def ask(request_id: str = "r", **changes: Any) -> InferenceRequest:
    fields: dict[str, Any] = {
        "id": request_id, "model": "m", "target_model": "m", "stream": False, "flow": "f",
        "band": Band.DEFAULT, "weight": 1.0, "workload": Workload(f"auto-{request_id}", 3, registered=False),
        "cost": 1.0, "ttl_s": 30.0, "subset": None,
    }  # fmt: skip
    return InferenceRequest(**{**fields, **changes})


def rules(live: int = 1, **queue: Any) -> Rules:
    """Of a configuration with `queue` as its `fair_request_queue`."""
    return rules_of(EffectiveConfig(parse({"fair_request_queue": queue}), {}), live)
