"""What each kind of call costs Valkey: CPU of its process, by the scripts as replicas call them."""

import json
import random
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import hiredis

from bench.rig.server import NEVER_MS, ScriptPool, Server, arrival, granted_ids
from bench.sizing.formula import Fleet, messages_a_second
from picker_fleet.bands import MOST_PRIORITY
from picker_fleet.state.batching import HEAD
from picker_fleet.state.keys import Keys
from picker_tools.local_fleet.network import LOOPBACK

_PLENTY = 100_000  # more requests in flight than are ever made
_ENDPOINTS = 8
_FLOWS = 10
_IN_FLIGHT = 64
_QUEUED = 1000
_DEADLINE_S = 30.0
_INFO_EVERY_S = 10  # the info of an idle replica changes so often (replica/info.py)
_SERVED = [[0, f"tenant-{n}", 12.0] for n in range(_FLOWS)]


def replica_info(number: int) -> str:
    """What a replica tells of itself with each heartbeat, in its usual length (replica/info.py)."""
    about = {
        "host": f"picker-6d5f7c9b8d-{number:05d}", "version": "0.1.0", "admin": f"http://10.1.0.{number}:9090",
        "grpc": f"10.1.0.{number}:9002", "up_s": 86400.123, "waiting": 3, "degraded": False, "returns": 0,
        "told": [],
    }  # fmt: skip
    served = {"served": {"priorities": [[0, 120.0]], "flows": _SERVED, "cut": False}}
    return "\n".join(json.dumps(part, separators=(",", ":")) for part in (about, served))


class Pool(ScriptPool):
    """A pool on `server`. With `queued`, that many requests wait and each one waits its turn."""

    def __init__(self, server: Server, name: str, *, queued: bool = False, replicas: int = 1) -> None:
        self.owners = [f"picker-6d5f7c9b8d-{n:05d}" for n in range(replicas)]
        super().__init__(server, name, self.owners[0])
        self._made = 0
        self._running: deque[str] = deque()
        for number in range(replicas):
            self.beat(number)
        self.publish(_ENDPOINTS, _IN_FLIGHT if queued else _PLENTY)
        if queued:
            self._running.extend(self.admit(_IN_FLIGHT))
            while self._made < _IN_FLIGHT + _QUEUED:
                self.admit(16)
        self._queued = queued
        self.recorded: list[bytes] = []
        self.recording = self.recorded

    def beat(self, number: int, *, changed: bool = True) -> None:
        """A heartbeat; with the replica info if that has `changed`."""
        info = replica_info(number) if changed else ""
        self.call("heartbeat", self.owners[number], info, NEVER_MS, "")

    def admit(self, count: int) -> list[str]:
        """The ids of `count` new requests."""
        ids = [f"{self._made + n:036d}" for n in range(count)]
        self._made += count
        arrivals = [arrival(id, f"tenant-{int(id) % _FLOWS}", ttl_ms=NEVER_MS) for id in ids]
        self.call("admit", self.owner, *arrivals)
        return ids

    def serve(self, batch: int, rounds: int) -> int:
        """Run `batch` requests a call, `rounds` times: as many arrive as end. Returns the calls made."""
        before = len(self.recorded)
        for _ in range(rounds):
            arrived = self.admit(batch)
            if not self._queued:
                self._running.extend(arrived)
            ending = [self._running.popleft() for _ in range(batch)]
            reply = self.settle(ending)
            if any(not each.startswith(b"settled") for each in reply[HEAD:]):
                raise RuntimeError(f"an end was not settled: {reply[HEAD:]!r}")
            if self._queued:
                granted = granted_ids(reply[1])
                if len(granted) != batch:
                    raise RuntimeError(f"{batch} ends granted {len(granted)} requests")
                self.acknowledge(granted)
                self._running.extend(granted)
        return len(self.recorded) - before


