"""The command `picker top`: shows the fleet live on a terminal, by one replica's admin API."""

import argparse
import asyncio
import math
import os
import signal
import sys
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeGuard
from urllib.parse import quote

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Sparkline, Static, TabbedContent, TabPane

from picker_fleet.admin import models
from picker_tools.top.client import AdminClient, AdminError, Event

Row = Any  # a row of one of the API's lists (admin/models.py)
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
_MAX_CELLS = 48  # maximum width of a text in a table, in terminal cells
_LOW_SHARE = 0.8  # a flow with less than this part of its fair share is highlighted
_GOOD, _FAIR, _BAD = "green", "yellow", "bold red"
_STYLES = {
    "ready": _GOOD, "live": _GOOD, "draining": _FAIR, "drained": _FAIR, "at its limit": _FAIR,
    "down": _BAD, "ejected": _BAD, "silent": _BAD, "without Redis": _BAD, "refused": _FAIR, "expired": _FAIR,
    "evicted": _FAIR, "abandoned": _FAIR, "reclaimed": _FAIR, "upstream_failed": _FAIR, "client_gone": _FAIR,
}  # fmt: skip
_QUEUE_ROWS = 200
_RECONNECT_S = 1.0
_HISTORY = 300  # maximum snapshots that are kept; one arrives each second
_MAX_DECISIONS = 200
_VIEW_OF = {"drain": "endpoints", "evict": "queue"}  # action -> the view in which it is available


def plain(text: object) -> str:
    """The text with control and format characters escaped: by these, clients could control the terminal."""
    return "".join(
        f"\\u{ord(sign):04x}" if unicodedata.category(sign) in _HIDDEN else sign for sign in str(text)
    )


def number(value: object, digits: int = 2) -> str:
    """A number as text like 7, 7.25 or 12 400, with at most `digits` decimals; a dash if unknown."""
    if not _known(value):
        return "-"
    text = f"{value:,.{digits}f}".replace(",", " ")
    return text.rstrip("0").rstrip(".") if "." in text else text


def seconds(value: object) -> str:
    """A duration in seconds as text like 40 ms, 3.2 s, 2 m 05 s or 3 h 10 m; a dash if unknown."""
    if not _known(value):
        return "-"
    if abs(value) < 59.95:
        return f"{value * 1000:.0f} ms" if abs(value) < 0.9995 else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} m {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} m"


def percent(value: object) -> str:
    return f"{number(100 * value, 1 if value < 0.0995 else 0)}%" if _known(value) else "-"


