"""`picker top`: the fleet on a terminal, through one replica's admin API."""

import argparse
import contextlib
import os
import signal
import sys
from dataclasses import replace
from types import FrameType

from rich.console import Console
from rich.live import Live

from picker_tools.top.client import AdminClient, AdminError, path_part
from picker_tools.top.controls import Controls, keyboard
from picker_tools.top.frame import ViewState, frame, height_of, room
from picker_tools.top.status import QueuePage, QueueReader, SnapshotReader, read
from picker_tools.top.views import VIEWS

_FIRST_SNAPSHOT_S = 8.0
_REFRESH_S = 0.25
_HEIGHT = 24  # of a frame that goes to no terminal, unless there are more rows
_WIDTH = 160  # likewise, unless COLUMNS says otherwise; every column fits
_MAX_ROWS = 100  # of the queue, in one frame
_TOKEN = "PICKER_ADMIN__TOKEN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--admin", metavar="URL", default="http://127.0.0.1:8081", help="a replica's (default: %(default)s)")
    about = "of a fleet with several (default: the one of requests that name none)"
    add("--pool", metavar="NAME", help=about)
    add("--once", action="store_true", help="print one frame and end")
    names = [view.name for view in VIEWS]
    add("--view", choices=names, default="flows", help="shown first (default: %(default)s)")
    parser.epilog = f"Changes need the fleet's token, where there is one, in {_TOKEN}."


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when the operator leaves, or after one frame.

    Raises:
        AdminError: the replica cannot be reached, or there is no terminal.
    """
    root = args.admin.rstrip("/")
    below = f"/pools/{path_part(args.pool)}" if args.pool else ""
    admin = AdminClient(f"{root}{below}", os.environ.get(_TOKEN))
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_WIDTH)
    view = next(at for at, each in enumerate(VIEWS) if each.name == args.view)
    if args.once:
        return _once(admin, console, view)
    if not (sys.stdin.isatty() and console.is_terminal):
        raise AdminError("picker top needs a terminal; --once prints one frame without")
    signal.signal(signal.SIGTERM, _exit)
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C leaves, too
        _follow(admin, console, view)
    return 0


def _once(admin: AdminClient, console: Console, view: int) -> int:
    name = VIEWS[view].name
    with SnapshotReader(admin) as snapshots:
        fleet = snapshots.wait_first(_FIRST_SNAPSHOT_S, decisions=name == "log")
    if fleet.snapshot is None:
        raise AdminError(fleet.error or f"{admin.url} was silent for {_FIRST_SNAPSHOT_S:g} s")
    state, height = ViewState(view), console.height - 1
    if name == "queue":
        limit = room(VIEWS[view], console.width, height) if console.is_terminal else _MAX_ROWS
        page = read(admin, "", limit)
        if page.error:
            raise AdminError(page.error)
        fleet = replace(fleet, page=page)
    if not console.is_terminal:
        height = max(_HEIGHT, height_of(VIEWS[view], len(state.rows(fleet)), console.width))
    console.print(frame(fleet, state, url=admin.url, width=console.width, height=height))
    return 0


def _follow(admin: AdminClient, console: Console, view: int) -> None:
    with (
        SnapshotReader(admin) as snapshots,
        QueueReader(admin) as pages,
        keyboard() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):

        def change(path: str) -> None:
            admin.change(path)
            pages.refresh()

        controls = Controls(change)
        controls.state = ViewState(view)
        snapshots.wait_first(_REFRESH_S)
        while not controls.leaving:
            fleet = snapshots.status(_page(pages, controls.state, console))
            shown = frame(fleet, controls.state, url=admin.url, width=console.width, height=console.height)
            live.update(shown, refresh=True)
            pressed = keys.pressed(_REFRESH_S)
            if pressed == "gone":
                return
            for key in pressed:
                controls.press(key, fleet)


def _page(pages: QueueReader, state: ViewState, console: Console) -> QueuePage | None:
    """The shown page of the queue, as long as the terminal is high."""
    view = VIEWS[state.view]
    if view.name != "queue":
        pages.hide()
        return None
    return pages.show(state.cursor, room(view, console.width, console.height))


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)  # context managers restore the terminal
