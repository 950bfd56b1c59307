"""The whole screen as text, from the fleet's status and the operator's view. Pure."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from picker_tools.top.format import bar, number, plain, seconds
from picker_tools.top.status import WINDOW_S, FleetStatus, StockSample
from picker_tools.top.views import ALL_COLUMNS_WIDTH, VIEWS, Row, View, detail, table

_ABOVE = 6  # lines above the table's rows: four of figures, the tabs, the table's header
_BELOW = 2
_DETAIL = 2  # lines for the selected row, where not every column fits
_LEAST_FOR_DETAIL = 16  # lines of the terminal
_HINTS: dict[str, str] = {
    "endpoints": "d drain/undrain  ",
    "queue": "e evict  n/b pages  ",
    "log": "space freeze  ",
}
_STOCK_CELLS = 12


@dataclass(frozen=True, slots=True)
class ViewState:
    """What the operator looks at: the view, the selected row, a question to confirm, the last message.

    `cursor` is where the page of the queue starts. `frozen` are the decisions shown while the log is frozen.
    """

    view: int = 0
    row: int = 0
    question: str = ""
    message: str = ""
    cursor: str = ""
    frozen: tuple[dict[str, Any], ...] | None = None

    def rows(self, fleet: FleetStatus) -> Sequence[Row]:
        """The rows of the view."""
        return VIEWS[self.view].rows(fleet if self.frozen is None else replace(fleet, decisions=self.frozen))


def room(view: View, width: int, height: int) -> int:
    """How many rows of `view` fit on a terminal."""
    return max(1, height - _ABOVE - _BELOW - _detail_lines(view, width, height))


def height_of(view: View, row_count: int, width: int) -> int:
    """The height of a frame that fits `row_count` rows of `view`."""
    bare = max(row_count + _ABOVE + _BELOW, _LEAST_FOR_DETAIL)
    return bare + _detail_lines(view, width, bare)


def _detail_lines(view: View, width: int, height: int) -> int:
    return _DETAIL if width < ALL_COLUMNS_WIDTH and height >= _LEAST_FOR_DETAIL and view.columns else 0


def frame(fleet: FleetStatus, state: ViewState, *, url: str, width: int, height: int) -> RenderableType:
    """The whole screen: at most `height` lines of `width` cells."""
    if fleet.snapshot is None:
        why = plain(fleet.error) or "waiting for the first figures"
        return Group(Text(f"picker top: {url}", "bold"), Text(why), Text(), _foot(state, VIEWS[0]))
    snapshot, view = fleet.snapshot, VIEWS[state.view]
    head: list[RenderableType] = [*_head(snapshot["state"], snapshot, fleet), _tabs(state, fleet)]
    lines = max(1, height - len(head) - 1)
    return Group(*head, *_body(view, state, fleet, width, height, lines), _foot(state, view, fleet.error))


def _body(
    view: View, state: ViewState, fleet: FleetStatus, width: int, height: int, lines: int
) -> Sequence[RenderableType]:
    """Exactly `lines` lines."""
    if not view.columns:
        unit = (fleet.snapshot or {})["state"].get("unit", "requests")
        return charts(fleet.history, unit, width=width, height=lines)
    rows = state.rows(fleet)
    if not rows:
        why = Text(view.empty_text(fleet) or f"no {view.name}", "dim", no_wrap=True, overflow="ellipsis")
        return [Text(), why, *[Text()] * (lines - 2)][-lines:]
    row_count = room(view, width, height)
    row = min(state.row, len(rows) - 1)
    first = max(0, min(row - row_count // 2, len(rows) - row_count))
    drawn = table(view, rows, first=first, count=row_count, selected=row, width=width)
    more = detail(view, rows[row], width=width, lines=_detail_lines(view, width, height))
    blank = lines - 1 - min(len(rows) - first, row_count) - len(more)
    return [drawn, *[Text()] * blank, *more]


def _line(*parts: str | tuple[str, str]) -> Text:
    line = Text.assemble(*parts, no_wrap=True, overflow="ellipsis")
    line.end = "\n"
    return line


def _head(fleet_state: Mapping[str, Any], snapshot: Mapping[str, Any], fleet: FleetStatus) -> list[Text]:
    at = datetime.datetime.fromtimestamp(snapshot["at"]).strftime("%H:%M:%S")
    alive = (f"STALE since {at}", "bold red") if fleet.is_stale or fleet.error else (f"live {at}", "green")
    marks: list[str | tuple[str, str]] = []
    if fleet_state.get("paused"):
        marks.append(("  PAUSED", "bold yellow"))
    if fleet_state.get("degraded"):
        marks.append(("  WITHOUT REDIS", "bold red"))
    upper, unit = fleet_state["bounds"]["upper"], fleet_state.get("unit", "requests")
    bands = fleet_state.get("bands", [])
    oldest = max((band["oldest_s"] or 0 for band in bands if band["queued"]), default=None)
    overdue = fleet_state.get("overdue") or 0
    ready = sum(1 for each in snapshot["endpoints"] if each["status"] == "ready")
    live = sum(1 for each in snapshot["replicas"] if each["live"])
    waiting = "  ".join(f"{band['band']} {number(band['queued'], 0)}" for band in bands)
    return [
        _line(
            ("Picker Fleet ", "bold"),
            f"pool {plain(fleet_state['pool'])} as {plain(fleet_state['replica'])} sees it  ",
            alive,
            *marks,
        ),
        _line(
            "in flight ",
            (bar(fleet_state["stock"], upper, _STOCK_CELLS, fleet_state["bounds"]["lower"]), "cyan"),
            (f" {number(fleet_state['stock'])}", "bold"),
            f" of {number(upper)} {unit}   {number(fleet_state.get('drain_rate'))}/s dispatched, ",
            f"{number(fleet_state.get('guard_dispatches_total'), 0)} by the guard",
        ),
        _line(
            "waiting   ",
            (number(fleet_state["queued"], 0), "bold"),
            f": {waiting}   oldest {seconds(oldest)}",
            (f"   {overdue} overdue", "yellow") if overdue else "",
        ),
        _line(
            "endpoints ",
            (f"{ready} of {len(snapshot['endpoints'])} ready", "" if ready else "bold red"),
            "   replicas ",
            (
                f"{live} of {len(snapshot['replicas'])} live",
                "" if live == len(snapshot["replicas"]) else "yellow",
            ),
            f"   {_why(fleet_state, ready)}",
        ),
    ]


def _why(fleet_state: Mapping[str, Any], ready: int) -> str:
    """Why requests wait."""
    lower = fleet_state["bounds"]["lower"]
    if not fleet_state["queued"]:
        return "nothing waits"
    if fleet_state.get("paused"):
        return "waiting: an operator has paused dispatch"
    if not ready:
        return "waiting: no endpoint takes requests"
    if fleet_state["stock"] >= lower:
        return f"waiting: dispatch continues below {number(lower)}"
    return "waiting: to be dispatched now"


def _tabs(state: ViewState, fleet: FleetStatus) -> Text:
    line = _line()
    for at, view in enumerate(VIEWS):
        name = f"{at + 1} {view.name}"
        if at != state.view:
            line.append(f"{name} ", "dim")
        elif not view.columns:
            line.append(f" {name} ", "reverse")
        else:
            said, total = len(state.rows(fleet)), view.total(fleet)
            paged = view.name != "queue" and said < total
            count = f"{number(said, 0)} of {number(total, 0)}" if paged else number(total, 0)
            line.append(f" {name} ({count}{', frozen' if state.frozen is not None else ''}) ", "reverse")
    return line


def _foot(state: ViewState, view: View, error: str = "") -> Text:
    if state.question:
        return _line((f"{state.question} y/n ", "bold yellow"))
    if state.message:
        return _line((state.message, "bold"))
    if error:
        return _line((plain(error), "bold red"))
    keys = f"q quit  p pause/resume  {_HINTS.get(view.name, '')}tab or 1-{len(VIEWS)} views  ↑↓ rows"
    return _line((keys, "dim"))


_GAP_S = 3.0  # no line is drawn over a longer gap between snapshots
_BLOCKS = " ▁▂▃▄▅▆▇█"
_SCALE_CELLS = 8  # of the scale at the left of a chart
_STEPS = (1.0, 1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)
_STYLES = {"upper": "red", "watermark": "dim", "lower": "yellow"}


def charts(history: Sequence[StockSample], unit: str, *, width: int, height: int) -> list[Text]:
    """Exactly `height` lines of at most `width` cells: the stock above the queue, each with a caption.

    A low terminal shows the stock only.
    """
    if not history:
        return [Text("no snapshot yet")] + [Text() for _ in range(height - 1)]
    low = height // 3 if height >= 9 else 0
    lines = _stock(history, unit, width, height - low)
    if low:
        lines += [_caption("waiting", history, lambda each: each.queued, "requests", width)]
        lines += _plot(history, lambda each: each.queued, (), width, low - 1)
    return lines


def _stock(history: Sequence[StockSample], unit: str, width: int, height: int) -> list[Text]:
    last = history[-1]
    caption = _caption("in flight", history, lambda each: each.stock, unit, width)
    caption.append(f"; bounds {number(last.lower)} to {number(last.upper)}")
    caption.truncate(width, overflow="ellipsis")
    drawn = _plot(history, lambda each: each.stock, ("upper", "lower", "watermark"), width, height - 1)
    return [caption, *drawn]


def _caption(
    name: str, history: Sequence[StockSample], of: Callable[[StockSample], float], unit: str, width: int
) -> Text:
    values = [of(each) for each in history]
    least, top = number(min(values)), number(max(values))
    spread = f"always {least}" if least == top else f"{least} to {top}"
    line = Text(f"{name} ", no_wrap=True)
    line.append(number(values[-1]), "bold")
    line.append(f" {unit} now; {spread} over {seconds(history[-1].at - history[0].at)}")
    line.truncate(width, overflow="ellipsis")
    return line


def _plot(
    history: Sequence[StockSample],
    of: Callable[[StockSample], float],
    bounds: Sequence[str],
    width: int,
    height: int,
) -> list[Text]:
    """`height` lines; time runs to the right and ends now; a bound is a horizontal line."""
    top = _round_up(
        max([of(each) for each in history] + [getattr(each, b) for each in history for b in bounds])
    )
    columns = _columns(history, of, max(1, width - _SCALE_CELLS - 1))
    labels = {0: "0"} | {_row(getattr(history[-1], b), top, height): b for b in reversed(bounds)}
    lines = []
    for row in range(height - 1, -1, -1):
        name = labels.get(row, "")
        caption = number(getattr(history[-1], name)) if name in bounds else name
        if row == height - 1 and not caption:
            caption = number(top)
        line = Text(no_wrap=True).append(f"{caption:>{_SCALE_CELLS}} ", "dim")
        cells = [_cell(sample, of, bounds, top, row, height) for sample in columns]
        for style, stretch in groupby(cells, key=lambda cell: cell[1]):  # few escape sequences, for SSH
            line.append("".join(sign for sign, _ in stretch), style)
        lines.append(line)
    return lines


def _columns(
    history: Sequence[StockSample], of: Callable[[StockSample], float], count: int
) -> list[StockSample | None]:
    """For each column the sample with the highest value in its time; None where no snapshot came."""
    columns: list[StockSample | None] = [None] * count
    end = history[-1].at
    for sample, after in pairwise([*history, history[-1]]):
        until = after.at if after.at - sample.at <= _GAP_S else sample.at  # a sample is valid until the next
        first, last = (int((1 - (end - at) / WINDOW_S) * (count - 1) + 0.5) for at in (sample.at, until))
        for at in range(max(0, first), min(count - 1, last) + 1):
            there = columns[at]
            if there is None or of(sample) >= of(there):
                columns[at] = sample
    return columns


def _cell(
    sample: StockSample | None,
    of: Callable[[StockSample], float],
    bounds: Sequence[str],
    top: float,
    row: int,
    height: int,
) -> tuple[str, str]:
    if sample is None:
        return " ", ""
    bound = next((each for each in bounds if _row(getattr(sample, each), top, height) == row), None)
    eighths = max(0, min(8, round(8 * (of(sample) / top * height - row))))
    if bound is None or 0 < eighths < 8:
        return _BLOCKS[eighths], "cyan"
    return "─", f"{_STYLES[bound]} on cyan" if eighths == 8 else _STYLES[bound]


def _row(value: float, top: float, height: int) -> int:
    return max(0, min(height - 1, int(value / top * height)))


def _round_up(value: float) -> float:
    """The smallest of 1, 1.2, 1.5, 2, 3, … 10, 12, … that is at least `value`."""
    power = 1.0
    while 10 * power < value:
        power *= 10
    return next(step * power for step in _STEPS if step * power >= min(value, 10 * power))
