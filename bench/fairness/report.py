"""The run as Markdown and as pictures. Nothing in it depends on the machine but waits in ms."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Protocol, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.fairness.readings import Run, Starvation, Weights
from bench.fairness.scenarios import TOKENS, WEIGHTS
from bench.fairness.suite import Claim, Plan, Results
from bench.rig.page import table

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

_SPLIT = """\ A flow is a fairness id: a client that may choose several has several flows. With 50 fairness
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


class _Reading(Protocol):
    @property
    def run(self) -> Run: ...


_R = TypeVar("_R", bound=_Reading)


def markdown(
    command: str, plan: Plan, results: Results, checked: Sequence[Claim], pictures: Sequence[str]
) -> str:
    """The whole page; `pictures` are file names beside it."""
    weights, waits, tokens = pictures
    split = results.split[0]
    parts = [
        "# One queue for the whole fleet: is it fair?",
        f"`{command}`; replicas {_listed(plan.replicas)}; seeds {_listed(plan.seeds)}.",
        _claims(checked),
        "## How it is measured",
        _HOW,
        "## Weights",
        _WEIGHTS,
        f"![Shares by replicas, one queue and one a replica]({weights})",
        _weights(plan, results),
        _SPLIT.format(taken=split.taken, due=split.due),
        "## A trickle beside a bulk",
        _TRICKLE,
        f"![Waits]({waits})",
        _trickle(plan, results),
        "## Starvation",
        _STARVATION.format(share=results.guarded[0].guard_share, ttl=plan.ttl_s, cap=2 * plan.ttl_s),
        _starvation(plan, results),
        "## Strict bands",
        _BANDS,
        _bands(plan, results),
        "## Tokens",
        _TOKENS,
        f"![Real tokens]({tokens})",
        _tokens(plan, results),
    ]
    return "\n\n".join(parts) + "\n"


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _claims(checked: Sequence[Claim]) -> str:
    lines = (
        [each.what, figure(each.measured), f"{each.sign} {each.limit:g}", "yes" if each.met else "**no**"]
        for each in checked
    )
    return table(["claim", "measured", "limit", "met"], lines)


def figure(number: float) -> str:
    return f"{number:g}" if number == int(number) else f"{number:.4f}"


def _weights(plan: Plan, results: Results) -> str:
    lines = [
        [
            name,
            str(replicas),
            *(_span(run.shares[flow] for run in runs) for flow in WEIGHTS),
            _span((run.jain for run in runs), 4),
            _span((run.min_by_max for run in runs), 4),
            f"{max(run.widest for run in runs):.2f}",
            *(str(sum(each)) for each in zip(*(map(_counts, runs)), strict=True)),
        ]
        for name, found in (("one queue", results.weights), ("one a replica", results.control))
        for replicas, runs in _by_replicas(plan, found)
    ]
    head = ["queues", "replicas", *(f"{name} ({weight:g})" for name, weight in WEIGHTS.items())]
    head += ["Jain", "min/max", "widest gap", "violations", "intervals", "dispatches"]
    return table(head, lines)


def _counts(run: Weights) -> tuple[int, int, int]:
    return run.violations, run.intervals, run.dispatches


def _trickle(plan: Plan, results: Results) -> str:
    lines = (
        [
            str(replicas),
            _span((run.trickle_ms for run in runs), 1),
            _span((run.bulk_ms for run in runs), 0),
            _span((run.ratio for run in runs), 4),
            _span((run.overload for run in runs), 2),
            *(str(sum(each)) for each in zip(*((run.served, run.intervals) for run in runs), strict=True)),
        ]
        for replicas, runs in _by_replicas(plan, results.trickle)
    )
    head = ["replicas", "trickle, ms", "bulk, ms", "ratio", "arrivals by dispatches", "served", "intervals"]
    return table(head, lines)


