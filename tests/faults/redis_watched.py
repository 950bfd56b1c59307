"""Starts a Redis primary, its replica, and three Sentinels that replace a failed primary."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from redis_servers import SILENCE_MS, Server, begun, debian, hosts, redis_server, wait

from picker_tools.local_fleet.network import LOOPBACK, free_port

SERVICE = "main"


@dataclass(slots=True)
class Watched:
    """A primary, its replica, and three Sentinels."""

    servers: list[Server]
    sentinels: list[Server]

    @property
    def url(self) -> str:
        return f"redis+sentinel://{hosts(self.sentinels)}/{SERVICE}"

    def primary(self) -> Server:
        """The server that most Sentinels name as primary."""
        named = [sentinel.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE) for sentinel in self.sentinels]
        ports = [int(address[1]) for address in named]
        port = max(set(ports), key=ports.count)
        return next(server for server in self.servers if server.port == port)

    def is_whole(self) -> bool:
        """Whether the Redis replica is in sync with the primary, and every Sentinel knows both servers."""
        return self.replica().follows() and all(map(_sees_all, self.sentinels))

    def replica(self) -> Server:
        return next(server for server in self.servers if server is not self.primary())


@contextlib.contextmanager
def watched(folder: Path, *options: str, silence_ms: int = SILENCE_MS) -> Iterator[Watched]:
    """Start a primary, its replica and three Sentinels. Primary and replica get `options`."""
    server, sentinel = debian("redis-server"), debian("redis-sentinel")
    fast = ("--repl-diskless-sync-delay", "0", "--repl-timeout", "5", *options)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(redis_server(folder / "0", *fast, binary=server))
        of_first = ("--replicaof", f"{LOOPBACK} {first.port}")
        second = stack.enter_context(redis_server(folder / "1", *fast, *of_first, binary=server))
        wait(second.follows, "the replica to get in sync")
        sentinels = [
            stack.enter_context(_sentinel(sentinel, folder / f"sentinel-{number}", first.port, silence_ms))
            for number in range(3)
        ]
        found = Watched([first, second], sentinels)
        wait(lambda: all(map(_sees_all, sentinels)), "Sentinels to know all servers")
        yield found


@contextlib.contextmanager
def _sentinel(binary: str, folder: Path, primary: int, silence_ms: int) -> Iterator[Server]:
    folder.mkdir(parents=True)
    port = free_port()
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind {LOOPBACK}\ndir {folder}\n"
        f"sentinel monitor {SERVICE} {LOOPBACK} {primary} 2\n"
        f"sentinel down-after-milliseconds {SERVICE} {silence_ms}\n"
        f"sentinel failover-timeout {SERVICE} 5000\n"
    )
    server = Server(port, begun(folder, (binary, str(config))), {})
    try:
        wait(lambda: server.ask("PING"), "a Sentinel's answer")
        yield server
    finally:
        server.kill()


def _sees_all(sentinel: Server) -> bool:
    flat = [text.decode() for text in sentinel.ask("SENTINEL", "MASTER", SERVICE)]
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    return (fields["num-slaves"], fields["num-other-sentinels"], fields["flags"]) == ("1", "2", "master")
