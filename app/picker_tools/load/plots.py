"""Plots of a run as SVG for the report, in the colours of its page."""

import io
import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from picker_fleet.bands import NAMED, Band
from picker_tools.load.client import Kind
from picker_tools.load.result import RunResult, flow_shares, quantile

# Placeholders for colours of the page, replaced in the finished SVG.
_INK, _GRID = "#010203", "#040506"
_SOURCES = ("#3b82f6", "#f59e0b", "#10b981", "#d946ef", "#8b5cf6", "#ef4444")
_BANDS = {Band.CRITICAL: "#ef4444", Band.DEFAULT: "#3b82f6", Band.SHEDDABLE: "#94a3b8"}
_KINDS = {Kind.SERVED: "#10b981", Kind.REFUSED: "#f59e0b", Kind.FAILED: "#ef4444", Kind.LEFT: "#94a3b8"}
_BOUND, _FAULT = "#ef4444", "#f59e0b"
_BINS = 40
_APART = 3  # bins
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
}
_FAMILY = re.compile(r"font-family:[^;\"]*|'DejaVu Sans'[^;\"]*sans-serif")


def draw(run: RunResult) -> dict[str, str]:
    """SVG by name, in the order of the page; empty plots are left out."""
    painters: dict[str, tuple[Callable[[Axes, RunResult], None], bool]] = {
        "stock": (_stock, bool(run.samples)),
        "queue": (_queue, any(not each.degraded for each in run.samples)),
        "outcomes": (_outcomes, bool(run.answers)),
        "waits": (_waits, any(run.waits(source) for source in run.sources)),
        "shares": (_shares, len({source.flow for source in run.sources}) > 1 and bool(flow_shares(run))),
        "first tokens": (_first_tokens, any(answer.first_s for answer in run.answers)),
        "latency": (_latency, any(answer.kind is Kind.SERVED for answer in run.answers)),
    }
    return {name: _svg(paint, run, name) for name, (paint, wanted) in painters.items() if wanted}


def _svg(paint: Callable[[Axes, RunResult], None], run: RunResult, name: str) -> str:
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(6.4, 3.0), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        paint(axes, run)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'<svg ([^>]*?)width="[^"]*" ', r"<svg \1", text, count=1)
    text = re.sub(r'<svg ([^>]*?)height="[^"]*" ', r"<svg \1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = _FAMILY.sub(
        lambda hit: "font-family: inherit" if hit[0].startswith("font-f") else "sans-serif", text
    )
    return text.replace(_INK, "currentColor").replace(_GRID, "var(--grid)")


def _stock(axes: Axes, run: RunResult) -> None:
    at = [each.at_s for each in run.samples]
    # A replica without Redis reports an outdated stock, which is not drawn.
    stock = [math.nan if each.degraded else each.stock for each in run.samples]
    axes.step(at, stock, where="post", color=_SOURCES[0], label="stock")
    for name, style, bounds in (
        ("upper bound", {"color": _BOUND, "ls": "--"}, [each.upper for each in run.samples]),
        ("lower bound", {"color": _INK, "ls": ":", "lw": 1}, [each.lower for each in run.samples]),
    ):
        axes.step(at, bounds, where="post", label=name, **style)
    if run.endpoint_samples:
        seen = [(each.at_s, each.requests) for each in run.endpoint_samples]
        axes.plot(*zip(*seen, strict=True), color=_SOURCES[2], lw=1, label="on endpoints")
    axes.set_ylabel("tokens" if run.scenario.in_tokens else "requests")
    _over_time(axes, run, "Stock against its bounds")


def _queue(axes: Axes, run: RunResult) -> None:
    known = [each for each in run.samples if not each.degraded]
    gap = dict.fromkeys((band.name for band in NAMED), math.nan)
    queued = [gap if each.degraded else each.queued for each in run.samples]
    used = [band for band in NAMED if any(each.queued.get(band.name) for each in known)] or [Band.DEFAULT]
    axes.stackplot(
        [each.at_s for each in run.samples],
        *([each.get(band.name, 0) for each in queued] for band in used),
        labels=[band.name for band in used],
        colors=[_BANDS[band] for band in used],
        alpha=0.75,
        step="post",
        linewidth=0,
    )
    axes.set_ylabel("requests")
    _over_time(axes, run, "Queue by band")


