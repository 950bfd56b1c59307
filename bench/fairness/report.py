"""The run as Markdown and as a picture. Nothing in it depends on the machine but waits in ms."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.fairness.readings import Weights
from bench.fairness.scenarios import TOKENS, WEIGHTS
from bench.fairness.suite import GUARD_SHARE, Claim, Plan, Results
from bench.rig.report import table

_HOW = """\
Replicas are processes of their own (store, gate, membership, wake-ups, as in production) on one Valkey; each
has the clients of some flows, and with enough replicas no two flows share one. A model server is a wait of
4–30 ms between placement and settlement. Everything below is read from the decision log that the scripts
write. Bounds are equal (no hysteresis), so that stock stays at them. The seed decides costs, service times
and arrivals; the interleaving of processes is the machine's. The worst of all runs decides on a claim.

The control gives each replica a queue of its own and its part of the bounds, as independent pickers have."""

_WEIGHTS = """\
Four flows, always backlogged, of weights 1, 2, 4 and 1; 16 in flight. The last spreads its requests over 50
workload ids; the first has the same weight and one id. A share is weight-normalised service while all are
backlogged, 1 being a fair one. The widest gap is the largest difference of two flows' weight-normalised
service over any interval in which both were backlogged, by its bound c_f/w_f + c_g/w_g: above 1 is a
violation of G2. Intervals counted are maximal; every interval within one is checked."""

_SPLIT = """\
A flow is a fairness id: a client that may choose several has several flows. With 50 fairness
ids of weight 1 each in place of one, the fourth flow's part of all service is {taken:.1%} where one id is due
{due:.1%}. The gateway must therefore set the fairness id from who the client is; workload ids may be the
client's own.
"""

_TRICKLE = """\
A bulk flow and a trickle of equal weight arrive at random, together twice what is served; the bulk's queue is
200 long and refuses the rest."""

_STARVATION = """\
One flow, workload-aware order. Criticality-5 requests of 40 workloads keep 8 in flight and about 90 waiting;
a criticality-1 workload asks for less than the guard's share ({share:g}) of dispatches. TTL 30 s and the
wait's cap of 60 s are scaled to {ttl:g} s and {cap:g} s, as all waits here are stated in TTLs; a request is
overdue at half its TTL. (Criticality 5 comes from many workloads, since the rate of a single one would cost
it its lead in the score.)"""

_BANDS = """\
Critical arrives at random at 0.3 of what can be served, Default at 0.55, Sheddable always waits. A dispatch
is an inversion if a request of a higher band waited at that moment. The guard serves what is overdue
whatever waits, so its dispatches are counted apart."""

_TOKENS = """\
Two flows of equal weight; the stock counts tokens (20 000). Estimates are the real number times a random
factor between 0.25 and 4 (even in its logarithm), corrected when a request ends. Had the charges
not been corrected, the estimates would be equal instead."""

Runs = Sequence[Any]  # readings of one kind
Column = Callable[[Runs], str]


def _span(name: str, digits: int = 3) -> Column:
    """The least and the greatest `name` of the runs, with so many digits."""

    def show(runs: Runs) -> str:
        found = _values(runs, name)
        low, high = f"{min(found):.{digits}f}", f"{max(found):.{digits}f}"
        return low if low == high else f"{low}–{high}"

    return show


def _total(name: str) -> Column:
    return lambda runs: str(sum(_values(runs, name)))


def _most(name: str, digits: int) -> Column:
    return lambda runs: f"{max(_values(runs, name)):.{digits}f}"


def _values(runs: Runs, name: str) -> list[Any]:
    """`name` of each run; `a.b` is attribute or item `b` of `a`."""
    of, _, item = name.partition(".")
    found = [getattr(run, of) for run in runs]
    if item:
        found = [each[item] if isinstance(each, Mapping) else getattr(each, item) for each in found]
    return found


def _guesses(runs: Runs) -> str:
    found = [guess for run in runs for guess in run.guesses]
    return f"{min(found):.2f}–{max(found):.2f}"


_WEIGHTS_COLUMNS: Mapping[str, Column] = {
    **{f"{name} ({weight:g})": _span(f"shares.{name}") for name, weight in WEIGHTS.items()},
    "Jain": _span("jain", 4),
    "min/max": _span("min_by_max", 4),
    "widest gap": _most("widest", 2),
    **{name: _total(name) for name in ("violations", "intervals", "dispatches")},
}
_TRICKLE_COLUMNS: Mapping[str, Column] = {
    "trickle, ms": _span("trickle_ms", 1),
    "bulk, ms": _span("bulk_ms", 0),
    "ratio": _span("ratio", 4),
    "arrivals by dispatches": _span("overload", 2),
    "served": _total("served"),
    "intervals": _total("intervals"),
}
_STARVATION_COLUMNS: Mapping[str, Column] = {
    "demand by dispatches": _span("demand"),
    "served": _total("served"),
    "expired": _total("expired"),
    "highest wait, TTLs": _most("highest", 3),
    "of criticality 5": _most("others_highest", 3),
}
_BANDS_COLUMNS: Mapping[str, Column] = {
    "turns": _total("order.turns"),
    "below Critical": _total("order.low_turns"),
    "inversions": _total("order.inverted_turns"),
    "by the guard": _total("order.guards"),
    "past a higher band": _total("order.inverted_guards"),
    **{f"{name}, mean ms": _span(f"wait_ms.{name}", 0) for name in ("critical", "default", "sheddable")},
}
_TOKENS_COLUMNS: Mapping[str, Column] = {
    **{f"{name}, tokens": _span(f"served.{name}", 0) for name in TOKENS},
    "min/max": _span("min_by_max", 4),
    "of the estimates": _span("estimated_min_by_max", 4),
    "estimate by real": _guesses,
}


def _table(plan: Plan, columns: Mapping[str, Column], first: str, groups: Mapping[str, Runs]) -> str:
    """A row for each number of replicas of each group; `first` is the head of the groups' names."""
    rows = [
        [
            name,
            str(replicas),
            *(show([run for run in found if run.replicas == replicas]) for show in columns.values()),
        ]
        for name, found in groups.items()
        for replicas in plan.replicas
    ]
    return table([first, "replicas", *columns], rows)


