"""Compares prefix hits of picks that look at some of a large pool's endpoints and of picks that look at all.

Runs a replica's chooser and the script's formula for the choice among candidates in this process. Simulated
chats of several turns begin with one of a few system prompts. Each request runs until `_RUNNING` more
requests have arrived, so that many endpoints are busy.
"""

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from unittest.mock import Mock, patch

from bench.rig.report import percentile
from picker_fleet.domain.config import parse
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.request import Band, Endpoint, InferenceRequest, Workload
from picker_fleet.endpoints.readings import EndpointMetrics, Reading, Readings
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.scheduling import endpoint_states
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.scheduling.endpoint_history import block_hashes
from picker_fleet.scheduling.route_stream import RouteStream
from picker_fleet.state.accounting_token import Keyring

SCORERS = {"queue-depth": 2.0, "kv-cache": 2.0, "prefix-affinity": 3.0}  # scorer weights in the Helm chart
_SYSTEM_PROMPTS, _SYSTEM_BLOCKS = 20, (4, 16)
_CHATS, _TURNS, _TURN_BLOCKS = 3000, 8, (2, 6)
_RUNNING = 2000
_PLACES = 4  # requests that an endpoint runs at once; further requests wait there
_WARM, _COUNTED = 8000, 8000
_READ_EACH = 100  # requests between two scrapes of the endpoints
_ALL = 10**9


@dataclass(frozen=True, slots=True)
class Hits:
    """`share`: share of the prompts' blocks that the chosen endpoint had cached. `load`, `load_p99`: mean and
    99th percentile of the chosen endpoint's requests before the choice."""

    share: float
    load: float
    load_p99: int


def measure_hits(size: int) -> tuple[Hits, Hits]:
    """The prefix hits of picks that look at some of `size` endpoints, and of picks that look at all."""
    with patch.object(endpoint_states, "ALL_LOOKED_AT", _ALL):
        of_all = _run(size)
    return _run(size), of_all


class _Chats:
    """Makes prompts of random chats, as hashes of the prompts' blocks; a prompt grows with each turn."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._system = [self._text(_SYSTEM_BLOCKS) for _ in range(_SYSTEM_PROMPTS)]
        self._chats = [self._new() for _ in range(_CHATS)]

    def next(self) -> tuple[bytes, ...]:
        at = self._dice.randrange(_CHATS)
        text, turns = self._chats[at]
        text += self._text(_TURN_BLOCKS)
        self._chats[at] = (text, turns + 1) if turns < _TURNS else self._new()
        return block_hashes("llama", text)

    def _new(self) -> tuple[bytes, int]:
        return self._dice.choice(self._system), 0

    def _text(self, blocks: tuple[int, int]) -> bytes:
        return self._dice.randbytes(256 * self._dice.randint(*blocks))


def _run(size: int) -> Hits:
    dice = random.Random(29)
    addresses = [f"10.{n // 62_500}.{n // 250 % 250}.{n % 250}:8000" for n in range(size)]
    cell, loads, now_s = SnapshotCell(), Counter[str](), 0.0
    cell.publish(Snapshot("1", tuple(map(Endpoint, addresses))))
    seen: dict[str, int] = {}
    fleet = KnownFleet(parse({"scheduling": {"scorers": SCORERS}}))
    routes = RouteStream("redis://127.0.0.1:1/0", stream="unused", replica="r")
    index = routes.index

    def readings() -> Readings:
        loads = {address: seen.get(address, 0) for address in addresses}
        pages = {
            address: EndpointMetrics(0, max(0, load - _PLACES), kv_utilisation=min(1.0, load / (2 * _PLACES)))
            for address, load in loads.items()
        }
        return Readings(pages, lambda address: Reading(pages[address], 0.0, known=True))

    chooser = EndpointChooser(
        fleet, cell, readings=Mock(snapshot=readings), routes=routes, keys=Keyring(), clock=lambda: now_s
    )
    chats, running, had, asked = _Chats(dice), deque[str](), 0, 0
    found: list[int] = []
    for number in range(_WARM + _COUNTED):
        if number % _READ_EACH == 0:
            fleet.in_flight = seen = dict(loads)
            now_s += 1.0
        prefix = chats.next()
        chosen = as_the_script(chooser.choose(request(prefix)).candidates, loads, chooser.live_weight)
        if number >= _WARM:
            asked += len(prefix)
            had += index.match(prefix, [chosen]).get(chosen, 0)
            found.append(loads[chosen])
        index.add(chosen, prefix)
        loads[chosen] += 1
        running.append(chosen)
        if len(running) > _RUNNING:
            loads[running.popleft()] -= 1
    return Hits(had / asked, sum(found) / len(found), int(percentile(found, 0.99)))


def as_the_script(candidates: str, loads: Counter[str], live_weight: float) -> str:
    """Choose among scored candidates, as lua/lib/endpoints.lua does."""
    scores = {address: float(score) for address, score in (each.split("=") for each in candidates.split(","))}
    most = max(1, *(loads[address] for address in scores))
    return min(scores, key=lambda address: live_weight * loads[address] / most - scores[address])


def request(prefix: Sequence[bytes], request_id: str = "r", body_bytes: int = 0) -> InferenceRequest:
    plain = InferenceRequest(
        request_id, "llama", "llama", False, "f", Band.DEFAULT, 1.0, Workload("w", 3), 1.0, 30.0, None
    )
    return plain._replace(prefix=tuple(prefix), body_bytes=body_bytes)
