"""What waits to be sent to Redis: items by script, and calls by themselves."""

from collections import deque
from collections.abc import Container, Mapping

from picker_fleet.errors import StateUnavailable
from picker_fleet.state.calls import Argument, Call, Item
from picker_fleet.state.scripts import ENDS, NAMES

MAX_BATCH = 16  # items a script call: one that preempts sixteen times stays well below 5 ms
_RANK = {name: rank for rank, name in enumerate(NAMES)}
_NO_ENDS = tuple(name for name in NAMES if name not in ENDS)


class Pending:
    """`batched` has the items of each script that has any; `single` is filled by who asks.

    `functions` are the scripts' names as FCALL knows them, `key` is the pool's, `caller` the replica.
    """

    def __init__(self, functions: Mapping[str, str], key: str, caller: str) -> None:
        self._heads = {name: ("FCALL", functions[name], 1, key, caller) for name in NAMES}
        self.batched: dict[str, deque[Item]] = {}
        self.single: deque[Call] = deque()

    def __bool__(self) -> bool:
        return bool(self.batched or self.single)

    def add(self, name: str, item: Item) -> None:
        """One more item for script `name`."""
        self.batched.setdefault(name, deque()).append(item)

    def waiting(self, name: str) -> int:
        """How many items wait for script `name`."""
        return len(self.batched.get(name, ()))

    def unsent(self, name: str) -> list[tuple[Argument, ...]]:
        """The arguments of the items of script `name` that Redis cannot have seen yet."""
        return [item.args for item in self.batched.get(name, ()) if not item.tried]

    def take(self, *, ends: bool = True) -> list[Call]:
        """Everything, with the ends or without, as calls of at most MAX_BATCH items, in the fixed order."""
        calls = self.take_of(NAMES if ends else _NO_ENDS)
        if self.single:
            calls.extend(self.single)
            self.single.clear()
        return calls

    def take_of(self, names: Container[str]) -> list[Call]:
        """The items of some scripts, likewise."""
        calls: list[Call] = []
        for name in sorted(self.batched, key=_RANK.__getitem__):
            if name not in names:
                continue
            waiting, head = self.batched.pop(name), self._heads[name]
            while waiting:
                items = [waiting.popleft() for _ in range(min(MAX_BATCH, len(waiting)))]
                args = [arg for item in items for arg in item.args]
                calls.append(Call(name, (*head, *args), items, batched=True, head=len(head)))
        return calls

    def set_aside(self, calls: list[Call], why: str, *, keep: bool) -> None:
        """Fail the items of `calls`; with `keep` the lasting ones go back to where they came from."""
        for call in reversed(calls):  # so that what is kept stays in order
            kept = [item for item in call.items if keep and item.lasting and not item.answer.done()]
            if kept:
                self.batched.setdefault(call.name, deque()).extendleft(reversed(kept))
            call.items = [item for item in call.items if item not in kept]
            call.fail(StateUnavailable, f"the shared state cannot be reached: {why}")
