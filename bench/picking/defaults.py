"""What the scorers of the contract's example add to a request, on the replica and in the script, beside the
choice without scorers: the fewest requests in flight."""

import json
import random
from typing import Any

from bench.lifecycle.life import SETTINGS
from bench.lifecycle.server import Server, server
from bench.picking.cases import Step
from picker_fleet.endpoints.readings import EndpointMetrics, Reading
from picker_fleet.endpoints.snapshot import Endpoint, Snapshot, SnapshotCell
from picker_fleet.request import Band, InferenceRequest, Workload
from picker_fleet.scheduling.chooser import LeastLoadedChooser, ScoringChooser, with_in_flight
from picker_fleet.scheduling.endpoint_history import LatencyTracker, PrefixIndex
from picker_fleet.scheduling.scheduler import Scheduler
from picker_fleet.state.arrival import pack

SCORERS = {"queue-depth": 2.0, "kv-cache": 2.0, "lora-affinity": 3.0}
ENDPOINTS = 10
_BATCH = 16
_ROUNDS = 7
_KEY = "epp:{bench}:pool"
_NEVER_MS = 10_000_000
_ADDRESSES = [f"10.0.0.{number}:8000" for number in range(ENDPOINTS)]
_REQUEST = InferenceRequest(
    "r", "llama", "llama", False, "llama", Band.DEFAULT, 1.0, Workload("w", 3, False), 1.0, 30.0, None
)


def choosing(*, scored: bool, anew: bool = False, seed: int = 5) -> Step:
    """The replica's part: the candidates that the script is told. `anew`: what is known of the endpoints is
    taken up again each time, which a replica does ten times a second."""
    cell, chance = SnapshotCell(), random.Random(seed)
    cell.publish(Snapshot("1", tuple(map(Endpoint, _ADDRESSES))))
    if not scored:
        plain = LeastLoadedChooser(cell)
        return lambda: plain.choose(_REQUEST)
    readings = {
        address: Reading(
            EndpointMetrics(0, waiting=chance.randrange(40), kv_utilisation=chance.random(), max_adapters=4),
            0.0,
            known=True,
        )
        for address in _ADDRESSES
    }
    now_s = 0.0

    def clock() -> float:
        nonlocal now_s
        now_s += 1.0 if anew else 0.0
        return now_s

    chooser = ScoringChooser(
        Scheduler(with_in_flight(SCORERS)),
        cell,
        readings=lambda: readings,
        in_flight=dict,
        index=PrefixIndex(),
        latencies=LatencyTracker(),
        routes=None,
        clock=clock,
    )

    def step() -> None:
        choice = chooser.choose(_REQUEST)
        chooser.placed(_REQUEST, choice, (_ADDRESSES[0],))

    return step


def script_us(requests: int) -> dict[str, float]:
    """The script's part by its candidates: CPU of the server for an admission and its end, microseconds.

    Admissions are 16 a call, and bypass the queue; the least of rounds that take turns.
    """
    chance = random.Random(5)
    told = ",".join(f"{address}={chance.random():.4f}" for address in _ADDRESSES[:8])
    found: dict[str, list[float]] = {"*": [], told: []}
    with server() as it:
        _publish(it)
        for number in range(_ROUNDS + 1):
            for candidates, costs in found.items():
                cost = _lives_us(it, candidates, requests, number)
                if number:  # the first round warms up
                    costs.append(cost)
    plain, scored = (min(costs) for costs in found.values())
    return {"without scorers": plain, "eight candidates with scores": scored}


def _publish(it: Server) -> None:
    settings = {**SETTINGS, "upper_per": 1000, "lower_per": 1000}
    about = '{"labels":{},"draining":false}'
    _call(it, "heartbeat", "r", "{}", _NEVER_MS)
    hosts = [word for address in _ADDRESSES for word in (address, about)]
    _call(it, "publish", "r", "c", "e", json.dumps(settings), *hosts)


def _lives_us(it: Server, candidates: str, requests: int, number: int) -> float:
    before = it.cpu_us()
    for at in range(0, requests, _BATCH):
        ids = [f"{number}-{at + one:032d}" for one in range(_BATCH)]
        replies = _call(
            it,
            "admit",
            "r",
            *(
                pack((one, "1", "llama", "", "llama", candidates), (1, 1, 1, _NEVER_MS, 0, 3, 0, 0))
                for one in ids
            ),
        )
        if not all(reply.startswith(b"placed") for reply in replies[4:]):
            raise RuntimeError(f"not all were placed: {replies[4:]}")
        _call(it, "settle", "r", *(word for one in ids for word in (one, "completed", "", "")))
    return (it.cpu_us() - before) / requests


def _call(it: Server, name: str, *args: Any) -> Any:
    return it.client.execute_command("FCALL", it.library.function(name), 1, _KEY, *args)
