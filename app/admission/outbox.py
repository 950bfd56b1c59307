"""What happened while the shared state was away, and has to be told to it when it is back. Bounded."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import TypeVar

from app.admission import ticket
from app.request import Alive, Completion

T = TypeVar("T")

MOST = 50_000  # requests of each kind that are remembered; the oldest go, and their leases end them


@dataclass(frozen=True, slots=True)
class Placed:
    """A request that this replica let go, at `placed_s`."""

    attempt: int
    ticket: str
    endpoint: str
    cost: float
    placed_s: float


class Outbox:
    """Requests seen in flight, and ends heard; each end counts once."""

    def __init__(self) -> None:
        self._placed: OrderedDict[str, Placed] = OrderedDict()
        self._alive: OrderedDict[str, Alive] = OrderedDict()
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
        if alive.ticket and alive.id not in self._ended:
            _keep(self._alive, alive.id, alive)

    def ended(self, completion: Completion, note: str) -> float | None:
        """What the end of a request frees, in the stock's unit: 0 for one that never ran, None if it has been
        heard before.

        `note` is its ticket, '' if none came with the end.
        """
        if completion.id in self._ended:
            return None
        _keep(self._ended, completion.id, completion)
        self._alive.pop(completion.id, None)
        placed = self._placed.pop(completion.id, None)
        return placed.cost if placed is not None else ticket.cost_of(note)

    def knows(self, request_id: str) -> bool:
        """Whether it has been seen to run."""
        return request_id in self._placed or request_id in self._alive

    def endpoint_of(self, request_id: str) -> str:
        """Where a request was placed, '' if it was not placed here."""
        placed = self._placed.get(request_id)
        return placed.endpoint if placed is not None else ""

    def in_flight(self, since_s: float) -> list[tuple[str, int | None, str, str]]:
        """(id, attempt, served endpoint, ticket) of all believed to run; only own ones have an attempt.

        Own ones placed before `since_s` must have been seen alive: if they run, whoever is told of them by
        the access log brings them, and if they have ended nobody else may have told this replica.
        """
        own = [
            (name, each.attempt, "", each.ticket)
            for name, each in self._placed.items()
            if each.placed_s >= since_s or name in self._alive
        ]
        heard = (each for name, each in self._alive.items() if name not in self._placed)
        return own + [(each.id, None, each.served or "", each.ticket) for each in heard]

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
