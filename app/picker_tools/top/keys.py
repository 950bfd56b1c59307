"""Keys of a terminal, one at a time and without its line editing."""

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

Key = str  # a character, or one of the names below
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
        """What was pressed; [] if nothing was `within_s`; "gone" if the terminal is."""
        ready, _, _ = select.select([self._fd], [], [], within_s)
        if not ready:
            return []
        raw = os.read(self._fd, 256)
        return parsed(raw.decode(errors="replace")) if raw else "gone"


def parsed(text: str) -> list[Key]:
    """The keys that a terminal tells of by `text`; sequences of other keys are left out."""
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
    """The keys of stdin; the terminal is as it was on leaving."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield Keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
