"""The rounds: each variant under the same load, in turn, in changing order; and a replica's memory."""

import asyncio
import contextlib
import math
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from bench.overhead.cases import (
    CALM_CONNECTIONS,
    MODEL,
    PACE_PER_S,
    PACED_REQUESTS,
    PROMPT_BYTES,
    Case,
    Plan,
    Setup,
    Variant,
)
from bench.overhead.stack import CpuTime, Stack, model_servers, stack
from bench.rig.load import Driver, Load, Outcome
from bench.rig.machine import resident_bytes

# Envoy sends its access log every 50 ms and the picker processes it in a call or two: by then all cost of a
# pass has been counted.
_TAIL_S = 0.3
_LIMIT_S = 180.0  # of one pass
_CALM_TURNS = 8
_IDLE_S = 3
_WARM_UP_SHARE = 3  # part of a pass, discarded before each round


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one pass: to the answer's headers (`first`) and to its last byte."""

    first_p50_ms: float
    first_p99_ms: float
    last_p50_ms: float
    last_p99_ms: float


@dataclass(frozen=True, slots=True)
class Reading:
    """One variant in one round. CPU is in µs a request, of all processes of a kind together."""

    requests_per_s: float
    picker_us: float
    envoy_us: float
    valkey_us: float
    busy: Latency
    calm: Latency | None


Readings = dict[Variant, list[Reading]]  # one reading a round, in the order of the rounds


@dataclass(frozen=True, slots=True)
class SetupResult:
    """`bypassed` is the share of requests that did not wait, by picker variant.

    `idle` is the CPU of all processes of a kind in a second without requests. `paced` has the pickers' CPU in
    µs a request, less idle CPU, for the shortest and the longest answer, one figure a round; empty if the
    setup is not `paced`.
    """

    setup: Setup
    cases: Mapping[Case, Readings]
    bypassed: Mapping[Variant, float]
    idle: Mapping[Variant, CpuTime]
    paced: Mapping[Variant, tuple[list[float], list[float]]]


async def run(plan: Plan, driver: Driver, log: Callable[[str], None]) -> list[SetupResult]:
    """All setups of `plan`, one after the other; `log` gets a line a round."""
    return [await _measure_setup(setup, plan.rounds, driver, log) for setup in plan.setups]


@contextlib.asynccontextmanager
async def running(
    setup: Setup, only: Collection[Variant] | None = None
) -> AsyncIterator[dict[Variant, Stack]]:
    """The stacks of `setup` by variant, all at once, or `only` some. Idle ones cost little."""
    async with contextlib.AsyncExitStack() as stacks:
        folder = Path(stacks.enter_context(tempfile.TemporaryDirectory(prefix="picker-bench-")))
        addresses = await stacks.enter_async_context(model_servers(folder, slow=False))
        found: dict[Variant, Stack] = {}
        for variant in only or setup.variants(setup.cases[0]):
            if variant == "queued":
                addresses = await stacks.enter_async_context(model_servers(folder, slow=True))
            found[variant] = await stacks.enter_async_context(
                stack(variant, setup.mode, setup.replicas, addresses, folder)
            )
        yield found


async def busy(
    driver: Driver, target: Stack, case: Case, requests: int, pace_per_s: float = 0
) -> tuple[Outcome, CpuTime]:
    """Send `requests` at full speed or at a rate; the outcome, and their CPU, access logs included."""
    await driver.prepare(_load(target, case, case.connections(target.variant), requests, pace_per_s))
    before = target.cpu()
    outcome = await driver.go()
    await asyncio.sleep(_TAIL_S)
    return outcome, target.cpu() - before


async def _measure_setup(
    setup: Setup, rounds: int, driver: Driver, log: Callable[[str], None]
) -> SetupResult:
    cases: dict[Case, Readings] = {
        case: {variant: [] for variant in setup.variants(case)} for case in setup.cases
    }
    sent: dict[Variant, int] = dict.fromkeys(setup.variants(setup.cases[0]), 0)
    bypassed: dict[Variant, int] = {variant: 0 for variant in sent if variant in ("picker", "queued")}
    compared: tuple[Variant, ...] = ("constant", "picker") if setup.paced else ()
    paced: dict[Variant, tuple[list[float], list[float]]] = {variant: ([], []) for variant in compared}
    idles: list[dict[Variant, CpuTime]] = []
    for number in range(rounds):
        log(f"{setup.name}: round {number + 1} of {rounds}")
        # New processes each round: two sets differ by more than one set does between rounds.
        async with running(setup) as stacks:
            for case in setup.cases:
                for variant in setup.variants(case):
                    requests = case.busy_requests(variant) // _WARM_UP_SHARE
                    outcome, _ = await busy(driver, stacks[variant], case, requests)
                    sent[variant] += outcome.sent
            idle = await _idle(stacks)
            for case in setup.cases:
                for variant, (reading, count) in (await _round(driver, stacks, setup, case, number)).items():
                    cases[case][variant].append(reading)
                    sent[variant] += count
            for variant in _rotated(compared, number):
                for case, figures in zip(setup.ends, paced[variant], strict=True):
                    cost_us, count = await _paced(driver, stacks[variant], case, idle[variant])
                    figures.append(cost_us)
                    sent[variant] += count
            for variant in bypassed:
                bypassed[variant] += await stacks[variant].bypass_count()
            idles.append(idle)
    shares = {variant: count / sent[variant] for variant, count in bypassed.items()}
    at_idle = {variant: sum((idle[variant] for idle in idles), CpuTime()) / rounds for variant in sent}
    return SetupResult(setup, cases, shares, at_idle, paced)


