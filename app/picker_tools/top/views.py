"""The views in the order of their keys, and how each becomes a table. Rows are those of the admin API."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from rich.table import Table
from rich.text import Text

from picker_tools.top.format import NONE, bar, number, percent, plain, seconds
from picker_tools.top.status import FleetStatus

Row = Mapping[str, Any]
ViewName = Literal["flows", "workloads", "endpoints", "replicas", "queue", "log", "stock"]
ALL_COLUMNS_WIDTH = 124  # cells; every column fits


@dataclass(frozen=True, slots=True)
class Column:
    """`cell` makes the cell of a row. Widths are in cells. A column is never narrower than its title;
    `max_width` grows on a wide terminal. An `optional` column is left out where not all columns fit.
    """

    title: str
    cell: Callable[[Row], str | Text]
    right: bool = False
    min_width: int | None = None
    max_width: int | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """`rows` picks the rows from the fleet's status, `total` is how many there are, shown or not; by default
    those of its name in the snapshot. `name_column` has the row's name. `empty_text` says why there are none.
    """

    name: ViewName
    columns: tuple[Column, ...]
    rows_of: Callable[[FleetStatus], Sequence[Row]] | None = None
    total_of: Callable[[FleetStatus], int] | None = None
    name_column: int = 0
    empty_text: Callable[[FleetStatus], str] = lambda _: ""

    def rows(self, fleet: FleetStatus) -> Sequence[Row]:
        if self.rows_of is not None:
            return self.rows_of(fleet)
        return () if fleet.snapshot is None else cast(Sequence[Row], fleet.snapshot[self.name])

    def total(self, fleet: FleetStatus) -> int:
        if self.total_of is not None:
            return self.total_of(fleet)
        return int((fleet.snapshot or {}).get(f"{self.name}_total") or len(self.rows(fleet)))

    def shown(self, width: int) -> list[int]:
        """The indices of the columns that fit into `width` cells."""
        return [
            at for at, column in enumerate(self.columns) if width >= ALL_COLUMNS_WIDTH or not column.optional
        ]


def table(
    view: View, rows: Sequence[Row], *, first: int, count: int, selected: int | None, width: int
) -> Table:
    """Rows `first` to `first + count` of a view; the row `selected` is highlighted."""
    columns = [view.columns[at] for at in view.shown(width)]
    made = Table(box=None, expand=True, padding=(0, 1), pad_edge=False, header_style="dim")
    for column in columns:
        justify: Literal["left", "right"] = "right" if column.right else "left"
        max_width = column.max_width and column.max_width + max(0, width - ALL_COLUMNS_WIDTH) // 2
        made.add_column(
            column.title,
            justify=justify,
            min_width=max(column.min_width or 0, len(column.title)),
            max_width=max_width,
            no_wrap=True,
            overflow="ellipsis",
        )
    scale = _scale(rows)
    for at_row, row in enumerate(rows[first : first + count], first):
        visible = [column.cell({**row, "scale": scale}) for column in columns]
        if at_row == selected:  # only the first cell is reversed: a reversed bar would read wrongly
            visible[0] = Text(str(visible[0]), "reverse")
        made.add_row(*visible, style="bold" if at_row == selected else "")
    return made


def detail(view: View, row: Row, *, width: int, lines: int) -> list[Text]:
    """Exactly `lines` lines: the row's full name and the columns that did not fit."""
    shown = (*view.shown(width), view.name_column)
    parts = [str(view.columns[view.name_column].cell(row))]
    parts += [f"{each.title} {each.cell(row)}" for at, each in enumerate(view.columns) if at not in shown]
    text = " · ".join(parts)
    cells_left = width * lines
    text = text if len(text) <= cells_left else f"{text[: cells_left - 1]}…"
    return [
        Text(text[at : at + width], "dim", no_wrap=True, overflow="crop")
        for at in range(0, cells_left, width)
    ]


def _scale(rows: Sequence[Row]) -> float:
    return max((max(_of(each, "share"), _of(each, "fair_share")) for each in rows), default=0.0)


