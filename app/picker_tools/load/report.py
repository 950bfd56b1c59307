"""Writes a run's report (`report.md`, SVG plots and `summary.json` in a folder) and prints the verdicts."""

import io
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from picker_tools.load.checks import AUDITED, Promise, Verdict
from picker_tools.load.generator import Kind, quantile, quantiles
from picker_tools.load.result import RunResult, flow_shares
from picker_tools.load.scenarios import Source

_STYLES = {Verdict.KEPT: "green", Verdict.BROKEN: "bold red", Verdict.UNKNOWN: "yellow"}


def summarise(run: RunResult, promises: Sequence[Promise]) -> dict[str, Any]:
    """A run as JSON types: its load, fleet, counts, percentiles (seconds) by source, shares and promises."""
    plan, target, faults = run.plan, run.target, run.faults_injected
    kinds = Counter(answer.kind for answer in run.answers)
    summary = {
        "scenario": run.scenario.name,
        "about": run.scenario.summary,
        "verdict": (Verdict.BROKEN if any_broken(promises) else Verdict.KEPT).value,
        "interrupted": run.interrupted,
        "seed": plan.seed,
        "began": datetime.fromtimestamp(run.wall_s, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "duration_s": plan.duration_s,
        "capacity_per_s": run.capacity_per_s,
        "fleet": {
            "own": target.own,
            "mode": target.mode,
            "replicas": len(target.admins),
            "endpoints": len(target.endpoints),
        },
        "machine": {"cores": os.cpu_count(), "load_average_before": run.load_average},
        "versions": {"python": platform.python_version(), "picker-fleet": version("picker-fleet")},
        "counts": {"sent": run.sent, **{kind.value: kinds[kind] for kind in Kind}},
        "ends": dict(Counter(answer.outcome for answer in run.answers).most_common()),
        "sources": {source.name: _source_summary(run, source) for source in run.sources},
        "shares": flow_shares(run),
        "kills": [{"at_s": at_s, "replica": name} for at_s, name in faults.kills],
        "redis_away": [{"from_s": began, "to_s": ended} for began, ended in faults.outages],
        "promises": [
            {
                "name": promise.name,
                "says": promise.says,
                "verdict": promise.verdict.value,
                "evidence": promise.evidence,
                "cases": list(promise.cases),
            }
            for promise in promises
        ],
    }
    return {key: _rounded(value) for key, value in summary.items()}


def any_broken(promises: Sequence[Promise]) -> bool:
    return any(promise.verdict is Verdict.BROKEN for promise in promises)


def _source_summary(run: RunResult, source: Source) -> dict[str, Any]:
    answers = run.answers_of(source)
    served = [answer for answer in answers if answer.served]
    kinds = Counter(answer.kind for answer in answers)
    return {
        "band": source.band.name,
        "sent": len(answers),
        **{kind.value: kinds[kind] for kind in Kind},
        "wait_s": quantiles(length for _, length in run.waits(source)) if run.has_dispatches else {},
        "ttft_s": quantiles(each.first_s for each in served if each.request.streamed and each.first_s),
        "latency_s": quantiles(answer.took_s for answer in served),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


def page(summary: Mapping[str, Any], plots: Iterable[str]) -> str:
    """A run's report in Markdown; `plots` are the names of SVG files in the report's folder."""
    fleet = summary["fleet"]
    counts = Counter(promise["verdict"] for promise in summary["promises"])
    machine = summary["machine"]
    parts = [
        f"{fleet['replicas']} replicas, {fleet['endpoints']} model servers, mode {fleet['mode']}"
        if fleet["own"]
        else "a fleet that was running",
        f"{summary['duration_s']:g} s of arrivals",
        f"seed {summary['seed']}",
        f"picker-fleet {summary['versions']['picker-fleet']}",
        summary["began"],
        f"{machine['cores']} cores with load average {machine['load_average_before']:.1f} before",
        *(["**interrupted**"] if summary["interrupted"] else []),
    ]
    measures = [(key, part) for key in ("wait_s", "ttft_s", "latency_s") for part in ("p50", "p95", "p99")]
    times = [f"{key.removesuffix('_s')} {part}, s" for key, part in measures]
    columns = ("band", "sent", *(kind.value for kind in Kind))
    sources = [
        (
            name,
            *(each[column] for column in columns),
            *(f"{each[key][part]:.3f}" if part in each[key] else "" for key, part in measures),
        )
        for name, each in summary["sources"].items()
    ]
    promises = [
        (each["verdict"], each["name"], each["says"], "<br>".join((each["evidence"], *each["cases"])))
        for each in sorted(summary["promises"], key=lambda each: each["verdict"] != Verdict.BROKEN)
    ]
    shares = [(name, *(f"{part:.1%}" for part in each.values())) for name, each in summary["shares"].items()]
    sections = [
        f"# {summary['scenario']}: {counts['broken']} promises broken, {counts['held']} held",
        summary["about"],
        "; ".join(parts),
        _table(("verdict", "promise", "says", "evidence"), promises),
        *(f"![{name}]({name}.svg)" for name in plots),
        _table(("source", *columns, *times), sources),
        _table(("end", "requests"), summary["ends"].items()),
        _table(("flow", "asked", "served", "fair"), shares),
    ]
    return "\n\n".join(sections) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = [[str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells))


def write(run: RunResult, promises: Sequence[Promise], folder: Path) -> None:
    """Write all files of the report to `folder`, and replace files of earlier reports."""
    summary, plots = summarise(run, promises), draw(run)
    for name, svg in plots.items():
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(page(summary, plots), encoding="utf-8")


def show(promises: Sequence[Promise]) -> None:
    """Print a line for each promise, then the cases of broken promises."""
    console = Console(highlight=False)
    for promise in promises:
        told = f"{promise.says}: {promise.evidence}" if promise.name in AUDITED else promise.evidence
        line = f"{promise.verdict.value:<11} {promise.name:<20} {told}"
        console.print(line, style=_STYLES[promise.verdict], markup=False, soft_wrap=True)
    for promise in promises:
        if promise.verdict is Verdict.BROKEN:
            text = "\n".join([f"BROKEN {promise.name}: {promise.says}; {promise.evidence}", *promise.cases])
            console.print(text, style="red", markup=False, soft_wrap=True)


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
    """The plots as SVG by name, in the order of the report, without plots that have no data."""
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
    # Leave a gap in the line while a replica has no Redis, since it then reports an outdated stock.
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
        # The quantile of a time bin without values is NaN, which leaves a gap in the line.
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
              color=_SOURCES[0], label="received")  # fmt: skip
    axes.barh([place + 0.2 for place in places], [each["fair"] for each in found.values()], 0.36,
              color=_DUE, label="fair share")  # fmt: skip
    axes.set_yticks(list(places), list(found))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(lambda part, _: f"{part:.0%}")
    axes.set_title("Share of the service, received and fair")
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
        axes.axvspan(began_s, end_s, color=_FAULT, alpha=0.15, lw=0, label=None if number else "Redis down")
    axes.set_xlabel("seconds")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_title(title)
    _legend(axes)


def _legend(axes: Axes) -> None:
    _, labels = axes.get_legend_handles_labels()
    if labels:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.2, handlelength=1.4)
