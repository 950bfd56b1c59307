"""`python -m bench.limits CASE --replicas N` compares limits that the fleet finds with the best static bound.

Each case runs a local fleet in front of simulated model servers whose steps take the times that were measured
for vLLM (app/picker_tools/simulator/batch.py). A search finds the static bound (requests in flight for each
endpoint) with the highest throughput. Then new fleets run alternately with the best bound and with no setting
at all, and count from the 20th second on. Without CASE all cases run. Each case replaces its section in
bench/results/limits.md. `--go FILE` compares with the Go picker's detectors instead (beside_go.py).
"""

import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from whole_fleet import exact_bounds

from bench.limits.kinds import KINDS, Kind
from bench.limits.servers import (
    COMPARED_S,
    SEARCHED_S,
    SLOTS,
    Event,
    Figures,
    Record,
    Servers,
    best_bound,
    fleet,
    median,
    run,
    servers,
)
from bench.rig.fleet import RunningFleet
from bench.rig.report import describe_run, options_parser, table, with_section, write_page

_GRID = (8, 16, 32, 64)
_EVENT_S, _EVENT_END_S = 25.0, 55.0
_CHATS = KINDS["short-chats"]
_ADAPTIVE: Mapping[str, Any] = {}  # nothing configured
_HEAD = ("", *Figures.HEAD)

Searched = Mapping[int, Figures]


async def _search(them: Servers, kind: Kind, replicas: int) -> Searched:
    """Figures of a geometric grid of static bounds, then of two bounds beside the best; all on one fleet."""
    found: dict[int, Figures] = {}

    async def measure(it: RunningFleet, bound: int) -> None:
        await it.change({"request_queue_controller": exact_bounds(bound)})
        record = await run(it, them, kind, seed=0, lasts_s=SEARCHED_S[1])
        found[bound] = record.between(*SEARCHED_S)
        print(f"bound {bound}: {found[bound].cells()}", flush=True)

    async with fleet(them, replicas, exact_bounds(_GRID[0])) as it:
        for bound in _GRID:
            await measure(it, bound)
        best = best_bound(found)
        for bound in (round(best / math.sqrt(2)), round(best * math.sqrt(2))):
            if bound not in found:
                await measure(it, bound)
    return dict(sorted(found.items()))


async def _compare(kind: Kind, sizes: Sequence[int], folder: Path, replicas: int, rounds: int) -> str:
    """Compare the best static bound with the limits that the fleet finds: a round has a run with each."""
    async with servers(folder, sizes) as them:
        searched = await _search(them, kind, replicas)
        best = best_bound(searched)
        configs = {"static": exact_bounds(best), "adaptive": _ADAPTIVE}
        records: dict[str, list[Record]] = {name: [] for name in configs}
        for seed in range(1, rounds + 1):
            for name in tuple(configs)[:: 1 if seed % 2 else -1]:
                async with fleet(them, replicas, configs[name]) as it:
                    records[name].append(await run(it, them, kind, seed=seed, lasts_s=COMPARED_S[1]))
                last = records[name][-1]
                print(f"{name}, {seed}: {last.between(*COMPARED_S).cells()} {_limits(last)}", flush=True)
    figures = {name: [each.between(*COMPARED_S) for each in records[name]] for name in records}
    names = {"static": f"best static bound, {best}", "adaptive": "nothing configured"}
    rows = [[names[name], *median(figures[name]).cells()] for name in figures]
    pairs = list(zip(figures["adaptive"], figures["static"], strict=True))
    by_bound = "; ".join(
        f"{n}: {each.tokens_per_s:.0f}, {each.ttft_p95_s:.2f} s" for n, each in searched.items()
    )
    parts = [
        table(_HEAD, [*rows, ["ratio, median of the rounds", *_ratios(pairs)]]),
        f"The search, tokens/s and p95 TTFT by bound: {by_bound}.",
        f"Limits found by the end of each round: {'; '.join(map(_limits, records['adaptive']))}.",
    ]
    return "\n\n".join(parts)


async def _slowed(folder: Path, replicas: int, rounds: int) -> str:
    """The first of four servers gets three times slower."""
    async with servers(folder, [SLOTS] * 4) as them:
        before = await _search(them, _CHATS, replicas)
        slow = partial(them.slow, them.addresses[0])
        await slow(3)
        after = await _search(them, _CHATS, replicas)
        await slow(1)
        events = [(_EVENT_S, partial(slow, 3)), (_EVENT_END_S, partial(slow, 1))]
        return await _disturbed(them, replicas, rounds, events, before, after)


