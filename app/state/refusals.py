"""Errors that Redis answers in place of a reply, and what becomes of the calls they meet.

What it refuses to all for now is asked again later, if it lasts. A batch in which a script comes upon an
error is asked again item by item, so that only the one fails whose fault it is. Redis keeps what the script
wrote before; an item that is repeated counts it once, but for a flow's corrected charge (`settle`).
"""

import asyncio
from collections.abc import Callable

from app.state.calls import Call
from app.state.message import Message

# What a server says that is out of memory, cannot write its file, is busy, or had its rights changed.
_FOR_NOW = ("OOM", "MISCONF", "BUSY", "NOPERM", "NOAUTH")
_PAUSE_S = 0.5


class Refusals:
    """Keeps what lasts and is refused to all for now; `ask_again` is given it when it is time. One event
    loop."""

    def __init__(self, ask_again: Callable[[list[Call]], None]) -> None:
        self._ask_again = ask_again
        self._kept: list[Call] = []
        self._pause: asyncio.TimerHandle | None = None

    def met(self, message: Message, call: Call, why: str) -> None:
        """`call` of `message` has been refused.

        What is not refused to all is one item's fault: its neighbours are asked for by themselves.
        """
        if call.answered:
            return  # an end that was asked for again, or one that nobody waits for
        for_now = why.startswith(_FOR_NOW)
        if for_now and any(item.lasting for item in call.items):
            for item in call.items:
                item.tried = True
            self._kept.append(call)
            if self._pause is None:
                self._pause = asyncio.get_running_loop().call_later(_PAUSE_S, self._over)
        elif len(call.items) > 1 and not for_now:
            message.part(call)
        else:
            call.fail(f"the shared state refused {call.name}: {why}")

    def take(self) -> list[Call]:
        """What is kept; it is kept no longer."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        kept, self._kept = self._kept, []
        return kept

    def _over(self) -> None:
        self._ask_again(self.take())