def _outcomes(axes: Axes, run: RunResult) -> None:
    width = _width(run)
    bottom = [0.0] * _BINS
    for kind in Kind:
        heights = [0.0] * _BINS
        for answer in run.answers:
            if answer.kind is kind:
                heights[min(_BINS - 1, int(answer.sent_s / width))] += 1 / width
        if any(heights):
            at = [number * width for number in range(_BINS)]
            axes.bar(at, heights, width * 0.9, bottom, align="edge", color=_KINDS[kind], label=kind.value)
        bottom = [under + height for under, height in zip(bottom, heights, strict=True)]
    axes.set_ylabel("requests a second")
    _over_time(axes, run, "What became of requests, by when they were sent")


def _waits(axes: Axes, run: RunResult) -> None:
    width = max(1.0, (run.plan.duration_s + 2) / _BINS)
    for place, source in enumerate(run.sources):
        bins: dict[int, list[float]] = {}
        for at_s, length in run.waits(source):
            bins.setdefault(int(at_s / width), []).append(length)
        spots = sorted(bins)
        # The line has a gap where nothing was served.
        for spot in [spot for spot, following in pairwise(spots) if following - spot > _APART]:
            bins[spot + 1] = [math.nan]
        spots = sorted(bins)
        at = [(spot + 0.5) * width for spot in spots]
        colour = _SOURCES[place % len(_SOURCES)]
        middle, high = ([quantile(sorted(bins[spot]), part) for spot in spots] for part in (0.5, 0.95))
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
              color=_BANDS[Band.SHEDDABLE], label="was due")  # fmt: skip
    axes.set_yticks(list(places), list(found))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(lambda part, _: f"{part:.0%}")
    axes.set_title("Share of the service, and the fair share of it")
    _legend(axes)


def _first_tokens(axes: Axes, run: RunResult) -> None:
    def seconds(name: str) -> list[float]:
        answers = (each for each in run.answers if each.source == name and each.kind is Kind.SERVED)
        return sorted(each.first_s for each in answers if each.streamed and each.first_s)

    _percentiles(axes, run, seconds, "Time to first token, by percentile")


def _latency(axes: Axes, run: RunResult) -> None:
    def seconds(name: str) -> list[float]:
        return sorted(each.last_s for each in run.answers if each.source == name and each.kind is Kind.SERVED)

    _percentiles(axes, run, seconds, "Time to the whole answer, by percentile")


def _percentiles(axes: Axes, run: RunResult, seconds: Callable[[str], list[float]], title: str) -> None:
    steps = [step / 100 for step in (*range(1, 100), 99.5, 100)]
    for place, source in enumerate(run.sources):
        values = seconds(source.name)
        if values:
            curve = [quantile(values, step) for step in steps]
            colour = _SOURCES[place % len(_SOURCES)]
            axes.plot([100 * step for step in steps], curve, color=colour, label=source.name)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    # Of the minor ticks those at 2 and 5 times a power of ten have labels.
    axes.yaxis.set_minor_formatter(
        lambda value, _: f"{value:g}" if f"{value:.5e}".startswith(("2.00000", "5.00000")) else ""
    )
    axes.tick_params(axis="y", which="minor", labelsize=8)
    axes.set_ylabel("seconds")
    axes.set_xlabel("percentile")
    axes.set_xticks([1, 25, 50, 75, 90, 99], ["1", "25", "50", "75", "90", "99"])
    axes.set_title(title)
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


def _width(run: RunResult) -> float:
    last: Sequence[float] = [answer.sent_s for answer in run.answers]
    return max(max(last, default=1.0), 1.0) * 1.0001 / _BINS