async def _idle(stacks: Mapping[Variant, Stack]) -> dict[Variant, CpuTime]:
    """CPU time of each stack in one second without requests."""
    before = {variant: target.cpu() for variant, target in stacks.items()}
    await asyncio.sleep(_IDLE_S)
    return {variant: (target.cpu() - before[variant]) / _IDLE_S for variant, target in stacks.items()}


async def _paced(driver: Driver, target: Stack, case: Case, idle: CpuTime) -> tuple[float, int]:
    """CPU of the pickers in µs a request, less idle CPU; and how many requests were sent."""
    outcome, cpu = await busy(driver, target, case, PACED_REQUESTS, PACE_PER_S)
    idle_ns = idle.picker_ns * (outcome.seconds + _TAIL_S)
    return (cpu.picker_ns - idle_ns) / 1000 / outcome.requests, outcome.sent


async def _round(
    driver: Driver, stacks: Mapping[Variant, Stack], setup: Setup, case: Case, number: int
) -> dict[Variant, tuple[Reading, int]]:
    """A busy pass of each variant, then a calm one; each variant's reading and count of requests."""
    passes = {}
    for variant in _rotated(setup.variants(case), number):
        passes[variant] = await busy(driver, stacks[variant], case, case.busy_requests(variant))
    calm: dict[Variant, list[Outcome]] = {variant: [] for variant in passes if variant != "queued"}
    # Added latency is a small difference, so the calm passes are split and mixed.
    for turn in range(_CALM_TURNS):
        for variant in _rotated(tuple(calm), number + turn):
            await driver.prepare(_load(stacks[variant], case, CALM_CONNECTIONS, case.calm // _CALM_TURNS))
            calm[variant].append(await driver.go())
    return {
        variant: (
            _reading(outcome, cpu, calm.get(variant, [])),
            sum(each.sent for each in (outcome, *calm.get(variant, []))),
        )
        for variant, (outcome, cpu) in passes.items()
    }


def _reading(outcome: Outcome, cpu: CpuTime, calm: Sequence[Outcome]) -> Reading:
    return Reading(
        requests_per_s=outcome.requests / outcome.seconds,
        picker_us=cpu.picker_ns / 1000 / outcome.requests,
        envoy_us=cpu.envoy_ns / 1000 / outcome.requests,
        valkey_us=cpu.valkey_ns / 1000 / outcome.requests,
        busy=_latency([outcome]),
        calm=_latency(calm) if calm else None,
    )


def _latency(outcomes: Sequence[Outcome]) -> Latency:
    first_us = sorted(each for outcome in outcomes for each in outcome.first_us)
    last_us = sorted(each for outcome in outcomes for each in outcome.last_us)
    return Latency(
        *(percentile(ordered, share) / 1000 for ordered in (first_us, last_us) for share in (0.5, 0.99))
    )


def percentile(ordered: Sequence[int], share: float) -> int:
    """The smallest value of `ordered` (ascending, not empty) that at least `share` of them do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _load(target: Stack, case: Case, connections: int, requests: int, pace_per_s: float = 0) -> Load:
    address = urlsplit(target.url)
    assert address.hostname is not None
    assert address.port is not None
    return Load(
        host=address.hostname,
        port=address.port,
        model=MODEL,
        connections=connections,
        requests=requests,
        tokens=case.tokens,
        prompt_bytes=PROMPT_BYTES[case.prompt],
        pace_per_s=pace_per_s,
        limit_s=_LIMIT_S,
    )


def _rotated(variants: tuple[Variant, ...], by: int) -> tuple[Variant, ...]:
    """Rotate the order, so that not always the same variant follows an expensive one."""
    start = by % max(1, len(variants))
    return variants[start:] + variants[:start]


_CASE = Case("small", 1, busy=2000, calm=0)
_STEPS = 5
_SETTLE_S = 1.0
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory in MiB once `requests` requests were over."""

    requests: int
    replica_mib: float
    valkey_mib: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Samples after a short warm-up and after each fifth of the requests."""

    samples: tuple[MemorySample, ...]

    @property
    def slope_kib(self) -> float:
        """Growth of the replica in KiB per 1000 requests, from the first fifth on: least squares."""
        after_first = self.samples[1:]
        x_mean = sum(sample.requests for sample in after_first) / len(after_first)
        y_mean = sum(sample.replica_mib for sample in after_first) / len(after_first)
        rise = sum((sample.requests - x_mean) * (sample.replica_mib - y_mean) for sample in after_first)
        return rise / sum((sample.requests - x_mean) ** 2 for sample in after_first) * 1024 * 1000

    @property
    def growth(self) -> float:
        """Of the replica, from the first fifth to the last, as a share of the first."""
        return self.samples[-1].replica_mib / self.samples[1].replica_mib - 1


async def run_memory(plan: Plan, driver: Driver, log: Callable[[str], None]) -> Memory:
    """`plan.memory_requests` small requests in `lean` through one replica, at full speed."""
    only: tuple[Variant, ...] = ("picker",)
    async with running(Setup("lean", 1, (_CASE,)), only) as stacks:
        picker = stacks["picker"]
        (replica,) = picker.picker_pids
        valkey = picker.valkey_pid
        assert valkey is not None
        samples = []
        done = 0
        for step in range(_STEPS + 1):
            requests = plan.memory_requests // _STEPS if step else _CASE.busy
            await busy(driver, picker, _CASE, requests)
            await asyncio.sleep(_SETTLE_S)
            done += requests if step else 0
            samples.append(MemorySample(done, resident_bytes(replica) / _MIB, resident_bytes(valkey) / _MIB))
            log(f"memory: {samples[-1].replica_mib:.1f} MiB after {done} requests")
    return Memory(tuple(samples))