def _known(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


class Column(NamedTuple):
    """A column of a table, which shows the attribute `key` of each row, and sorts rows by it."""

    title: str
    key: str
    show: Callable[[Any], str] = lambda value: str(value or "-")

    @property
    def justify(self) -> Any:
        return "right" if self.show in (number, seconds, percent) else "left"

    def cell(self, row: Row) -> Text:
        shown = plain(self.show(self._value(row)))
        late = self.key == "age_s" and row.overdue
        late |= self.key == "share" and (row.share or 0) < _LOW_SHARE * (row.fair_share or 0)
        text = Text(shown, _FAIR if late else _STYLES.get(shown, ""), justify=self.justify, no_wrap=True)
        text.truncate(_MAX_CELLS, overflow="ellipsis")
        return text

    def rank(self, row: Row) -> tuple[bool, float, str]:
        """The sort key of `row`, which puts the largest numbers first and unknown values last."""
        value = self._value(row)
        return value is None, -value if _known(value) else 0.0, str(value)

    def _value(self, row: Row) -> Any:
        value = getattr(row, self.key)
        return value.total if isinstance(value, models.Score) else value


_BAND, _FLOW, _SCORE = Column("Band", "band"), Column("Flow", "flow"), Column("Score", "score", number)
# The views with their columns, in the order of the keys that show the views; the view `stock` has charts.
VIEWS: dict[str, tuple[Column, ...]] = {
    "flows": (
        _FLOW, _BAND, Column("Waits", "queued", number), Column("Oldest", "oldest_s", seconds),
        Column("Service", "share", percent), Column("Fair", "fair_share", percent),
        Column("State", "throttled", lambda throttled: "at its limit" if throttled else "in turn"),
        Column("Weight", "weight", number), Column("In flight", "in_flight", number),
        Column("Cost/s", "served_cost_per_s", number),
    ),
    "workloads": (
        Column("Workload", "id"), Column("Active", "active", number), Column("Ever", "total", number),
        Column("Rate/s", "rate", number), Column("Average wait", "average_wait_s", seconds), _SCORE,
    ),
    "endpoints": (
        Column("Endpoint", "address"), Column("Stages", "stages", ", ".join), Column("Status", "status"),
        Column("In flight", "in_flight", number), Column("Limit", "limit", number),
        Column("Prefills", "prefills", number), Column("Prefill limit", "prefill_limit", number),
        Column("Runs", "running", number), Column("Waits", "waiting", number),
        Column("KV", "kv_utilisation", percent),
        Column("Latency", "latency_mean_s", seconds), Column("±", "latency_std_s", seconds),
        Column("Adapters", "adapters", ", ".join),
        Column("Ejected for", "ejected", lambda ejected: ejected.reason if ejected else ""),
    ),
    "replicas": (
        Column("Replica", "id"), Column("Health", "live", lambda live: "live" if live else "silent"),
        Column("Redis", "degraded", lambda degraded: "without Redis" if degraded else "reached"),
        Column("Heartbeat", "heartbeat_s_ago", seconds), Column("Holds", "waiting", number),
        Column("Up for", "started_s_ago", seconds), Column("Admin", "admin"), Column("Version", "version"),
    ),
    "queue": (
        Column("#", "position", number), _FLOW, _BAND, Column("Age", "age_s", seconds),
        Column("Deadline", "deadline_in_s", seconds), Column("Request", "id"), Column("Workload", "workload"),
        Column("Cost", "cost", number), _SCORE, Column("State", "state"), Column("Owner", "owner"),
    ),
    "log": (
        Column("Time", "at", _clock), Column("Decision", "event"), _FLOW, Column("Endpoint", "endpoint"),
        Column("In flight", "stock", number), Column("Waits", "queued", number), _BAND, Column("By", "by"),
        Column("Note", "note"), Column("Request", "request"),
    ),
    "stock": (),
}  # fmt: skip


def identity(row: Row) -> tuple[object, ...]:
    """The identity of a row in its view: the same in all snapshots."""
    return tuple(getattr(row, name, None) for name in ("id", "address", "seq", "band", "flow"))


def head(snapshot: models.Snapshot, error: str) -> Text:
    """The figures of the whole fleet in four lines, and then the error, if there is one."""
    state, at = snapshot.state, _clock(snapshot.at)
    ready = sum(each.status == "ready" for each in snapshot.endpoints)
    live, replicas = sum(each.live for each in snapshot.replicas), len(snapshot.replicas)
    oldest = max((band.oldest_s or 0 for band in state.bands if band.queued), default=None)
    bands = "  ".join(f"{plain(band.band)} {number(band.queued)}" for band in state.bands)
    return Text.assemble(
        (f"STALE since {at}" if error else f"live {at}", _BAD if error else _GOOD),
        ("  PAUSED" if state.paused else "", "bold yellow"),
        ("  WITHOUT REDIS" if state.degraded else "", _BAD),
        f"  pool {plain(state.pool)} as {plain(state.replica)} sees it\nin flight ",
        (f"{number(state.stock)} of {number(state.bounds.upper)} {state.unit}", "bold"),
        f", dispatch below {number(state.bounds.lower)}; {number(state.drain_rate)}/s dispatched, ",
        f"{number(state.guard_dispatches_total)} by the guard\nwaiting ",
        (number(state.queued), "bold"),
        f": {bands}   oldest {seconds(oldest)}",
        (f"   {state.overdue} overdue" if state.overdue else "", _FAIR),
        (f"\nendpoints {ready} of {len(snapshot.endpoints)} ready", "" if ready else _BAD),
        (f"   replicas {live} of {replicas} live", "" if live == replicas else _FAIR),
        (f"\n{plain(error)}" if error else "", _BAD),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--admin", metavar="URL", default="http://127.0.0.1:8081", help="of a replica (default: %(default)s)")
    add("--pool", metavar="NAME", help="one of several pools (default: the pool of requests that name none)")
    add("--admin-ca", type=Path, metavar="FILE", help="the authorities of an https URL's certificate (PEM)")
    parser.epilog = "Where the fleet has tokens, give one in PICKER_ADMIN__TOKEN; changes need an operator's."


def url_of(admin: str, pool: str | None) -> str:
    """The URL of the admin API of the pool `pool` at a replica; None: of the replica's default pool."""
    below = f"/pools/{quote(pool, safe='')}" if pool else ""
    return f"{admin.rstrip('/')}{below}"


def run(args: argparse.Namespace) -> int:
    """Run `picker top`. Exit code 0 if the operator quits, 143 after SIGTERM. AdminError: no terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise AdminError("picker top needs a terminal; programs read the admin API")
    token = os.environ.get("PICKER_ADMIN__TOKEN")
    admin = AdminClient(url_of(args.admin, args.pool), token, args.admin_ca)
    top = Top(admin)
    top.run()
    return top.return_code or 0


class Ask(ModalScreen[bool]):
    """A dialogue that asks the operator a question; only the key `y` confirms."""

    BINDINGS: ClassVar = [("y", "dismiss(True)", "yes"), ("n,escape,q", "dismiss(False)", "no")]

    def __init__(self, question: str) -> None:
        super().__init__()
        self._question = question

    def compose(self) -> ComposeResult:
        yield Static(self._question, markup=False)
        yield Footer()


class Top(App[None]):
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Static { height: auto; }
    TabbedContent, ContentSwitcher, TabPane, DataTable, Sparkline { height: 1fr; padding: 0; }
    Ask { align: center middle; }
    Ask > Static { width: auto; max-width: 90%; border: round $warning; padding: 1 2; background: $surface; }
    """
    BINDINGS: ClassVar = [
        ("q", "quit", "quit"),
        Binding("ctrl+c", "quit", show=False, priority=True),
        ("p", "pause", "pause/resume"),
        ("d", "drain", "drain/undrain"),
        ("e", "evict", "evict"),
        ("s", "sort", "sort"),
        *(Binding(str(at), f"open('{view}')", show=False) for at, view in enumerate(VIEWS, 1)),
    ]

    def __init__(self, admin: AdminClient) -> None:
        super().__init__()
        self.animation_level = "none"
        self.view = next(iter(VIEWS))
        self._admin = admin
        self._tabs, self._head, self._note = TabbedContent(), Static(markup=False), Static(markup=False)
        self._lines = (Sparkline(), Sparkline())  # charts of requests in flight, of waiting requests
        self._tables: dict[str, DataTable[Text]] = {}
        self._snapshot: models.Snapshot | None = None
        self._error = "waiting for the first figures"
        self._rows: dict[str, Sequence[Row]] = dict.fromkeys(VIEWS, ())  # view -> rows in the API's order
        self._totals: dict[str, int] = {}  # view that reads only some rows -> total number of its rows
        self._shown: Sequence[Row] = ()
        self._sorter = 0  # number of the column by which rows are sorted; 0: rows are in the API's order
        self._history: deque[tuple[float, float]] = deque(maxlen=_HISTORY)  # (in flight, waiting)

    def compose(self) -> ComposeResult:
        yield self._head
        with self._tabs:
            for at, (view, columns) in enumerate(VIEWS.items(), 1):
                with TabPane(f"{at} {view}", id=view):
                    if columns:
                        self._tables[view] = DataTable(cursor_type="row")
                        self._tables[view].add_columns(*(Text(c.title, justify=c.justify) for c in columns))
                        yield self._tables[view]
                    else:
                        yield from self._lines
        yield from (self._note, Footer(compact=True))

    def on_mount(self) -> None:
        # On SIGTERM call `exit`, which restores the terminal.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: self.exit(return_code=143))
        self.run_worker(self._follow())

    async def on_unmount(self) -> None:
        await self._admin.close()

    async def _follow(self) -> None:
        """Read the API's events, and reconnect whenever the event stream ends."""
        while True:
            try:
                async for event in self._admin.events():
                    await self._take(event)
                    self._draw()
                self._error = f"{self._admin.url} ended the stream of events"
            except AdminError as error:
                self._error = str(error)
            self._draw()
            await asyncio.sleep(_RECONNECT_S)

    async def _take(self, event: Event) -> None:
        if isinstance(event, models.Unavailable):
            self._error = event.detail
        elif isinstance(event, models.Decisions):
            # After a reconnect the API sends the latest decisions again, so skip known decisions.
            new = [entry for entry in reversed(event.entries) if entry not in self._rows["log"]]
            self._rows["log"] = [*new, *self._rows["log"]][:_MAX_DECISIONS]
        else:
            self._snapshot, self._error = event, ""
            self._history.append((event.state.stock, event.state.queued))
            self._rows |= {view: getattr(event, view) for view in VIEWS if hasattr(event, view)}
            self._totals |= {"flows": event.flows_total, "workloads": event.workloads_total}
            if self.view == "queue":
                queue = await self._admin.queue(_QUEUE_ROWS)
                self._rows["queue"], self._totals["queue"] = queue.requests, queue.total

    def _draw(self) -> None:
        snapshot = self._snapshot
        self._head.update(head(snapshot, self._error) if snapshot else plain(self._error))
        note = self._fill() if VIEWS[self.view] else ""
        if self.view == "endpoints" and (row := self._chosen()) and row.limit_reason:
            moved = f", {seconds(row.limit_changed_s)} ago" if row.limit_changed_s is not None else ""
            note += f"; limit of {row.address}: {plain(row.limit_reason)}{moved}"
        if snapshot and self.view == "stock":
            bound, (in_flight, waiting) = snapshot.state.bounds.upper, zip(*self._history, strict=True)
            # Two extra values at the start fix each chart's scale: 0 to the bound, and 0 to at least 1.
            self._lines[0].data, self._lines[1].data = [0.0, bound, *in_flight], [0.0, 1.0, *waiting]
            note = f"in flight {number(min(in_flight))} to {number(max(in_flight))} of {number(bound)}, "
            note += f"lower chart: waiting, at most {number(max(waiting))}"
        self._note.update(note)

    def _fill(self) -> str:
        """Fill the shown table; the cursor stays on its row. Returns a note with the number of rows."""
        table, columns, rows = self._tables[self.view], VIEWS[self.view], self._rows[self.view]
        if self.view == "log" and self._shown and table.cursor_row:
            return "paused; move the cursor to the first row to follow the log"
        chosen, at, offset = identity(self._chosen()), table.cursor_row, table.scroll_offset
        self._shown = sorted(rows, key=columns[self._sorter - 1].rank) if self._sorter else rows
        table.clear()
        for index, row in enumerate(self._shown):
            table.add_row(*(column.cell(row) for column in columns))
            if identity(row) == chosen and self.view != "log":
                at = index
        table.move_cursor(row=at, scroll=False)
        table.scroll_to(*offset, animate=False)
        hint = "; decision_log.enabled turns it on" if self.view == "log" and not rows else ""
        order = f", sorted by {columns[self._sorter - 1].title}" if self._sorter else ""
        return f"{number(len(rows))} of {number(self._totals.get(self.view, len(rows)))}{hint}{order}"

    def _chosen(self) -> Row | None:
        at = self._tables[self.view].cursor_row
        return self._shown[at] if at < len(self._shown) else None

    def on_tabbed_content_tab_activated(self, event: TabbedContent.TabActivated) -> None:
        self.view = event.pane.id or ""
        self._shown, self._sorter = (), 0
        if self.view in self._tables:
            self._tables[self.view].focus()
        self.refresh_bindings()
        self._draw()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:
        """Whether `action` is available in the view that is shown."""
        return _VIEW_OF.get(action, self.view) == self.view

    def action_open(self, view: str) -> None:
        self._tabs.active = view

    def action_sort(self) -> None:
        self._shown, self._sorter = (), (self._sorter + 1) % (len(VIEWS[self.view]) + 1)
        self._draw()

    def action_pause(self) -> None:
        if self._snapshot and self._snapshot.state.paused:
            self._change("Resume dispatch", "resume")
        elif self._snapshot:
            self._change("Pause dispatch for the whole fleet", "pause")

    def action_drain(self) -> None:
        row = self._chosen()
        if row and row.status == "drained":
            self._change(f"Give requests to {row.address} again", "endpoints", row.address, "undrain")
        elif row:
            self._change(f"Send nothing new to {row.address}", "endpoints", row.address, "drain")

    def action_evict(self) -> None:
        if row := self._chosen():
            self._change(f"Evict {row.id} of {row.flow}", "requests", row.id, "evict")

    @work
    async def _change(self, what: str, *path: str) -> None:
        """If the operator confirms, send a POST to `path` below /api/v1."""
        if not await self.push_screen_wait(Ask(plain(f"{what}?"))):
            return
        try:
            await self._admin.change(*path)
            self.notify(plain(f"done: {what}"), markup=False)
        except AdminError as error:
            self.notify(plain(error), severity="error", markup=False)
