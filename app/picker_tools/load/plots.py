"""Draws the SVG plots for the report of a run."""

import io
import math
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from picker_tools.load.generator import quantile
from picker_tools.load.result import RunResult, flow_shares

_SOURCES = ("#3b82f6", "#f59e0b", "#10b981", "#d946ef", "#8b5cf6", "#ef4444")
_BOUND, _FAULT, _DUE = "#ef4444", "#f59e0b", "#94a3b8"
_BINS = 40
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "picker load",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#d6dbe2",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
}


def draw(run: RunResult) -> dict[str, str]:
    """SVG by plot name, in the order of the report; plots without data are left out."""
    painters: dict[str, tuple[Callable[[Axes, RunResult], None], bool]] = {
        "waits": (_waits, any(run.waits(source) for source in run.sources)),
        "stock": (_stock, bool(run.samples)),
        "shares": (_shares, len({source.flow for source in run.sources}) > 1 and bool(flow_shares(run))),
        "latency": (_latency, any(answer.served for answer in run.answers)),
    }
    return {name: _svg(paint, run) for name, (paint, wanted) in painters.items() if wanted}


def _svg(paint: Callable[[Axes, RunResult], None], run: RunResult) -> str:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 3.0), layout="constrained")
        paint(figure.subplots(), run)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _stock(axes: Axes, run: RunResult) -> None:
    at = [each.at_s for each in run.samples]
    # A replica without Redis reports an outdated stock: leave a gap.
    stock = [math.nan if each.degraded else each.stock for each in run.samples]
    axes.step(at, stock, where="post", color=_SOURCES[0], label="stock")
    axes.step(at, [each.upper for each in run.samples], "--", where="post", color=_BOUND, label="upper bound")
    axes.step(at, [each.lower for each in run.samples], "k:", where="post", lw=1, label="lower bound")
    if run.endpoint_samples:
        seen = [(each.at_s, each.requests) for each in run.endpoint_samples]
        axes.plot(*zip(*seen, strict=True), color=_SOURCES[2], lw=1, label="on endpoints")
    axes.set_ylabel("requests")
    _over_time(axes, run, "Stock against its bounds")


def _waits(axes: Axes, run: RunResult) -> None:
    width = max(1.0, (run.plan.duration_s + 2) / _BINS)
    for source, colour in zip(run.sources, _SOURCES, strict=False):
        bins: dict[int, list[float]] = {}
        for at_s, length in run.waits(source):
            bins.setdefault(int(at_s / width), []).append(length)
        spots = range(max(bins, default=0) + 1)
        at = [(spot + 0.5) * width for spot in spots]
        # The quantile of an empty bin is NaN, which leaves a gap in the line.
        middle, high = (
            [quantile(sorted(bins.get(spot, ())), part) for spot in spots] for part in (0.5, 0.95)
        )
        axes.plot(at, middle, "o-", ms=2.5, color=colour, label=source.name)
        axes.fill_between(at, middle, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_ylabel("seconds")
    what = "Wait in the queue" if run.has_dispatches else "Time to first token"
    _over_time(axes, run, f"{what}: median, shaded to p95")


def _shares(axes: Axes, run: RunResult) -> None:
    found = flow_shares(run)
    places = range(len(found))
    axes.barh([place - 0.2 for place in places], [each["served"] for each in found.values()], 0.36,
              color=_SOURCES[0], label="had")  # fmt: skip
    axes.barh([place + 0.2 for place in places], [each["fair"] for each in found.values()], 0.36,
              color=_DUE, label="was due")  # fmt: skip
    axes.set_yticks(list(places), list(found))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(lambda part, _: f"{part:.0%}")
    axes.set_title("Share of the service, and the fair share of it")
    _legend(axes)


def _latency(axes: Axes, run: RunResult) -> None:
    steps = (*range(1, 100), 99.5, 100)
    for source, colour in zip(run.sources, _SOURCES, strict=False):
        if values := sorted(each.took_s for each in run.answers_of(source) if each.served):
            axes.plot(
                steps, [quantile(values, step / 100) for step in steps], color=colour, label=source.name
            )
    axes.set_yscale("log")
    axes.set_ylabel("seconds")
    axes.set_xlabel("percentile")
    axes.set_title("Time to the whole answer, by percentile")
    _legend(axes)


def _over_time(axes: Axes, run: RunResult, title: str) -> None:
    for number, (at_s, _) in enumerate(run.faults_injected.kills):
        axes.axvline(at_s, color=_FAULT, ls="--", lw=1, label=None if number else "replica killed")
    for number, (began_s, ended_s) in enumerate(run.faults_injected.outages):
        end_s = run.plan.duration_s if ended_s is None else ended_s
        axes.axvspan(began_s, end_s, color=_FAULT, alpha=0.15, lw=0, label=None if number else "Redis away")
    axes.set_xlabel("seconds")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    _legend(axes)


def _legend(axes: Axes) -> None:
    _, labels = axes.get_legend_handles_labels()
    if labels:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, handlelength=1.4)
