"""The messages that are on their way to Redis, and the deadline of the first of them."""

import asyncio
from collections import deque
from collections.abc import Callable

from app.state.calls import Call
from app.state.message import Message


class UnderWay(deque[Message]):
    """In the order in which they are answered. `on_overdue` is called once the first has had no answer for
    `timeout_s`. One event loop."""

    def __init__(self, timeout_s: float, on_overdue: Callable[[], None]) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        self._on_overdue = on_overdue
        self._loop = asyncio.get_running_loop()
        self._deadline: asyncio.TimerHandle | None = None

    def begin(self, message: Message) -> None:
        """It is sent now."""
        self.append(message)
        if self._deadline is None:
            self._deadline = self._loop.call_later(self._timeout_s, self._look)

    def rest(self) -> None:
        """Their connection is lost: nobody waits for them until there is another."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def forget(self) -> None:
        """None is under way any more."""
        self.clear()
        self.rest()

    def drop(self) -> list[Call]:
        """None is under way any more; their unanswered calls, whose items Redis may have seen."""
        calls = self.unanswered
        for call in calls:
            for item in call.items:
                item.tried = True
        self.forget()
        return calls

    @property
    def unanswered(self) -> list[Call]:
        return [call for message in self for call in message.unanswered]

    @property
    def once_more(self) -> bool:
        """Whether one of them was lost with a connection before."""
        return any(message.again for message in self)

    def _look(self) -> None:
        """The deadline of a message has come; it may be one that has long been answered.

        One timer does for all that are sent within a deadline, so that none is set and stopped for each.
        """
        self._deadline = None
        if not self:
            return
        left_s = self[0].sent_s + self._timeout_s - self._loop.time()
        if left_s > 0:
            self._deadline = self._loop.call_later(left_s, self._look)
        else:
            self._on_overdue()
