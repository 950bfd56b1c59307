"""A message on its way to Redis: calls that are written together and answered in order."""

from collections import deque
from dataclasses import dataclass, field

from app.state.calls import Call


@dataclass(slots=True)
class Message:
    """`sent_s` in event-loop time. `whole`: it took all that was pending, and not only the decisions.
    `again`: it was lost with a connection before; there is no third try.
    """

    calls: list[Call]
    sent_s: float
    whole: bool
    again: bool
    flying: deque[Call] = field(init=False)  # what is not answered yet, in order
    anew: list[Call] = field(default_factory=list)  # what of it is to be asked once more, in order
    forgotten: bool = False  # some of it met a Redis that lacks the library
    loads: int = 0  # of the library, on its behalf

    def __post_init__(self) -> None:
        self.flying = deque(self.calls)

    @property
    def items(self) -> int:
        return sum(len(call.items) for call in self.calls)

    def part(self, call: Call) -> None:
        """Ask for each item of `call` by itself once more, if it is one of this message's own."""
        for at, each in enumerate(self.calls):
            if each is call:
                self.calls[at : at + 1] = alone = call.apart()
                self.anew += alone
                return

    @property
    def unanswered(self) -> list[Call]:
        return [call for call in self.calls if not call.answered]