def _starvation(plan: Plan, results: Results) -> str:
    lines = [
        [
            name,
            str(replicas),
            _span(run.demand for run in runs),
            str(sum(run.served for run in runs)),
            str(sum(run.expired for run in runs)),
            f"{max(run.highest for run in runs):.3f}",
            f"{max(run.others_highest for run in runs):.3f}",
        ]
        for name, found in (("guarded", results.guarded), ("no guard", results.unguarded))
        for replicas, runs in _by_replicas(plan, found)
    ]
    head = ["", "replicas", "demand by dispatches", "served", "expired"]
    return table([*head, "highest wait, TTLs", "of criticality 5"], lines)


def _bands(plan: Plan, results: Results) -> str:
    counted = ("turns", "low_turns", "inverted_turns", "guards", "inverted_guards")
    waited = list(results.bands[0].wait_ms)
    lines = (
        [
            str(replicas),
            *(str(sum(getattr(run.order, name) for run in runs)) for name in counted),
            *(_span((run.wait_ms[name] for run in runs), 0) for name in waited),
        ]
        for replicas, runs in _by_replicas(plan, results.bands)
    )
    head = ["replicas", "turns", "below Critical", "inversions", "by the guard", "past a higher band"]
    return table([*head, *(f"{name}, mean ms" for name in waited)], lines)


def _tokens(plan: Plan, results: Results) -> str:
    lines = (
        [
            str(replicas),
            *(_span((run.served[name] for run in runs), 0) for name in TOKENS),
            _span((run.min_by_max for run in runs), 4),
            _span((run.estimated_min_by_max for run in runs), 4),
            f"{min(run.lowest_guess for run in runs):.2f}–{max(run.highest_guess for run in runs):.2f}",
        ]
        for replicas, runs in _by_replicas(plan, results.tokens)
    )
    head = [
        "replicas",
        *(f"{name}, tokens" for name in TOKENS),
        "min/max",
        "of the estimates",
        "estimate by real",
    ]
    return table(head, lines)


def _by_replicas(plan: Plan, found: Sequence[_R]) -> list[tuple[int, list[_R]]]:
    return [(number, [each for each in found if each.run.replicas == number]) for number in plan.replicas]


def _span(found: Iterable[float], digits: int = 3) -> str:
    ordered = sorted(found)
    low, high = f"{ordered[0]:.{digits}f}", f"{ordered[-1]:.{digits}f}"
    return low if low == high else f"{low}–{high}"


PICTURES = ("weights", "waits", "tokens")
_FLOWS = dict(zip(WEIGHTS, ("#9aa5b1", "#5b8def", "#1d4e89", "#c2410c"), strict=True))
_GOOD, _BAD = "#2563a8", "#c2410c"
_FAIR = 0.95  # min/max
_AT_THE_EDGE = ("axes fraction", "data")


def draw(plan: Plan, results: Results, stem: Path) -> list[str]:
    """Write `STEM-weights.png` and so on; their names, in the order of PICTURES."""
    mpl.use("agg")
    names = []
    for name, paint in zip(PICTURES, (_plot_weights, _plot_waits, _plot_tokens), strict=True):
        file = stem.with_name(f"{stem.name}-{name}.png")
        figure = paint(plan, results)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(file, dpi=130)
        names.append(file.name)
    return names


def _plot_weights(plan: Plan, results: Results) -> Figure:
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    one, many, spread = figure.subplots(1, 3)
    _plot_shares(one, plan, results.weights, "One queue for all replicas")
    _plot_shares(many, plan, results.control, "Control: one queue a replica")
    one.sharey(many)
    one.set_ylabel("weight-normalised service, 1 is fair")
    one.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    for found, colour, label in (
        (results.weights, _GOOD, "one queue"),
        (results.control, _BAD, "one a replica"),
    ):
        places = [plan.replicas.index(each.run.replicas) for each in found]
        spread.plot(places, [each.min_by_max for each in found], "o", color=colour, label=label, alpha=0.6)
    spread.axhline(_FAIR, color="black", linewidth=0.8, linestyle=":", label=f"limit {_FAIR:g}")
    spread.set_ylim(0, 1.05)
    spread.set_ylabel("min/max of service")
    spread.set_title("Every run", fontsize=10)
    spread.legend(frameon=False, fontsize=8, loc="lower left")
    _replica_axis(spread, plan)
    return figure


