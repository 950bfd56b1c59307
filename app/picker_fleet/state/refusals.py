"""Items that Redis answers with an error, and what becomes of them; which error means what: error_replies.py.

A batch in which a script comes upon an error is asked again item by item, so that only the one fails whose
fault it is. What Redis denies to everyone is asked once more after a moment. What lasts is kept, and asked
again and again, where Redis denies it or takes no writes for now. A script that fails leaves nothing of
what it did (lua/lib/storage.lua), so an item that is repeated counts once.
"""

import asyncio
import logging
from collections.abc import Callable

from picker_fleet.errors import ScriptFailed, StateUnavailable, WritesRefused
from picker_fleet.state.calls import Call, Item
from picker_fleet.state.error_replies import Meaning
from picker_fleet.state.message import Message

_log = logging.getLogger(__name__)
_MOMENT_S = 0.05
_PAUSE_S = 0.5
_LINES_A_SECOND = 10  # of the log: whoever sends a bad request may send many
_MOST_LOGGED = 200  # characters of a name, or of an error

Ask = Callable[[list[Call]], None]


class Refusals:
    """`ask_again` is given what lasts, when it is time, `ask_once_more` what was denied for the first time.
    One event loop."""

    def __init__(self, ask_again: Ask, ask_once_more: Ask) -> None:
        self._kept, self._denied = _Kept(_PAUSE_S, ask_again), _Kept(_MOMENT_S, ask_once_more)
        self._logged_s, self._lines = 0, 0

    def met(self, message: Message, call: Call, why: str, meaning: Meaning) -> None:
        """`call` of `message` was answered with the error `why`, which is not ELSEWHERE."""
        if call.answered:
            return  # an end that was asked for again, or one that nobody waits for
        if meaning is Meaning.ITEM:
            if len(call.items) > 1:
                message.part(call)
            else:
                self._tell(call, why)
                call.fail(ScriptFailed, f"the shared state refused {call.name}: {why}")
        elif any(item.lasting for item in call.items):
            for item in call.items:
                item.tried = True
            self._kept.add(call)
        elif meaning is Meaning.FULL:
            call.fail(WritesRefused, f"the shared state takes no writes for now: {why}")
        elif call.denied:
            call.fail(StateUnavailable, f"the shared state denies {call.name}: {why}")
        else:
            call.denied = True
            for each in call.apart() if call.batched else [call]:  # some may have no use for it by then
                self._denied.add(each)

    def take(self) -> list[Call]:
        """What is kept; it is kept no longer."""
        return self._kept.take() + self._denied.take()

    def _tell(self, call: Call, why: str) -> None:
        second = int(asyncio.get_running_loop().time())
        if second != self._logged_s:
            self._logged_s, self._lines = second, 0
        self._lines += 1
        if self._lines <= _LINES_A_SECOND:
            whose = ", ".join(_named(item) for item in call.items)
            _log.error("Redis answered %s of %s with an error: %s", call.name, whose, _shown(why))


def _named(item: Item) -> str:
    """Which request it is about; of an arrival (state/arrival.py) also what its keys are made of."""
    first = item.args[0] if item.args else ""
    if not isinstance(first, bytes):
        return _shown(str(first))
    request_id, _, flow, workload, *_ = [*first.decode(errors="replace").split("\0", 4), "", "", "", ""]
    return f"{_shown(request_id)} (flow {_shown(flow)}, workload {_shown(workload)})"


def _shown(text: str) -> str:
    shown = ascii(text[:_MOST_LOGGED])
    return shown if len(shown) <= _MOST_LOGGED else shown[: _MOST_LOGGED - 1] + "…"


class _Kept:
    """Calls, of which those without an answer are handed over `pause_s` after the first was added."""

    def __init__(self, pause_s: float, ask: Ask) -> None:
        self._pause_s = pause_s
        self._ask = ask
        self._calls: list[Call] = []
        self._pause: asyncio.TimerHandle | None = None

    def add(self, call: Call) -> None:
        self._calls.append(call)
        if self._pause is None:
            self._pause = asyncio.get_running_loop().call_later(self._pause_s, self._over)

    def take(self) -> list[Call]:
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        calls, self._calls = self._calls, []
        return calls

    def _over(self) -> None:
        if calls := [call for call in self.take() if not call.answered]:
            self._ask(calls)
