"""Runs with pulses: a stopped process runs again in the end, and each fault of a run is found."""

import asyncio
import sys
from dataclasses import replace
from functools import partial

import psutil
from pulse_runs import Run, faults_of, faults_of_all, page, pulses
from tables import cases

from picker_tools.local_fleet import network

CALM = Run(40.0, 2400, 0, 0.4, 0.6, 0.8, 13, 0, 0, 0.0)
WELL = Run(40.0, 1300, 0, 0.8, 1.8, 2.1, 15, 0, 1, 11.0)


def test_a_good_run_has_no_fault() -> None:
    assert faults_of_all({1: WELL, 2: WELL}, CALM) == []
    assert "**as it should be**" in page("about", {1: WELL}, CALM)


@cases("change, said", {
    "a long wait": ({"longest_s": 3.1}, "waited 3.1 s"),
    "many waits": ({"p99_s": 2.1}, "p99 2.10 s"),
    "few served": ({"served": 1000}, "0.42 of the calm"),
    "a failure": ({"failed": 1}, "1 requests failed"),
    "too many in flight": ({"most_at_engines": 16}, "16 at the engines"),
    "counts at the end": ({"left_over": 1}, "counts were 1"),
})  # fmt: skip
def test_each_fault_of_a_run_is_named(change: dict[str, float], said: str) -> None:
    (fault,) = faults_of(replace(WELL, **change), CALM)  # type: ignore[arg-type]
    assert said in fault
    assert said in page("about", {1: replace(WELL, **change)}, CALM)  # type: ignore[arg-type]


def test_a_low_mean_throughput_of_all_seeds_is_a_fault() -> None:
    (fault,) = faults_of_all({1: replace(WELL, served=1100), 2: replace(WELL, served=1200)}, CALM)
    assert "on average" in fault


async def test_a_process_that_is_stopped_when_the_block_ends_runs_again() -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE
    )
    try:
        process = psutil.Process(child.pid)

        async def is_stopped(wanted: bool) -> bool | None:
            return (process.status() == psutil.STATUS_STOPPED) is wanted or None

        async with pulses(1, {"child": process}):
            assert await network.until(partial(is_stopped, True), within_s=30)
        assert await network.until(partial(is_stopped, False), within_s=30)
    finally:
        child.kill()
        await child.wait()
