"""A fleet of whole replicas, as `picker up` starts it, under light load."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import TypeVar

import redis

from bench.rig.fleet import RunningFleet, picker_up
from bench.rig.report import cpu_ns
from bench.sizing.formula import Fleet, Formula
from picker_tools.local_fleet.processes import picker_command

T = TypeVar("T")
_IDLE_S = 20.0
_LOGGED_S = 10.0
_LOAD_S = 30
_RATE = 20


@dataclass(frozen=True, slots=True)
class WholeFleet:
    replicas: int
    started_s: float
    resident_mb: float  # of a replica
    idle_cores: float
    loaded_cores: float
    loaded_rate: float
    heartbeats_cores: float
    load: str  # what `picker load` says
    audit: str

    def lines(self, formula: Formula) -> list[str]:
        said = []
        for rate, cores in ((0.0, self.idle_cores), (self.loaded_rate, self.loaded_cores)):
            wanted = formula.cores(Fleet(self.replicas, rate))
            error = wanted / cores - 1
            said.append(f"with {rate:.0f} requests/s {cores:.2%} (formula: {wanted:.2%}, error {error:+.0%})")
        return [
            f"{self.replicas} replicas: ready after {self.started_s:.0f} s, {self.resident_mb:.0f} MB each.",
            f"Of a core Valkey took {', '.join(said)}. "
            f"Heartbeats took {self.heartbeats_cores:.2%} by its log of slow calls, which held all (wanted: "
            "at most 1 %).",
            f"`picker load steady --rate {_RATE} --duration {_LOAD_S}`: {self.load}",
            f"`picker audit`: {self.audit}",
        ]


async def run_whole(replicas: int) -> WholeFleet:
    """Start, watch and load a fleet of `replicas`. StartupError if it does not start."""
    began_s = time.monotonic()
    async with picker_up({"decision_log": {"enabled": True}}, "--replicas", str(replicas)) as fleet:
        return await asyncio.to_thread(_watch, fleet, time.monotonic() - began_s)


def _watch(fleet: RunningFleet, started_s: float) -> WholeFleet:
    client, valkey = redis.Redis.from_url(fleet.redis_url), fleet.process("server").pid
    time.sleep(5)
    idle_cores, *_ = _watched(valkey, partial(time.sleep, _IDLE_S))
    heartbeats_cores = _heartbeats_cores(client)
    resident_mb = fmean(replica.memory_info().rss for replica in fleet.replicas) / 1e6
    load = ["load", "steady", "--state-file", str(fleet.state_file), "--rate", f"{_RATE}"]
    load += ["--duration", f"{_LOAD_S}", "--report", str(fleet.state_file.with_name("report"))]
    loaded_cores, seconds, said = _watched(valkey, partial(_said, "no-errors", *load))
    return WholeFleet(
        len(fleet.replicas), started_s, resident_mb, idle_cores, loaded_cores, _RATE * _LOAD_S / seconds,
        heartbeats_cores, said, _said("entries", "audit", "--redis", fleet.redis_url),
    )  # fmt: skip


def _watched(pid: int, work: Callable[[], T]) -> tuple[float, float, T]:
    """Cores that a process takes during `work`, the seconds it lasts, and its result."""
    before_ns, began_s = cpu_ns([pid]), time.monotonic()
    result = work()
    seconds = time.monotonic() - began_s
    return (cpu_ns([pid]) - before_ns) / 1e9 / seconds, seconds, result


def _heartbeats_cores(client: "redis.Redis") -> float:
    """Time of all heartbeats in some seconds, from the slow log."""
    client.config_set("slowlog-max-len", 100_000)
    client.config_set("slowlog-log-slower-than", 0)
    client.slowlog_reset()
    time.sleep(_LOGGED_S)
    client.config_set("slowlog-log-slower-than", -1)
    calls = client.slowlog_get(100_000)
    client.slowlog_reset()
    heartbeats = [each["duration"] for each in calls if each["command"].startswith(b"FCALL heartbeat")]
    if not heartbeats:
        raise RuntimeError("no heartbeat came")
    return sum(heartbeats) / 1e6 / _LOGGED_S


def _said(word: str, *arguments: str) -> str:
    """The first line of a command's output with `word`, and its exit status."""
    done = subprocess.run(
        picker_command(*arguments), capture_output=True, text=True, timeout=180, check=False
    )
    lines = (done.stdout or done.stderr).strip().splitlines()
    if done.returncode:
        print("\n".join(lines), file=sys.stderr)
    line = next((each for each in lines if word in each), "nothing")
    return f"{' '.join(line.split())} (exit status {done.returncode})"
