"""A long steady load on whole fleets: does anything grow, does any count drift? `python -m bench.soak`.

A fleet of each mode, side by side. Loads, pauses, reads, again; then writes bench/results/soak.md. Exits with
0 if nothing grew and nothing drifted.
"""

import argparse
import asyncio
import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median
from typing import Any

from redis.asyncio import Redis

from bench.rig.fleet import RunningFleet, picker_up
from bench.rig.machine import describe_machine
from bench.rig.page import options_parser, table, total, write_page
from bench.rig.process_figures import environment, read_figures
from picker_tools.load.client_history import LONGEST_BODY_BYTES, ClientRequest, closed_loop, mixed_request

_CALL_S = 10.0
_CONFIG: Mapping[str, Any] = {
    "request_queue_controller": {"watermark_per_backend": 4},
    "fair_request_queue": {"flow_capacity": 500},
}
_SIM = ("--sim-ttft", "20", "--sim-itl", "5")


@dataclass(frozen=True, slots=True)
class Reading:
    """`at_s` since the load began. Sizes in bytes: of the largest replica, of what its C allocator has and
    does not use, of Envoy, of Redis's data.

    `objects` and `blocks` are of the replica that has most (bench/rig/process_figures.py). `keys` Redis has,
    `files` the replicas have open, `served` clients were until then. `drift` is by how much the fleet's
    counts differ from the simulators' own, all endpoints' differences added: looked at in a pause of the
    load, when both must be 0.
    """

    at_s: float
    replica_bytes: int
    free_bytes: int
    objects: int
    blocks: int
    envoy_bytes: int
    redis_bytes: int
    keys: int
    files: int
    served: int
    drift: int


class Fleet(RunningFleet):
    """A fleet whose counts are compared with those of its simulators."""

    def __init__(self, running: RunningFleet, redis: Redis) -> None:
        super().__init__(running.state_file, running.child, running.client)
        self._redis = redis

    async def reading(self, at_s: float, served: int) -> Reading:
        """A reading now."""
        inside = await asyncio.gather(
            *(asyncio.to_thread(read_figures, replica.pid) for replica in self.replicas)
        )
        return Reading(
            at_s,
            max(replica.memory_info().rss for replica in self.replicas),
            max(each.c_free_bytes for each in inside),
            max(each.objects for each in inside),
            max(each.blocks for each in inside),
            self.process("envoy").memory_info().rss,
            int((await self._redis.info("memory"))["used_memory"]),
            int(await self._redis.dbsize()),
            sum(replica.num_fds() for replica in self.replicas),
            served,
            await self.drift(),
        )

    async def drift(self) -> int:
        """Differences of the fleet's and the simulators' in-flight counts, plus all other counts."""
        state = await self.read("state")
        pages = zip(self.endpoints, await self._simulator_pages(), strict=True)
        differences = sum(abs(state["in_flight"].get(address, 0) - _busy(page)) for address, page in pages)
        return int(differences + state["stock"] + state["queued"] + state["leases"])

    async def at_model_servers(self) -> int:
        """Requests that the simulators have at this moment, by their own pages."""
        return sum(map(_busy, await self._simulator_pages()))

    async def finished(self) -> int:
        """Requests that the simulators themselves count as finished."""
        return int(sum(total(page, "vllm:request_success_total") for page in await self._simulator_pages()))

    async def _simulator_pages(self) -> list[str]:
        calls = [self.client.get(f"http://{address}/metrics") for address in self.endpoints]
        return [answer.text for answer in await asyncio.gather(*calls)]

    async def wait_for_rest(self, within_s: float) -> None:
        """Wait until all counts agree. TimeoutError if they do not."""
        async with asyncio.timeout(within_s):
            while await self.drift():  # noqa: ASYNC110 - the fleet notifies nobody of it
                await asyncio.sleep(0.2)