def markdown(command: str, plan: Plan, results: Results, checked: Sequence[Claim], picture: str) -> str:
    """The whole page; `picture` is the name of a file beside it."""
    claims = (
        [each.what, figure(each.measured), f"{each.sign} {each.limit:g}", "yes" if each.met else "**no**"]
        for each in checked
    )
    queues = {"one queue": results.weights, "one a replica": results.control}
    guards = {"guarded": results.guarded, "no guard": results.unguarded}
    due = WEIGHTS["split"] / sum(WEIGHTS.values())
    parts = [
        "# One queue for the whole fleet: is it fair?",
        f"`{command}`; replicas {_listed(plan.replicas)}; seeds {_listed(plan.seeds)}.",
        table(["claim", "measured", "limit", "met"], claims),
        "## How it is measured",
        _HOW,
        "## Weights",
        _WEIGHTS,
        f"![Shares by replicas, one queue and one a replica]({picture})",
        _table(plan, _WEIGHTS_COLUMNS, "queues", queues),
        _SPLIT.format(taken=results.split_part, due=due),
        "## A trickle beside a bulk",
        _TRICKLE,
        _table(plan, _TRICKLE_COLUMNS, "", {"": results.trickle}),
        "## Starvation",
        _STARVATION.format(share=GUARD_SHARE, ttl=plan.ttl_s, cap=2 * plan.ttl_s),
        _table(plan, _STARVATION_COLUMNS, "", guards),
        "## Strict bands",
        _BANDS,
        _table(plan, _BANDS_COLUMNS, "", {"": results.bands}),
        "## Tokens",
        _TOKENS,
        _table(plan, _TOKENS_COLUMNS, "", {"": results.tokens}),
    ]
    return "\n\n".join(parts) + "\n"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def figure(number: float) -> str:
    return f"{number:g}" if number == int(number) else f"{number:.4f}"


_FLOWS = dict(zip(WEIGHTS, ("#9aa5b1", "#5b8def", "#1d4e89", "#c2410c"), strict=True))
_FAIR = 0.95  # min/max


def draw(plan: Plan, results: Results, file: Path) -> None:
    """Draw the weights."""
    mpl.use("agg")
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    one, many, spread = figure.subplots(1, 3)
    _plot_shares(one, plan, results.weights, "One queue for all replicas")
    _plot_shares(many, plan, results.control, "Control: one queue a replica")
    one.sharey(many)
    one.set_ylabel("weight-normalised service, 1 is fair")
    one.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    for found, colour, label in (
        (results.weights, "#2563a8", "one queue"),
        (results.control, "#c2410c", "one a replica"),
    ):
        places = [plan.replicas.index(each.replicas) for each in found]
        spread.plot(places, [each.min_by_max for each in found], "o", color=colour, label=label, alpha=0.6)
    spread.axhline(_FAIR, color="black", linewidth=0.8, linestyle=":", label=f"limit {_FAIR:g}")
    spread.set_ylim(0, 1.05)
    spread.set_ylabel("min/max of service")
    spread.set_title("Every run", fontsize=10)
    spread.legend(frameon=False, fontsize=8, loc="lower left")
    for axes in (one, many, spread):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xticks(range(len(plan.replicas)), [str(number) for number in plan.replicas])
        axes.set_xlim(-0.6, len(plan.replicas) - 0.4)
        axes.set_xlabel("replicas")
    figure.savefig(file, dpi=130)


def _plot_shares(axes: Axes, plan: Plan, found: Sequence[Weights], title: str) -> None:
    width = 0.8 / len(WEIGHTS)
    for place, replicas in enumerate(plan.replicas):
        runs = [each for each in found if each.replicas == replicas]
        for number, (flow, weight) in enumerate(WEIGHTS.items()):
            shares = [run.shares[flow] for run in runs]
            at = place + (number - (len(WEIGHTS) - 1) / 2) * width
            ids = ", 50 ids" if flow == "split" else ""
            label = f"weight {weight:g}{ids}" if place == 0 else None
            axes.bar(at, mean(shares), width, color=_FLOWS[flow], label=label)
            axes.plot([at, at], [min(shares), max(shares)], color="black", linewidth=0.8)
    axes.axhline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_title(title, fontsize=10)
    axes.margins(y=0.2)