async def _scaled(folder: Path, replicas: int, rounds: int) -> str:
    """A fleet of two servers gets six more, all of half the usual size."""
    async with servers(folder, [SLOTS // 2] * 8) as them:
        after = await _search(them, _CHATS, replicas)
        await them.show(2)
        before = await _search(them, _CHATS, replicas)
        events = [(_EVENT_S, partial(them.show, 8)), (_EVENT_END_S, partial(them.show, 2))]
        return await _disturbed(them, replicas, rounds, events, before, after)


async def _restarted(folder: Path, replicas: int, rounds: int) -> str:
    """One of four servers is killed, and starts again 3 s later."""
    async with servers(folder, [SLOTS] * 4) as them:
        found = await _search(them, _CHATS, replicas)
        first = them.addresses[0]
        events = [(_EVENT_S, partial(them.kill, first)), (_EVENT_S + 3, partial(them.start, first))]
        return await _disturbed(them, replicas, rounds, events, found, found)


async def _disturbed(
    them: Servers, replicas: int, rounds: int, events: Sequence[Event], before: Searched, after: Searched
) -> str:
    """Run adaptive fleets through `events`; compare parts of the runs with each phase's best static bound."""
    records: list[Record] = []
    for seed in range(1, rounds + 1):
        async with fleet(them, replicas, _ADAPTIVE) as it:
            records.append(await run(it, them, _CHATS, seed=seed, lasts_s=_EVENT_END_S, events=events))
    rows = []
    for from_s, to_s in ((-10, 0), *((at_s, at_s + 5) for at_s in range(0, 30, 5))):
        found = median([each.between(_EVENT_S + from_s, _EVENT_S + to_s) for each in records])
        searched = after if to_s > 0 else before
        oracle = searched[best_bound(searched)].tokens_per_s
        ratio = f"{found.tokens_per_s / oracle:.2f}"
        limits = _limits(records[0], _EVENT_S + to_s)
        rows.append([f"{from_s:+} to {to_s:+} s", *found.cells(), f"{oracle:.0f}", ratio, limits])
        print(rows[-1], flush=True)
    head = [*_HEAD, "oracle, tokens/s", "ratio", "limits, round 1"]
    bests = f"best static bounds: {best_bound(before)} before, {best_bound(after)} after"
    return f"{table(head, rows)}\n\nThe event is at 0 s; {bests}."


def _ratios(pairs: Sequence[tuple[Figures, Figures]]) -> list[str]:
    """Median over the pairs of runs of first run / second run, for each field of `Figures` but the last."""
    of_rounds = [
        [a / b if b else math.nan for a, b in zip(astuple(one)[:-1], astuple(two)[:-1], strict=True)]
        for one, two in pairs
    ]
    return [*(f"{statistics.median(each):.2f}" for each in zip(*of_rounds, strict=True)), ""]


def _limits(record: Record, at_s: float = COMPARED_S[1]) -> str:
    return ", ".join(map(str, record.limits_at(at_s))) or "none"


Case = Callable[[Path, int, int], Coroutine[Any, Any, str]]
_CASES: Mapping[str, Case] = {
    **{name: partial(_compare, kind, [SLOTS] * 4) for name, kind in KINDS.items()},
    "sizes": partial(_compare, _CHATS, [4, 16, 64]),
    "slowed": _slowed,
    "scale-out": _scaled,
    "restart": _restarted,
}
_TITLE = "# Limits that the fleet finds, beside the best static bound\n"


def main() -> int:
    parser = options_parser("python -m bench.limits", __doc__)
    parser.add_argument("case", nargs="?", choices=_CASES, metavar="CASE", help=", ".join(_CASES))
    parser.add_argument("--replicas", type=int, action="append", metavar="N", help="default: 1, 2, 4 and 8")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument(
        "--go", metavar="FILE", help="the Go picker's binary (bench/overhead/gateway.py says how to build)"
    )
    options = parser.parse_args()
    file = options.out / "limits.md"
    if options.go:
        from bench.limits.beside_go import compare  # imports test modules that only `make` puts on the path

        for name in [options.case] if options.case in KINDS else KINDS:
            command = f"python -m bench.limits {name} --go FILE --rounds {options.rounds}"
            text = uvloop.run(compare(KINDS[name], options.go, options.rounds))
            section = f"{name}, beside the Go picker"
            write_page(file, with_section(file, _TITLE, section, f"{describe_run(command)}\n\n{text}"))
        return 0
    for name in [options.case] if options.case else _CASES:
        for replicas in options.replicas or (1, 2, 4, 8):
            command = f"python -m bench.limits {name} --replicas {replicas} --rounds {options.rounds}"
            with tempfile.TemporaryDirectory() as folder:
                text = uvloop.run(_CASES[name](Path(folder), replicas, options.rounds))
            section = f"{name}, {replicas} replicas"
            write_page(file, with_section(file, _TITLE, section, f"{describe_run(command)}\n\n{text}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
