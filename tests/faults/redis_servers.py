"""Runs Valkey or Redis as a process, without persistence, optionally with TLS. Tests may kill and restart it.

`redis_watched.py` adds Sentinels, and `redis_clustered.py` forms a Cluster.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis

from picker_tools.local_fleet.network import LOOPBACK, free_port
from picker_tools.local_fleet.processes import valkey_binary

if TYPE_CHECKING:
    from tls_files import Pair

READY_S = 30.0
SILENCE_MS = 1500  # Sentinels and Clusters replace a primary that is silent for this time
PATIENT_MS = 15_000  # in tests that kill no server, Sentinels must not replace a stalled primary
REPLACED_S = 60.0  # time for a failover: a failed election is repeated after 10 s
_POLL_S = 0.02
_TRIES = 3  # starts of a server, because another process may take its chosen port first
_IN_MEMORY = ("--save", "", "--appendonly", "no")


_SAVE = """
local saved = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  saved[#saved + 1] = key
  saved[#saved + 1] = redis.call('DUMP', key)
end
return saved
"""
_PUT_BACK = """
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do redis.call('DEL', key) end
for i = 2, #ARGV, 2 do redis.call('RESTORE', ARGV[i], 0, ARGV[i + 1]) end
"""


def debian(name: str) -> str:
    """Return the path of the program `name`; if it is missing, name the Debian package to install."""
    found = shutil.which(name)
    assert found, f"{name} is missing: install Debian's {name}"
    return found


def wait(condition: Callable[[], Any], what: str, within_s: float = READY_S) -> Any:
    """Poll `condition` and return its first true value; an unreachable server counts as false."""
    end, tick = time.monotonic() + within_s, threading.Event()
    last: object = None
    while time.monotonic() < end:
        try:
            last = condition()
        except (redis.RedisError, OSError) as fault:
            last = fault
        else:
            if last:
                return last
        tick.wait(_POLL_S)
    raise AssertionError(f"timed out after {within_s:g} s waiting for {what}; last result: {last!r}")


@dataclass(slots=True)
class Server:
    """A running Redis or Valkey. `options` let redis-py connect as a user with all permissions.

    `folder` and `command`: the method `revive` starts the server with these; empty if no test restarts it.
    """

    port: int
    process: subprocess.Popen[bytes]
    options: dict[str, Any]
    folder: Path = field(default_factory=Path)
    command: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    def client(self) -> redis.Redis:
        return redis.Redis(LOOPBACK, self.port, protocol=2, socket_timeout=5.0, **self.options)

    def ask(self, *command: object) -> Any:
        """The server's raw reply to one command."""
        with self.client() as client:
            client.set_response_callback(str(command[0]), lambda reply, **_: reply)
            return client.execute_command(*command)

    def save(self, pattern: str) -> tuple[Any, ...]:
        """Arguments of an EVAL that later restores all keys that match `pattern` to their present state."""
        return (_PUT_BACK, 0, pattern, *self.ask("EVAL", _SAVE, 0, pattern))

    def info(self, section: str) -> dict[str, str]:
        lines = self.ask("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def follows(self, primary: int | None = None) -> bool:
        """Whether this server is a replica in sync with its primary (at port `primary`, if given)."""
        seen = self.info("replication")
        of_it = primary is None or seen.get("master_port") == str(primary)
        return of_it and seen.get("master_link_status") == "up"

    def began(self) -> str:
        """Whether the server has started: 'yes': the server answers; 'no': its process has ended; else ''."""
        if self.process.poll() is not None:
            return "no"
        return "yes" if self.ask("PING") else ""

    def kill(self) -> None:
        """Send SIGKILL to the server, and wait for its exit."""
        self.process.kill()
        self.process.wait()

    def revive(self) -> None:
        """Restart the server, empty, with the same command and port; wait until it answers."""
        self.process = begun(self.folder, self.command)
        assert wait(self.began, f"an answer of {self.command[0]}") == "yes", "the server did not restart"

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def documented_user(name: str) -> str:
    """The ACL rules of the user `name` in docs/redis.md."""
    page = (Path(__file__).parents[2] / "docs" / "redis.md").read_text()
    found = re.search(rf"^user {name} on >PASSWORD (.*\+(?:fcall|function\|load).*)$", page, re.M)
    assert found is not None, name
    return found[1]


@contextlib.contextmanager
def redis_server(
    folder: Path, *options: str, binary: str = "", tls: "Pair | None" = None, **asking: Any
) -> Iterator[Server]:
    """Start a server with `options`, and wait until it answers. The server's program is `binary`, else the
    one that the environment variable PICKER_TEST_SERVER names, else Valkey. With `tls` the server accepts
    only TLS, from clients with the same certificate. `asking`: options of redis-py's connections."""
    folder.mkdir(parents=True, exist_ok=True)
    binary = binary or os.environ.get("PICKER_TEST_SERVER") or valkey_binary()
    if tls is not None:
        cert, key = str(tls.cert), str(tls.key)
        secure = ("--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert)
        options = (*options, *secure)
        asking |= {"ssl": True, "ssl_ca_certs": cert, "ssl_certfile": cert, "ssl_keyfile": key}
    for _ in range(_TRIES):
        chosen = free_port()
        listen = ("--port", "0", "--tls-port", str(chosen)) if tls is not None else ("--port", str(chosen))
        command = (binary, "--bind", LOOPBACK, *listen, "--dir", str(folder), *_IN_MEMORY, *options)
        server = Server(chosen, begun(folder, command), asking, folder, command)
        try:
            if wait(server.began, f"an answer of {binary}") == "yes":
                yield server
                return
        finally:
            server.kill()
    raise AssertionError(f"{binary} did not start: {(folder / 'log').read_text()[-2000:]}")


def begun(folder: Path, command: Sequence[str]) -> "subprocess.Popen[bytes]":
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def hosts(servers: Sequence[Server]) -> str:
    return ",".join(f"{LOOPBACK}:{server.port}" for server in servers)
