"""Stops and continues replicas and Valkey at random under load, as a host with busy cores does.

The fleet has two replicas, two simulators, Envoy in `lean` and a Valkey; clients send their next request at
once. A simulator runs six requests at once; the fleet finds this limit, or its configuration gives it. Again
and again each process runs for 0.1 to 1.5 s and is then stopped (SIGSTOP) for 50 to 600 ms. The first run
stops no process, for comparison.
"""

import argparse
import asyncio
import bisect
import contextlib
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import psutil
from model_servers import simulators, static

from bench.rig.fleet import RunningFleet, picker_up
from bench.rig.report import percentile, table
from long.findings import Findings
from picker_tools.audit.log import LogStream
from picker_tools.load.generator import Request, closed_loop

_PAUSE_S = (0.1, 1.5)  # seconds for which a process runs between two stops
_STOP_S = (0.05, 0.6)
_CLIENTS, _TOKENS = 24, 16
_WARM_S, _REST_S, _LOOK_S = 3.0, 2.0, 0.1
_OPTIONS = ("--replicas", "2", "--endpoints", "0")
_BATCH = 6
_HOSTS = ("127.0.0.71", "127.0.0.72")
_SIMULATOR = ("--ttft", "150", "--itl", "2", "--max-num-seqs", str(_BATCH))
_CONFIG = {
    "fair_request_queue": {"flow_capacity": 500},
    "decision_log": {"enabled": True, "max_entries": 3_000_000},
}
_BOUNDS = {"adaptive": {"mode": "adaptive"}, "static": {"watermark_per_backend": _BATCH}}
_MOST_OF_BOUND = 1.2
_ENDS_S = 2.0  # seconds within which requests above a lowered bound end
_LONGEST_S, _P99_S = 3.0, 2.0
_LEAST, _LEAST_MEAN = 0.45, 0.5  # minimum throughput / calm throughput: of each run, of the runs' mean


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("seeds", nargs="*", type=int, default=[1, 2, 3, 4, 5], help="(1 to 5)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a run")
    parser.add_argument("--mode", choices=_BOUNDS, default="adaptive", help="of `request_queue_controller`")


@dataclass(frozen=True, slots=True)
class _Run:
    """Figures of one run. `rate`: answers a second. `failed`: unserved requests whose clients did not leave.

    `most_at_engines`: maximum number of requests on the simulators' metrics pages; `most_of_bound`: this
    number relative to the bound then in force. `left_over`: the fleet's counts two seconds after the last
    answer. `departures`: failovers to local admission. `stopped_s`: mean total time for which a process was
    stopped.
    """

    rate: float
    failed: int
    median_s: float
    p99_s: float
    longest_s: float
    most_at_engines: int
    most_of_bound: float
    left_over: int
    departures: int
    stopped_s: float


class _Fleet(RunningFleet):
    simulators: Sequence[str]

    @property
    def endpoints(self) -> list[str]:
        return list(self.simulators)


def run(options: argparse.Namespace, findings: Findings) -> None:
    calm = asyncio.run(_run(None, options.seconds, options.mode))
    rows, parts = [_row("calm", calm, calm)], []
    for seed in options.seeds:
        found = asyncio.run(_run(seed, options.seconds, options.mode))
        rows.append(_row(str(seed), found, calm))
        parts.append(found.rate / calm.rate)
        for what, holds in {
            f"no client waits longer than {_LONGEST_S:g} s": found.longest_s <= _LONGEST_S,
            f"p99 is at most {_P99_S:g} s": found.p99_s <= _P99_S,
            f"throughput is at least {_LEAST:g} of the calm run's": parts[-1] >= _LEAST,
            "no request fails": not found.failed,
            f"requests at the engines are at most {_MOST_OF_BOUND:g} times the bound": found.most_of_bound
            <= _MOST_OF_BOUND,
            "the counts are 0 two seconds after the last answer": not found.left_over,
        }.items():
            findings.check(f"seed {seed}: {what}", holds)
    least = f"the mean throughput of the runs is at least {_LEAST_MEAN:g} of the calm run's"
    findings.check(least, mean(parts) >= _LEAST_MEAN, f"{mean(parts):.2f}")
    head = ["seed", "answers/s", "of calm", "failed", "median s", "p99 s", "longest s", "at the engines"]
    findings.add(table([*head, "of the bound", "left over", "replicas left", "stopped s, mean"], rows))


def _row(name: str, run: _Run, calm: _Run) -> list[str]:
    times = [f"{each:.2f}" for each in (run.rate / calm.rate, run.median_s, run.p99_s, run.longest_s)]
    most = [str(run.most_at_engines), f"{run.most_of_bound:.2f}"]
    counts = [*most, str(run.left_over), str(run.departures)]
    return [name, f"{run.rate:.1f}", times[0], str(run.failed), *times[1:], *counts, f"{run.stopped_s:.1f}"]


