"""Commands sent again as fast as the server takes them, so that its caches are as warm as under load."""

import csv
import shutil
import socket
import subprocess
from collections.abc import Sequence

import hiredis

from app.fleet.ports import LOOPBACK
from bench.lifecycle.life import BATCH, Lives, Size
from bench.lifecycle.server import Server

_DEADLINE_S = 60.0
_IN_FLIGHT = 12  # commands on their way at once
# The floor: what a script costs that writes three times.
_THREE_WRITES = """
redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
redis.call('HINCRBY', KEYS[2], 'count', 1)
redis.call('ZPOPMIN', KEYS[1])
"""


def life_us(server: Server, size: Size, lives: int, seed: int) -> tuple[float, float]:
    """Server CPU of one life at `size` in microseconds, and bytes a queued request takes."""
    warm_up = 100 * BATCH
    tape: list[bytes] = []
    for round in ("record", "play"):
        state = Lives(server, size, seed)
        bytes_each = (server.memory_bytes() - state.empty_bytes) / size.queued
        state.live(warm_up)
        if round == "record":
            state.tape = tape
            state.live(lives)
            state.tape = None
    return _play(server, tape) / lives, bytes_each


def floor_us(server: Server, calls: int) -> float:
    """What `redis-benchmark` finds one call of the floor to take, in microseconds: one by its rate.

    RuntimeError if the program is missing (Debian: redis-tools) or fails.
    """
    program = shutil.which("redis-benchmark")
    if program is None:
        raise RuntimeError("redis-benchmark is not installed")
    server.forget()
    sha = server.client.script_load(_THREE_WRITES)
    said = subprocess.run(
        [program, "-p", str(server.port), "-n", str(calls), "-r", "1000000", "--csv",
         "EVALSHA", sha, "2", "{bench}z", "{bench}h", "1", "member-__rand_int__"],
        capture_output=True, text=True, check=False, timeout=_DEADLINE_S,
    )  # fmt: skip
    try:
        *_, row = csv.reader(said.stdout.splitlines())
        return 1e6 / float(row[1])
    except (ValueError, IndexError, ZeroDivisionError):
        raise RuntimeError(f"redis-benchmark failed: {said.stderr or said.stdout}") from None


def _play(server: Server, commands: Sequence[bytes]) -> float:
    """Send `commands`, some at a time; the CPU they took, in microseconds. RuntimeError if one fails."""
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
                    left -= 1
        return server.cpu_us() - before
