"""Measures Valkey's CPU for simulated replicas and dashboards, and fits the formula for sizing.

All figures are CPU time of the Valkey process, not wall time, because other processes share the machine.
"""

import json
import random
import selectors
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import hiredis

from bench.lifecycle.formula import Fleet, Formula, Point, line, messages_a_second
from bench.lifecycle.replay import measure_lifecycle
from bench.lifecycle.workload import Size, Workload
from bench.rig.report import table
from bench.rig.server import NEVER_MS, Server
from picker_fleet.domain.bands import MOST_PRIORITY
from picker_fleet.state.keys import Keys
from picker_tools.local_fleet.network import LOOPBACK

_REQUESTS = 800
_FITTED_BATCHES, _CHECKED_BATCHES = (1, 4, 16), (2, 8)
_FITTED_FLEETS = (
    Fleet(10, 0), Fleet(100, 0), Fleet(256, 0), Fleet(1000, 0), Fleet(10, 300), Fleet(100, 1000),
)  # fmt: skip
_CHECKED_FLEETS = (
    Fleet(30, 0), Fleet(200, 0), Fleet(600, 0), Fleet(30, 100), Fleet(10, 1000), Fleet(300, 500),
)  # fmt: skip
_VIEWED_FITTED, _VIEWED_CHECKED = (10, 256), (100,)
_VIEWS = 200
_WANTED_ERROR = 0.25
_SIZES = (10, 100, 1000)
_RATES = (0, 1_000, 10_000, 100_000)
_DEADLINE_S = 30.0
_INFO_EVERY_S = 10  # interval at which an idle replica's info changes (fleet/info.py)
_SERVED = [[0, f"tenant-{n}", 12.0] for n in range(10)]


def measure_fleets(server: Server, rounds: int) -> tuple[bool, str]:
    """Take medians of `rounds`. Returns whether the formula's error is small enough at all checked points,
    and the result page."""
    requests = {
        (queued, batch): _medians(rounds, lambda queued=queued, batch=batch: _request(server, batch, queued))
        for queued in (0, 1000)
        for batch in sorted(_FITTED_BATCHES + _CHECKED_BATCHES)
    }
    views = {
        count: _medians(rounds, lambda count=count: _views(server, count))
        for count in sorted(_VIEWED_FITTED + _VIEWED_CHECKED)
    }
    fleets = _FITTED_FLEETS + _CHECKED_FLEETS
    cores = _medians(rounds, lambda: [_simulate(server, each) for each in fleets])
    points = [Point(*each) for each in zip(fleets, cores, strict=True)]
    direct, waiting = (line([requests[queued, b] for b in _FITTED_BATCHES]) for queued in (0, 1000))
    dashboard = line([(float(n), sum(views[n])) for n in _VIEWED_FITTED])
    told = line([(float(n), views[n][0]) for n in _VIEWED_FITTED])[1]
    formula = Formula(direct, waiting, dashboard, told).fitted(points[: len(_FITTED_FLEETS)])
    rows: list[tuple[str, bool, float, float, str]] = []  # label, fitted, measured, formula, unit
    for (queued, batch), (calls, us) in requests.items():
        fixed, each = waiting if queued else direct
        what = f"a {'queued' if queued else 'direct'} request, {batch} a call, Valkey full"
        rows.append((what, batch in _FITTED_BATCHES, us, fixed + each * calls, "µs"))
    for count, view in views.items():
        what = f"a second of a dashboard, {count} replicas"
        rows.append((what, count in _VIEWED_FITTED, sum(view), dashboard[0] + dashboard[1] * count, "µs"))
    for point in points:
        what = f"{point.fleet.replicas} simulated replicas, {point.fleet.requests_per_s:.0f} requests/s"
        wanted = formula.cores(point.fleet) * 100
        rows.append((what, point.fleet in _FITTED_FLEETS, point.cores * 100, wanted, "% of a core"))
    wrong = max(abs(wanted / got - 1) for _, fitted, got, wanted, _ in rows if not fitted)
    met = wrong <= _WANTED_ERROR
    shown = [
        [what, "fitted" if fitted else "checked", f"{got:.2f} {unit}", f"{wanted:.2f} {unit}",
         f"{wanted / got - 1:+.0%}"]
        for what, fitted, got, wanted, unit in rows
    ]  # fmt: skip
    full = [
        [str(batch), *(f"{1e6 / requests[queued, batch][1]:,.0f}" for queued in (0, 1000))]
        for batch in sorted(_FITTED_BATCHES + _CHECKED_BATCHES)
    ]
    by_size = [
        [str(n), f"{rate:,}", *(f"{formula.cores(Fleet(n, rate, queued=q)):.2f}" for q in (False, True))]
        for n in _SIZES
        for rate in _RATES
    ]
    return met, "\n\n".join([
        f"## Formula and measurement\n\nGreatest error at a checked point: {wrong:.0%}; wanted: "
        f"at most {_WANTED_ERROR:.0%}: {'met' if met else '**not met**'}.",
        table(["what", "", "measured", "formula", "error"], shown),
        f"Parameters (µs): {formula}",
        "## Requests/s of one full Valkey",
        table(["requests a call", "direct", "queued"], full),
        "## Cores of Valkey by the formula\n\nAbove 1.00 the fleet needs more than one Valkey.",
        table(["replicas", "requests/s", "direct", "queued"], by_size),
    ])  # fmt: skip


