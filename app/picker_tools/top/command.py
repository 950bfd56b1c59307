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

from picker_tools.top.admin import Admin, AdminFault
from picker_tools.top.feed import Feed, Page
from picker_tools.top.frame import Place, frame, height_of, room
from picker_tools.top.keys import keyboard
from picker_tools.top.operator import Operator
from picker_tools.top.pages import Pages, read
from picker_tools.top.views import VIEWS

_FIRST_S = 8.0
_LOOK_S = 0.25
_HEIGHT = 24  # of a frame that goes to no terminal, if not more rows are to be had
_WIDTH = 160  # likewise, unless COLUMNS says otherwise: every column has room
_MOST_ROWS = 100  # of the queue, in one frame
_TOKEN = "PICKER_ADMIN__TOKEN"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--admin", metavar="URL", default="http://127.0.0.1:8081", help="a replica's (default: %(default)s)")
    add("--once", action="store_true", help="print one frame and end")
    add(
        "--view",
        choices=[view.name for view in VIEWS],
        default="flows",
        help="the first (default: %(default)s)",
    )
    parser.epilog = f"Changes need the fleet's token, where there is one, in {_TOKEN}."


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when the operator leaves, or after the one frame.

    Raises:
        AdminFault: there is no first frame: the replica cannot be asked; or no terminal to show it on.
    """
    admin = Admin(args.admin, os.environ.get(_TOKEN))
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_WIDTH)
    view = next(at for at, each in enumerate(VIEWS) if each.name == args.view)
    if args.once:
        return _once(admin, console, view)
    if not (sys.stdin.isatty() and console.is_terminal):
        raise AdminFault("picker top needs a terminal; --once prints one frame to anything")
    signal.signal(signal.SIGTERM, _leave)
    with contextlib.suppress(KeyboardInterrupt):  # one of the ways to leave
        _follow(admin, console, view)
    return 0


def _once(admin: Admin, console: Console, view: int) -> int:
    name = VIEWS[view].name
    with Feed(admin) as feed:
        news = feed.first(_FIRST_S, decisions=name == "log")
    if news.shot is None:
        raise AdminFault(news.fault or f"{admin.url} said nothing for {_FIRST_S:g} s")
    place, height = Place(view), console.height - 1
    if name == "queue":
        limit = room(VIEWS[view], console.width, height) if console.is_terminal else _MOST_ROWS
        page = read(admin, "", limit)
        if page.fault:
            raise AdminFault(page.fault)
        news = replace(news, page=page)
    if not console.is_terminal:
        height = max(_HEIGHT, height_of(VIEWS[view], len(place.things(news)), console.width))
    console.print(frame(news, place, url=admin.url, width=console.width, height=height))
    return 0


def _follow(admin: Admin, console: Console, view: int) -> None:
    with (
        Feed(admin) as feed,
        Pages(admin) as pages,
        keyboard() as keys,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):

        def change(path: str) -> None:
            admin.change(path)
            pages.again()

        operator = Operator(change)
        operator.place = Place(view)
        feed.first(_LOOK_S)
        while not operator.leaving:
            news = feed.news(_page(pages, operator.place, console))
            shown = frame(news, operator.place, url=admin.url, width=console.width, height=console.height)
            live.update(shown, refresh=True)
            pressed = keys.pressed(_LOOK_S)
            if pressed == "gone":
                return
            for key in pressed:
                operator.press(key, news)


def _page(pages: Pages, place: Place, console: Console) -> Page | None:
    """The page of the queue that is looked at, as long as the terminal is high."""
    view = VIEWS[place.view]
    if view.name != "queue":
        pages.away()
        return None
    return pages.look(place.cursor, room(view, console.width, console.height))


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)  # through the context managers, so that the terminal is put back
