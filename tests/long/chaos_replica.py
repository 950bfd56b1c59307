"""One replica of the chaos run with its clients, and the configuration of its pool.

`long.chaos` starts `python -m long.chaos_replica` and writes lines to its stdin: first a
`bench.fairness.scenarios.Job`, then `adopt ID ID…` to send requests of a killed replica again, and `end` to
stop after the requests in flight. The process prints `ready`, and `done` when all its requests have ended. A
request's id determines the whole request, so that any replica can send it again.
"""

import asyncio
import itertools
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import uvloop

from bench.fairness.replica import joined
from bench.fairness.scenarios import Job
from bench.rig.child import Orders
from picker_fleet.admission.admission import Admission
from picker_fleet.domain.bands import Bands
from picker_fleet.domain.errors import RequestError
from picker_fleet.domain.request import Completion, InferenceRequest, Outcome, Workload

POOL = "chaos"
_LOG_ENTRIES = 4_000_000  # more entries than a run writes, so none is trimmed
_LEASE_S = 3.0
_ENDPOINTS = 4
FLOWS = tuple(f"flow-{number}" for number in range(12))
_LIMITED, _LIMIT = 3, 2  # 3 flows are limited to 2 requests in flight per endpoint
_WORKLOADS = 30
_BANDS, _PRIORITIES = Bands(), (10, 10, 0, 0, 0, -10, -10, 100, 7, -3)  # 7 of 10 belong to a named band
_MODEL = "llama"
_CLIENTS = 60
_AGAIN_S = 0.1  # seconds for which a client pauses after a refusal
_PROMPT_TOKENS = 1


def configuration(url: str) -> dict[str, Any]:
    """A configuration with bounds and capacities so small that all refusals and preemption occur."""
    return {
        "pool": POOL,
        "redis": {"url": url, "silence": _LEASE_S / 2, "connect_timeout": 5.0},
        "discovery": {"static": [{"address": f"10.0.0.{n + 1}:8000"} for n in range(_ENDPOINTS)]},
        "request_queue_controller": {"watermark_per_backend": 200, "unit": "tokens"},
        "fair_request_queue": {"total_capacity": 200, "flow_capacity": 60, "queue_ttl": 30.0},
        "leases": {
            "heartbeat": 0.5, "replica_silence": 1.5, "inflight": _LEASE_S, "access_log_interval": 1.0,
        },
        "decision_log": {"enabled": True, "max_entries": _LOG_ENTRIES},
    }  # fmt: skip


def change(dice: random.Random) -> Mapping[str, Any]:
    """A random change of live settings, named as in docs/redis-schema.md; None resets a setting."""
    per = dice.choice((75, 200, 200, 400))
    return dice.choice(
        (
            {"upper_per": per * 1.1, "lower_per": per * 0.9},
            {"upper_per": None, "lower_per": None},
            {"adaptive": 1, "limit_initial": per},
            {"adaptive": None},
            {"weights": {dice.choice(FLOWS): dice.choice((0.5, 2.0, 8.0))}},
            {"weights": None},
            {"total_capacity": dice.choice((100, 150, 400))},
            {"flow_capacity": dice.choice((20, 60))},
            {"overload": dice.choice(("preempt", "reject-noncritical"))},
            {"guard_share": dice.choice((0.05, 0.1, 0.5))},
            {"starvation_ms": dice.choice((0, 100, 1000))},
            {"band_policy": dice.choice(("strict", "weighted"))},
            # A changed ordering, fairness or wait signal changes a flow queue only at the next sweep.
            {"ordering": dice.choice(("fcfs", "edf", "workload-aware"))},
            {"fairness": dice.choice(("weighted-fair", "round-robin", "none"))},
            {"wait_signal": dice.choice(("request", "workload_average"))},
            {"ordering": None, "fairness": None, "wait_signal": None},
            {"total_capacity": None, "overload": None, "band_policy": None, "flow_capacity": None},
        )
    )


@dataclass(frozen=True, slots=True)
class Call:
    """A request, and how its client and its model server behave.

    `leaves_s`: the client leaves if not admitted after this time (None: never). `tokens`: the actual cost.
    """

    request: InferenceRequest
    leaves_s: float | None
    service_s: float
    stream_owned: bool
    tokens: int


def call_of(request_id: str) -> Call:
    """The call that belongs to `request_id`, the same call in every process."""
    dice = random.Random(request_id)
    number = dice.randrange(len(FLOWS))
    shared = dice.random() < 0.5
    name = f"workload-{dice.randrange(_WORKLOADS)}" if shared else ""
    tokens = dice.randint(1, 20)
    long = dice.random() < 0.002
    request = InferenceRequest(
        request_id,
        model=_MODEL,
        target_model=_MODEL,
        stream=False,
        flow=FLOWS[number],
        band=_BANDS.of(dice.choice(_PRIORITIES)),
        weight=1.0 + number % 4,
        workload=Workload(name, dice.randint(1, 5)),
        cost=float(max(1, round(tokens * dice.uniform(0.25, 4)))),
        ttl_s=dice.choice((0.3, 1.0, 5.0, 30.0)),
        subset=None,
        limit=_LIMIT if number < _LIMITED else 0,
    )
    return Call(
        request,
        leaves_s=dice.uniform(0, 0.3) if dice.random() < 0.1 else None,
        service_s=4.0 if long else dice.uniform(0.002, 0.02),
        stream_owned=long,
        tokens=tokens,
    )


async def _served(gate: Admission, request_id: str) -> bool:
    """Admit the request, serve it and settle it. False if the request is refused or its client leaves."""
    call = call_of(request_id)
    try:
        async with asyncio.timeout(call.leaves_s):
            await gate.admit(call.request, stream_owned=call.stream_owned)
    except (RequestError, TimeoutError):
        return False
    await asyncio.sleep(call.service_s)
    spent = (_PROMPT_TOKENS, call.tokens - _PROMPT_TOKENS)
    seconds = (call.service_s, call.service_s)
    gate.settle(Completion(request_id, Outcome.COMPLETED, 200, None, *spent, *seconds))
    return True


async def _client(gate: Admission, ids: Iterator[str], ending: asyncio.Event) -> None:
    while not ending.is_set():
        if not await _served(gate, next(ids)):
            await asyncio.sleep(_AGAIN_S)


async def work(job: Job, orders: Orders) -> None:
    ids, ending = (f"{job.replica}.{number}" for number in itertools.count()), asyncio.Event()
    async with joined(job) as gate:
        print("ready", flush=True)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(_CLIENTS):
                tasks.create_task(_client(gate, ids, ending))
            while (order := await orders.next()) and order != "end":
                for request_id in order.split()[1:]:
                    tasks.create_task(_served(gate, request_id))
            ending.set()
        print("done", flush=True)
        await orders.next()  # keep sending heartbeats until all replicas have ended


async def main() -> None:
    orders = await Orders.of_stdin()
    await work(Job.read(await orders.next()), orders)


if __name__ == "__main__":
    uvloop.run(main())
