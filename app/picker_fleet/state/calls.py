"""What a message to Redis is made of: calls, each with the items that its reply answers."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from picker_fleet.errors import StateFault

Reply = Any
Argument = str | int | float | bytes
HEAD = 4  # born, news, attempts, served: what every batched script's reply begins with


class CallMetrics(Protocol):
    """What is reported of calls."""

    def redis_call(self, script: str, seconds: float, items: int) -> None: ...

    def redis_error(self, script: str, kind: str) -> None: ...

    def redis_silence(self, seconds: float, stood_s: float) -> None:
        """Nothing has come for `seconds`; this replica has stood still for `stood_s` in all."""

    def strays(self, n: int) -> None: ...


@dataclass(slots=True)
class Item:
    """One thing asked, and the future that brings its answer. A `lasting` one outlives a lost connection;
    `tried` says that it was on its way when one broke."""

    args: tuple[Argument, ...]
    answer: asyncio.Future[Reply]
    lasting: bool
    tried: bool = False


@dataclass(slots=True)
class Call:
    """One function call (or plain command) and the items it answers: none, one, or a whole batch."""

    name: str
    command: tuple[Any, ...]
    items: list[Item]
    batched: bool = False
    head: int = 0  # how many words of `command` come before the items' own
    denied: bool = False  # once before: state/error_replies.py

    @property
    def answered(self) -> bool:
        return all(item.answer.done() for item in self.items)

    def answer(self, reply: Reply, on_batch: Callable[[Sequence[Any]], None]) -> None:
        """Give each item its part of `reply`; `on_batch` gets a batch's head after that."""
        if not self.batched:
            for item in self.items:
                _resolve(item, reply)
            return
        for item, part in zip(self.items, reply[HEAD:], strict=True):
            _resolve(item, part)
        on_batch(reply[:HEAD])

    def apart(self) -> list["Call"]:
        """A call for each item that has no answer yet."""
        head = self.command[: self.head]
        return [
            Call(self.name, (*head, *item.args), [item], self.batched, self.head, self.denied)
            for item in self.items
            if not item.answer.done()
        ]

    def fail(self, fault: type[StateFault], why: str) -> None:
        """`fault` to every item that has no answer yet."""
        for item in self.items:
            if not item.answer.done():
                item.answer.set_exception(fault(why, retry_after_s=1))
                item.answer.exception()  # a caller that has gone must not raise a warning


def _resolve(item: Item, reply: Reply) -> None:
    if not item.answer.done():
        item.answer.set_result(reply)
