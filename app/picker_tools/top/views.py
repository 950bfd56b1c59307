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
    """Widths are in cells. A column is never narrower than its title; `max_width` grows on a wide terminal.
    An `optional` column is left out where not all columns fit.
    """

    title: str
    right: bool = False
    min_width: int | None = None
    max_width: int | None = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """`rows` picks the rows from the fleet's status, `cells` makes one cell a column of a row.

    `name_column` has the row's name. `total` is how many rows there are, shown or not. `empty_text` says why
    there are none.
    """

    name: ViewName
    columns: tuple[Column, ...]
    rows: Callable[[FleetStatus], Sequence[Row]]
    cells: Callable[[Row, float], Sequence[str | Text]]
    total: Callable[[FleetStatus], int]
    name_column: int = 0
    empty_text: Callable[[FleetStatus], str] = lambda _: ""

    def shown(self, width: int) -> list[int]:
        """The indices of the columns that fit into `width` cells."""
        return [
            at for at, column in enumerate(self.columns) if width >= ALL_COLUMNS_WIDTH or not column.optional
        ]


def table(
    view: View, rows: Sequence[Row], *, first: int, count: int, selected: int | None, width: int
) -> Table:
    """Rows `first` to `first + count` of a view; the row `selected` is highlighted."""
    shown = view.shown(width)
    made = Table(box=None, expand=True, padding=(0, 1), pad_edge=False, header_style="dim")
    for at in shown:
        column = view.columns[at]
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
        cells = view.cells(row, scale)
        visible = [cells[at] for at in shown]
        if at_row == selected:  # only the first cell is reversed: a reversed bar would read wrongly
            visible[0] = Text(str(visible[0]), "reverse")
        made.add_row(*visible, style="bold" if at_row == selected else "")
    return made


def detail(view: View, row: Row, *, width: int, lines: int) -> list[Text]:
    """Exactly `lines` lines: the row's full name and the columns that did not fit."""
    cells, shown = view.cells(row, 1.0), view.shown(width)
    parts = [str(cells[view.name_column])]
    parts += [
        f"{each.title} {cells[at]}"
        for at, each in enumerate(view.columns)
        if at not in (*shown, view.name_column)
    ]
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


def _flow(flow: Row, scale: float) -> list[str | Text]:
    share, fair = flow.get("share"), flow.get("fair_share")
    less = share is not None and fair is not None and share < _LOW_SHARE * fair
    service = Text(bar(share, scale, _BAR_CELLS, fair), style="yellow" if less else "cyan")
    service.append(f" {percent(share):>5} of {percent(fair)}", style="default")
    return [
        Text(plain(flow["flow"]) or "(the whole band)"),
        flow["band"],
        number(flow["queued"], 0),
        seconds(flow.get("oldest_s")),
        service,
        number(flow.get("weight"), 2),
        number(flow.get("in_flight"), 0),
        number(flow.get("served_cost_per_s")),
        Text("at its limit", "yellow") if flow.get("parked") else "in turn",
    ]


def _workload(workload: Row, _: float) -> list[str | Text]:
    score = workload.get("score")
    return [
        Text(plain(workload["id"])),
        number(workload.get("active"), 0),
        number(workload.get("total"), 0),
        f"{number(workload.get('rate'), 2)}/s",
        seconds(workload.get("average_wait_s")),
        number(score.get("total") if isinstance(score, Mapping) else score, 3),
    ]


def _endpoint(endpoint: Row, _: float) -> list[str | Text]:
    mean, status = endpoint.get("latency_mean_s"), endpoint["status"]
    latency = NONE if mean is None else f"{seconds(mean)} ± {seconds(endpoint.get('latency_std_s'))}"
    return [
        endpoint["address"],
        Text(status, _STYLES.get(status, "yellow")),
        number(endpoint.get("in_flight"), 0),
        f"{number(endpoint.get('running'), 0)} + {number(endpoint.get('waiting'), 0)}",
        percent(endpoint.get("kv_utilisation")),
        latency,
        Text(plain(", ".join(endpoint.get("adapters") or []) or NONE)),
    ]


def _replica(replica: Row, _: float) -> list[str | Text]:
    health = "silent" if not replica["live"] else "without Redis" if replica.get("degraded") else "live"
    return [
        Text(plain(replica["id"]) + (" (this one)" if replica.get("this") else "")),
        Text(health, _STYLES.get(health, "bold red")),
        f"{seconds(replica.get('heartbeat_s_ago'))} ago",
        number(replica.get("waiting"), 0),
        plain(replica.get("admin") or NONE),
        seconds(replica.get("started_s_ago")),
        plain(replica.get("version") or NONE),
    ]


