"""Under a long steady load no fleet's memory, keys or open files may grow, and no count may drift.

A fleet for each mode runs at the same time, with simulators, Envoy and Valkey. A closed loop sends plain and
streamed requests of six flows with bodies up to 60 KB; one client in ten leaves. Every two minutes, at least
twelve times, the load pauses for a reading. Drift is the difference between the fleet's and the simulators'
counts, which must be 0 in a pause. Growth per hour is the median slope between any two readings of the last
three quarters of the run (Theil-Sen), relative to the median size. `objects` are the objects that Python's
garbage collector tracks after a collection.
"""

import argparse
import asyncio
import contextlib
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median

from redis.asyncio import Redis

from bench.rig.fleet import RunningFleet, picker_up
from bench.rig.report import table
from long.findings import Findings
from picker_tools.load.generator import LONGEST_BODY_BYTES, Request, closed_loop, mixed_request
from picker_tools.local_fleet.parts import MODES

_INSIDE = Path(__file__).parent / "inside"
_CALL_S = 10.0
_CONFIG = {
    "request_queue_controller": {"watermark_per_backend": 4},
    "fair_request_queue": {"flow_capacity": 500},
}
_OPTIONS = ("--sim-ttft", "20", "--sim-itl", "5", "--debug-headers", "--replicas", "2", "--endpoints", "2")
_CLIENTS, _THINK_S = 4, 0.4
_READ_EVERY_S = 120.0
_PAUSES = 12  # minimum number of readings in a run
_FILLING = 400  # long prompts that fill the bounded prefix index before the first reading
_REST_WITHIN_S = 20.0  # longer than a lease: a request that still counts after this time is lost
_MOST_GROWTH = 0.02  # maximum growth per hour, relative to the size
_JUDGED_FROM = 0.25  # skip this first part of the run, while caches and pools fill up
_SIZES = (
    ("replica_bytes", "a replica"), ("objects", "its Python objects"), ("envoy_bytes", "Envoy"),
    ("redis_bytes", "Redis's data"), ("files", "open files"),
)  # fmt: skip
_MIB = 1024 * 1024


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Measurements when the load has run for `at_s` s. `replica_bytes`, `objects`: maximum over the replicas.
    `keys`: keys in Redis. `files`: open files of all replicas. `served`: requests served so far."""

    at_s: float
    replica_bytes: int
    objects: int
    envoy_bytes: int
    redis_bytes: int
    keys: int
    files: int
    served: int
    drift: int


def run(options: argparse.Namespace, findings: Findings) -> None:
    async def soak_all() -> list[tuple[list[_Reading], dict[str, int]]]:
        return await asyncio.gather(*(_soak(mode, options.minutes * 60) for mode in options.modes))

    for mode, (readings, counts) in zip(options.modes, asyncio.run(soak_all()), strict=True):
        _check_growth(mode, readings, counts, findings)


def _check_growth(
    mode: str, readings: Sequence[_Reading], counts: Mapping[str, int], findings: Findings
) -> None:
    for what, name in _SIZES:
        grew = _growth(readings, what)
        findings.check(
            f"`{mode}`: {name} grows by at most {_MOST_GROWTH:.0%} an hour",
            grew <= _MOST_GROWTH,
            f"{grew:+.2%}",
        )
    late = readings[len(readings) // 4 :]
    earlier = max(reading.keys for reading in late[: len(late) // 2])
    findings.check(f"`{mode}`: the keys in Redis do not grow", late[-1].keys <= earlier, f"{late[-1].keys}")
    drift = sum(reading.drift for reading in readings)
    findings.check(f"`{mode}`: counts of fleet and simulators agree", not drift, f"{drift}")
    findings.check(f"`{mode}`: no request fails", not counts["failed"], f"{counts['failed']}")
    agree = counts["served"] <= counts["finished"] <= counts["served"] + counts["left"]
    seen = ", ".join(f"{name} {counts[name]}" for name in ("asked", "served", "left", "finished"))
    findings.check(f"`{mode}`: simulators finish each served request once", agree, seen)
    head = ["minutes", "served", "largest replica MiB", "objects", "Envoy MiB", "Redis MiB", "keys"]
    rows = [
        f"{r.at_s / 60:.1f} {r.served} {r.replica_bytes / _MIB:.1f} {r.objects} {r.envoy_bytes / _MIB:.1f} "
        f"{r.redis_bytes / _MIB:.2f} {r.keys} {r.files} {r.drift}".split()
        for r in readings
    ]
    findings.add(f"## `{mode}`\n\n" + table([*head, "open files", "drift"], rows))


def _growth(readings: Sequence[_Reading], what: str) -> float:
    """The growth of the size `what` per hour, relative to the median size."""
    judged = readings[int(len(readings) * _JUDGED_FROM) :]
    slopes = [(getattr(b, what) - getattr(a, what)) / (b.at_s - a.at_s) for a, b in combinations(judged, 2)]
    return median(slopes) * 3600 / median(getattr(each, what) for each in judged)


async def _soak(mode: str, lasts_s: float) -> tuple[list[_Reading], dict[str, int]]:
    """Run load on a fleet in `mode` for `lasts_s`. Returns the readings, and the requests by outcome."""
    readings: list[_Reading] = []
    counts = Counter[str]()
    parts = max(_PAUSES, round(lasts_s / _READ_EVERY_S))
    watched = {"PYTHONPATH": os.pathsep.join([str(_INSIDE), os.environ.get("PYTHONPATH", "")])}
    async with (
        picker_up(_CONFIG, *_OPTIONS, "--mode", mode, environment=watched) as fleet,
        Redis.from_url(fleet.state["redis"], socket_timeout=_CALL_S) as redis,
    ):
        async with closed_loop(fleet.url, clients=4, make_request=_long_request) as load:
            await load.wait_for_served(_FILLING)
        before, began = await fleet.finished(), time.monotonic()
        for part in range(parts):
            pace = {"clients": _CLIENTS, "think_s": _THINK_S}
            async with closed_loop(fleet.url, seed=part, make_request=_make_request, **pace) as load:
                await asyncio.sleep(max(0.0, began + lasts_s * (part + 1) / parts - time.monotonic()))
            left = sum(record.left for record in load.history)
            counts.update(asked=len(load.history), served=load.served, left=left, failed=len(load.unserved))
            for record in load.unserved:
                print(mode, record, flush=True)
            with contextlib.suppress(TimeoutError):  # the next reading shows counts that are not 0
                await fleet.wait_for_rest(_REST_WITHIN_S)
            readings.append(await _read(fleet, redis, time.monotonic() - began, counts["served"]))
            print(mode, readings[-1], flush=True)
        return readings, {**counts, "finished": await fleet.finished() - before}


async def _read(fleet: RunningFleet, redis: Redis, at_s: float, served: int) -> _Reading:
    replicas = fleet.replicas
    objects = [await asyncio.to_thread(_objects, replica.pid) for replica in replicas]
    return _Reading(
        at_s,
        max(replica.memory_info().rss for replica in replicas),
        max(objects),
        fleet.child("envoy").memory_info().rss,
        int((await redis.info("memory"))["used_memory"]),
        int(await redis.dbsize()),
        sum(replica.num_fds() for replica in replicas),
        served,
        await fleet.drift(),
    )


def _objects(pid: int) -> int:
    """The number of Python objects in process `pid`, from inside/sitecustomize.py. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(_CALL_S)
        one.connect(f"\0picker-soak-{pid}")
        return int(one.recv(64))


def _long_request(_: random.Random, number: int) -> Request:
    return Request(f"{number} ", 1, pad_bytes=LONGEST_BODY_BYTES - 500)


def _make_request(dice: random.Random, number: int) -> Request:
    """A request of `picker load`'s mix; one client in ten leaves within 0.4 s."""
    request = mixed_request(dice, number)
    return replace(request, leaves_s=dice.uniform(0, 0.4) if dice.random() < 0.1 else None)
