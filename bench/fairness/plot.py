"""The run as pictures, the fleet beside its control."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.fairness.readings import Starvation, Weights
from bench.fairness.scenarios import TOKENS, WEIGHTS
from bench.fairness.suite import Plan, Results

PICTURES = ("weights", "waits", "tokens")
_FLOWS = dict(zip(WEIGHTS, ("#9aa5b1", "#5b8def", "#1d4e89", "#c2410c"), strict=True))
_GOOD, _BAD = "#2563a8", "#c2410c"
_FAIR = 0.95  # min/max
_AT_THE_EDGE = ("axes fraction", "data")


def draw(plan: Plan, results: Results, stem: Path) -> list[str]:
    """Write `STEM-weights.png` and so on; their names, in the order of PICTURES."""
    mpl.use("agg")
    names = []
    for name, paint in zip(PICTURES, (_weights, _waits, _tokens), strict=True):
        file = stem.with_name(f"{stem.name}-{name}.png")
        figure = paint(plan, results)
        for axes in figure.axes:
            axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(file, dpi=130)
        names.append(file.name)
    return names


def _weights(plan: Plan, results: Results) -> Figure:
    figure = Figure(figsize=(12, 3.8), layout="constrained")
    one, many, spread = figure.subplots(1, 3)
    _shares(one, plan, results.weights, "One queue for all replicas")
    _shares(many, plan, results.control, "Control: one queue a replica")
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
    _by_replicas(spread, plan)
    return figure


def _shares(axes: Axes, plan: Plan, found: Sequence[Weights], title: str) -> None:
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
    _by_replicas(axes, plan)


def _waits(plan: Plan, results: Results) -> Figure:
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    trickle, starvation = figure.subplots(1, 2)
    places = [plan.replicas.index(each.run.replicas) for each in results.trickle]
    trickle.plot(places, [each.bulk_ms for each in results.trickle], "o", color=_BAD, label="bulk")
    trickle.plot(places, [each.trickle_ms for each in results.trickle], "o", color=_GOOD, label="trickle")
    trickle.set_yscale("log")
    trickle.set_ylabel("mean wait, ms")
    trickle.set_title("A trickle at twice the load that fits", fontsize=10)
    trickle.legend(frameon=False, fontsize=8, loc="center left")
    _by_replicas(trickle, plan)
    _highest(starvation, plan, results.unguarded, _BAD, "no guard", -0.2)
    _highest(starvation, plan, results.guarded, _GOOD, "guarded", 0.2)
    for limit, name in ((1.0, "TTL"), (0.5, "overdue")):
        starvation.axhline(limit, color="black", linewidth=0.8, linestyle=":")
        starvation.annotate(
            name, (1, limit), (2, 0), xycoords=_AT_THE_EDGE, textcoords="offset points", fontsize=8
        )
    starvation.set_ylim(0, 1.4)
    starvation.set_ylabel("highest wait, TTLs")
    starvation.set_title("Criticality 1 beside criticality 5", fontsize=10)
    starvation.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    _by_replicas(starvation, plan)
    return figure


def _highest(
    axes: Axes, plan: Plan, found: Sequence[Starvation], colour: str, label: str, side: float
) -> None:
    for place, replicas in enumerate(plan.replicas):
        runs = [each for each in found if each.run.replicas == replicas]
        height = max(run.highest for run in runs)
        axes.bar(place + side, height, 0.36, color=colour, label=label if place == 0 else None)
        expired, ended = (sum(run.expired for run in runs), sum(run.expired + run.served for run in runs))
        text = f"{expired} of {ended}\nexpired"
        axes.annotate(text, (place + side, height), ha="center", va="bottom", fontsize=7)


def _tokens(plan: Plan, results: Results) -> Figure:
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
    _by_replicas(axes, plan)
    return figure


def _by_replicas(axes: Axes, plan: Plan) -> None:
    axes.set_xticks(range(len(plan.replicas)), [str(number) for number in plan.replicas])
    axes.set_xlim(-0.6, len(plan.replicas) - 0.4)
    axes.set_xlabel("replicas")
