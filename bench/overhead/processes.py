"""What processes have used so far, as the kernel counts it."""

import time
from collections.abc import Iterable

import psutil

_SCHEDULER_CLOCK = 2  # CPUCLOCK_SCHED of the Linux ABI: user and system time of all threads, past ones too


def cpu_ns(pids: Iterable[int]) -> int:
    """CPU time of `pids` together since each started.

    Read from each process' own CPU clock (what `clock_getcpuclockid` names), which counts nanoseconds;
    /proc counts in steps of 10 ms, too coarse for a pass of a second.
    """
    return sum(time.clock_gettime_ns((~pid << 3) | _SCHEDULER_CLOCK) for pid in pids)


def resident_bytes(pid: int) -> int:
    """Memory of `pid` that is in RAM."""
    size: int = psutil.Process(pid).memory_info().rss
    return size
