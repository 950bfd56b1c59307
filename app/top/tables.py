"""The four views, each a table of one kind of thing in the fleet. Shapes are those of the admin API."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table
from rich.text import Text

from app.top.words import NONE, bar, number, percent, plain, seconds

Thing = Mapping[str, Any]
ViewName = Literal["flows", "workloads", "endpoints", "replicas"]
_BAR_CELLS = 12
_ROOMY = 124  # cells: room for every column
_LESS = 0.8  # a flow below this part of its fair share stands out
_STYLES = {"ready": "green", "live": "green", "draining": "yellow", "drained": "yellow", "down": "bold red"}


@dataclass(frozen=True, slots=True)
class Column:
    """Widths are in cells: the narrowest it may become (never less than its title), and the widest on a
    terminal that has no room to spare. One with `wide` is left out where there is no room for all."""

    title: str
    right: bool = False
    least: int | None = None
    most: int | None = None
    wide: bool = False


@dataclass(frozen=True, slots=True)
class View:
    """`things` picks the rows out of a snapshot, `cells` makes one: a cell a column."""

    name: ViewName
    columns: tuple[Column, ...]
    things: Callable[[Thing], Sequence[Thing]]
    cells: Callable[[Thing, float], Sequence[str | Text]]
    total: Callable[[Thing], int]


def table(view: View, shot: Thing, *, first: int, rows: int, selected: int | None, width: int) -> Table:
    """Rows `first` to `first + rows` of a view; `selected` is the row to stand out."""
    shown = [at for at, column in enumerate(view.columns) if width >= _ROOMY or not column.wide]
    made = Table(box=None, expand=True, padding=(0, 1), pad_edge=False, header_style="dim")
    for at in shown:
        column = view.columns[at]
        justify: Literal["left", "right"] = "right" if column.right else "left"
        most = column.most and column.most + max(0, width - _ROOMY) // 2
        made.add_column(
            column.title,
            justify=justify,
            min_width=max(column.least or 0, len(column.title)),
            max_width=most,
            no_wrap=True,
            overflow="ellipsis",
        )
    things = view.things(shot)
    scale = max((max(_of(each, "share"), _of(each, "fair_share")) for each in things), default=0.0)
    for row, thing in enumerate(things[first : first + rows], first):
        cells = view.cells(thing, scale)
        made.add_row(*(cells[at] for at in shown), style="reverse" if row == selected else "")
    return made


def _of(thing: Thing, key: str) -> float:
    value = thing.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _flow(flow: Thing, scale: float) -> list[str | Text]:
    share, fair = flow.get("share"), flow.get("fair_share")
    less = share is not None and fair is not None and share < _LESS * fair
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


def _workload(workload: Thing, _: float) -> list[str | Text]:
    score = workload.get("score")
    return [
        Text(plain(workload["id"])),
        number(workload.get("active"), 0),
        number(workload.get("total"), 0),
        f"{number(workload.get('rate'), 2)}/s",
        seconds(workload.get("average_wait_s")),
        number(score.get("total") if isinstance(score, Mapping) else score, 3),
    ]


def _endpoint(endpoint: Thing, _: float) -> list[str | Text]:
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


def _replica(replica: Thing, _: float) -> list[str | Text]:
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


def _total(key: str) -> Callable[[Thing], int]:
    return lambda shot: int(shot.get(f"{key}_total") or len(shot[key]))


VIEWS: tuple[View, ...] = (
    View(
        "flows",
        (
            Column("Flow", least=10, most=24),
            Column("Band", least=9),
            Column("Waits", right=True),
            Column("Oldest", right=True, least=7),
            Column("Service, │ its fair share", least=27),
            Column("Weight", right=True, wide=True),
            Column("In flight", right=True, wide=True),
            Column("Cost/s", right=True, wide=True),
            Column("State", wide=True),
        ),
        lambda shot: shot["flows"],
        _flow,
        _total("flows"),
    ),
    View(
        "workloads",
        (
            Column("Workload", least=12, most=30),
            Column("Active", right=True),
            Column("Ever", right=True),
            Column("Rate", right=True),
            Column("Average wait", right=True),
            Column("Score", right=True),
        ),
        lambda shot: shot["workloads"],
        _workload,
        _total("workloads"),
    ),
    View(
        "endpoints",
        (
            Column("Endpoint", least=14, most=28),
            Column("Status", least=8),
            Column("In flight", right=True),
            Column("Runs + waits", right=True, least=7),
            Column("KV", right=True, least=4),
            Column("Latency", right=True, least=16),
            Column("Adapters", wide=True),
        ),
        lambda shot: shot["endpoints"],
        _endpoint,
        _total("endpoints"),
    ),
    View(
        "replicas",
        (
            Column("Replica", least=14, most=26),
            Column("Health", least=8),
            Column("Heartbeat", right=True),
            Column("Holds", right=True),
            Column("Admin", least=12),
            Column("Up for", right=True),
            Column("Version", wide=True),
        ),
        lambda shot: shot["replicas"],
        _replica,
        _total("replicas"),
    ),
)