def _of(row: Row, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0


_BAR_CELLS = 12
_LOW_SHARE = 0.8  # a flow below this part of its fair share is highlighted
_STYLES = {"ready": "green", "live": "green", "draining": "yellow", "drained": "yellow", "down": "bold red"}
_BAD_EVENTS = frozenset(
    {"refused", "expired", "preempted", "evicted", "abandoned", "reclaimed", "upstream_failed", "client_gone"}
)


def _service(flow: Row) -> Text:
    share, fair = flow.get("share"), flow.get("fair_share")
    less = share is not None and fair is not None and share < _LOW_SHARE * fair
    style = "yellow" if less else "cyan"
    service = Text(bar(share, flow.get("scale", 1.0), _BAR_CELLS, fair), style=style)
    service.append(f" {percent(share):>5} of {percent(fair)}", style="default")
    return service


def _turn(flow: Row) -> Text:
    return Text("at its limit", "yellow") if flow.get("parked") else Text("in turn")


def _status(endpoint: Row) -> Text:
    return Text(endpoint["status"], _STYLES.get(endpoint["status"], "yellow"))


def _runs_and_waits(endpoint: Row) -> str:
    return f"{number(endpoint.get('running'), 0)} + {number(endpoint.get('waiting'), 0)}"


def _replica(replica: Row) -> Text:
    return Text(plain(replica["id"]) + (" (this one)" if replica.get("this") else ""))


def _owner(request: Row) -> Text:
    return Text("nobody") if request.get("state") == "held" else _text("owner")(request)


def _latency(endpoint: Row) -> str:
    mean = endpoint.get("latency_mean_s")
    return NONE if mean is None else f"{seconds(mean)} ± {seconds(endpoint.get('latency_std_s'))}"


def _health(replica: Row) -> Text:
    health = "silent" if not replica["live"] else "without Redis" if replica.get("degraded") else "live"
    return Text(health, _STYLES.get(health, "bold red"))


def _age(request: Row) -> str | Text:
    age = seconds(request.get("age_s"))
    return Text(age, "yellow") if request.get("overdue") else age


def _time(entry: Row) -> str:
    at = datetime.datetime.fromtimestamp(entry["at"])
    return f"{at:%H:%M:%S}.{at.microsecond // 100_000}"


def _event(entry: Row) -> Text:
    event = plain(entry["event"])
    return Text(event, "yellow" if event in _BAD_EVENTS else "")


def _score(row: Row) -> str:
    """The score's total, where the API explains it; else the score."""
    score = row.get("score")
    return number(score.get("total") if isinstance(score, Mapping) else score, 3)


def _text(key: str) -> Callable[[Row], Text]:
    return lambda row: Text(plain(row.get(key) or NONE))


def _number(key: str, digits: int = 1) -> Callable[[Row], str]:
    return lambda row: number(row.get(key), digits)


def _seconds(key: str) -> Callable[[Row], str]:
    return lambda row: seconds(row.get(key))


def _no_queue(fleet: FleetStatus) -> str:
    if fleet.page is None:
        return "reading"
    return plain(fleet.page.error) or "nothing waits"


def _no_log(fleet: FleetStatus) -> str:
    return "no decision yet" if fleet.has_log else "the decision log is off: decision_log: {enabled: true}"


VIEWS: tuple[View, ...] = (
    View(
        "flows",
        (
            Column(
                "Flow", lambda row: Text(plain(row["flow"]) or "(the whole band)"), min_width=10, max_width=24
            ),
            Column("Band", lambda row: row["band"], min_width=9),
            Column("Waits", _number("queued", 0), right=True),
            Column("Oldest", _seconds("oldest_s"), right=True, min_width=7),
            Column("Service, │ its fair share", _service, min_width=27),
            Column("Weight", _number("weight", 2), right=True, optional=True),
            Column("In flight", _number("in_flight", 0), right=True, optional=True),
            Column("Cost/s", _number("served_cost_per_s"), right=True, optional=True),
            Column("State", _turn, optional=True),
        ),
    ),
    View(
        "workloads",
        (
            Column("Workload", _text("id"), min_width=12, max_width=30),
            Column("Active", _number("active", 0), right=True),
            Column("Ever", _number("total", 0), right=True),
            Column("Rate", lambda row: f"{number(row.get('rate'), 2)}/s", right=True),
            Column("Average wait", _seconds("average_wait_s"), right=True),
            Column("Score", _score, right=True),
        ),
    ),
    View(
        "endpoints",
        (
            Column("Endpoint", lambda row: row["address"], min_width=14, max_width=28),
            Column("Status", _status, min_width=8),
            Column("In flight", _number("in_flight", 0), right=True),
            Column("Runs + waits", _runs_and_waits, right=True, min_width=7),
            Column("KV", lambda row: percent(row.get("kv_utilisation")), right=True, min_width=4),
            Column("Latency", _latency, right=True, min_width=16),
            Column(
                "Adapters",
                lambda row: Text(plain(", ".join(row.get("adapters") or []) or NONE)),
                optional=True,
            ),
        ),
    ),
    View(
        "replicas",
        (
            Column("Replica", _replica, min_width=14, max_width=26),
            Column("Health", _health, min_width=8),
            Column("Heartbeat", lambda row: f"{seconds(row.get('heartbeat_s_ago'))} ago", right=True),
            Column("Holds", _number("waiting", 0), right=True),
            Column("Admin", _text("admin"), min_width=12),
            Column("Up for", _seconds("started_s_ago"), right=True),
            Column("Version", _text("version"), optional=True),
        ),
    ),
    View(
        "queue",
        (
            Column("#", _number("position", 0), right=True, min_width=3),
            Column("Flow", _text("flow"), min_width=10, max_width=20),
            Column("Band", lambda row: row["band"], min_width=9),
            Column("Age", _age, right=True, min_width=7),
            Column("Deadline in", _seconds("deadline_in_s"), right=True),
            Column("Request", _text("id"), min_width=10),
            Column("Workload", _text("workload"), optional=True),
            Column("Cost", _number("cost"), right=True, optional=True),
            Column("Score", _score, right=True, optional=True),
            Column("Owner", _owner, optional=True),
        ),
        lambda fleet: fleet.page.requests if fleet.page else (),
        lambda fleet: int((fleet.page and fleet.page.total) or 0),
        name_column=5,
        empty_text=_no_queue,
    ),
    View(
        "log",
        (
            Column("Time", _time, min_width=10),
            Column("Decision", _event, min_width=9),
            Column("Flow", _text("flow"), min_width=10, max_width=18),
            Column("Endpoint", _text("endpoint"), min_width=10),
            Column("In flight", _number("stock"), right=True),
            Column("Waits", _number("queued", 0), right=True),
            Column("Band", lambda row: row.get("band") or NONE, optional=True),
            Column("By", _text("by"), optional=True),
            Column("Note", _text("note"), optional=True),
            Column("Request", _text("request"), optional=True),
        ),
        lambda fleet: fleet.decisions or (),
        lambda fleet: len(fleet.decisions or ()) + fleet.skipped,
        name_column=9,
        empty_text=_no_log,
    ),
    View("stock", (), lambda _: (), lambda _: 0),
)
