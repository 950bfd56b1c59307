"""Measures and writes bench/results/lifecycle.md; exit 1 if a limit is not met."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.lifecycle.life import BATCH, Lives, Size
from bench.lifecycle.replay import floor_us, life
from bench.lifecycle.server import Server, server
from bench.overhead.surroundings import look

_RESULTS = Path(__file__).parents[1] / "results"
_ROUNDS = 3
_FLOORS = 3.0  # a life may cost this many calls of the floor
_GROWTH = 1.7
_LONGEST_US = 5000
_BYTES = 500
_SMALL = Size()


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    measured: float
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        return self.measured <= self.limit


def _sizes(most: int) -> dict[str, Size]:
    return {
        "1000 queued, 10 flows, 10 workloads, 4 endpoints": _SMALL,
        f"{most} queued": Size(queued=most),
        "10 000 flows": Size(flows=10_000),
        "10 000 workloads": Size(workloads=10_000),
        "500 endpoints": Size(endpoints=500),
        "workload-aware": Size(ordering="workload-aware"),
        "workload-aware, 10 000 workloads": Size(ordering="workload-aware", workloads=10_000),
    }


def _measure(it: Server, lives: int, most: int) -> Iterator[Row]:
    floors, costs = [], {}
    longest = 0
    for name, size in _sizes(most).items():
        found, beside = [], []
        for seed in range(_ROUNDS if size.queued < 100_000 else 1):
            floors.append(floor_us(it, 5 * lives))
            found.append(life(it, size, lives, seed))
            # The machine is twice as fast at one time as at another: growth is to what it was just then.
            beside.append(found[-1] if size == _SMALL else life(it, _SMALL, lives, seed))
            longest = max(longest, found[-1].longest_us)
        costs[name] = median(each.us for each in found)
        bytes_each = found[0].queued_bytes
        print(
            f"{name}: {costs[name]:.1f} us a life, {bytes_each:.0f} bytes queued, longest call {longest} us",
            flush=True,
        )
        if size == _SMALL:
            yield Row("a life, in calls of the floor", costs[name] / median(floors), _FLOORS, "")
            yield Row("memory of a queued request", bytes_each, _BYTES, "bytes")
        elif size.ordering == "fcfs":
            growth = median(one.us / base.us for one, base in zip(found, beside, strict=True))
            yield Row(f"growth to {name}", growth, _GROWTH, "")
    yield Row("the floor", median(floors), float("inf"), "us")
    for name, cost in costs.items():
        yield Row(f"a life: {name}", cost, float("inf"), "us")
    yield Row("the longest call", longest, _LONGEST_US, "us")


def _leaves_nothing(it: Server, lives: int) -> Row:
    """Keys left when `lives` requests have lived."""
    state = Lives(it, _SMALL, 0)
    state.live(lives)
    state.drain()
    state.sweep()
    allowed = {"pool", "load", "endpoints", "workloads", "replicas", "about"}
    left = {key.decode().split("}:")[1] for key in it.client.keys("*")} - allowed
    return Row(f"keys left over after {lives} lives", len(left), 0, "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lifecycle")
    parser.add_argument("--quick", action="store_true", help="small sizes, in less than a minute")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    lives, most, total = (1600, 20_000, 20_000) if options.quick else (16_000, 1_000_000, 1_000_000)
    here = look(["--quick"] if options.quick else [])
    with server() as it:
        rows = [*_measure(it, lives, most), _leaves_nothing(it, total)]
    lines = [
        "# What a life costs Redis", "",
        f"`{here.command.replace('overhead', 'lifecycle')}`, {here.date}, {here.cores} cores, load"
        f" {here.load:.2f} before. A life is admit, wait, grant, place, settle, {BATCH} a call, with the"
        " queue kept at its length; recorded once and played back to the server as fast as it takes it."
        f" Server CPU, medians of {_ROUNDS} (of 1 for the longest queue). The floor is what"
        " `redis-benchmark` makes of a script of three writes (ZADD, HINCRBY, ZPOPMIN), one by its rate,"
        " between the rounds. All is done twice; a call is as long as it was the shorter time,"
        " by the slow log, which also counts the time for which other processes had the core.", "",
        "| what | measured | limit | met |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        limit = "" if row.limit == float("inf") else f"{row.limit:g} {row.unit}".strip()
        met = "" if not limit else "yes" if row.met else "**no**"
        lines.append(f"| {row.what} | {row.measured:.4g} {row.unit} | {limit} | {met} |")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "lifecycle.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[4:]))
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
