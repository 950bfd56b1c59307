"""What happened while the shared state was away, and has to be told to it when it is back. Bounded."""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from picker_fleet.admission import accounting_token
from picker_fleet.errors import ScriptFailed
from picker_fleet.request import Alive, Completion
from picker_fleet.state.store import Store

T = TypeVar("T")

MOST = 50_000  # requests of each kind that are remembered; the oldest go, and their leases end them
_REPORT_SLACK_S = 1.0  # by which the access log may be late with a sign of life


def unseen_s(report_s: float) -> float:
    """What has given no sign of life for so long is not brought back; the access log gives one each
    `report_s`. If it runs, whoever hears its next sign brings it."""
    return report_s + _REPORT_SLACK_S


@dataclass(frozen=True, slots=True)
class Placed:
    """A request that this replica let go, at `placed_s`."""

    attempt: int
    accounting_token: str
    endpoint: str
    cost: float
    placed_s: float


class Running(NamedTuple):
    """A request that is believed to run: what the shared state is told of it. Only one that was let go here
    has an attempt. `seen_s` is when it was let go or, if it has been, last seen alive."""

    id: str
    attempt: int | None
    served: str
    accounting_token: str
    seen_s: float


class Outbox:
    """Requests seen in flight, and ends heard; each end counts once. `clock` gives seconds as in `Placed`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._placed: OrderedDict[str, Placed] = OrderedDict()
        self._alive: OrderedDict[str, tuple[Alive, float]] = OrderedDict()  # with when it was told
        self._ended: OrderedDict[str, Completion | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._placed)

    def placed(self, request_id: str, placed: Placed) -> None:
        self._ended.pop(request_id, None)
        _keep(self._placed, request_id, placed)

    def withdrawn(self, request_id: str) -> float:
        """It never ran. What it had cost; 0 if it is not known here."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return 0.0
        _keep(self._ended, request_id, None)
        return placed.cost

    def alive(self, alive: Alive) -> None:
        if alive.accounting_token and self._ended.get(alive.id) is None:
            _keep(self._alive, alive.id, (alive, self._clock()))

    def ended(self, completion: Completion, note: str) -> float | None:
        """What the end of a request frees, in the stock's unit: 0 for one that never ran, None if it has been
        heard before, or has freed its place here by being withdrawn.

        `note` is its accounting token, '' if none came with the end.
        """
        if self._ended.get(completion.id) is not None:
            return None
        withdrawn = completion.id in self._ended  # then Envoy has brought it to another replica
        _keep(self._ended, completion.id, completion)
        self._alive.pop(completion.id, None)
        placed = self._placed.pop(completion.id, None)
        if withdrawn:
            return None
        return placed.cost if placed is not None else accounting_token.cost_of(note)

    def knows(self, request_id: str) -> bool:
        """Whether it has been seen to run."""
        return request_id in self._placed or request_id in self._alive

    def endpoint_of(self, request_id: str) -> str:
        """Where a request was placed, '' if it was not placed here."""
        placed = self._placed.get(request_id)
        return placed.endpoint if placed is not None else ""

    def in_flight(self, since_s: float) -> list[Running]:
        """All believed to run: let go, or seen alive, since `since_s`.

        Of others the end may have been told to another replica; if they run, whoever is told of them next by
        the access log brings them.
        """
        found = []
        for name, placed in self._placed.items():
            seen_s = self._alive[name][1] if name in self._alive else placed.placed_s
            if seen_s >= since_s:
                found.append(Running(name, placed.attempt, "", placed.accounting_token, seen_s))
        for name, (alive, seen_s) in self._alive.items():
            if name not in self._placed and seen_s >= since_s:
                found.append(Running(name, None, alive.served or "", alive.accounting_token, seen_s))
        return found

    def ends(self) -> list[Completion]:
        """Every end heard, oldest first."""
        return [each for each in self._ended.values() if each is not None]

    def take_ended(self) -> list[Completion]:
        """Every end heard, oldest first; they are forgotten, and what ran with them."""
        ended = self.ends()
        self._placed.clear()
        self._alive.clear()
        self._ended.clear()
        return ended


def _keep(book: OrderedDict[str, T], key: str, value: T) -> None:
    book[key] = value
    if len(book) > MOST:
        book.popitem(last=False)


_AT_ONCE = 512  # requests; the link sends 16 a call


async def bring(store: Store, outbox: Outbox, report_s: float, clock: Callable[[], float]) -> int:
    """Tell the shared state of what runs by `outbox`, as `tell_what_runs`."""
    running = outbox.in_flight(clock() - unseen_s(report_s))
    for at in range(0, len(running), _AT_ONCE):
        asked = [
            store.renew(each.id, each.attempt, each.served, each.accounting_token, clock() - each.seen_s)
            for each in running[at : at + _AT_ONCE]
        ]
        for answer in asked:
            with contextlib.suppress(ScriptFailed):  # its lease makes it good
                await answer
    return len(running)
