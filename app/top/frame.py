"""What is on the terminal: pure, from news and from where the operator is."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from app.top.feed import News
from app.top.tables import VIEWS, View, table
from app.top.words import bar, number, plain, seconds

_ABOVE = 6  # lines above the table's rows: head, figures, tabs and the table's own head
_BELOW = 2
_STOCK_CELLS = 12


@dataclass(frozen=True, slots=True)
class Place:
    """Where the operator is: the view, the selected row, a question that waits for y, and what was done."""

    view: int = 0
    row: int = 0
    question: str = ""
    said: str = ""


def frame(news: News, place: Place, *, url: str, width: int, height: int) -> RenderableType:
    """The whole screen: at most `height` lines of `width` cells."""
    if news.shot is None:
        why = plain(news.fault) or "waiting for the first figures"
        return Group(Text(f"picker top: {url}", "bold"), Text(why), Text(), _foot(place, VIEWS[0]))
    shot, view = news.shot, VIEWS[place.view]
    rows = max(1, height - _ABOVE - _BELOW)
    things = view.things(shot)
    row = min(place.row, max(0, len(things) - 1))
    first = max(0, min(row - rows // 2, len(things) - rows))
    body: list[RenderableType] = [*_head(shot["state"], shot, news), _tabs(place, shot)]
    if things:
        selected = row if view.name == "endpoints" or row else None
        body.append(table(view, shot, first=first, rows=rows, selected=selected, width=width))
    else:
        body += [Text(), Text(f"no {view.name}", "dim")]
    blank = height - _ABOVE - min(len(things) - first, rows) - 1
    return Group(
        *body, *([Text()] * max(0, blank if things else height - _ABOVE - 2)), _foot(place, view, news.fault)
    )


def _line(*parts: str | tuple[str, str]) -> Text:
    line = Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
    line.end = "\n"
    return line


def _head(state: Mapping[str, Any], shot: Mapping[str, Any], news: News) -> list[Text]:
    at = datetime.datetime.fromtimestamp(shot["at"]).strftime("%H:%M:%S")
    alive = (f"STALE since {at}", "bold red") if news.stale or news.fault else (f"live {at}", "green")
    marks: list[str | tuple[str, str]] = []
    if state.get("paused"):
        marks.append(("  PAUSED", "bold yellow"))
    if state.get("degraded"):
        marks.append(("  WITHOUT REDIS", "bold red"))
    upper, unit = state["bounds"]["upper"], state.get("unit", "requests")
    bands = state.get("bands", [])
    oldest = max((band["oldest_s"] or 0 for band in bands if band["queued"]), default=None)
    overdue = state.get("overdue") or 0
    ready = sum(1 for each in shot["endpoints"] if each["status"] == "ready")
    live = sum(1 for each in shot["replicas"] if each["live"])
    waiting = "  ".join(f"{band['band']} {number(band['queued'], 0)}" for band in bands)
    return [
        _line(
            ("Picker Fleet ", "bold"),
            f"pool {plain(state['pool'])} as {plain(state['replica'])} sees it  ",
            alive,
            *marks,
        ),
        _line(
            "in flight ",
            (bar(state["stock"], upper, _STOCK_CELLS, state["bounds"]["lower"]), "cyan"),
            (f" {number(state['stock'])}", "bold"),
            f" of {number(upper)} {unit}   {number(state.get('drain_rate'))}/s dispatched, ",
            f"{number(state.get('guard_dispatches_total'), 0)} by the guard",
        ),
        _line(
            "waiting   ",
            (number(state["queued"], 0), "bold"),
            f": {waiting}   oldest {seconds(oldest)}",
            (f"   {overdue} overdue", "yellow") if overdue else "",
        ),
        _line(
            "endpoints ",
            (f"{ready} of {len(shot['endpoints'])} ready", "" if ready else "bold red"),
            "   replicas ",
            (f"{live} of {len(shot['replicas'])} live", "" if live == len(shot["replicas"]) else "yellow"),
            f"   {_why(state, ready)}",
        ),
    ]


def _why(state: Mapping[str, Any], ready: int) -> str:
    """Why what waits does wait."""
    lower = state["bounds"]["lower"]
    if not state["queued"]:
        return "nothing waits"
    if state.get("paused"):
        return "waiting: an operator has paused dispatch"
    if not ready:
        return "waiting: no endpoint takes requests"
    if state["stock"] >= lower:
        return f"waiting: dispatch goes on below {number(lower)}"
    return "waiting: to be dispatched now"


def _tabs(place: Place, shot: Mapping[str, Any]) -> Text:
    line = _line()
    for at, view in enumerate(VIEWS):
        said, total = len(view.things(shot)), view.total(shot)
        count = f"{number(said, 0)} of {number(total, 0)}" if said < total else number(total, 0)
        line.append(f" {at + 1} {view.name} ({count}) ", "reverse" if at == place.view else "dim")
        line.append(" ")
    return line


def _foot(place: Place, view: View, fault: str = "") -> Text:
    if place.question:
        return _line((f"{place.question} y/n ", "bold yellow"))
    if place.said:
        return _line((place.said, "bold"))
    if fault:
        return _line((plain(fault), "bold red"))
    drain = "d drain/undrain  " if view.name == "endpoints" else ""
    return _line((f"q quit  p pause/resume  {drain}tab or 1-4 views  ↑↓ rows", "dim"))
