"""For how long this replica was awake: what it has not heard while it stood still says nothing of Redis.

A process stands still when its event loop is late (SIGSTOP, a frozen machine, a long callback), when it is
ready to run and another has the core (the kernel's run-queue delay), or when the hypervisor runs another
machine (steal). A tick tells the first: what passes beyond the expected time of the next tick is not awake
time. The kernel tells the others, where it does; it is asked only while somebody doubts Redis.
"""

import asyncio
import contextlib
import math
import os
from collections.abc import Callable

TICK_S = 0.1
# A reply that was sent, or a stream that was begun, before so long a stand-still may be another replica's by
# now: Envoy has given up on this one. Shorter than the shortest lease, 2 s.
LONG_S = 1.0
_WOKEN_S = 1.0  # for how long a process counts as just woken
_PAUSE_S = 0.05


class AwakeClock:
    """`clock` tells seconds that only rise, `delayed` for how long, in all, the kernel kept this thread from
    running. `tick` comes each `TICK_S`; all else may be asked at any time. One event loop."""

    def __init__(
        self, clock: Callable[[], float] | None = None, delayed: Callable[[], float] | None = None
    ) -> None:
        self._clock = clock or asyncio.get_running_loop().time
        self._delayed = delayed or KernelDelay().read
        self._ticked_s = math.inf
        self._woke_s = -math.inf
        self._stood_s = 0.0
        self._delayed_s: float | None = None  # as of the last tick; None: it was not asked

    @property
    def stood_s(self) -> float:
        """Seconds in which it stood still, in all."""
        return self.stood_until(self._clock())

    def stood_until(self, now_s: float) -> float:
        """The same, where the clock's time is known."""
        late_s = now_s - self._ticked_s - TICK_S
        return self._stood_s + late_s if late_s > 0.0 else self._stood_s

    @property
    def just_woke(self) -> bool:
        """Whether it stood still for long, and that less than a second ago."""
        now_s = self._clock()
        if now_s - self._ticked_s > TICK_S + LONG_S:
            self._woke_s = now_s
        return now_s - self._woke_s < _WOKEN_S

    async def pause(self) -> None:
        """Let what came while it stood still be read first: a stream's beginning has come, and its end."""
        await asyncio.sleep(_PAUSE_S)

    def tick(self, *, closely: bool = False) -> float:
        """Seconds awake since the last tick; `closely` asks the kernel, too."""
        now_s = self._clock()
        elapsed_s = max(now_s - self._ticked_s, 0.0)
        lost_s = max(elapsed_s - TICK_S, 0.0)
        if lost_s > LONG_S:
            self._woke_s = now_s
        before_s, self._delayed_s = self._delayed_s, self._delayed() if closely else None
        if before_s is not None and self._delayed_s is not None:
            lost_s = min(max(lost_s, self._delayed_s - before_s), elapsed_s)
        self._stood_s += lost_s
        self._ticked_s = now_s
        return elapsed_s - lost_s

    def woke(self) -> None:
        """It stood still for long, in all."""
        self._woke_s = self._clock()


class KernelDelay:
    """What Linux tells of a thread that was ready to run and did not; 0 where it does not tell."""

    def __init__(self, schedstat: str = "/proc/thread-self/schedstat", stat: str = "/proc/stat") -> None:
        self._schedstat, self._stat = schedstat, stat

    def read(self) -> float:
        """Seconds in all, of the thread that asks: its run-queue delay, and each core's mean steal."""
        delayed_s = 0.0
        with contextlib.suppress(OSError, ValueError, IndexError):
            delayed_s += _run_queue_s(_text(self._schedstat))
        with contextlib.suppress(OSError, ValueError, IndexError):
            delayed_s += _steal_s(_text(self._stat))
        return delayed_s


def _text(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read(4096)


def _run_queue_s(schedstat: str) -> float:
    """Its fields: time on the core, time waited for one (both ns), and how often (proc_pid_schedstat(5))."""
    return int(schedstat.split()[1]) / 1e9


def _steal_s(stat: str) -> float:
    """Of the line `cpu`, in ticks: user nice system idle iowait irq softirq steal (proc_stat(5))."""
    return int(stat.split("\n", 1)[0].split()[8]) / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