def _medians(rounds: int, measure_once: Callable[[], Sequence[float]]) -> tuple[float, ...]:
    found = [measure_once() for _ in range(rounds)]
    return tuple(statistics.median(each) for each in zip(*found, strict=True))


def _request(server: Server, batch: int, queued: int) -> tuple[float, float]:
    """Script calls per request, and Valkey's CPU in µs per request under full load."""
    cost = measure_lifecycle(server, Size(queued, batch=batch), _REQUESTS, 0)
    return cost.calls, cost.us


class _Replicas:
    """`count` simulated replicas of one pool, registered in Valkey."""

    def __init__(self, server: Server, count: int, *, queued: int = 0) -> None:
        self.pool = Workload(server, Size(queued, endpoints=8, batch=1), 0)
        self.owners = [f"picker-6d5f7c9b8d-{n:05d}" for n in range(count)]
        for number in range(count):
            self.beat(number, changed=True)

    def beat(self, number: int, *, changed: bool) -> None:
        """Send the heartbeat of replica `number`; if `changed`, the heartbeat carries the replica's info."""
        info = _replica_info(number) if changed else ""
        self.pool.call("heartbeat", self.owners[number], info, NEVER_MS, "")


def _replica_info(number: int) -> str:
    """A replica's info of usual length, as a heartbeat carries it (fleet/info.py)."""
    about = {
        "host": f"picker-6d5f7c9b8d-{number:05d}", "version": "0.1.0", "admin": f"http://10.1.0.{number}:9090",
        "grpc": f"10.1.0.{number}:9002", "up_s": 86400.123, "waiting": 3, "degraded": False, "resyncs": 0,
        "answered": [],
    }  # fmt: skip
    served = {"served": {"priorities": [[0, 120.0]], "flows": _SERVED, "cut": False}}
    return "\n".join(json.dumps(part, separators=(",", ":")) for part in (about, served))


def _views(server: Server, replicas: int) -> list[float]:
    """Valkey's CPU in µs for each call that a dashboard makes once a second: state, flows and replicas."""
    call = _Replicas(server, replicas, queued=1000).pool.call
    reads: tuple[tuple[object, ...], ...] = (
        ("state", NEVER_MS), ("view_flows", 0, MOST_PRIORITY, "", "", 50, ""), ("view_replicas", 256),
    )  # fmt: skip
    found = []
    for read in reads:
        for _ in range(20):
            call(*read)
        found.append(server.cpu_us_of(lambda read=read: [call(*read) for _ in range(_VIEWS)]) / _VIEWS)
    return found


def _simulate(server: Server, fleet: Fleet) -> float:
    """The cores that Valkey uses for `fleet`. This process makes all calls of one second one by one, evenly
    spaced; on a slow machine these calls take longer than a second."""
    replicas = _Replicas(server, fleet.replicas)
    owners, channel = replicas.owners, Keys.of("bench").metrics
    text = json.dumps({"from": owners[0], "sent": 1700000000123, "readings": {}})
    with _subscribers(server, channel, fleet.replicas) as drain:

        def publish() -> None:
            with server.client.pipeline(transaction=False) as pipe:
                pipe.time()
                pipe.publish(channel, text)
                pipe.execute()
            drain()

        def beat(number: int) -> None:
            replicas.beat(number, changed=number % _INFO_EVERY_S == 0)
            replicas.pool.call("state", NEVER_MS)

        def rest(number: int) -> list[Callable[[], object]]:
            sweep = ("sweep", owners[number], 1000, NEVER_MS, NEVER_MS, NEVER_MS)
            ping = server.client.ping
            return [lambda: beat(number), lambda: replicas.pool.call(*sweep), ping, ping]

        work = [call for number in range(fleet.replicas) for call in rest(number)]
        work += [publish] * round(messages_a_second(fleet.replicas))
        work += [lambda: replicas.pool.run(1)] * round(fleet.requests_per_s)
        random.Random(1).shuffle(work)
        before, began_s = server.cpu_us(), time.monotonic()
        for at, call in enumerate(work):
            if (wait_s := began_s + at / len(work) - time.monotonic()) > 0:
                time.sleep(wait_s)
            call()
        time.sleep(max(0.0, began_s + 1 - time.monotonic()))
        return (server.cpu_us() - before) / 1e6


@contextmanager
def _subscribers(server: Server, channel: str, count: int) -> Iterator[Callable[[], None]]:
    """Subscribe `count` connections to `channel`; yields a function that waits for a message on each."""
    watch = selectors.DefaultSelector()
    open_: list[socket.socket] = []
    for _ in range(count):
        one = socket.create_connection((LOOPBACK, server.port), _DEADLINE_S)
        one.sendall(hiredis.pack_command(("SUBSCRIBE", channel)))
        one.recv(4096)
        watch.register(one, selectors.EVENT_READ, hiredis.Reader())
        open_.append(one)

    def drain() -> None:
        left = count
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