@contextlib.asynccontextmanager
async def running_fleet(
    config: Mapping[str, Any] = _CONFIG, options: Sequence[str] = _SIM
) -> AsyncIterator[Fleet]:
    """Three replicas, four simulators, Envoy in `lean`, a Valkey, unless `options` of `picker up` say
    otherwise; ended with the block. StartupError as `picker_up` raises it."""
    async with (
        picker_up(config, "--debug-headers", *options, environment=environment()) as running,
        Redis.from_url(running.redis_url, socket_timeout=_CALL_S) as redis,
    ):
        yield Fleet(running, redis)


def _busy(page: str) -> int:
    return int(total(page, "vllm:num_requests_running") + total(page, "vllm:num_requests_waiting"))


_MOST_GROWTH = 0.02  # an hour, of the size
_JUDGED_FROM = 0.25  # of the run: caches and pools are filled until then
_SIZES = (
    ("replica_bytes", "a replica"), ("objects", "its Python objects"), ("blocks", "its blocks"),
    ("envoy_bytes", "Envoy"), ("redis_bytes", "Redis's data"), ("files", "open files"),
)  # fmt: skip


def growth(readings: Sequence[Reading], what: str) -> float:
    """By what share of its median `what` grew in an hour, by the readings of the last three quarters of the
    run: the median of the slopes between any two of them (Theil-Sen), which a few odd ones do not move."""
    judged = readings[int(len(readings) * _JUDGED_FROM) :]
    slopes = [(getattr(b, what) - getattr(a, what)) / (b.at_s - a.at_s) for a, b in combinations(judged, 2)]
    return median(slopes) * 3600 / median(getattr(each, what) for each in judged)


