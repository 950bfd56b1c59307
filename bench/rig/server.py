"""Runs a Valkey for a benchmark, and measures its CPU time, memory and slow calls."""

import contextlib
import json
import random
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hiredis
import redis
from redis_servers import redis_server

from bench.rig.report import cpu_ns
from picker_fleet.state.keys import Keys
from picker_fleet.state.schema import ARRIVAL_NUMBERS
from picker_fleet.state.scripts import load_library
from picker_fleet.state.store import pack_arrival
from picker_tools.local_fleet.network import LOOPBACK
from picker_tools.local_fleet.parts import VALKEY_SETTINGS

_DEADLINE_S = 60.0
_PIPELINED = 12  # number of commands sent before waiting for replies
# Threshold of the slow log in µs. With 1000 us the slow log had 15 000 calls after a million requests, and
# clearing the log delayed the next call by 20 to 50 ms.
SLOW_US = 3000


def arrival(
    request_id: str, flow: str, *, workload: str = "", candidates: str = "*", **others: float
) -> bytes:
    """Pack an arrival for the script `admit`: a request of weight and cost 1, by default for any endpoint.
    `others`: further numeric fields of the arrival."""
    numbers = {"weight": 1, "cost": 1, "criticality": 3, **others}
    texts = (request_id, "1", flow, workload, "llama", candidates, "")
    return pack_arrival(texts, tuple(numbers.get(name, 0) for name in ARRIVAL_NUMBERS))


def request_id(dice: random.Random, number: int) -> str:
    """The id of request `number`, as long as Envoy's request ids."""
    return f"{dice.getrandbits(64):016x}-{number:019d}"


class Server:
    """A running Valkey with the product's Lua library. All times are in microseconds."""

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self.pid = pid
        self.client = redis.Redis(LOOPBACK, port, socket_timeout=_DEADLINE_S, protocol=2)
        self.library = load_library()
        self.client.function_load(self.library.source)
        self.client.config_set("slowlog-log-slower-than", SLOW_US)
        self.client.config_set("slowlog-max-len", 100_000)

    @property
    def kind(self) -> str:
        """The server's name, version and allocator."""
        info = self.client.info()
        valkey = info.get("valkey_version")
        name = f"Valkey {valkey}" if valkey else f"Redis {info['redis_version']}"
        return f"{name} with {info['mem_allocator']}"

    def cpu_us(self) -> float:
        return cpu_ns([self.pid]) / 1000

    def cpu_us_of(self, work: Callable[[], object]) -> float:
        """Run `work`, and return the CPU time in µs that the server used meanwhile."""
        before = self.cpu_us()
        work()
        return self.cpu_us() - before

    def memory_bytes(self) -> int:
        return int(self.client.info("memory")["used_memory"])

    def slow_us(self) -> dict[int, float]:
        """For the hash of each command in the slow log: the command's longest duration in µs."""
        found: dict[int, float] = {}
        for entry in self.client.slowlog_get(100_000):
            command = entry["command"]
            if command.startswith(b"FCALL"):
                call = hash(command)
                found[call] = max(found.get(call, 0), entry["duration"])
        return found

    def replies(self, commands: Sequence[bytes]) -> Iterator[Any]:
        """Send packed `commands` on a new connection, several at a time so that the server is never idle, and
        yield each reply. Raises RuntimeError if a command fails.
        """
        reader = hiredis.Reader()
        with socket.create_connection((LOOPBACK, self.port), _DEADLINE_S) as connection:
            for at in range(0, len(commands), _PIPELINED):
                part = commands[at : at + _PIPELINED]
                connection.sendall(b"".join(part))
                left = len(part)
                while left:
                    reader.feed(connection.recv(65536))
                    while (reply := reader.gets()) is not False:
                        if isinstance(reply, hiredis.ReplyError):
                            raise RuntimeError(f"the server refused: {reply}")
                        left -= 1
                        yield reply

    def forget(self) -> None:
        # Flush with SYNC, because freeing memory in the background would cost the next calls CPU.
        self.client.execute_command("FLUSHALL", "SYNC")
        # Allocate a large block now: the first one sorts the freed memory (2 to 18 ms after 1e6 requests).
        self.client.set("{bench}much", bytes(1 << 20))
        self.client.execute_command("FLUSHALL", "SYNC")
        self.forget_slow()

    def forget_slow(self) -> None:
        self.client.slowlog_reset()


NEVER_MS = 10_000_000
_SETTINGS: dict[str, Any] = {
    "upper_per": 0, "lower_per": 0, "total_capacity": 10**9, "flow_capacity": 10**9, "lease_ms": NEVER_MS,
    "silence_ms": NEVER_MS, "fallbacks": 2, "log_max": 0, "window_ms": 60_000, "ema_alpha": 0.2,
    "band_policy": "strict", "band_weights": [70, 20, 10], "fairness": "weighted-fair", "ordering": "fcfs",
    "overload": "preempt", "guard_share": 0.1, "starvation_ms": 0, "weights": {}, "paused": 0,
    "wait_signal": "request", "wait_weight": 0.4, "criticality_weight": 0.4, "rate_weight": 0.2,
    "wait_cap_ms": 60_000, "rate_cap": 100, "default_answer": 256, "answer_alpha": 0.2,
    "live_weight": 0.5,
}  # fmt: skip


class ScriptPool:
    """Calls the scripts of one pool as replica `owner`. `recording` is a list that collects the packed
    commands, or None."""

    def __init__(self, server: Server, name: str, owner: str) -> None:
        self.server, self.key, self.owner = server, Keys.of(name).pool, owner
        self.recording: list[bytes] | None = None

    def call(self, name: str, *args: Any) -> Any:
        command = ("FCALL", self.server.library.function(name), 1, self.key, *args)
        if self.recording is not None:
            self.recording.append(hiredis.pack_command(command))
        return self.execute(command)

    def execute(self, command: Sequence[Any]) -> Any:
        return self.server.client.execute_command(*command)

    def publish(self, endpoints: int, in_flight: float, **settings: Any) -> None:
        """Publish `endpoints` endpoints with a bound of `in_flight` requests of cost 1 in total."""
        per = in_flight / endpoints
        hosts = [
            x
            for n in range(endpoints)
            for x in (f"10.0.{n // 256}.{n % 256}:8000", '{"labels":{},"draining":false}')
        ]
        text = json.dumps({**_SETTINGS, "upper_per": per, "lower_per": per, **settings})
        self.call("publish", self.owner, "c", "e", text, *hosts)

    def settle(self, ids: Sequence[str], usage: bytes = b"") -> Any:
        ends = (x for id in ids for x in (id, "completed", "", "", "", usage))
        return self.call("settle", self.owner, *ends)

    def acknowledge(self, ids: Sequence[str]) -> None:
        self.call("acknowledge", self.owner, *(x for id in ids for x in (id, 1)))


def granted_ids(grants: Sequence[bytes]) -> list[str]:
    """The request ids of `grants`, each `placed ATTEMPT ENDPOINTS LOADS ID` or `granted ID`."""
    return [item.split()[-1].decode() for item in grants]


@contextlib.contextmanager
def server(binary: str = "") -> Iterator[Server]:
    """Run a Valkey, or the server `binary`, set as in a local fleet, until the `with` block ends."""
    with (
        tempfile.TemporaryDirectory() as folder,
        redis_server(Path(folder), *VALKEY_SETTINGS, binary=binary) as it,
    ):
        yield Server(it.port, it.process.pid)
