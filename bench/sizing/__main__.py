"""`python -m bench.sizing`: how much of a Valkey a fleet takes, by replicas, requests and dashboards.

Fits the formula (bench/sizing/formula.py) to some measured fleets and checks it at others, then starts a
fleet of whole replicas under light load. CPU time of Valkey's process counts, not time by the clock: other
processes share the machine. Writes bench/results/sizing.md; docs/sizing.md explains it.
"""

import asyncio
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence

from bench.rig.report import describe_run, options_parser, table, write_page
from bench.rig.server import Server, server
from bench.sizing.calls import request_costs, shard_costs, simulate, view_costs
from bench.sizing.formula import Fleet, Formula, Point, line
from bench.sizing.whole import WholeFleet, run_whole

_ROUNDS = 3
_REQUESTS = 1600
_FITTED_BATCHES, _CHECKED_BATCHES = (1, 4, 16), (2, 8)
_FITTED_FLEETS = (
    Fleet(10, 0), Fleet(100, 0), Fleet(256, 0), Fleet(1000, 0), Fleet(10, 300), Fleet(100, 1000),
)  # fmt: skip
_CHECKED_FLEETS = (
    Fleet(30, 0), Fleet(200, 0), Fleet(600, 0), Fleet(30, 100), Fleet(10, 1000), Fleet(300, 500),
)  # fmt: skip
_VIEWED_FITTED, _VIEWED_CHECKED = (10, 256), (100,)
_SIMULATED_S = 2
_WANTED_ERROR = 0.25
_SIZES = (10, 100, 1000)
_RATES = (0, 1_000, 10_000, 100_000)

Rows = list[tuple[str, str, float, float, str]]  # what, fitted or checked, measured, formula, unit


class Measured:
    """All that is measured on one Valkey; `rows` has it beside the formula."""

    def __init__(self, it: Server) -> None:
        batches = sorted(_FITTED_BATCHES + _CHECKED_BATCHES)
        self.requests = {
            (queued, batch): _medians(
                lambda queued=queued, batch=batch: request_costs(it, batch, _REQUESTS, queued=queued)
            )
            for queued in (False, True)
            for batch in batches
        }
        views = {
            count: _medians(lambda count=count: view_costs(it, count, 200))
            for count in sorted(_VIEWED_FITTED + _VIEWED_CHECKED)
        }
        self.dashboard_us = {count: sum(each) for count, each in views.items()}
        self.state_us = {count: each[0] for count, each in views.items()}
        fleets = _FITTED_FLEETS + _CHECKED_FLEETS
        cores = _medians(lambda: [simulate(it, each, _SIMULATED_S) for each in fleets])
        self.fleets = [Point(*each) for each in zip(fleets, cores, strict=True)]
        lines = [line([self.requests[queued, b] for b in _FITTED_BATCHES]) for queued in (False, True)]
        dashboard, state = (
            line([(float(n), costs[n]) for n in _VIEWED_FITTED])
            for costs in (self.dashboard_us, self.state_us)
        )
        formula = Formula(lines[0], lines[1], dashboard, told=state[1])
        self.formula = formula.fitted(self.fleets[: len(_FITTED_FLEETS)])

    def rows(self) -> Rows:
        formula, rows = self.formula, Rows()
        for (queued, batch), (calls, us) in self.requests.items():
            fixed, each = formula.waiting if queued else formula.direct
            what = f"a {'queued' if queued else 'direct'} request, {batch} a call, Valkey full"
            rows.append((what, _role(batch in _FITTED_BATCHES), us, fixed + each * calls, "µs"))
        for count, us in self.dashboard_us.items():
            fixed, each = formula.dashboard
            what = f"a second of a dashboard, {count} replicas"
            rows.append((what, _role(count in _VIEWED_FITTED), us, fixed + each * count, "µs"))
        for number, point in enumerate(self.fleets):
            wanted = formula.cores(point.fleet)
            what = f"{point.fleet.replicas} simulated replicas, {point.fleet.requests_per_s:.0f} requests/s"
            role = _role(number < len(_FITTED_FLEETS))
            rows.append((what, role, point.cores * 100, wanted * 100, "% of a core"))
        return rows


def _medians(measure_once: Callable[[], Sequence[float]]) -> tuple[float, ...]:
    rounds = [measure_once() for _ in range(_ROUNDS)]
    return tuple(statistics.median(each) for each in zip(*rounds, strict=True))


def _role(fitted: bool) -> str:
    return "fitted" if fitted else "checked"


def page(measured: Measured, shards: Mapping[str, Sequence[float]], whole: WholeFleet | None) -> str:
    formula, rows = measured.formula, measured.rows()
    wrong = max(abs(wanted / got - 1) for _, role, got, wanted, _ in rows if role == "checked")
    verdict = "met" if wrong <= _WANTED_ERROR else "**not met**"
    shown = [
        [what, role, f"{got:.2f} {unit}", f"{wanted:.2f} {unit}", f"{wanted / got - 1:+.0%}"]
        for what, role, got, wanted, unit in rows
    ]
    full = [
        [f"{batch}", *(f"{1e6 / measured.requests[queued, batch][1]:,.0f}" for queued in (False, True))]
        for batch in sorted(_FITTED_BATCHES + _CHECKED_BATCHES)
    ]
    cores = []
    for replicas in _SIZES:
        for rate in _RATES:
            each = [formula.cores(Fleet(replicas, rate, queued=queued)) for queued in (False, True)]
            cores.append([f"{replicas}", f"{rate:,}", *(f"{one:.2f}" for one in each)])
    sharded = [
        [name, *(f"{us:.1f}" for us in each), *[""] * (2 - len(each))] for name, each in shards.items()
    ]
    parameters = {name: getattr(formula, name) for name in formula.__slots__}
    parts = [
        "# How much of a Valkey a fleet takes",
        f"{describe_run('python -m bench.sizing')} CPU time of Valkey's process. "
        "[docs/sizing.md](../../docs/sizing.md) says what follows from it.",
        "## The formula beside what was measured",
        f"Greatest error of a checked point: {wrong:.0%}; wanted: at most {_WANTED_ERROR:.0%}: {verdict}.",
        table(["what", "", "measured", "formula", "error"], shown),
        "Parameters (µs): " + ", ".join(f"`{name}` {_shown(value)}" for name, value in parameters.items()),
        "## Requests/s of one full Valkey",
        table(["requests a call", "direct", "queued"], full),
        "## Cores of Valkey by the formula",
        "Above 1.00 it does not fit on one Valkey.",
        table(["replicas", "requests/s", "direct", "queued"], cores),
        "## Two pools, 16 direct requests a call, Valkey full",
        table(["pools", "µs a request, first Valkey", "second Valkey"], sharded),
    ]
    if whole is not None:
        parts += ["## Whole replicas, started by `picker up`", *whole.lines(formula)]
    return "\n\n".join(parts) + "\n"


def _shown(value: float | tuple[float, float]) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value[0]:.3g} + {value[1]:.3g}"


def main() -> int:
    parser = options_parser("python -m bench.sizing")
    parser.add_argument("--whole", type=int, default=50, metavar="N", help="whole replicas (0: none)")
    args = parser.parse_args()
    with server() as one:
        measured = Measured(one)
        with server() as two:
            shards = {
                "both on one": shard_costs([one], 16, 8000),
                "one on each": shard_costs([one, two], 16, 8000),
            }
    write_page(args.out / "sizing.md", page(measured, shards, None))  # should more fail
    if args.whole:
        write_page(args.out / "sizing.md", page(measured, shards, asyncio.run(run_whole(args.whole))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
