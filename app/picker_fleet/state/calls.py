"""What messages to Redis are made of (state/batching.py): items, the calls that carry them, and what
waits."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from picker_fleet.errors import StateFault, StateUnavailable
from picker_fleet.state.scripts import NAMES

Reply = Any
Argument = str | int | float | bytes

HEAD = 4  # epoch, notifications, attempts, successes: the first elements of every batched reply
MAX_BATCH = 16  # items a script call: one that preempts sixteen times stays well below 5 ms
UNREACHABLE = "the shared state cannot be reached: {}"
_RANK = {name: rank for rank, name in enumerate(NAMES)}
_LOG_LINES_PER_S = 10  # a client that sends a bad request may send many
_MAX_LOGGED_CHARS = 200  # of a name, or of an error

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Item:
    """One submission. `durable`: kept until Redis has taken it. `tried`: Redis may have seen it."""

    args: tuple[Argument, ...]
    answer: asyncio.Future[Reply]
    durable: bool
    tried: bool = False


@dataclass(slots=True)
class Call:
    """One function call or plain command, and the items that its reply answers: none, one, or a batch."""

    name: str
    command: tuple[Any, ...]
    items: list[Item]
    batched: bool = False
    head: int = 0  # words of `command` before the items' own
    denied: bool = False  # once before

    @property
    def answered(self) -> bool:
        return all(item.answer.done() for item in self.items)

    def answer(self, reply: Reply, on_batch: Callable[[Sequence[Any]], None]) -> None:
        """Give each item its part of `reply`, then the head of a batched one to `on_batch`."""
        parts = reply[HEAD:] if self.batched else [reply] * len(self.items)
        for item, part in zip(self.items, parts, strict=True):
            if not item.answer.done():
                item.answer.set_result(part)
        if self.batched:
            on_batch(reply[:HEAD])

    def split(self) -> list["Call"]:
        """One call for each item that has no answer."""
        head = self.command[: self.head]
        return [
            Call(self.name, (*head, *item.args), [item], self.batched, self.head, self.denied)
            for item in self.items
            if not item.answer.done()
        ]

    def mark_tried(self) -> None:
        for item in self.items:
            item.tried = True

    def fail(self, fault: type[StateFault], why: str) -> None:
        """Fail every item that has no answer."""
        for item in self.items:
            if not item.answer.done():
                item.answer.set_exception(fault(why, retry_after_s=1))
                item.answer.exception()  # a caller that has gone must not raise a warning


class Pending:
    """What waits to be sent: items by script, and calls by themselves.

    `functions` are the scripts' names as FCALL knows them, `key` is the pool's, `caller` the replica.
    """

    def __init__(self, functions: Mapping[str, str], key: str, caller: str) -> None:
        self._heads = {name: ("FCALL", functions[name], 1, key, caller) for name in NAMES}
        self._batched: dict[str, deque[Item]] = {}
        self._single: deque[Call] = deque()

    def __bool__(self) -> bool:
        return bool(self._batched or self._single)

    def add(self, name: str, item: Item) -> None:
        self._batched.setdefault(name, deque()).append(item)

    def add_call(self, call: Call) -> None:
        self._single.append(call)

    def count(self, name: str) -> int:
        return len(self._batched.get(name, ()))

    def unsent(self, name: str) -> list[tuple[Argument, ...]]:
        """The arguments of the items of script `name` that Redis cannot have seen."""
        return [item.args for item in self._batched.get(name, ()) if not item.tried]

    def take(self, names: Collection[str] = NAMES) -> list[Call]:
        """The items of the scripts `names` as `take_batched` gives them, then the single calls."""
        calls = self.take_batched(names)
        calls.extend(self._single)
        self._single.clear()
        return calls

    def take_batched(self, names: Collection[str]) -> list[Call]:
        """The items of the scripts `names`, as calls of at most MAX_BATCH items, in the order of NAMES."""
        calls: list[Call] = []
        for name in sorted(self._batched, key=_RANK.__getitem__):
            if name not in names:
                continue
            items, head = self._batched.pop(name), self._heads[name]
            while items:
                batch = [items.popleft() for _ in range(min(MAX_BATCH, len(items)))]
                args = [arg for item in batch for arg in item.args]
                calls.append(Call(name, (*head, *args), batch, batched=True, head=len(head)))
        return calls

    def put_back(self, calls: list[Call], why: str) -> None:
        """Put the durable items of `calls` back where they came from; the others fail."""
        for call in reversed(calls):  # so that what is kept stays in order
            kept = [item for item in call.items if item.durable and not item.answer.done()]
            if kept:
                self._batched.setdefault(call.name, deque()).extendleft(reversed(kept))
            call.items = [item for item in call.items if item not in kept]
            call.fail(StateUnavailable, UNREACHABLE.format(why))


class DelayedCalls:
    """Hands over its calls, except those answered meanwhile, `delay_s` after the first of them was added."""

    def __init__(self, delay_s: float, on_due: Callable[[list[Call]], None]) -> None:
        self._delay_s, self._on_due = delay_s, on_due
        self._calls: list[Call] = []
        self._timer: asyncio.TimerHandle | None = None

    def add(self, *calls: Call) -> None:
        self._calls += calls
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._due)

    def take(self) -> list[Call]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        calls, self._calls = self._calls, []
        return calls

    def _due(self) -> None:
        if calls := [call for call in self.take() if not call.answered]:
            self._on_due(calls)


class ErrorLog:
    """Logs calls that Redis answered with an error, a bounded number a second."""

    def __init__(self) -> None:
        self._second, self._lines = 0, 0

    def write(self, call: Call, error: str) -> None:
        second = int(asyncio.get_running_loop().time())
        if second != self._second:
            self._second, self._lines = second, 0
        self._lines += 1
        if self._lines <= _LOG_LINES_PER_S:
            names = ", ".join(_named(item) for item in call.items)
            _log.error("Redis answered %s of %s with an error: %s", call.name, names, _shown(error))


def _named(item: Item) -> str:
    """The request that it concerns; of an arrival (schema.pack_arrival) also what its keys are made of."""
    first = item.args[0] if item.args else ""
    if not isinstance(first, bytes):
        return _shown(str(first))
    request_id, _, flow, workload, *_ = [*first.decode(errors="replace").split("\0", 4), "", "", "", ""]
    return f"{_shown(request_id)} (flow {_shown(flow)}, workload {_shown(workload)})"


def _shown(text: str) -> str:
    shown = ascii(text[:_MAX_LOGGED_CHARS])
    return shown if len(shown) <= _MAX_LOGGED_CHARS else shown[: _MAX_LOGGED_CHARS - 1] + "…"
