"""One round after the other: each variant under the same load, in turn, in changing order."""

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
    Rig,
    Variant,
)
from bench.overhead.client import Load, Outcome
from bench.overhead.driver import Driver
from bench.overhead.stack import CpuTime, Stack, model_servers, stack

# Envoy sends its access log every 50 ms, and the picker accounts for it in a call or two: what a pass
# caused has happened, and counts as its cost, this long after its last answer.
_TAIL_S = 0.3
_LIMIT_S = 180.0  # of one pass
_CALM_TURNS = 8
_IDLE_S = 3
_WARM_UP_SHARE = 3  # one part in so many of a pass, thrown away, before each round


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one pass: to the answer's headers (`first`), which come with a token, and to its last byte."""

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
class RigResult:
    """`bypassed` is the share of requests that did not wait, by picker variant.

    `idle` is what all processes of a kind use in a second without requests. `paced` has the CPU of the
    pickers' processes in µs a request, less what idling uses, for the shortest and for the longest answer,
    one figure a round; empty if the rig is not `paced`.
    """

    rig: Rig
    cases: Mapping[Case, Readings]
    bypassed: Mapping[Variant, float]
    idle: Mapping[Variant, CpuTime]
    paced: Mapping[Variant, tuple[list[float], list[float]]]


async def run(plan: Plan, driver: Driver, tell: Callable[[str], None]) -> list[RigResult]:
    """All rigs of `plan`, one after the other; `tell` hears of each round."""
    return [await _measure_rig(rig, plan.rounds, driver, tell) for rig in plan.rigs]


@contextlib.asynccontextmanager
async def standing(rig: Rig, only: Collection[Variant] | None = None) -> AsyncIterator[dict[Variant, Stack]]:
    """The stacks of `rig` by variant, all up at once, or `only` some. Idle ones cost little."""
    async with contextlib.AsyncExitStack() as stacks:
        folder = Path(stacks.enter_context(tempfile.TemporaryDirectory(prefix="picker-bench-")))
        addresses = await stacks.enter_async_context(model_servers(folder, slow=False))
        found: dict[Variant, Stack] = {}
        for variant in only or rig.variants(rig.cases[0]):
            if variant == "queued":
                addresses = await stacks.enter_async_context(model_servers(folder, slow=True))
            found[variant] = await stacks.enter_async_context(
                stack(variant, rig.mode, rig.replicas, addresses, folder)
            )
        yield found


async def busy(
    driver: Driver, target: Stack, case: Case, requests: int, pace_per_s: float = 0
) -> tuple[Outcome, CpuTime]:
    """`requests` at full speed or at a pace; what came of them, and the CPU they cost, access log and all."""
    await driver.prepare(_load(target, case, case.connections(target.variant), requests, pace_per_s))
    before = target.cpu()
    outcome = await driver.go()
    await asyncio.sleep(_TAIL_S)
    return outcome, target.cpu() - before


async def _measure_rig(rig: Rig, rounds: int, driver: Driver, tell: Callable[[str], None]) -> RigResult:
    cases: dict[Case, Readings] = {
        case: {variant: [] for variant in rig.variants(case)} for case in rig.cases
    }
    sent: dict[Variant, int] = dict.fromkeys(rig.variants(rig.cases[0]), 0)
    bypassed: dict[Variant, int] = {variant: 0 for variant in sent if variant in ("picker", "queued")}
    compared: tuple[Variant, ...] = ("constant", "picker") if rig.paced else ()
    paced: dict[Variant, tuple[list[float], list[float]]] = {variant: ([], []) for variant in compared}
    idles: list[dict[Variant, CpuTime]] = []
    for number in range(rounds):
        tell(f"{rig.name}: round {number + 1} of {rounds}")
        # Begun anew: two sets of the same processes differ by more than one does from round to round.
        async with standing(rig) as stacks:
            for case in rig.cases:
                for variant in rig.variants(case):
                    requests = case.busy_requests(variant) // _WARM_UP_SHARE
                    outcome, _ = await busy(driver, stacks[variant], case, requests)
                    sent[variant] += outcome.sent
            idle = await _idle(stacks)
            for case in rig.cases:
                for variant, (reading, count) in (await _round(driver, stacks, rig, case, number)).items():
                    cases[case][variant].append(reading)
                    sent[variant] += count
            for variant in _turned(compared, number):
                for case, figures in zip(rig.ends, paced[variant], strict=True):
                    cost_us, count = await _paced(driver, stacks[variant], case, idle[variant])
                    figures.append(cost_us)
                    sent[variant] += count
            for variant in bypassed:
                bypassed[variant] += await stacks[variant].bypasses()
            idles.append(idle)
    shares = {variant: count / sent[variant] for variant, count in bypassed.items()}
    at_rest = {variant: sum((idle[variant] for idle in idles), CpuTime()) / rounds for variant in sent}
    return RigResult(rig, cases, shares, at_rest, paced)


async def _idle(stacks: Mapping[Variant, Stack]) -> dict[Variant, CpuTime]:
    """CPU time that each stack uses in one second while nothing is sent."""
    before = {variant: target.cpu() for variant, target in stacks.items()}
    await asyncio.sleep(_IDLE_S)
    return {variant: (target.cpu() - before[variant]) / _IDLE_S for variant, target in stacks.items()}


async def _paced(driver: Driver, target: Stack, case: Case, idle: CpuTime) -> tuple[float, int]:
    """CPU of the pickers' processes in µs a request, less that of idling; and how many requests it took."""
    outcome, cpu = await busy(driver, target, case, PACED_REQUESTS, PACE_PER_S)
    idle_ns = idle.picker_ns * (outcome.seconds + _TAIL_S)
    return (cpu.picker_ns - idle_ns) / 1000 / outcome.requests, outcome.sent


async def _round(
    driver: Driver, stacks: Mapping[Variant, Stack], rig: Rig, case: Case, number: int
) -> dict[Variant, tuple[Reading, int]]:
    """A busy pass of each variant, then a calm one; each variant's reading and count of requests."""
    passes = {}
    for variant in _turned(rig.variants(case), number):
        passes[variant] = await busy(driver, stacks[variant], case, case.busy_requests(variant))
    calm: dict[Variant, list[Outcome]] = {variant: [] for variant in passes if variant != "queued"}
    # Added latency is a small difference: the passes it is between are cut up and mixed.
    for turn in range(_CALM_TURNS):
        for variant in _turned(tuple(calm), number + turn):
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
    """The least of `ordered` (ascending, not empty) that `share` of them do not pass."""
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


def _turned(variants: tuple[Variant, ...], by: int) -> tuple[Variant, ...]:
    """Whoever comes after a costly neighbour should not always be the same."""
    start = by % max(1, len(variants))
    return variants[start:] + variants[:start]
