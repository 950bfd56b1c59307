"""Writes the report of a run: `report.md`, plots (SVG) and `summary.json` in a folder, verdicts on stdout."""

import json
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from picker_tools.load.checks import AUDITED, Promise, Verdict
from picker_tools.load.generator import Kind, quantiles
from picker_tools.load.plots import draw
from picker_tools.load.result import RunResult, flow_shares
from picker_tools.load.scenarios import Source

_STYLES = {Verdict.KEPT: "green", Verdict.BROKEN: "bold red", Verdict.UNKNOWN: "yellow"}


def summarise(run: RunResult, promises: Sequence[Promise]) -> dict[str, Any]:
    """The run as JSON types: load, fleet, counts, percentiles (seconds) by source, shares, promises."""
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
    """The report in Markdown; `plots` are the names of the SVG files in the same folder."""
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
    """Write all files of the report to `folder`, replacing earlier ones."""
    summary, plots = summarise(run, promises), draw(run)
    for name, svg in plots.items():
        (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(page(summary, plots), encoding="utf-8")


def show(promises: Sequence[Promise]) -> None:
    """Print a line for each promise, then the cases of broken ones."""
    console = Console(highlight=False)
    for promise in promises:
        told = f"{promise.says}: {promise.evidence}" if promise.name in AUDITED else promise.evidence
        line = f"{promise.verdict.value:<11} {promise.name:<20} {told}"
        console.print(line, style=_STYLES[promise.verdict], markup=False, soft_wrap=True)
    for promise in promises:
        if promise.verdict is Verdict.BROKEN:
            text = "\n".join([f"BROKEN {promise.name}: {promise.says}; {promise.evidence}", *promise.cases])
            console.print(text, style="red", markup=False, soft_wrap=True)
