"""Requests and queue rules for tests of local admission, without Redis."""

import asyncio
from typing import Any

from background import until

from picker_fleet.admission.local_gate import LocalGate
from picker_fleet.admission.local_queue import Rules, rules_of
from picker_fleet.admission.waits import Wait
from picker_fleet.domain.bands import Band
from picker_fleet.domain.config import EffectiveConfig, parse
from picker_fleet.domain.request import InferenceRequest, Workload
from picker_fleet.domain.tenants import Tree


def ask(request_id: str = "r", **changes: Any) -> InferenceRequest:
    fields: dict[str, Any] = {
        "id": request_id, "model": "m", "target_model": "m", "stream": False, "flow": "f",
        "band": Band.DEFAULT, "weight": 1.0, "workload": Workload("", 3),
        "cost": 1.0, "ttl_s": 30.0, "subset": None,
    }  # fmt: skip
    return InferenceRequest(**{**fields, **changes})


def rules(live: int = 1, tree: Tree | None = None, **queue: Any) -> Rules:
    """The queue rules of one of `live` replicas, whose section `fair_request_queue` has the settings
    `queue`. `tree`: the tree of tenants."""
    return rules_of(EffectiveConfig(parse({"fair_request_queue": queue}), {}), live, tree)


def start(gate: LocalGate, name: str, since_s: float = 0.0, **changes: Any) -> asyncio.Task[bool]:
    """Ask `gate` to admit a request of cost 1 that arrived `since_s` seconds ago."""
    wait = Wait(asyncio.get_running_loop().time() - since_s)
    return asyncio.create_task(gate.admit(ask(name, **changes), 1.0, wait))


async def waiting(gate: LocalGate, *names: str, **changes: Any) -> list[asyncio.Task[bool]]:
    """Start requests, and return their tasks once all wait in the queue of `gate`."""
    before = gate.waiting
    tasks = [start(gate, name, **changes) for name in names]
    await until(lambda: gate.waiting == before + len(names))
    return tasks