def faults_of(readings: Sequence[Reading], counts: Mapping[str, int]) -> list[str]:
    """What grew, drifted or failed in the run."""
    faults = [
        f"{name} grew by {growth(readings, what):.1%} an hour, {_MOST_GROWTH:.0%} at most"
        for what, name in _SIZES
        if growth(readings, what) > _MOST_GROWTH
    ]
    late = readings[len(readings) // 4 :]
    if late[-1].keys > max(reading.keys for reading in late[: len(late) // 2]):
        faults.append(f"keys in Redis grew to {late[-1].keys}")
    drifted = sum(reading.drift for reading in readings)
    if drifted:
        faults.append(f"counts drifted by {drifted}")
    if counts["failed"]:
        faults.append(f"{counts['failed']} requests failed")
    if not counts["served"] <= counts["finished"] <= counts["served"] + counts["left"]:
        faults.append(f"simulators finished {counts['finished']}, clients were served {counts['served']}")
    return faults


_MIB = 1024 * 1024


def section(mode: str, readings: Sequence[Reading], counts: Mapping[str, int]) -> str:
    """The results of one fleet as Markdown."""
    head = ("minutes", "served", "largest replica MiB", "free in its C heap MiB", "objects", "blocks",
            "Envoy MiB", "Redis MiB", "keys", "open files", "drift")  # fmt: skip
    rows = [
        f"{r.at_s / 60:.1f} {r.served} {r.replica_bytes / _MIB:.1f} {r.free_bytes / _MIB:.1f} {r.objects} "
        f"{r.blocks} {r.envoy_bytes / _MIB:.1f} {r.redis_bytes / _MIB:.2f} {r.keys} {r.files} {r.drift}"
        for r in readings
    ]
    grew = ", ".join(f"{name} {growth(readings, what):+.2%}" for what, name in _SIZES)
    faults = faults_of(readings, counts)
    return f"""\
## `{mode}`

- requests {counts["asked"]}: served {counts["served"]}, left by their clients
  {counts["left"]}, failed {counts["failed"]}; the simulators finished {counts["finished"]}
- growth in an hour: {grew}
- drift: {sum(reading.drift for reading in readings)}
- **{"; ".join(faults) or "nothing grew, nothing drifted"}**

{table(head, map(str.split, rows))}
"""


def _head(load: float, command: str, date: str) -> str:
    return f"""# Soak

`{command}`, {date}, load average {load:.1f} before it.

For each mode a fleet of its own, all at once, with simulators, Envoy and a Valkey; a closed loop of plain and
streamed requests of six flows, bodies up to 60 KB, one client in ten leaves. Every two minutes, and
twelve times at least, the load pauses, and everything is read: drift is the difference between the fleet's
counts and the simulators' own, which must both be 0 then.

Growth is the median slope between any two readings of the last three quarters of the run (Theil-Sen), in an
hour, of the median size. More than {_MOST_GROWTH:.0%} is a leak; so is a key more than earlier. Before
the first reading {_FILLING} long prompts fill the index of prefixes, which is bounded. Objects are those that
Python's garbage collector tracks, after a collection; blocks are of Python's allocator.
"""


_READ_EVERY_S = 120.0
_PAUSES = 12  # in a run, however short
_FILLING = 400  # long prompts before the first reading; they fill the index of prefixes, which is bounded
_REST_WITHIN_S = 20.0  # longer than a lease: what has not ended then never will


def main() -> int:
    parser = options_parser("python -m bench.soak")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--modes", default="standard,lean,http", help="a fleet of each (%(default)s)")
    parser.add_argument("--replicas", type=int, default=2, help="of each fleet")
    parser.add_argument("--clients", type=int, default=4, help="of each fleet")
    parser.add_argument("--think", type=float, default=0.4, metavar="S", help="pause of a client")
    options = parser.parse_args()
    here = describe_machine("bench.soak", sys.argv[1:])
    found = asyncio.run(_soak_all(options))
    sections = [section(mode, *each) for mode, each in found.items()]
    write_page(options.out / "soak.md", "\n".join([_head(here.load, here.command, here.date), *sections]))
    return 1 if any(faults_of(*each) for each in found.values()) else 0


_Found = tuple[list[Reading], dict[str, int]]


async def _soak_all(options: argparse.Namespace) -> dict[str, _Found]:
    modes = options.modes.split(",")
    return dict(zip(modes, await asyncio.gather(*(_soak(mode, options) for mode in modes)), strict=True))


async def _soak(mode: str, options: argparse.Namespace) -> _Found:
    """Readings, and how many requests were asked, served, left by their clients, failed, finished."""
    readings: list[Reading] = []
    counts = Counter[str]()
    lasts_s = options.minutes * 60
    parts = max(_PAUSES, round(lasts_s / _READ_EVERY_S))
    size = ("--replicas", str(options.replicas), "--endpoints", "2", "--mode", mode)
    async with running_fleet(options=(*_SIM, *size)) as fleet:
        async with closed_loop(fleet.url, clients=4, make_request=_long_request) as load:
            await load.wait_for_served(_FILLING)
        before, began = await fleet.finished(), time.monotonic()
        for part in range(parts):
            pace = {"clients": options.clients, "think_s": options.think}
            async with closed_loop(fleet.url, seed=part, make_request=_make_request, **pace) as load:
                await asyncio.sleep(max(0.0, began + lasts_s * (part + 1) / parts - time.monotonic()))
            left = sum(record.left for record in load.history)
            counts.update(asked=len(load.history), served=load.served, left=left, failed=len(load.failed))
            for record in load.failed:
                print(mode, record, flush=True)
            with contextlib.suppress(TimeoutError):  # the reading shows what remains
                await fleet.wait_for_rest(_REST_WITHIN_S)
            readings.append(await fleet.reading(time.monotonic() - began, counts["served"]))
            print(mode, readings[-1], flush=True)
        return readings, {**counts, "finished": await fleet.finished() - before}


def _long_request(_: random.Random, number: int) -> ClientRequest:
    return ClientRequest(f"{number} ", 1, pad_bytes=LONGEST_BODY_BYTES - 500)


def _make_request(dice: random.Random, number: int) -> ClientRequest:
    """A mixed request; one client in ten hangs up."""
    request = mixed_request(dice, number)
    return replace(request, leaves_s=dice.uniform(0, 0.4) if dice.random() < 0.1 else None)


if __name__ == "__main__":
    sys.exit(main())
