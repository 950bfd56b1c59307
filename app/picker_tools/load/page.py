"""The run for people: one HTML page that needs nothing beside it. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from picker_tools.load.promise import Promise, Verdict

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
_CLASS = {Verdict.HELD: "held", Verdict.BROKEN: "broken", Verdict.NOT_JUDGED: "open"}
_MARK = {Verdict.HELD: "✓ held", Verdict.BROKEN: "✗ broken", Verdict.NOT_JUDGED: "– not judged"}


def page(told: Mapping[str, Any], promises: Sequence[Promise], pictures: Mapping[str, str]) -> str:
    """`told` is the summary, `pictures` SVG by name."""
    counts = {verdict: sum(each.verdict is verdict for each in promises) for verdict in Verdict}
    body = [
        f"<h1>{escape(told['scenario'])}: {_headline(counts)}</h1>",
        f"<p>{escape(told['about'])}</p>",
        f'<p class="soft">{escape(_setting(told))}</p>',
        _tiles(told),
        "<h2>Promises</h2>",
        _promises(promises),
        "<h2>What was seen</h2>",
        f'<div class="plots">{"".join(_figure(name, svg) for name, svg in pictures.items())}</div>',
        "<h2>By source</h2>",
        _sources(told),
        "<h2>How requests ended</h2>",
        _table(("end", "requests"), told["counts"]["ends"].items()),
        "<h2>The run</h2>",
        _table(("", ""), _facts(told)),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(told['scenario'])} – picker load</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _headline(counts: Mapping[Verdict, int]) -> str:
    kept, broken = counts[Verdict.HELD], counts[Verdict.BROKEN]
    if broken:
        noun = "promise" if broken == 1 else "promises"
        return f'<span class="broken">{broken} {noun} broken</span>, {kept} held'
    return f'<span class="held">all {kept} promises judged were held</span>'


def _setting(told: Mapping[str, Any]) -> str:
    given = told["parameters"]
    fleet = (
        f"{given['replicas']} replicas, {given['endpoints']} simulated model servers, mode {given['mode']}"
        if given["fleet"] == "its own"
        else "a fleet that was running"
    )
    load = told["machine"]["load_average_before"]
    parts = [
        fleet,
        f"{given['duration_s']:g} s of arrivals",
        f"seed {told['seed']}",
        told["began"],
        f"{told['machine']['cores']} cores shared with load average {load:.1f} before it began",
    ]
    if told["interrupted"]:
        parts.append("INTERRUPTED: this is what there was by then")
    return "; ".join(parts)


def _tiles(told: Mapping[str, Any]) -> str:
    counts, stock = told["counts"], told["stock"]
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


def _figure(name: str, svg: str) -> str:
    return f'<figure role="img" aria-label="{escape(name)}">{svg}</figure>'


def _sources(told: Mapping[str, Any]) -> str:
    head = ("source", "band", "sent", "served", "refused", "failed")
    measures = (("wait_s", "wait"), ("ttft_s", "first token"), ("latency_s", "answer"))
    parts = ("p50", "p95", "p99")
    names = (*head, *(f"{name} {part}, s" for _, name in measures for part in parts))
    rows = []
    for name, each in told["sources"].items():
        figures = [_seconds(each[key].get(part)) for key, _ in measures for part in parts]
        rows.append(
            (name, each["band"], each["sent"], each["served"], each["refused"], each["failed"], *figures)
        )
    return _table(names, rows, numbers_from=2)


def _facts(told: Mapping[str, Any]) -> Iterable[tuple[object, object]]:
    for key, value in told["parameters"].items():
        if value is not None:
            yield key, value
    yield "versions", ", ".join(f"{name} {number}" for name, number in told["versions"].items() if number)
    if told["log_events"]:
        yield "decision log", ", ".join(f"{event} {count}" for event, count in told["log_events"].items())
    for name, each in told["shares"].items():
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
