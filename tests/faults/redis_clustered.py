"""Starts a Redis Cluster of six nodes, of Valkey or Redis."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from redis.crc import key_slot
from redis_servers import SILENCE_MS, Server, hosts, redis_server, wait

from picker_fleet.state.keys import Keys
from picker_tools.local_fleet.network import LOOPBACK, free_port

SLOTS = 16384


@dataclass(slots=True)
class Cluster:
    """Three primaries, each with one replica."""

    servers: list[Server]

    @property
    def url(self) -> str:
        return f"redis+cluster://{hosts(self.servers)}"

    def owner(self, pool: str, *, but: Sequence[Server] = ()) -> Server | None:
        """The node that most nodes name as owner of the pool's slot; the nodes `but` are not asked."""
        slot = key_slot(Keys.of(pool).pool.encode())
        seen = []
        for server in self.servers:
            if server not in but:
                ranges = server.ask("CLUSTER", "SLOTS")
                seen += [int(each[2][1]) for each in ranges if int(each[0]) <= slot <= int(each[1])]
        port = max(set(seen), key=seen.count) if seen else 0
        return next((server for server in self.servers if server.port == port and server not in but), None)

    def is_whole(self) -> bool:
        """Whether every node sees three primaries, each with one replica."""
        return all(map(_is_whole, self.servers))

    def pools(self) -> list[str]:
        """For each primary, the name of a pool whose slot the primary owns."""
        found: dict[int, str] = {}
        for number in range(1000):
            owner = self.owner(f"pool-{number}")
            if owner is not None:
                found.setdefault(owner.port, f"pool-{number}")
            if len(found) == 3:
                return list(found.values())
        raise AssertionError(f"no pools for three primaries: {found}")


@contextlib.contextmanager
def clustered(folder: Path, binary: str = "", *, silence_ms: int = SILENCE_MS) -> Iterator[Cluster]:
    """Start six Redis nodes, and yield once the Cluster serves every slot."""
    with contextlib.ExitStack() as stack:
        servers = []
        for number in range(6):
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(silence_ms))
            bus = ("--cluster-port", str(free_port()), "--repl-diskless-sync-delay", "0")
            server = redis_server(folder / str(number), *options, *bus, binary=binary)
            servers.append(stack.enter_context(server))
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
        wait(lambda server=server: _known(server) == 6, "every node to know six nodes")
    for primary, replica in zip(primaries, replicas, strict=True):
        replica.ask("CLUSTER", "REPLICATE", primary.ask("CLUSTER", "MYID"))
    for replica in replicas:
        wait(replica.follows, "a replica to get in sync")
    for server in servers:
        wait(lambda server=server: _is_whole(server), "a whole Cluster")


def _known(server: Server) -> int:
    return len([line for line in server.ask("CLUSTER", "NODES").splitlines() if b"handshake" not in line])


def _is_whole(server: Server) -> bool:
    slots = server.ask("CLUSTER", "SLOTS")
    return b"cluster_state:ok" in server.ask("CLUSTER", "INFO") and [len(each) for each in slots] == [4, 4, 4]
