"""The rounds: each variant under the same load, in turn, in changing order.

Each round starts new processes: two sets of processes differ more than one set does between rounds.
"""

import asyncio
import contextlib
import io
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.overhead.reduced_replica import PARTS
from bench.overhead.stack import Variant, model_servers, stack
from bench.rig.load import LARGE_BYTES, SMALL_BYTES, Driver, Load
from bench.rig.page import percentile
from bench.versions import Fleet, running

# The picker accounts for the last ends within milliseconds: by then all cost of a pass has been counted.
_TAIL_S = 0.3
_CALM_CONNECTIONS = 2
_CALM_TURNS = 8
_IDLE_S = 5
_WARM_UP_SHARE = 3  # part of a pass, discarded before each round

# The last commit before the native transport and mode `http`.
BASE = "7a3e7bc1fd9fa41fd66b9b232408f7ea43551ecd"
_THROUGHPUT_REQUESTS = 3000
_THROUGHPUT_CONNECTIONS = 16
_THROUGHPUT_WATERMARK = 1000


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of request. `busy` are sent at full speed over `connections`, for CPU; `calm` over two, for
    latency."""

    name: str
    prompt_bytes: int
    tokens: int
    connections: int
    busy: int
    calm: int


@dataclass(frozen=True, slots=True)
class Setup:
    """Variants that run side by side, while `cases` are measured in turn. `itl_ms`: between two tokens of the
    model servers, which send each token as a chunk unless it is 0."""

    name: str
    variants: tuple[Variant, ...]
    cases: tuple[Case, ...]
    itl_ms: float = 0.0


SHORT = Case("300 B, 1 token", SMALL_BYTES, 1, connections=16, busy=1200, calm=800)
LONG = Case("300 B, 100 tokens in 100 chunks", SMALL_BYTES, 100, connections=8, busy=160, calm=0)
LARGE = Case("400 KB, 1 token", LARGE_BYTES, 1, connections=8, busy=240, calm=120)
SCORERS = ("queue-depth", "kv-cache", "prefix-affinity")
_NONE, _CONSTANT, _PICKER = (
    lambda mode: Variant("none", mode, "none"),
    lambda mode: Variant("constant", mode, "constant"),
    lambda mode: Variant("picker", mode),
)
_TERSE = Variant("terse", "lean", "terse")
SETUPS = (
    Setup("standard", tuple(make("standard") for make in (_NONE, _CONSTANT, _PICKER)), (SHORT,)),
    Setup("chunks", (_CONSTANT("standard"), _PICKER("standard")), (LONG,), itl_ms=2.0),
    Setup("headers", tuple(make("headers") for make in (_NONE, _CONSTANT, _PICKER)), (SHORT,)),
    Setup(
        "lean",
        (
            _NONE("lean"),
            _TERSE,
            _PICKER("lean"),
            Variant("picker, http", "http"),
            Variant("picker, scorers", "lean", scorers=SCORERS),
        ),
        (SHORT, LARGE),
    ),
)


# What the parts of a decision cost. Not measured unless asked for: nothing has to hold for these.
PARTS_SETUPS = tuple(
    Setup(
        f"{mode}-parts",
        (
            *baselines,
            *(Variant(f"picker, {part}", mode, part=part) for part in PARTS),
            _PICKER(mode),
        ),
        (SHORT,),
    )
    for mode, baselines in (
        ("standard", (_NONE("standard"), _CONSTANT("standard"))),
        ("headers", (_NONE("headers"), _CONSTANT("headers"))),
        ("lean", (_NONE("lean"), _TERSE)),
        ("http", (_NONE("lean"), _TERSE)),
    )
)


class Target(Protocol):
    """What is loaded at `url`."""

    @property
    def url(self) -> str: ...

    def cpu_us(self) -> tuple[float, float, float]:
        """CPU time since start of pickers, Valkey and Envoy, in microseconds."""
        ...


@dataclass(frozen=True, slots=True)
class Reading:
    """One variant in one round: CPU in µs a request of the busy pass, milliseconds to the answer's headers in
    the calm one (0 without it)."""

    requests_per_s: float
    picker_us: float
    valkey_us: float
    envoy_us: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    """`readings` by case and variant, one a round. `idle_ms` is the picker's CPU in ms a second at rest."""

    readings: Mapping[str, Mapping[str, list[Reading]]]
    idle_ms: Mapping[str, list[float]]


