"""`python -m bench.versions BASE`: what a request costs this version and the one in the checkout BASE.

Both fleets stand side by side, each started by its own `picker up` with its own Envoy configuration and
started again each round; their busy passes take turns. Writes bench/results/versions.md: the paired ratio of
CPU time a request and of script calls shows whether a change made a request more expensive.
"""

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.rig.fleet import RunningFleet, picker_up
from bench.rig.load import LARGE_BYTES, SMALL_BYTES, Driver, Load, WrongAnswer
from bench.rig.machine import cpu_ns, describe_machine
from bench.rig.page import T_95, interval, options_parser, table, write_page
from picker_fleet.errors import StartupError
from picker_fleet.state import primary
from picker_fleet.state.keys import Keys

_TAIL_S = 0.5  # by then the access log of a pass was processed
_WARM_UP_SHARE = 4
_PLENTY = 100_000
_SIMULATORS = ("--endpoints", "2", "--sim-ttft", "0", "--sim-itl", "0")
# Of a pass: bytes of the prompt, tokens of the answer, requests, connections.
_PASSES: tuple[tuple[int, int, int, int], ...] = (
    (SMALL_BYTES, 1, 1500, 16),
    (SMALL_BYTES, 100, 1000, 16),
    (LARGE_BYTES, 1, 240, 8),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one request in a pass: CPU time in microseconds by kind of process, script calls, commands."""

    picker_us: float
    valkey_us: float
    envoy_us: float
    calls: float
    commands: float


class Fleet:
    """A running fleet, and what it has taken so far."""

    def __init__(self, running: RunningFleet) -> None:
        self.url, self._redis_url = running.url, running.redis_url
        self._pickers = [replica.pid for replica in running.replicas]
        self._envoy, self._valkey = ([running.process(name).pid] for name in ("envoy", "server"))

    async def read(self) -> list[float]:
        """CPU of pickers, Valkey and Envoy so far, in microseconds; script calls and all commands so far."""
        async with primary.client(self._redis_url, Keys.of("default").pool, decode_responses=True) as client:
            stats = await client.info("commandstats")
        counts = {name.removeprefix("cmdstat_"): int(each["calls"]) for name, each in stats.items()}
        cpu_us = (cpu_ns(pids) / 1000 for pids in (self._pickers, self._valkey, self._envoy))
        return [*cpu_us, counts.get("fcall", 0), sum(counts.values())]

    async def measure(
        self, driver: Driver, prompt_bytes: int, tokens: int, requests: int, conns: int
    ) -> Cost:
        await driver.prepare(Load(self.url, conns, requests, tokens, prompt_bytes))
        before = await self.read()
        await driver.go()
        await asyncio.sleep(_TAIL_S)
        after = await self.read()
        return Cost(*((now - then) / requests for now, then in zip(after, before, strict=True)))


def commit_of(checkout: Path) -> str:
    """The short name of its commit."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@contextlib.asynccontextmanager
async def running(
    source: Path, replicas: int, *, mode: str = "lean", watermark: int = _PLENTY
) -> AsyncIterator[Fleet]:
    """A fleet of `source`, ready; it ends with the block. `watermark` is that of each endpoint.

    Raises:
        StartupError: it does not become ready.
    """
    # In earlier versions the package itself was called `app`.
    is_earlier = not (source / "app" / "picker_fleet").is_dir()
    package, path = ("app", source) if is_earlier else ("picker_fleet", source / "app")
    command = (sys.executable, "-P", "-m", f"{package}.cli", "up")
    options = ("--replicas", str(replicas), "--mode", mode, *_SIMULATORS)
    config = {
        "request_queue_controller": {"watermark_per_backend": watermark},
        "fair_request_queue": {"total_capacity": _PLENTY, "flow_capacity": _PLENTY},
    }
    environment = {**os.environ, "PYTHONPATH": str(path)}
    async with picker_up(config, *options, command=command, environment=environment) as running_fleet:
        yield Fleet(running_fleet)


async def measure(base: Path, rounds: int, replicas: int) -> list[list[tuple[Cost, Cost]]]:
    """For each kind of pass, base and present in each round."""
    here = Path(__file__).parent.parent
    found: list[list[tuple[Cost, Cost]]] = [[] for _ in _PASSES]
    async with Driver.started() as driver:
        for number in range(rounds):
            async with running(base, replicas) as old, running(here, replicas) as new:
                for kind, (prompt, tokens, requests, conns) in enumerate(_PASSES):
                    costs: dict[Fleet, Cost] = {}
                    for fleet in (old, new):
                        await fleet.measure(driver, prompt, tokens, requests // _WARM_UP_SHARE, conns)
                    for fleet in (old, new) if number % 2 else (new, old):
                        costs[fleet] = await fleet.measure(driver, prompt, tokens, requests, conns)
                    found[kind].append((costs[old], costs[new]))
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return found


def page(found: Sequence[Sequence[tuple[Cost, Cost]]], base: str, replicas: int) -> str:
    """The results as Markdown."""
    made = describe_machine("bench.versions")
    rounds = len(found[0])
    rows = []
    for (prompt, tokens, *_), pairs in zip(_PASSES, found, strict=True):
        name = f"{prompt} B prompt, {tokens} token{'s' if tokens > 1 else ''}"
        for what, label in (
            ("picker_us", "CPU of replicas"), ("valkey_us", "CPU of Valkey"), ("envoy_us", "CPU of Envoy"),
            ("calls", "script calls"), ("commands", "commands"),
        ):  # fmt: skip
            old = [getattr(one, what) for one, _ in pairs]
            new = [getattr(one, what) for _, one in pairs]
            mean, low, high = interval([b / a for a, b in zip(old, new, strict=True)])
            digits = 2 if what in ("calls", "commands") else 0
            medians = [f"{statistics.median(each):.{digits}f}" for each in (old, new)]
            rows.append([name, label, *medians, f"{mean:.3f}", f"{low:.3f} to {high:.3f}"])
    head = ["request", "what", "base", "present", "ratio", "interval"]
    return f"""\
# What a request costs, this version beside an earlier one

`python -m bench.versions`, base {base}, {made.date}, {made.cores} cores, load {made.load:.2f} at the end.
{rounds} rounds; each starts a fleet of either version by its own `picker up` (replicas: {replicas}, mode
`lean`, bounds so high that nothing waits), and their busy passes take turns. CPU in microseconds a request,
medians; script calls (FCALL) and all commands of Valkey, those inside scripts included, a request. A ratio
is present by base within a round: geometric mean, and its 95 % interval.

{table(head, rows)}
"""


def main(arguments: Sequence[str]) -> int:
    parser = options_parser("python -m bench.versions", __doc__)
    parser.add_argument("base", type=Path, help="a checkout of the version to compare with")
    parser.add_argument("--name", default="", help="what to call it (default: its commit)")
    parser.add_argument("--rounds", type=int, choices=sorted(T_95), default=9)
    parser.add_argument("--replicas", type=int, default=1)
    args = parser.parse_args(arguments)
    base = args.base.resolve()
    name = args.name or commit_of(base)
    try:
        found = asyncio.run(measure(base, args.rounds, args.replicas))
    except (StartupError, WrongAnswer) as fault:
        print(fault, file=sys.stderr)
        return 1
    write_page(args.out / "versions.md", page(found, name, args.replicas))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
