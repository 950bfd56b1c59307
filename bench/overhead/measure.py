"""Sends passes (similar requests) to each target, in changing order, and measures CPU and latency."""

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.rig.passes import LARGE_BYTES, SMALL_BYTES, alike, per_s, warmed
from bench.rig.report import percentile

# The picker settles a pass's last requests within this pause, so the measured CPU includes them.
_TAIL_S = 0.3
_CALM_CONNECTIONS = 2
_CALM_TURNS = 8
_IDLE_S = 5
_WARM_UP_SHARE = 3  # before each round, a third of a pass warms up each target


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request. A busy pass sends `busy` requests at full speed over `connections`, to measure
    CPU; a calm pass sends `calm` requests over two connections, to measure latency."""

    name: str
    prompt_bytes: int
    tokens: int
    connections: int
    busy: int
    calm: int


CASES = (
    Case("300 B, 1 token", SMALL_BYTES, 1, connections=16, busy=1200, calm=800),
    Case("300 B, 100 tokens in 100 chunks", SMALL_BYTES, 100, connections=8, busy=160, calm=0),
    Case("400 KB, 1 token", LARGE_BYTES, 1, connections=8, busy=240, calm=120),
)


class Target(Protocol):
    """A target of load, which takes requests at `url`."""

    @property
    def url(self) -> str: ...

    def cpu_us(self) -> tuple[float, float, float]:
        """CPU time in µs of pickers, Valkey and Envoy since they started."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """Figures of one target in one round, namely CPU in µs per request of the busy pass, and milliseconds to
    the answer's headers in the calm pass (0 without a calm pass)."""

    requests_per_s: float
    picker_us: float
    valkey_us: float
    envoy_us: float
    p50_ms: float
    p99_ms: float

    @property
    def shared_us(self) -> float:
        """CPU in µs per request of picker and Valkey together."""
        return self.picker_us + self.valkey_us


class Readings:
    """The figures of each round by case and target. `at_rest`: CPU of picker and Valkey in ms a second."""

    def __init__(self) -> None:
        self.at_rest: dict[str, list[float]] = {}
        self.by_case: dict[str, dict[str, list[Reading]]] = {case.name: {} for case in CASES}

    async def round(self, targets: Mapping[str, Target], number: int) -> None:
        """Warm up every target, measure it at rest, and measure all cases in round `number`."""
        for case in CASES:
            for target in targets.values():
                await _send(target, case, case.busy // _WARM_UP_SHARE)
        before = {name: target.cpu_us() for name, target in targets.items()}
        await asyncio.sleep(_IDLE_S)
        for name, target in targets.items():
            used_us = sum(target.cpu_us()[:2]) - sum(before[name][:2])
            self.at_rest.setdefault(name, []).append(used_us / 1000 / _IDLE_S)
        for case in CASES:
            for name, reading in (await _compare(targets, case, number)).items():
                self.by_case[case.name].setdefault(name, []).append(reading)

    def ratios(self, case: str, own: str, other: str, of: Callable[[Reading], float]) -> list[float]:
        """For each round: figure `of` of target `own`, divided by the same figure of target `other`."""
        pairs = zip(self.by_case[case][own], self.by_case[case][other], strict=True)
        return [of(a) / of(b) for a, b in pairs]

    def rows(self, case: str, none: str) -> list[list[str]]:
        """Rows of the table, one per target: medians of the rounds; latencies minus the latency of target
        `none`."""
        found = []
        for name, readings in self.by_case[case].items():
            row = [case, name]
            for what in ("picker_us", "valkey_us", "envoy_us", "requests_per_s"):
                row.append(f"{statistics.median(getattr(each, what) for each in readings):.0f}")
            bases = self.by_case[case][none]
            for what in ("p50_ms", "p99_ms"):
                pairs = zip(readings, bases, strict=True)
                added = statistics.median(getattr(a, what) - getattr(b, what) for a, b in pairs)
                row.append(f"{added:.2f}" if readings[0].p50_ms and name != none else "–")
            found.append([*row, f"{statistics.median(self.at_rest[name]):.1f}"])
        return found


HEAD = (
    "request", "target", "picker µs", "Valkey µs", "Envoy µs", "requests/s", "added p50 ms", "added p99 ms",
    "at rest, ms/s",
)  # fmt: skip


async def _send(target: Target, case: Case, requests: int) -> list[float]:
    """Send `requests` requests to the target at full speed. Returns requests a second, and the CPU in µs per
    request of pickers, Valkey and Envoy, access logs included."""
    make_request = alike(case.prompt_bytes, case.tokens)
    async with warmed(target.url, case.connections, make_request) as send:
        before = target.cpu_us()
        answers = await send(requests)
        await asyncio.sleep(_TAIL_S)
        cpu_us = [(now - then) / requests for now, then in zip(target.cpu_us(), before, strict=True)]
    return [per_s(answers), *cpu_us]


async def _compare(targets: Mapping[str, Target], case: Case, number: int) -> dict[str, Reading]:
    """Measure a busy pass to each target, then a calm pass to each target."""
    names = tuple(targets)
    passes = {name: await _send(targets[name], case, case.busy) for name in _rotated(names, number)}
    calm_ms: dict[str, list[float]] = {name: [] for name in names}
    make_request = alike(case.prompt_bytes, case.tokens)
    # Added latency is a small difference, so split the calm passes into turns that alternate between targets.
    for turn in range(_CALM_TURNS if case.calm else 0):
        for name in _rotated(names, number + turn):
            async with warmed(targets[name].url, _CALM_CONNECTIONS, make_request) as send:
                answers = await send(case.calm // _CALM_TURNS)
            calm_ms[name] += [1000 * (each.head_s or each.took_s) for each in answers]
    return {
        name: Reading(*busy, *(percentile(calm_ms[name], share) for share in (0.5, 0.99)))
        for name, busy in passes.items()
    }


def _rotated(names: Sequence[str], by: int) -> Sequence[str]:
    """`names` rotated by `by`, so that an expensive target does not always precede the same target."""
    return [*names[by % len(names) :], *names[: by % len(names)]]
