"""Measures and writes bench/results/lifecycle.md, or of another server than the embedded Valkey
lifecycle-NAME.md; exit 1 if a limit is not met."""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.lifecycle.life import BATCH, Lives, Size
from bench.lifecycle.replay import Floor, Life, floor, life, upkeep_us
from bench.lifecycle.server import Server, server
from bench.lifecycle.upkeep import MANY
from bench.overhead.surroundings import look
from picker_fleet.state.calls import MAX_BATCH

_RESULTS = Path(__file__).parents[1] / "results"
_ROUNDS = 3
_ROUNDS_BESIDE_FLOOR = 30
_FLOORS = 3.0  # a life may cost this many calls of the floor
_GROWTH = 1.7
_LONGEST_US = 5000
_BYTES = 500
_MEGABYTES = 10
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
        "edf": Size(ordering="edf"),
        "edf, 10 000 flows": Size(ordering="edf", flows=10_000),
        "workload-aware": Size(ordering="workload-aware"),
        "workload-aware, 10 000 flows": Size(ordering="workload-aware", flows=10_000),
        "workload-aware, 10 000 workloads": Size(ordering="workload-aware", workloads=10_000),
    }


def _measure(it: Server, lives: int, most: int) -> Iterator[Row]:
    floors: list[Floor] = []
    costs: dict[str, float] = {}
    longest = 0.0
    yield from _beside_floor(it, lives // 2, floors)
    for name, size in _sizes(most).items():
        found, beside = [], []
        base = Size(ordering=size.ordering)
        for seed in range(_ROUNDS):
            found.append(life(it, size, lives, seed, kept_up=size.large and seed == 0))
            # The machine is twice as fast at one time as at another: growth is to what it was just then.
            beside.append(found[-1] if size == base else life(it, base, lives, seed))
            longest = max(longest, found[-1].longest_us)
        costs[name] = median(each.us for each in found)
        print(f"{name}: {costs[name]:.1f} us a life, longest call {longest:.0f} us", flush=True)
        if size == base:
            yield from _memory(size.ordering, found)
        else:
            growth = median(one.us / base.us for one, base in zip(found, beside, strict=True))
            yield Row(f"growth to {name}", growth, _GROWTH, "")
        for kind, us in found[0].upkeep_us.items():
            yield Row(f"{name}: longest of {kind}", us, _LONGEST_US, "us")
    yield Row("the floor", median(each.us for each in floors), float("inf"), "us")
    yield Row("the floor by the clock", median(each.clock_us for each in floors), float("inf"), "us")
    for name, cost in costs.items():
        yield Row(f"a life: {name}", cost, float("inf"), "us")
    yield Row("the longest call of these", longest, _LONGEST_US, "us")


def _beside_floor(it: Server, lives: int, floors: list[Floor]) -> Iterator[Row]:
    """Many short runs of both in turns, in the server's CPU: the clock would count whoever else had the core
    while a floor was found, and so flatter the life."""
    steps = {"admit, wait, grant, settle": False, "a life, which is these and place": True}
    found: dict[str, list[float]] = {what: [] for what in steps}
    for seed in range(_ROUNDS_BESIDE_FLOOR):
        floors.append(floor(it, 2 * lives))
        for what, placed in steps.items():
            found[what].append(life(it, _SMALL, lives, seed, placed=placed).us)
    for what, us in found.items():
        # The machine takes up to twice as long for the same from one second to the next. That only ever adds.
        least = min(us) / min(each.us for each in floors)
        yield Row(f"{what}, in calls of the floor: the least of {_ROUNDS_BESIDE_FLOOR}", least, _FLOORS, "")
        yield Row("the same of medians", median(us) / median(each.us for each in floors), _FLOORS, "")


def _memory(ordering: str, found: list[Life]) -> Iterator[Row]:
    queued = median(each.queued_bytes for each in found)
    yield Row(f"memory of a queued request, {ordering}", queued, _BYTES, "bytes")
    registry = median(each.registry_bytes for each in found)
    yield Row(f"of it, the registry of 10 workloads, {ordering}", registry, float("inf"), "bytes")


def _upkeep(it: Server, queued: int) -> Iterator[Row]:
    """Where there is much of everything."""
    size = Size(queued, flows=10_000, workloads=10_000, endpoints=500, ordering="workload-aware")
    for kind, us in upkeep_us(it, size, 0).items():
        yield Row(f"{queued} queued, much of everything: longest of {kind}", us, _LONGEST_US, "us")


def _thousand_workloads(it: Server) -> Iterator[Row]:
    state = Lives(it, Size(queued=10_000, workloads=1000, ordering="workload-aware"), 0)
    it.forget_slow()
    mega = 1_000_000
    yield Row("memory of 1000 workloads in the registry", state.registry_bytes() / mega, _MEGABYTES, "MB")
    all_of_it = (it.memory_bytes() - state.empty_bytes) / mega
    yield Row("the same with ten requests waiting of each", all_of_it, _MEGABYTES, "MB")


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
    parser.add_argument(
        "--server", metavar="PATH", help="of redis-server or valkey-server, instead of the embedded"
    )
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)  # before ten minutes are spent
    lives, most, total, crowd = 8000, 1_000_000, 1_000_000, 50_000
    if options.quick:
        lives, most, total, crowd = 1600, 100_000, 20_000, 5000
    here = look(sys.argv[1:])
    began = time.monotonic()
    with server(options.server) as it:
        kind = it.kind
        rows = [
            *_measure(it, lives, most),
            *_upkeep(it, crowd),
            *_thousand_workloads(it),
            _leaves_nothing(it, total),
        ]
    lines = [
        "# What a life costs Redis", "",
        f"`{here.command.replace('overhead', 'lifecycle')}`, {here.date}, {kind}, {here.cores} cores, load"
        f" {here.load:.2f} before. A life is admit, wait, grant, place, settle, {BATCH} a call, with the"
        " queue kept at its length; recorded once and played back to the server as fast as it takes it."
        f" Server CPU, medians of {_ROUNDS}. The floor is a call of a script of three writes (ZADD, HINCRBY,"
        " ZPOPMIN), in server CPU as well, while `redis-benchmark` asks for it as fast as it can; a life is"
        f" judged beside it by {_ROUNDS_BESIDE_FLOOR} short runs of each, in turns. By the clock (one by the"
        " rate that `redis-benchmark` tells) a floor is longer wherever others use the machine."
        " All is done twice, thrice where there is much; a call is as long as it was the shortest time: in"
        " server CPU where it fills the"
        " queue and in upkeep, in lives by the slow log, which also counts the time for which other"
        " processes had the core."
        f" Upkeep: sweeps that find {MANY} requests overdue, expired, with ended leases, or those of a"
        f" silent replica; {MAX_BATCH} arrivals a call that preempt under a full queue; live changes of"
        " policy. Where there is much of everything: 10 000 flows, 10 000 workloads, 500 endpoints,"
        " `workload-aware`."
        f" The run took {time.monotonic() - began:.0f} s.", "",
        "| what | measured | limit | met |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        limit = "" if row.limit == float("inf") else f"{row.limit:g} {row.unit}".strip()
        met = "" if not limit else "yes" if row.met else "**no**"
        lines.append(f"| {row.what} | {row.measured:.4g} {row.unit} | {limit} | {met} |")
    name = f"lifecycle-{Path(options.server).name}.md" if options.server else "lifecycle.md"
    (options.out / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[4:]))
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