def _plot_shares(axes: Axes, plan: Plan, found: Sequence[Weights], title: str) -> None:
    width = 0.8 / len(WEIGHTS)
    for place, replicas in enumerate(plan.replicas):
        runs = [each for each in found if each.run.replicas == replicas]
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
    _replica_axis(axes, plan)


def _plot_waits(plan: Plan, results: Results) -> Figure:
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    trickle, starvation = figure.subplots(1, 2)
    places = [plan.replicas.index(each.run.replicas) for each in results.trickle]
    trickle.plot(places, [each.bulk_ms for each in results.trickle], "o", color=_BAD, label="bulk")
    trickle.plot(places, [each.trickle_ms for each in results.trickle], "o", color=_GOOD, label="trickle")
    trickle.set_yscale("log")
    trickle.set_ylabel("mean wait, ms")
    trickle.set_title("A trickle at twice the load that fits", fontsize=10)
    trickle.legend(frameon=False, fontsize=8, loc="center left")
    _replica_axis(trickle, plan)
    _plot_highest(starvation, plan, results.unguarded, _BAD, "no guard", -0.2)
    _plot_highest(starvation, plan, results.guarded, _GOOD, "guarded", 0.2)
    for limit, name in ((1.0, "TTL"), (0.5, "overdue")):
        starvation.axhline(limit, color="black", linewidth=0.8, linestyle=":")
        starvation.annotate(
            name, (1, limit), (2, 0), xycoords=_AT_THE_EDGE, textcoords="offset points", fontsize=8
        )
    starvation.set_ylim(0, 1.4)
    starvation.set_ylabel("highest wait, TTLs")
    starvation.set_title("Criticality 1 beside criticality 5", fontsize=10)
    starvation.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    _replica_axis(starvation, plan)
    return figure


def _plot_highest(
    axes: Axes, plan: Plan, found: Sequence[Starvation], colour: str, label: str, side: float
) -> None:
    for place, replicas in enumerate(plan.replicas):
        runs = [each for each in found if each.run.replicas == replicas]
        height = max(run.highest for run in runs)
        axes.bar(place + side, height, 0.36, color=colour, label=label if place == 0 else None)
        expired, ended = (sum(run.expired for run in runs), sum(run.expired + run.served for run in runs))
        text = f"{expired} of {ended}\nexpired"
        axes.annotate(text, (place + side, height), ha="center", va="bottom", fontsize=7)


def _plot_tokens(plan: Plan, results: Results) -> Figure:
    figure = Figure(figsize=(5, 3.8), layout="constrained")
    axes = figure.subplots()
    for name, colour, side in zip(TOKENS, (_GOOD, _BAD), (-0.2, 0.2), strict=True):
        for place, replicas in enumerate(plan.replicas):
            served = [each.served[name] / 1e6 for each in results.tokens if each.run.replicas == replicas]
            label = f"requests of {TOKENS[name]} tokens" if place == 0 else None
            axes.bar(place + side, mean(served), 0.38, color=colour, label=label)
            axes.plot([place + side] * 2, [min(served), max(served)], color="black", linewidth=0.8)
    axes.set_ylabel("real tokens, millions")
    axes.set_title("Equal weights, estimates off by up to four times", fontsize=10)
    axes.margins(y=0.25)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    _replica_axis(axes, plan)
    return figure


def _replica_axis(axes: Axes, plan: Plan) -> None:
    axes.set_xticks(range(len(plan.replicas)), [str(number) for number in plan.replicas])
    axes.set_xlim(-0.6, len(plan.replicas) - 0.4)
    axes.set_xlabel("replicas")