async def _run(seed: int | None, lasts_s: float, mode: str) -> _Run:
    """Start a fleet and run load on it for `lasts_s`. If `seed` is None, no process is stopped."""
    async with contextlib.AsyncExitStack() as parts:
        addresses = list(await parts.enter_async_context(simulators(_HOSTS, *_SIMULATOR)))
        own = {"request_queue_controller": _BOUNDS[mode], "discovery": static(addresses)}
        fleet = await parts.enter_async_context(picker_up({**_CONFIG, **own}, *_OPTIONS, kind=_Fleet))
        fleet.simulators = addresses
        async with closed_loop(fleet.url, clients=_CLIENTS, make_request=_make_request):
            await asyncio.sleep(_WARM_S)
        before = await _departures(fleet)
        looks: list[tuple[float, int]] = []
        processes = {f"replica {n}": process for n, process in enumerate(fleet.replicas)}
        processes["valkey"] = fleet.child("valkey-server")
        async with contextlib.AsyncExitStack() as stack:
            looking = asyncio.create_task(_look(fleet, looks))
            began_s = time.monotonic()
            async with closed_loop(fleet.url, clients=_CLIENTS, make_request=_make_request) as load:
                stopped_s: Mapping[str, float] = {"no process": 0.0}
                if seed is not None:
                    stopped_s = await stack.enter_async_context(_pulses(seed, processes))
                await asyncio.sleep(lasts_s)
                await stack.aclose()
            looking.cancel()
            await asyncio.wait((looking,))
        await asyncio.sleep(_REST_S)
        left_over = await fleet.drift()
        departures = await _departures(fleet) - before
        most_of_bound = await asyncio.to_thread(_most_of_bound, looks, fleet.state["redis"])
    within = [record for record in load.history if record.done_s < began_s + lasts_s]
    waited_s = [record.took_s for record in load.history]
    return _Run(
        sum(record.served for record in within) / lasts_s,
        len(load.unserved),
        percentile(waited_s, 0.5),
        percentile(waited_s, 0.99),
        max(waited_s),
        max(count for _, count in looks),
        most_of_bound,
        left_over,
        departures,
        mean(stopped_s.values()),
    )


@contextlib.asynccontextmanager
async def _pulses(seed: int, processes: Mapping[str, psutil.Process]) -> AsyncIterator[dict[str, float]]:
    """Stop and continue `processes` until the block ends; afterwards all run. Yields, by name, the seconds
    for which each process was stopped so far. `seed` and its name determine when a process stops."""
    stopped_s = dict.fromkeys(processes, 0.0)

    async def pulse(name: str, process: psutil.Process) -> None:
        dice = random.Random(f"{seed} {name}")
        try:
            while True:
                await asyncio.sleep(dice.uniform(*_PAUSE_S))
                lasts_s = dice.uniform(*_STOP_S)
                process.suspend()
                await asyncio.sleep(lasts_s)
                process.resume()
                stopped_s[name] += lasts_s
        finally:
            process.resume()

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(pulse(*each)) for each in processes.items()]
        try:
            yield stopped_s
        finally:
            for task in running:
                task.cancel()


def _most_of_bound(looks: Sequence[tuple[float, int]], redis_url: str) -> float:
    """The largest ratio of requests at the engines to the largest bound in the `_ENDS_S` before. `looks`:
    (time, number of requests at the engines)."""
    with LogStream(redis_url, "default") as log:
        entries = [entry for page in log.pages() for entry in page.entries]
    times_s = [int(entry["time_us"]) / 1e6 for entry in entries]

    def bound(at_s: float) -> float:
        last = bisect.bisect(times_s, at_s)
        first = min(bisect.bisect(times_s, at_s - _ENDS_S), last - 1)
        return max(float(entry["upper"]) for entry in entries[first:last])

    return max(count / bound(at_s) for at_s, count in looks)


async def _look(fleet: RunningFleet, looks: list[tuple[float, int]]) -> None:
    while True:
        count = await fleet.at_model_servers()
        looks.append((time.time(), count))
        await asyncio.sleep(_LOOK_S)


async def _departures(fleet: RunningFleet) -> int:
    """The number of failovers from the shared queue to local admission, over all replicas."""
    return int(await fleet.counted("epp_failover_transitions_total", to="local"))


def _make_request(dice: random.Random, number: int) -> Request:
    return Request(f"request {number} ", _TOKENS, streamed=number % 2 == 0)
