"""The messages that are on their way to Redis."""

from collections import deque

from picker_fleet.state.calls import Call
from picker_fleet.state.message import Message


class UnderWay(deque[Message]):
    """In the order in which they are answered."""

    def drop(self) -> list[Call]:
        """None is under way any more; their unanswered calls, whose items Redis may have seen."""
        calls = self.unanswered
        for call in calls:
            for item in call.items:
                item.tried = True
        self.clear()
        return calls

    @property
    def unanswered(self) -> list[Call]:
        return [call for message in self for call in message.unanswered]

    @property
    def once_more(self) -> bool:
        """Whether one of them was lost with a connection before."""
        return any(message.again for message in self)
