"""The keyboard: which keys were pressed, and what they do to the view and the fleet."""

import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

from picker_tools.top.client import AdminError, path_part
from picker_tools.top.format import plain
from picker_tools.top.frame import ViewState
from picker_tools.top.status import FleetStatus
from picker_tools.top.views import VIEWS

Key = str  # a character, or one of these names
UP, DOWN, TAB, BACK_TAB, ESCAPE = "up", "down", "tab", "back-tab", "escape"
PAGE_DOWN, PAGE_UP = "page-down", "page-up"
_SEQUENCES = {
    "\x1b[A": UP,
    "\x1bOA": UP,
    "\x1b[B": DOWN,
    "\x1bOB": DOWN,
    "\x1b[Z": BACK_TAB,
    "\x1b[6~": PAGE_DOWN,
    "\x1b[5~": PAGE_UP,
    "n": PAGE_DOWN,
    "b": PAGE_UP,
    "\t": TAB,
    "k": UP,
    "j": DOWN,
    "\x1b": ESCAPE,
}


class Keys:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def pressed(self, within_s: float) -> list[Key] | Literal["gone"]:
        """The keys pressed; [] if none `within_s`; "gone" if the terminal is closed."""
        ready, _, _ = select.select([self._fd], [], [], within_s)
        if not ready:
            return []
        raw = os.read(self._fd, 256)
        return parsed(raw.decode(errors="replace")) if raw else "gone"


def parsed(text: str) -> list[Key]:
    """The keys in a terminal's input; escape sequences of other keys are left out."""
    found: list[Key] = []
    while text:
        if text[0] == "\x1b" and len(text) > 1:
            end = next((at for at in range(2, len(text)) if "@" <= text[at] <= "~"), len(text) - 1)
            sequence, text = text[: end + 1], text[end + 1 :]
            if sequence in _SEQUENCES:
                found.append(_SEQUENCES[sequence])
        else:
            found.append(_SEQUENCES.get(text[0], text[0]))
            text = text[1:]
    return found


@contextmanager
def keyboard() -> Iterator[Keys]:
    """The keys of stdin, read one at a time; the terminal's settings are restored on leaving."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield Keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


_NUMBERS = tuple(str(at + 1) for at in range(len(VIEWS)))
_PAGE_ROWS = 10
_STEPS = {UP: -1, DOWN: 1, PAGE_UP: -_PAGE_ROWS, PAGE_DOWN: _PAGE_ROWS}


class Controls:
    """Turns keys into changes of `state` and, once confirmed, of the fleet.

    `change` posts to a path below /api/v1, or raises AdminError.
    """

    def __init__(self, change: Callable[[str], None]) -> None:
        self._change = change
        self._unconfirmed: tuple[str, str] | None = None  # a path to post to, and the message once it is done
        self._pages = [""]  # cursors of the queue's pages up to the one shown
        self.state = ViewState()
        self.leaving = False

    def press(self, key: Key, fleet: FleetStatus) -> None:
        """`fleet` is the status that the operator saw when pressing `key`."""
        if self._unconfirmed is not None:
            self._answer(key)
        elif key == "q":
            self.leaving = True
        elif key in (TAB, BACK_TAB):
            step = 1 if key == TAB else -1
            self._open((self.state.view + step) % len(VIEWS))
        elif key in _NUMBERS:
            self._open(_NUMBERS.index(key))
        elif fleet.snapshot is None:
            self.state = replace(self.state, message="")
        elif key in _STEPS:
            self._move(_STEPS[key], key, fleet)
        elif key == "p":
            self._pause(fleet.snapshot["state"])
        else:
            self._view_key(key, fleet)

    def _open(self, view: int) -> None:
        self._pages = [""]
        self.state = ViewState(view)

    def _move(self, step: int, key: Key, fleet: FleetStatus) -> None:
        """Move by rows; in the queue also by pages."""
        paged = VIEWS[self.state.view].name == "queue" and key in (PAGE_DOWN, PAGE_UP)
        if paged and step > 0 and fleet.page and fleet.page.next_cursor:
            self._open_page([*self._pages, fleet.page.next_cursor])
        elif paged and step < 0 and len(self._pages) > 1:
            self._open_page(self._pages[:-1])
        elif not paged:
            last = max(0, len(self.state.rows(fleet)) - 1)
            row = min(self.state.row, last) + step
            self.state = replace(self.state, row=max(0, min(last, row)), message="")

    def _open_page(self, pages: list[str]) -> None:
        self._pages = pages
        self.state = replace(self.state, row=0, cursor=pages[-1], message="")

    def _view_key(self, key: Key, fleet: FleetStatus) -> None:
        """Apply the keys that belong to one view to its selected row."""
        view, rows = VIEWS[self.state.view].name, self.state.rows(fleet)
        selected = rows[min(self.state.row, len(rows) - 1)] if rows else None
        if key == "d" and view == "endpoints" and selected:
            self._drain(selected)
        elif key == "e" and view == "queue" and selected:
            self._evict(selected)
        elif key == " " and view == "log":
            frozen = fleet.decisions if self.state.frozen is None else None
            self.state = replace(self.state, frozen=frozen, message="")
        else:
            self.state = replace(self.state, message="")

    def _pause(self, fleet_state: Mapping[str, Any]) -> None:
        if fleet_state["paused"]:
            self._ask("Resume dispatch?", "resume", "the fleet dispatches again")
        else:
            self._ask("Pause dispatch for the whole fleet?", "pause", "the fleet has stopped dispatching")

    def _drain(self, endpoint: Mapping[str, Any]) -> None:
        address = endpoint["address"]
        path = f"endpoints/{path_part(address)}"
        if endpoint["status"] == "drained":
            self._ask(f"Give {address} requests again?", f"{path}/undrain", f"{address} takes requests")
        else:
            self._ask(f"Send nothing new to {address}?", f"{path}/drain", f"{address} gets nothing new")

    def _evict(self, request: Mapping[str, Any]) -> None:
        name = request["id"]
        question = f"Evict {name} of {request['flow']}?"
        self._ask(question, f"requests/{path_part(name)}/evict", f"{name} has left the queue")

    def _ask(self, question: str, path: str, done: str) -> None:
        self._unconfirmed = path, done
        self.state = replace(self.state, question=plain(question), message="")

    def _answer(self, key: Key) -> None:
        change, self._unconfirmed = self._unconfirmed, None
        message = "nothing was changed"
        if key in ("y", "Y") and change is not None:
            try:
                path, message = change
                self._change(path)
            except AdminError as error:
                message = str(error)
        self.state = replace(self.state, question="", message=plain(message))