async def measure(setup: Setup, rounds: int, driver: Driver) -> Result:
    """All cases of `setup`."""
    readings: dict[str, dict[str, list[Reading]]] = {
        case.name: {variant.name: [] for variant in setup.variants} for case in setup.cases
    }
    idle_ms: dict[str, list[float]] = {variant.name: [] for variant in setup.variants}
    for number in range(rounds):
        print(f"{setup.name}: round {number + 1} of {rounds}", flush=True)
        async with contextlib.AsyncExitStack() as stacks:
            folder = Path(stacks.enter_context(tempfile.TemporaryDirectory(prefix="picker-bench-")))
            addresses = await stacks.enter_async_context(model_servers(folder, setup.itl_ms))
            found = {
                variant.name: await stacks.enter_async_context(stack(variant, addresses, folder))
                for variant in setup.variants
            }
            for case in setup.cases:
                for target in found.values():
                    await send(driver, target, case, case.busy // _WARM_UP_SHARE)
            before = {name: target.cpu_us()[0] for name, target in found.items()}
            await asyncio.sleep(_IDLE_S)
            for name, target in found.items():
                idle_ms[name].append((target.cpu_us()[0] - before[name]) / 1000 / _IDLE_S)
            for case in setup.cases:
                for name, reading in (await compare(driver, found, case, number)).items():
                    readings[case.name][name].append(reading)
    return Result(readings, idle_ms)


async def send(driver: Driver, target: Target, case: Case, requests: int) -> list[float]:
    """Send `requests` at full speed: how many a second, and the CPU of one, access logs included, in µs of
    pickers, Valkey and Envoy."""
    await driver.prepare(_load(target, case, case.connections, requests))
    before = target.cpu_us()
    outcome = await driver.go()
    await asyncio.sleep(_TAIL_S)
    cpu_us = [(now - then) / requests for now, then in zip(target.cpu_us(), before, strict=True)]
    return [requests / outcome.seconds, *cpu_us]


async def compare(
    driver: Driver, targets: Mapping[str, Target], case: Case, number: int
) -> dict[str, Reading]:
    """A busy pass of each variant, then a calm one."""
    names = tuple(targets)
    passes = {name: await send(driver, targets[name], case, case.busy) for name in _rotated(names, number)}
    calm_us: dict[str, list[int]] = {name: [] for name in names}
    # Added latency is a small difference, so the calm passes are split and mixed.
    for turn in range(_CALM_TURNS if case.calm else 0):
        for name in _rotated(names, number + turn):
            await driver.prepare(_load(targets[name], case, _CALM_CONNECTIONS, case.calm // _CALM_TURNS))
            calm_us[name] += (await driver.go()).first_us
    return {
        name: Reading(*busy, *(percentile(calm_us[name], share) / 1000 for share in (0.5, 0.99)))
        for name, busy in passes.items()
    }


def _load(target: Target, case: Case, connections: int, requests: int) -> Load:
    return Load(target.url, connections, requests, case.tokens, case.prompt_bytes)


def _rotated(names: tuple[str, ...], by: int) -> tuple[str, ...]:
    """Rotate the order, so that not always the same variant follows an expensive one."""
    return names[by % len(names) :] + names[: by % len(names)]


async def throughput(rounds: int, driver: Driver) -> list[tuple[float, float]]:
    """In each round, requests/s of BASE in `standard` and of this version in `http`, by `picker up` with one
    replica."""
    here = Path(__file__).parents[2]
    found = []
    with tempfile.TemporaryDirectory(prefix="picker-bench-base-") as folder:
        command = ["git", "-C", str(here), "archive", BASE]
        packed = subprocess.run(command, capture_output=True, check=True).stdout  # noqa: ASYNC221 - nothing runs
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        for number in range(rounds):
            print(f"throughput: round {number + 1} of {rounds}", flush=True)
            async with (
                running(Path(folder), 1, mode="standard", watermark=_THROUGHPUT_WATERMARK) as old,
                running(here, 1, mode="http", watermark=_THROUGHPUT_WATERMARK) as new,
            ):
                for fleet in (old, new):
                    await _requests_per_s(driver, fleet, _THROUGHPUT_REQUESTS // _WARM_UP_SHARE)
                order = (old, new) if number % 2 else (new, old)
                rates = {each: await _requests_per_s(driver, each, _THROUGHPUT_REQUESTS) for each in order}
                found.append((rates[old], rates[new]))
    return found


async def _requests_per_s(driver: Driver, fleet: Fleet, requests: int) -> float:
    await driver.prepare(Load(fleet.url, _THROUGHPUT_CONNECTIONS, requests, 1, SMALL_BYTES))
    outcome = await driver.go()
    return requests / outcome.seconds
