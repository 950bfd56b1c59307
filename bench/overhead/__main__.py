"""What a request costs, beside a picker that answers a constant (`make bench`). Writes one page.

The constant picker is built on grpc.aio, the usual gRPC server of Python. It answers as is usual in
full-duplex mode (`constant`), or in `lean` with one message (`terse`), as the picker does.
"""

import asyncio
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bench.overhead import measure
from bench.overhead.measure import LARGE, LONG, PARTS_SETUPS, SETUPS, SHORT, Case, Result
from bench.rig.load import Driver, WrongAnswer
from bench.rig.machine import Machine, describe_machine
from bench.rig.page import options_parser, table, write_page
from picker_fleet.errors import PickerError

_ROUNDS = 5
_THROUGHPUT = "throughput"

_HOW = """\
Every variant runs behind the same Envoy binary with a bootstrap of its own mode: `none` (no picker; Envoy
balances by itself), `constant` and `terse` (a picker on grpc.aio that answers a constant, `terse` with one
message, as the picker does in `lean`), and one replica of `picker` on an embedded Valkey over its socket,
with bounds so high that nothing waits. They run side by side and take turns in each round, in changing
order; each round starts new processes. A ratio is taken within each round; the table has its median, lowest
and highest.

CPU is that of all processes of a kind, by the requests of a pass at full speed over 16 connections (8 for
400 KB and for 100 chunks), access logs included. Added latency is of a pass over 2 connections, up to the
answer's headers, less that of `none`. Model servers answer at once; for 100 chunks with a token every 2 ms,
so that each is a message to the picker in `standard`. Mode `http` has no constant picker on gRPC: it is
compared with the terse one in `lean`.
"""

