"""Whether one replica's memory stays where it is while requests pass."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from bench.overhead.cases import Case, Plan, Rig, Variant
from bench.overhead.driver import Driver
from bench.overhead.measure import busy, standing
from bench.overhead.processes import resident_bytes

_CASE = Case("small", 1, busy=2000, calm=0)
_STEPS = 5
_SETTLES_S = 1.0
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Mark:
    """Memory in MiB once `requests` requests were over."""

    requests: int
    replica_mib: float
    valkey_mib: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Marks at the start (a little warm) and after each fifth of the requests."""

    marks: tuple[Mark, ...]

    @property
    def slope_kib(self) -> float:
        """Growth of the replica in KiB per 1000 requests, from the first fifth on: least squares."""
        later = self.marks[1:]
        x_mean = sum(mark.requests for mark in later) / len(later)
        y_mean = sum(mark.replica_mib for mark in later) / len(later)
        rise = sum((mark.requests - x_mean) * (mark.replica_mib - y_mean) for mark in later)
        return rise / sum((mark.requests - x_mean) ** 2 for mark in later) * 1024 * 1000

    @property
    def growth(self) -> float:
        """Of the replica, from the first fifth to the last, as a share of the first."""
        return self.marks[-1].replica_mib / self.marks[1].replica_mib - 1


async def run(plan: Plan, driver: Driver, tell: Callable[[str], None]) -> Memory:
    """`plan.memory_requests` small requests in `lean` through one replica, at full speed."""
    only: tuple[Variant, ...] = ("picker",)
    async with standing(Rig("lean", 1, (_CASE,)), only) as stacks:
        picker = stacks["picker"]
        (replica,) = picker.picker_pids
        valkey = picker.valkey_pid
        assert valkey is not None
        marks = []
        done = 0
        for step in range(_STEPS + 1):
            requests = plan.memory_requests // _STEPS if step else _CASE.busy
            await busy(driver, picker, _CASE, requests)
            await asyncio.sleep(_SETTLES_S)
            done += requests if step else 0
            marks.append(Mark(done, resident_bytes(replica) / _MIB, resident_bytes(valkey) / _MIB))
            tell(f"memory: {marks[-1].replica_mib:.1f} MiB after {done} requests")
    return Memory(tuple(marks))
