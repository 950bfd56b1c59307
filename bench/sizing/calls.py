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

from bench.lifecycle.workload import SETTINGS
from bench.rig.server import Server, arrival
from bench.sizing.formula import Fleet, messages_a_second
from picker_fleet.bands import MOST_PRIORITY
from picker_fleet.state.batching import HEAD
from picker_fleet.state.keys import Keys
from picker_tools.local_fleet.network import LOOPBACK

_NEVER_MS = 10_000_000
_SILENCE_MS = 5000
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


class Pool:
    """A pool on `server`. With `queued`, that many requests wait and each one waits its turn."""

    def __init__(self, server: Server, name: str, *, queued: bool = False, replicas: int = 1) -> None:
        self._server, self._keys = server, Keys.of(name)
        self._made = 0
        self._running: deque[str] = deque()
        self.recording: list[bytes] = []
        self.owners = [f"picker-6d5f7c9b8d-{n:05d}" for n in range(replicas)]
        for number in range(replicas):
            self.beat(number)
        per = (_IN_FLIGHT if queued else _PLENTY) / _ENDPOINTS
        hosts = [x for n in range(_ENDPOINTS) for x in (f"10.0.0.{n}:8000", '{"labels":{},"draining":false}')]
        settings = {**SETTINGS, "upper_per": per, "lower_per": per, "silence_ms": _NEVER_MS}
        self.call("publish", self.owners[0], "c", "e", json.dumps(settings), *hosts)
        if queued:
            self._running.extend(self.admit(_IN_FLIGHT))
            while self._made < _IN_FLIGHT + _QUEUED:
                self.admit(16)
        self._queued = queued
        self.recording.clear()

    def call(self, name: str, *args: object) -> list[bytes]:
        command = ("FCALL", self._server.library.function(name), 1, self._keys.pool, *args)
        self.recording.append(hiredis.pack_command(command))  # type: ignore[arg-type]
        reply: list[bytes] = self._server.client.execute_command(*command)
        return reply

    def beat(self, number: int, *, changed: bool = True) -> None:
        """A heartbeat; with the replica info if that has `changed`."""
        info = replica_info(number) if changed else ""
        self.call("heartbeat", self.owners[number], info, _NEVER_MS, "")

    def admit(self, count: int) -> list[str]:
        """The ids of `count` new requests."""
        ids = [f"{self._made + n:036d}" for n in range(count)]
        self._made += count
        arrivals = [arrival(id, f"tenant-{int(id) % _FLOWS}", ttl_ms=_NEVER_MS) for id in ids]
        self.call("admit", self.owners[0], *arrivals)
        return ids

    def serve(self, batch: int, rounds: int) -> int:
        """Run `batch` requests a call, `rounds` times: as many arrive as end. Returns the calls made."""
        before = len(self.recording)
        for _ in range(rounds):
            arrived = self.admit(batch)
            if not self._queued:
                self._running.extend(arrived)
            ending = [self._running.popleft() for _ in range(batch)]
            ends = (x for id in ending for x in (id, "completed", "", ""))
            reply = self.call("settle", self.owners[0], *ends)
            if any(not each.startswith(b"settled") for each in reply[HEAD:]):
                raise RuntimeError(f"an end was not settled: {reply[HEAD:]!r}")
            if self._queued:
                # Each is `placed ATTEMPT ENDPOINTS LOADS ID`.
                granted = [item.split()[-1].decode() for item in reply[1]]
                if len(granted) != batch:
                    raise RuntimeError(f"{batch} ends granted {len(granted)} requests")
                self.call("acknowledge", self.owners[0], *(x for id in granted for x in (id, 1)))
                self._running.extend(granted)
        return len(self.recording) - before


def request_costs(server: Server, batch: int, requests: int, *, queued: bool) -> tuple[float, float]:
    """Calls of a request, and its CPU in µs when Valkey is full."""
    server.forget()
    pool = Pool(server, "sizing", queued=queued)
    pool.serve(batch, 200 // batch)
    pool.recording.clear()
    calls = pool.serve(batch, requests // batch)
    server.forget()
    again = Pool(server, "sizing", queued=queued)  # the same ids: the recording serves the same requests
    again.serve(batch, 200 // batch)
    full_us = server.cpu_us_of(lambda: _replay([server], [pool.recording]))
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
            recordings = [pool.recording for pool in pools]
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
        lambda: pool.call("state", _NEVER_MS),
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
            pool.call("state", _NEVER_MS)

        def rest(number: int) -> list[Callable[[], object]]:
            return [
                lambda: beat(number),
                lambda: pool.call("sweep", owners[number], 1000, _NEVER_MS, _NEVER_MS, _NEVER_MS),
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
                pool.recording.clear()
            time.sleep(max(0.0, began_s + 1 - time.monotonic()))
        return (server.cpu_us() - before) / seconds / 1e6