_PARTS = """\
What a replica costs that does only a part of its work, each part with those before it
(`bench/overhead/reduced_replica.py`), by a picker on grpc.aio that answers a constant: it `reads` the request
and answers a constant; it `pings` Valkey; it `calls` `admit` and `settle`, with no queue, failover or
accounting around them.

"""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the first table: `values` are one a round, whose median must be as `sign` and `limit` say."""

    what: str
    limit: float
    values: list[float]
    sign: str = "≤"

    @property
    def measured(self) -> str:
        return _spread(self.values)

    @property
    def met(self) -> bool:
        middle = statistics.median(self.values)
        return middle >= self.limit if self.sign == "≥" else middle <= self.limit


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def _ratios(
    result: Result, case: Case, variant: str, baseline: str, *, with_valkey: bool = False
) -> list[float]:
    """CPU of `variant` by that of `baseline`."""
    own, other = (
        [each.picker_us + with_valkey * each.valkey_us for each in result.readings[case.name][name]]
        for name in (variant, baseline)
    )
    return [a / b for a, b in zip(own, other, strict=True)]


def _added(result: Result, variant: str, baseline: str) -> list[float]:
    """Added p50 of `variant` by that of `baseline`."""
    readings = result.readings[SHORT.name]
    return [
        (own.p50_ms - none.p50_ms) / max(other.p50_ms - none.p50_ms, 1e-9)
        for own, other, none in zip(readings[variant], readings[baseline], readings["none"], strict=True)
    ]


# Mode, setup, variant, baseline, and what is compared: case, limit, limit with Valkey.
_COMPARED: tuple[tuple[str, str, str, str, tuple[tuple[Case, float, float | None], ...]], ...] = (
    ("standard", "standard", "picker", "constant", ((SHORT, 0.38, 0.55),)),
    ("standard", "chunks", "picker", "constant", ((LONG, 0.70, None),)),
    ("lean", "lean", "picker", "terse", ((SHORT, 0.65, 0.90), (LARGE, 0.70, None))),
    ("http", "lean", "picker, http", "terse", ((SHORT, 0.40, 0.60), (LARGE, 0.35, None))),
)
_ADDED = (
    ("standard", "standard", "picker", "constant"),
    ("headers", "headers", "picker", "constant"),
    ("lean", "lean", "picker", "terse"),
    ("http", "lean", "picker, http", "terse"),
)
_ADDED_LIMIT, _SCORERS_LIMIT, _REST_MS, _THROUGHPUT_LIMIT = 0.8, 1.10, 10.0, 2.0


def rows(results: dict[str, Result], rates: Sequence[tuple[float, float]]) -> list[Row]:
    """What was measured of the first table."""
    found = []
    for mode, setup, variant, baseline, cases in _COMPARED:
        if setup not in results:
            continue
        for case, limit, limit_with_valkey in cases:
            what = f"`{mode}`, {case.name}: CPU by that of `{baseline}`"
            found.append(Row(what, limit, _ratios(results[setup], case, variant, baseline)))
            values = _ratios(results[setup], case, variant, baseline, with_valkey=True)
            if limit_with_valkey is not None:
                found.append(Row(f"{what}, with Valkey's", limit_with_valkey, values))
    for mode, setup, variant, baseline in _ADDED:
        if setup in results:
            values = _added(results[setup], variant, baseline)
            found.append(Row(f"`{mode}`: added p50 by that of `{baseline}`, calm", _ADDED_LIMIT, values))
    if "lean" in results:
        values = _ratios(results["lean"], SHORT, "picker, scorers", "picker")
        found.append(Row(f"`lean`: CPU with {', '.join(measure.SCORERS)} by without", _SCORERS_LIMIT, values))
        for name, mode in (("picker", "lean"), ("picker, http", "http")):
            values = results["lean"].idle_ms[name]
            found.append(Row(f"`{mode}`: a replica at rest, ms of CPU a second", _REST_MS, values))
    if rates:
        what = f"requests/s of `http` by those of `standard` at {measure.BASE[:7]}, closed loop of 16"
        found.append(Row(what, _THROUGHPUT_LIMIT, [new / old for old, new in rates], "≥"))
    return found


def parts_table(results: dict[str, Result]) -> str:
    """What replicas that do a part of their work cost, by the constant picker of their setup."""
    found = []
    for setup in PARTS_SETUPS:
        if setup.name not in results:
            continue
        result, (_, baseline, *others) = results[setup.name], setup.variants
        for variant in others:
            values = (
                _ratios(result, SHORT, variant.name, baseline.name),
                _ratios(result, SHORT, variant.name, baseline.name, with_valkey=True),
                _added(result, variant.name, baseline.name),
            )
            found.append([variant.mode, variant.part or "all", *map(_spread, values)])
    return table(["mode", "what it does", "CPU", "CPU with Valkey's", "added p50, calm"], found)


def page(
    machine: Machine, rounds: int, results: dict[str, Result], rates: Sequence[tuple[float, float]]
) -> str:
    """The page as Markdown."""
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    limits = [
        [row.what, f"{row.sign} {row.limit:g}", row.measured, "met" if row.met else "**missed**"]
        for row in rows(results, rates)
    ]
    figures = []
    for setup, result in results.items():
        for case, variants in result.readings.items():
            none = variants.get("none", [])
            for name, readings in variants.items():
                middle = [
                    statistics.median(getattr(each, what) for each in readings)
                    for what in ("picker_us", "valkey_us", "envoy_us", "requests_per_s")
                ]
                added = ["–", "–"]
                if none and name != "none":
                    added = [
                        f"{statistics.median(b - a for a, b in zip(low, high, strict=True)):.2f}"
                        for low, high in (
                            [[getattr(each, what) for each in side] for side in (none, readings)]
                            for what in ("p50_ms", "p99_ms")
                        )
                    ]
                idle = f"{statistics.median(result.idle_ms[name]):.1f}"
                figures.append([setup, case, name, *(f"{each:.0f}" for each in middle), *added, idle])
    head = ["setup", "request", "variant", "picker µs", "Valkey µs", "Envoy µs", "requests/s"]
    head += ["added p50 ms", "added p99 ms", "at rest, ms/s"]
    parts = [
        "# What a request costs" if limits else "# What the parts of a decision cost",
        f"`{machine.command}`, {machine.date}, {rounds} rounds. {machine.cores} cores ({machine.processor}, "
        f"{machine.system}), load average {machine.load:.2f} before the start. {versions}.",
        table(["what", "limit", "measured", ""], limits) if limits else _PARTS + parts_table(results),
        _HOW.rstrip(),
        table(head, figures),
    ]
    if rates:
        parts.append(
            "Requests/s, `standard` before and `http` now: "
            + ", ".join(f"{old:.0f} and {new:.0f}" for old, new in rates)
            + "."
        )
    return "\n\n".join(parts) + "\n"


async def _measure(names: Sequence[str], rounds: int) -> tuple[dict[str, Result], list[tuple[float, float]]]:
    async with Driver.started() as driver:
        results = {
            setup.name: await measure.measure(setup, rounds, driver)
            for setup in (*SETUPS, *PARTS_SETUPS)
            if setup.name in names
        }
        rates = await measure.throughput(rounds, driver) if _THROUGHPUT in names else []
    return results, rates


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 whatever the figures are, 1 if the measurement failed."""
    usual = (*(setup.name for setup in SETUPS), _THROUGHPUT)
    parts = tuple(setup.name for setup in PARTS_SETUPS)
    parser = options_parser("python -m bench.overhead", __doc__)
    parser.add_argument(
        "--only", nargs="+", choices=(*usual, *parts), default=usual, help=f"default: {', '.join(usual)}"
    )
    parser.add_argument("--rounds", type=int, choices=range(1, 101), default=_ROUNDS, metavar="N")
    args = parser.parse_args(arguments)
    machine = describe_machine("bench.overhead", arguments)
    try:
        results, rates = asyncio.run(_measure(args.only, args.rounds))
    except (PickerError, WrongAnswer) as fault:
        print(fault, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    name = "overhead-parts" if set(args.only) <= set(parts) else "overhead"
    write_page(args.out / f"{name}.md", page(machine, args.rounds, results, rates))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
