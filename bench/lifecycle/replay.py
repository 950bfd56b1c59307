"""Commands sent again as fast as the server takes them, so that its caches are as warm as under load."""

import csv
import shutil
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

import hiredis

from bench.lifecycle.life import BATCH, Lives, Size
from bench.lifecycle.server import Server
from bench.lifecycle.upkeep import upkeep
from picker_fleet.state.calls import HEAD
from picker_tools.local_fleet.network import LOOPBACK

_DEADLINE_S = 60.0
_ASTRAY = (b"gone", b"left", b"unknown")
_IN_FLIGHT = 12  # commands on their way at once
# The floor: what a script costs that writes three times.
_THREE_WRITES = """
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
redis.call('HINCRBY', KEYS[2], 'count', 1)
redis.call('ZPOPMIN', KEYS[1])
"""


@dataclass(frozen=True, slots=True)
class Life:
    """Server CPU of one life in microseconds, the bytes a queued request takes, those of them that are the
    workloads' registry, and the longest call: of lives, and of each kind of upkeep."""

    us: float
    queued_bytes: float
    registry_bytes: float
    longest_us: float
    upkeep_us: dict[str, float] = field(default_factory=dict)


def life(
    server: Server, size: Size, lives: int, seed: int, *, kept_up: bool = False, placed: bool = True
) -> Life:
    """A life at `size`. The same is done twice, and a call is as long as it was the shorter time: what holds
    only one of them up is the machine. Where calls are many, some are held up twice: there it is thrice.

    Where order depends on when requests came (`workload-aware`), a replay would serve others: it is lived the
    second time, too, call by call. `kept_up`: then comes all the upkeep there is (bench/lifecycle/upkeep.py).
    `placed`: with the step in which a granted request gets its endpoint.
    """
    warm_up = 100 * BATCH
    tape: list[bytes] = []
    longest: list[dict[int, float]] = []
    kinds: list[dict[str, dict[int, float]]] = []
    for round in range(3 if size.large else 2):
        state = Lives(server, size, seed, watched=True, placed=placed)
        filling_us, state.took_us = state.took_us or {}, None
        server.forget_slow()  # it holds what was asked, which is no part of what is stored
        bytes_each = (server.memory_bytes() - state.empty_bytes) / size.queued
        registry_each = state.registry_bytes() / size.queued
        state.live(warm_up)
        if round == 0:  # it is recorded, and then played
            state.tape = tape
            state.live(lives)
            state.tape = None
        else:
            cpu_us = _play(server, tape) if size.ordering == "fcfs" else _live(server, state, lives)
        longest.append(filling_us | server.slow_us())
        kinds.append(_kept_up(state) if kept_up else {})
    upkeep_us = {kind: _longest(*(made[kind] for made in kinds)) for kind in kinds[0]}
    return Life(cpu_us / lives, bytes_each, registry_each, _longest(*longest), upkeep_us)


def upkeep_us(server: Server, size: Size, seed: int) -> dict[str, float]:
    """The longest call of each kind of upkeep at `size`, each the shortest time of three."""
    kinds = [_kept_up(Lives(server, size, seed)) for _ in range(3)]
    return {kind: _longest(*(made[kind] for made in kinds)) for kind in kinds[0]}


def _kept_up(state: Lives) -> dict[str, dict[int, float]]:
    found = {}
    state.took_us = {}
    for kind in upkeep(state):
        found[kind], state.took_us = state.took_us, {}
    return found


def _longest(*rounds: dict[int, float]) -> float:
    """Of the calls that all made, each as long as it was the shortest time."""
    common = set[int].intersection(*map(set, rounds))
    return max((min(made[call] for made in rounds) for call in common), default=0.0)


@dataclass(frozen=True, slots=True)
class Floor:
    """One call of the floor, in microseconds: of the server's CPU, and by the clock (one by the rate that
    `redis-benchmark` finds). They are alike where nothing else runs; what else runs is in the second, too."""

    us: float
    clock_us: float


def floor(server: Server, calls: int) -> Floor:
    """The floor while `redis-benchmark` asks for it as fast as it can.

    RuntimeError if the program is missing (Debian: redis-tools) or fails.
    """
    program = shutil.which("redis-benchmark")
    if program is None:
        raise RuntimeError("redis-benchmark is not installed")
    server.forget()
    sha = server.client.script_load(_THREE_WRITES)
    before = server.cpu_us()
    said = subprocess.run(
        [program, "-p", str(server.port), "-n", str(calls), "-r", "1000000", "--csv",
         "EVALSHA", sha, "2", "{bench}z", "{bench}h", "1", "member-__rand_int__"],
        capture_output=True, text=True, check=False, timeout=_DEADLINE_S,
    )  # fmt: skip
    cpu_us = server.cpu_us() - before
    try:
        *_, row = csv.reader(said.stdout.splitlines())
        return Floor(cpu_us / calls, 1e6 / float(row[1]))
    except (ValueError, IndexError, ZeroDivisionError):
        raise RuntimeError(f"redis-benchmark failed: {said.stderr or said.stdout}") from None


def _live(server: Server, state: Lives, lives: int) -> float:
    before = server.cpu_us()
    state.live(lives)
    return server.cpu_us() - before


def _play(server: Server, commands: Sequence[bytes]) -> float:
    """Send `commands`, some at a time; the CPU they took, in microseconds.

    RuntimeError if one fails, or finds another request than it did when it was recorded.
    """
    reader = hiredis.Reader()
    with socket.create_connection((LOOPBACK, server.port), _DEADLINE_S) as connection:
        before = server.cpu_us()
        for at in range(0, len(commands), _IN_FLIGHT):
            part = commands[at : at + _IN_FLIGHT]
            connection.sendall(b"".join(part))
            left = len(part)
            while left:
                reader.feed(connection.recv(65536))
                while (reply := reader.gets()) is not False:
                    if isinstance(reply, hiredis.ReplyError):
                        raise RuntimeError(f"the server refused: {reply}")
                    if any(each.startswith(_ASTRAY) for each in reply[HEAD:]):
                        raise RuntimeError(f"the replay served others: {reply}")
                    left -= 1
        return server.cpu_us() - before
