"""Measures the cost of requests at one size of the shared state, by replaying recorded commands."""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from bench.lifecycle.workload import BATCH, Size, Workload, upkeep
from bench.rig.server import Server
from picker_fleet.state.connection import HEAD

_DEADLINE_S = 60.0
_MISMATCH = (b"gone", b"left", b"unknown")
# The baseline for a request's cost is a script with three writes.
_THREE_WRITES = """
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
redis.call('HINCRBY', KEYS[2], 'count', 1)
redis.call('ZPOPMIN', KEYS[1])
"""


@dataclass(frozen=True, slots=True)
class LifecycleCost:
    """The cost of one request: server CPU in µs, script calls, and bytes while queued (`registry_bytes`: in
    the workload registry). `longest_us`: the longest call for requests; `upkeep_us`: for each kind of upkeep.
    """

    us: float
    calls: float
    queued_bytes: float
    registry_bytes: float
    longest_us: float
    upkeep_us: dict[str, float] = field(default_factory=dict)


def measure_lifecycle(
    server: Server, size: Size, requests: int, seed: int, *, upkeep: int = 0, placed: bool = True
) -> LifecycleCost:
    """Measure requests at `size` in two rounds. Each call's shortest time counts, because delays by the
    machine occur in only one round.

    With the policy `fcfs`, later rounds replay the recorded commands. With other policies a replay could
    serve other requests, so later rounds repeat the calls. `upkeep`: how many rounds measure upkeep.
    `placed`: whether grants place requests.
    """
    warm_up = 50 * BATCH
    recording: list[bytes] = []
    longest: list[dict[int, float]] = []
    kinds: list[dict[str, dict[int, float]]] = []
    for round in range(2):
        state = Workload(server, size, seed, watched=True, placed=placed)
        filling_us, state.took_us = state.took_us or {}, None
        server.forget_slow()  # exclude the slow log from the memory measurement
        bytes_each = (server.memory_bytes() - state.empty_bytes) / max(1, size.queued)
        registry_each = state.registry_bytes() / max(1, size.queued)
        state.run(warm_up)
        if round == 0:  # record the commands for the replay in the later rounds
            state.recording = recording
            state.run(requests)
            state.recording = None
        else:
            is_replayed = size.ordering == "fcfs"
            work = partial(_play, server, recording) if is_replayed else partial(state.run, requests)
            cpu_us = server.cpu_us_of(work)
        longest.append(filling_us | server.slow_us())
        if round < upkeep:
            kinds.append(_upkeep_calls(state))
    calls, by_kind = len(recording) / requests, _by_kind(kinds)
    return LifecycleCost(cpu_us / requests, calls, bytes_each, registry_each, _longest(*longest), by_kind)


def upkeep_us(server: Server, size: Size, seed: int, rounds: int) -> dict[str, float]:
    """The longest call of each kind of upkeep at `size`; a call's time is the shortest of all rounds."""
    return _by_kind([_upkeep_calls(Workload(server, size, seed)) for _ in range(rounds)])


def _by_kind(rounds: Sequence[dict[str, dict[int, float]]]) -> dict[str, float]:
    return {kind: _longest(*(made[kind] for made in rounds)) for kind in (rounds[0] if rounds else ())}


def _upkeep_calls(state: Workload) -> dict[str, dict[int, float]]:
    found = {}
    state.took_us = {}
    for kind in upkeep(state):
        found[kind], state.took_us = state.took_us, {}
    return found


def _longest(*rounds: dict[int, float]) -> float:
    """The longest call that all rounds made; a call's time is the shortest of all rounds."""
    common = set[int].intersection(*map(set, rounds))
    return max((min(made[call] for made in rounds) for call in common), default=0.0)


def baseline(server: Server, calls: int) -> float:
    """Server CPU in µs per call of the baseline script, called by `redis-benchmark`.

    Raises RuntimeError if the program is missing (Debian: redis-tools) or fails.
    """
    program = shutil.which("redis-benchmark")
    if program is None:
        raise RuntimeError("redis-benchmark is not installed")
    server.forget()
    sha = server.client.script_load(_THREE_WRITES)
    before = server.cpu_us()
    output = subprocess.run(
        [program, "-p", str(server.port), "-n", str(calls), "-r", "1000000", "-q",
         "EVALSHA", sha, "2", "{bench}z", "{bench}h", "1", "member-__rand_int__"],
        capture_output=True, text=True, check=False, timeout=_DEADLINE_S,
    )  # fmt: skip
    if output.returncode:
        raise RuntimeError(f"redis-benchmark failed: {output.stderr or output.stdout}")
    return (server.cpu_us() - before) / calls


def _play(server: Server, commands: Sequence[bytes]) -> None:
    """Send recorded `commands`, a few at a time. Raises RuntimeError if a command fails or serves other
    requests than in the recording."""
    for reply in server.replies(commands):
        if any(each.startswith(_MISMATCH) for each in reply[HEAD:]):
            raise RuntimeError(f"the replay served other requests: {reply}")
