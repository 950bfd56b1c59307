"""What is on the terminal: pure, from news and from where the operator is."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from picker_tools.top.chart import charts
from picker_tools.top.feed import News
from picker_tools.top.tables import ROOMY, Thing, View, detail, table
from picker_tools.top.views import VIEWS
from picker_tools.top.words import bar, number, plain, seconds

_ABOVE = 6  # lines above the table's rows: head, figures, tabs and the table's own head
_BELOW = 2
_DETAIL = 2  # lines for the chosen row, where not every column has room
_LEAST_FOR_DETAIL = 16  # lines of the terminal
_HINTS: dict[str, str] = {
    "endpoints": "d drain/undrain  ",
    "queue": "e evict  n/b pages  ",
    "log": "space hold  ",
}
_STOCK_CELLS = 12


@dataclass(frozen=True, slots=True)
class Place:
    """Where the operator is: the view, the selected row, a question that waits for y, and what was done.

    `cursor`: behind which the queue's page begins; `held`: the decisions that are kept as they were.
    """

    view: int = 0
    row: int = 0
    question: str = ""
    said: str = ""
    cursor: str = ""
    held: tuple[dict[str, Any], ...] | None = None

    def things(self, news: News) -> Sequence[Thing]:
        """The rows of its view."""
        return VIEWS[self.view].things(news if self.held is None else replace(news, decisions=self.held))


def room(view: View, width: int, height: int) -> int:
    """How many rows of a view a terminal has lines for."""
    return max(1, height - _ABOVE - _BELOW - _detail_lines(view, width, height))


def height_of(view: View, rows: int, width: int) -> int:
    """The height of a frame that has room for so many rows of a view."""
    bare = max(rows + _ABOVE + _BELOW, _LEAST_FOR_DETAIL)
    return bare + _detail_lines(view, width, bare)


def _detail_lines(view: View, width: int, height: int) -> int:
    return _DETAIL if width < ROOMY and height >= _LEAST_FOR_DETAIL and view.columns else 0


def frame(news: News, place: Place, *, url: str, width: int, height: int) -> RenderableType:
    """The whole screen: at most `height` lines of `width` cells."""
    if news.shot is None:
        why = plain(news.fault) or "waiting for the first figures"
        return Group(Text(f"picker top: {url}", "bold"), Text(why), Text(), _foot(place, VIEWS[0]))
    shot, view = news.shot, VIEWS[place.view]
    head: list[RenderableType] = [*_head(shot["state"], shot, news), _tabs(place, news)]
    lines = max(1, height - len(head) - 1)
    return Group(*head, *_body(view, place, news, width, height, lines), _foot(place, view, news.fault))


def _body(
    view: View, place: Place, news: News, width: int, height: int, lines: int
) -> Sequence[RenderableType]:
    """Exactly `lines` lines."""
    if not view.columns:
        unit = (news.shot or {})["state"].get("unit", "requests")
        return charts(news.moments, unit, width=width, height=lines)
    things = place.things(news)
    if not things:
        why = Text(view.none(news) or f"no {view.name}", "dim", no_wrap=True, overflow="ellipsis")
        return [Text(), why, *[Text()] * (lines - 2)][-lines:]
    rows = room(view, width, height)
    row = min(place.row, len(things) - 1)
    first = max(0, min(row - rows // 2, len(things) - rows))
    drawn = table(view, things, first=first, rows=rows, selected=row, width=width)
    more = detail(view, things[row], width=width, lines=_detail_lines(view, width, height))
    blank = lines - 1 - min(len(things) - first, rows) - len(more)
    return [drawn, *[Text()] * blank, *more]


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


def _tabs(place: Place, news: News) -> Text:
    line = _line()
    for at, view in enumerate(VIEWS):
        name = f"{at + 1} {view.name}"
        if at != place.view:
            line.append(f"{name} ", "dim")
        elif not view.columns:
            line.append(f" {name} ", "reverse")
        else:
            said, total = len(place.things(news)), view.total(news)
            paged = view.name != "queue" and said < total
            count = f"{number(said, 0)} of {number(total, 0)}" if paged else number(total, 0)
            line.append(f" {name} ({count}{', held' if place.held is not None else ''}) ", "reverse")
    return line


def _foot(place: Place, view: View, fault: str = "") -> Text:
    if place.question:
        return _line((f"{place.question} y/n ", "bold yellow"))
    if place.said:
        return _line((place.said, "bold"))
    if fault:
        return _line((plain(fault), "bold red"))
    keys = f"q quit  p pause/resume  {_HINTS.get(view.name, '')}tab or 1-{len(VIEWS)} views  ↑↓ rows"
    return _line((keys, "dim"))