def request_costs(server: Server, batch: int, requests: int, *, queued: bool) -> tuple[float, float]:
    """Calls of a request, and its CPU in µs when Valkey is full."""
    server.forget()
    pool = Pool(server, "sizing", queued=queued)
    pool.serve(batch, 200 // batch)
    pool.recorded.clear()
    calls = pool.serve(batch, requests // batch)
    server.forget()
    again = Pool(server, "sizing", queued=queued)  # the same ids: the recording serves the same requests
    again.serve(batch, 200 // batch)
    full_us = server.cpu_us_of(lambda: _replay([server], [pool.recorded]))
    return calls / requests, full_us / requests


def _replay(servers: list[Server], recordings: list[list[bytes]]) -> None:
    """Send each recording to its server, all at once. RuntimeError if a command fails."""
    with ThreadPoolExecutor(len(servers)) as threads:
        for done in [
            threads.submit(deque, server.replies(commands), 0)  # reads them all and keeps none
            for server, commands in zip(servers, recordings, strict=True)
        ]:
            done.result()


def shard_costs(servers: list[Server], batch: int, requests: int) -> list[float]:
    """CPU of a request in µs on each of `servers` when two pools are served at once: both on one server, or
    one on each of two."""
    names = ("sizing-a", "sizing-b")
    hosts = servers if len(servers) == 2 else servers * 2
    recordings: list[list[bytes]] = []
    for live in (False, True):
        for server in servers:
            server.forget()
        pools = [Pool(server, name) for server, name in zip(hosts, names, strict=True)]
        if not live:
            for pool in pools:
                pool.serve(batch, requests // batch)
            recordings = [pool.recorded for pool in pools]
    before = [server.cpu_us() for server in servers]
    _replay(hosts, recordings)
    each = requests * 2 / len(servers)
    return [(server.cpu_us() - was) / each for server, was in zip(servers, before, strict=True)]


def view_costs(server: Server, replicas: int, calls: int) -> list[float]:
    """CPU in µs of each read that a dashboard makes once a second, in a fleet of `replicas`: the state,
    flows, replicas."""
    server.forget()
    pool = Pool(server, "sizing", queued=True, replicas=replicas)

    found = []
    for call in (
        lambda: pool.call("state", NEVER_MS),
        lambda: pool.call("view_flows", 0, MOST_PRIORITY, "", "", 50, ""),
        lambda: pool.call("view_replicas", 256),
    ):
        for _ in range(20):
            call()
        found.append(server.cpu_us_of(lambda call=call: [call() for _ in range(calls)]) / calls)
    return found


@contextmanager
def _subscribers(server: Server, channel: str, count: int) -> Iterator[Callable[[int], None]]:
    """`count` connections that follow `channel`; the value waits until each of so many messages has come."""
    watch = selectors.DefaultSelector()
    open_: list[socket.socket] = []
    for _ in range(count):
        one = socket.create_connection((LOOPBACK, server.port), _DEADLINE_S)
        one.sendall(hiredis.pack_command(("SUBSCRIBE", channel)))
        one.recv(4096)
        watch.register(one, selectors.EVENT_READ, hiredis.Reader())
        open_.append(one)

    def drain(messages: int) -> None:
        left = messages * count
        while left:
            for key, _ in watch.select(_DEADLINE_S):
                key.data.feed(key.fileobj.recv(65536))  # type: ignore[union-attr]
                while key.data.gets() is not False:
                    left -= 1

    try:
        yield drain
    finally:
        for one in open_:
            one.close()


def simulate(server: Server, fleet: Fleet, seconds: int) -> float:
    """Cores of Valkey's that simulated replicas take: their calls, spread over a second, one at a time.

    Where this process is too slow for that, a second takes longer."""
    server.forget()
    pool = Pool(server, "sizing", replicas=fleet.replicas)
    owners, channel = pool.owners, Keys.of("sizing").metrics
    text = json.dumps({"from": owners[0], "sent": 1700000000123, "readings": {}})
    with _subscribers(server, channel, fleet.replicas) as drain:

        def publish() -> None:
            with server.client.pipeline(transaction=False) as pipe:
                pipe.time()
                pipe.publish(channel, text)
                pipe.execute()
            drain(1)

        def beat(number: int) -> None:
            pool.beat(number, changed=number % _INFO_EVERY_S == 0)
            pool.call("state", NEVER_MS)

        def rest(number: int) -> list[Callable[[], object]]:
            return [
                lambda: beat(number),
                lambda: pool.call("sweep", owners[number], 1000, NEVER_MS, NEVER_MS, NEVER_MS),
                server.client.ping,
                server.client.ping,
            ]

        work = [call for number in range(fleet.replicas) for call in rest(number)]
        work += [publish] * round(messages_a_second(fleet.replicas))
        work += [lambda: pool.serve(1, 1)] * round(fleet.requests_per_s)
        random.Random(1).shuffle(work)
        before = server.cpu_us()
        for _ in range(seconds):
            began_s = time.monotonic()
            for at, call in enumerate(work):
                if (wait_s := began_s + at / len(work) - time.monotonic()) > 0:
                    time.sleep(wait_s)
                call()
                pool.recorded.clear()
            time.sleep(max(0.0, began_s + 1 - time.monotonic()))
        return (server.cpu_us() - before) / seconds / 1e6
