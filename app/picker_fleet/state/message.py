"""A message on its way to Redis: calls that are written together and answered in order."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from picker_fleet.state.calls import Call
from picker_fleet.state.scripts import ENDS


@dataclass(slots=True)
class Message:
    """`sent_s` in event-loop time, when this replica had stood still for `stood_s` in all. `whole`: until it
    is answered, nothing but decisions goes out beside it. `again`: it was lost with a connection before;
    there is no third try.
    """

    calls: list[Call]
    sent_s: float
    stood_s: float
    whole: bool
    again: bool
    flying: deque[Call] = field(init=False)  # what is not answered yet, in order
    anew: list[Call] = field(default_factory=list)  # what of it is to be asked once more, in order
    forgotten: bool = False  # some of it met a Redis that lacks the library
    loads: int = 0  # of the library, on its behalf
    load_fault: str = ""  # why it could not be loaded

    def __post_init__(self) -> None:
        self.flying = deque(self.calls)

    def repeat(self, load: Call | None, others: Iterable["Message"]) -> None:
        """What is in `anew` flies once more, behind `load`; `others` are under way."""
        self.flying = deque(self.anew)
        if load is not None:
            self.loads += 1
            self.flying.appendleft(load)
        # An admission or renewal that runs late must not outlive the end that was sent after it.
        asked = {id(call) for call in self.anew}
        self.flying.extend(
            call
            for each in (self, *others)
            for call in each.calls
            if call.name in ENDS and id(call) not in asked
        )
        self.anew, self.forgotten = [], False

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
