"""Processes stopped and continued at random, as on a host whose cores are busy, and the checks of such a run.

`make pulses` (bench/pulses.py) makes the runs.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from statistics import mean

import psutil

PAUSE_S = (0.1, 1.5)  # since the last stop ended
STOP_S = (0.05, 0.6)


@contextlib.asynccontextmanager
async def pulses(seed: int, processes: Mapping[str, psutil.Process]) -> AsyncIterator[dict[str, float]]:
    """Stop and continue `processes` until the block ends. Yields for how many seconds each was stopped so
    far.

    They are descendants of this process. `seed` and a process's name determine its pauses and stops. All run
    after the block.
    """
    stopped_s = dict.fromkeys(processes, 0.0)

    async def pulse(name: str, process: psutil.Process) -> None:
        dice = random.Random(f"{seed} {name}")
        try:
            while True:
                await asyncio.sleep(dice.uniform(*PAUSE_S))
                lasts_s = dice.uniform(*STOP_S)
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


UPPER = 13.2  # 2 endpoints x watermark 6 x 1.1
_MOST_AT_ENGINES = 1.2 * UPPER
_LONGEST_S = 3.0
_P99_S = 2.0
_LEAST, _LEAST_MEAN = 0.45, 0.5  # of the calm throughput


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `served` requests were answered in `lasted_s`; `failed` were not, of clients that waited.

    Times in seconds. `most_at_engines` is the highest count of requests at the engines, by their own pages;
    `left_over` what the fleet still counted two seconds after the last answer; `departures` how often a
    replica left the shared queue; `stopped_s` for how long processes were stopped, on average.
    """

    lasted_s: float
    served: int
    failed: int
    median_s: float
    p99_s: float
    longest_s: float
    most_at_engines: int
    left_over: int
    departures: int
    stopped_s: float

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.served / self.lasted_s


def faults_of(run: Run, calm: Run) -> list[str]:
    """The faults of one run with pulses, in words."""
    part = run.rate / calm.rate
    found = {
        f"a client waited {run.longest_s:.1f} s, {_LONGEST_S:g} at most": run.longest_s > _LONGEST_S,
        f"p99 {run.p99_s:.2f} s, {_P99_S:g} at most": run.p99_s > _P99_S,
        f"{part:.2f} of the calm throughput, {_LEAST:g} at least": part < _LEAST,
        f"{run.failed} requests failed": run.failed > 0,
        f"{run.most_at_engines} at the engines, {_MOST_AT_ENGINES:g} at most": run.most_at_engines
        > _MOST_AT_ENGINES,
        f"counts were {run.left_over} two seconds after the last answer": run.left_over != 0,
    }
    return [fault for fault, is_so in found.items() if is_so]


def faults_of_all(runs: Mapping[int, Run], calm: Run) -> list[str]:
    """The same of all runs by their seeds, and of their mean."""
    faults = [f"seed {seed}: {fault}" for seed, run in sorted(runs.items()) for fault in faults_of(run, calm)]
    part = mean(run.rate for run in runs.values()) / calm.rate
    if part < _LEAST_MEAN:
        faults.append(f"{part:.2f} of the calm throughput on average, {_LEAST_MEAN:g} at least")
    return faults


def page(about: str, runs: Mapping[int, Run], calm: Run) -> str:
    """The results as Markdown, beginning with `about`."""
    faults = faults_of_all(runs, calm)
    part = mean(run.rate for run in runs.values()) / calm.rate
    rows = [_row("calm", calm, calm), *(_row(str(seed), run, calm) for seed, run in sorted(runs.items()))]
    return "\n".join(
        [
            "# Pulses", "", about, "",
            f"Due: no client waits longer than {_LONGEST_S:g} s, p99 at most {_P99_S:g} s, at least",
            f"{_LEAST:g} of the calm throughput (mean at least {_LEAST_MEAN:g}), no error, never more than",
            f"1.2 x {UPPER:g} at the engines, counts 0 two seconds after the last answer.", "",
            f"- on average {part:.2f} of the calm throughput",
            *([f"- **{fault}**" for fault in faults] or ["- **as it should be**"]),
            "",
            "| seed | answers/s | of calm | failed | median s | p99 s | longest s | at the engines "
            "| left over | replicas left | stopped s, mean |",
            "|---|---|---|---|---|---|---|---|---|---|---|",
            *rows, "",
        ]
    )  # fmt: skip


def _row(name: str, run: Run, calm: Run) -> str:
    return (
        f"| {name} | {run.rate:.1f} | {run.rate / calm.rate:.2f} | {run.failed} | {run.median_s:.2f} "
        f"| {run.p99_s:.2f} | {run.longest_s:.2f} | {run.most_at_engines} | {run.left_over} "
        f"| {run.departures} | {run.stopped_s:.1f} |"
    )