def _request(request: Row, _: float) -> list[str | Text]:
    score, age = request.get("score"), seconds(request.get("age_s"))
    return [
        number(request.get("position"), 0),
        Text(plain(request["flow"])),
        request["band"],
        Text(age, "yellow") if request.get("overdue") else age,
        seconds(request.get("deadline_in_s")),
        Text(plain(request["id"])),
        Text(plain(request.get("workload") or NONE)),
        number(request.get("cost")),
        number(score.get("total") if isinstance(score, Mapping) else None, 3),
        Text("nobody" if request.get("state") == "held" else plain(request.get("owner") or NONE)),
    ]


def _decision(entry: Row, _: float) -> list[str | Text]:
    at = datetime.datetime.fromtimestamp(entry["at"])
    event = plain(entry["event"])
    return [
        f"{at:%H:%M:%S}.{at.microsecond // 100_000}",
        Text(event, "yellow" if event in _BAD_EVENTS else ""),
        Text(plain(entry.get("flow") or NONE)),
        Text(plain(entry.get("endpoint") or NONE)),
        number(entry.get("stock")),
        number(entry.get("queued"), 0),
        entry.get("band") or NONE,
        Text(plain(entry.get("by") or NONE)),
        Text(plain(entry.get("note") or NONE)),
        Text(plain(entry.get("request") or NONE)),
    ]


def _no_queue(fleet: FleetStatus) -> str:
    if fleet.page is None:
        return "reading"
    return plain(fleet.page.error) or "nothing waits"


def _no_log(fleet: FleetStatus) -> str:
    return "no decision yet" if fleet.has_log else "the decision log is off: decision_log: {enabled: true}"


def _listed(fleet: FleetStatus, key: str) -> Sequence[Row]:
    return () if fleet.snapshot is None else cast(Sequence[Row], fleet.snapshot[key])


def _total(key: str) -> Callable[[FleetStatus], int]:
    return lambda fleet: int((fleet.snapshot or {}).get(f"{key}_total") or len(_listed(fleet, key)))


VIEWS: tuple[View, ...] = (
    View(
        "flows",
        (
            Column("Flow", min_width=10, max_width=24),
            Column("Band", min_width=9),
            Column("Waits", right=True),
            Column("Oldest", right=True, min_width=7),
            Column("Service, │ its fair share", min_width=27),
            Column("Weight", right=True, optional=True),
            Column("In flight", right=True, optional=True),
            Column("Cost/s", right=True, optional=True),
            Column("State", optional=True),
        ),
        lambda fleet: _listed(fleet, "flows"),
        _flow,
        _total("flows"),
    ),
    View(
        "workloads",
        (
            Column("Workload", min_width=12, max_width=30),
            Column("Active", right=True),
            Column("Ever", right=True),
            Column("Rate", right=True),
            Column("Average wait", right=True),
            Column("Score", right=True),
        ),
        lambda fleet: _listed(fleet, "workloads"),
        _workload,
        _total("workloads"),
    ),
    View(
        "endpoints",
        (
            Column("Endpoint", min_width=14, max_width=28),
            Column("Status", min_width=8),
            Column("In flight", right=True),
            Column("Runs + waits", right=True, min_width=7),
            Column("KV", right=True, min_width=4),
            Column("Latency", right=True, min_width=16),
            Column("Adapters", optional=True),
        ),
        lambda fleet: _listed(fleet, "endpoints"),
        _endpoint,
        _total("endpoints"),
    ),
    View(
        "replicas",
        (
            Column("Replica", min_width=14, max_width=26),
            Column("Health", min_width=8),
            Column("Heartbeat", right=True),
            Column("Holds", right=True),
            Column("Admin", min_width=12),
            Column("Up for", right=True),
            Column("Version", optional=True),
        ),
        lambda fleet: _listed(fleet, "replicas"),
        _replica,
        _total("replicas"),
    ),
    View(
        "queue",
        (
            Column("#", right=True, min_width=3),
            Column("Flow", min_width=10, max_width=20),
            Column("Band", min_width=9),
            Column("Age", right=True, min_width=7),
            Column("Deadline in", right=True),
            Column("Request", min_width=10),
            Column("Workload", optional=True),
            Column("Cost", right=True, optional=True),
            Column("Score", right=True, optional=True),
            Column("Owner", optional=True),
        ),
        lambda fleet: fleet.page.requests if fleet.page else (),
        _request,
        lambda fleet: int((fleet.page and fleet.page.total) or 0),
        name_column=5,
        empty_text=_no_queue,
    ),
    View(
        "log",
        (
            Column("Time", min_width=10),
            Column("Decision", min_width=9),
            Column("Flow", min_width=10, max_width=18),
            Column("Endpoint", min_width=10),
            Column("In flight", right=True),
            Column("Waits", right=True),
            Column("Band", optional=True),
            Column("By", optional=True),
            Column("Note", optional=True),
            Column("Request", optional=True),
        ),
        lambda fleet: fleet.decisions or (),
        _decision,
        lambda fleet: len(fleet.decisions or ()) + fleet.skipped,
        name_column=9,
        empty_text=_no_log,
    ),
    View("stock", (), lambda _: (), lambda _, __: (), lambda _: 0),
)
