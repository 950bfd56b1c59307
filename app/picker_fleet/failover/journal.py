"""What one replica saw during an outage and has to tell Redis afterwards (G8). Bounded."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from picker_fleet.admission import accounting_token
from picker_fleet.request import Alive, Completion

T = TypeVar("T")

MAX_ENTRIES = 50_000  # of each kind; the oldest are dropped, and their leases end them
_REPORT_SLACK_S = 1.0  # by which the access log may be late with a sign of life


def unseen_s(report_s: float) -> float:
    """A request without a sign of life for so long is not restored; the access log gives one each `report_s`.
    If it runs, the replica that receives the next one restores it."""
    return report_s + _REPORT_SLACK_S


@dataclass(frozen=True, slots=True)
class LocalPlacement:
    """A request that this replica placed at `placed_s` without Redis."""

    attempt: int
    accounting_token: str
    endpoint: str
    cost: float
    placed_s: float


class Running(NamedTuple):
    """A request that is believed to run, as the shared state is told of it. Only one that was placed here has
    an attempt. `seen_s` is when it last gave a sign of life or, without one, was placed."""

    id: str
    attempt: int | None
    served: str
    accounting_token: str
    seen_s: float


class OutageJournal:
    """Requests seen in flight, and their ends; each end counts once. `clock` is that of `placed_s`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._placed: OrderedDict[str, LocalPlacement] = OrderedDict()
        self._alive: OrderedDict[str, tuple[Alive, float]] = OrderedDict()  # with when it was seen
        self._ended: OrderedDict[str, Completion | None] = OrderedDict()  # None: withdrawn

    def __len__(self) -> int:
        """Requests placed here that have not ended."""
        return len(self._placed)

    def placed(self, request_id: str, placement: LocalPlacement) -> None:
        self._ended.pop(request_id, None)
        _add(self._placed, request_id, placement)

    def withdrawn(self, request_id: str) -> float:
        """The request never ran. Returns its cost; 0 if it was not placed here."""
        placement = self._placed.pop(request_id, None)
        if placement is None:
            return 0.0
        _add(self._ended, request_id, None)
        return placement.cost

    def alive(self, alive: Alive) -> None:
        if alive.accounting_token and self._ended.get(alive.id) is None:
            _add(self._alive, alive.id, (alive, self._clock()))

    def ended(self, completion: Completion, token: str) -> float | None:
        """What the end of a request releases, in the stock's unit: 0 for one that never ran, None if the end
        is known already or the request was withdrawn here, which released its cost.

        `token` is the accounting token, '' if none came with the end.
        """
        if self._ended.get(completion.id) is not None:
            return None
        withdrawn = completion.id in self._ended  # then Envoy has sent it to another replica
        _add(self._ended, completion.id, completion)
        self._alive.pop(completion.id, None)
        placement = self._placed.pop(completion.id, None)
        if withdrawn:
            return None
        return placement.cost if placement is not None else accounting_token.cost_of(token)

    def knows(self, request_id: str) -> bool:
        """Whether the request was seen to run and its end was not."""
        return request_id in self._placed or request_id in self._alive

    def endpoint_of(self, request_id: str) -> str:
        """Where a request was placed, '' if it was not placed here."""
        placement = self._placed.get(request_id)
        return placement.endpoint if placement is not None else ""

    def in_flight(self, since_s: float) -> list[Running]:
        """All requests believed to run: placed here or seen alive since `since_s`.

        Others may have ended at another replica; if they run, the replica that receives their next sign of
        life restores them.
        """
        found = []
        for name, placement in self._placed.items():
            seen_s = self._alive[name][1] if name in self._alive else placement.placed_s
            if seen_s >= since_s:
                found.append(Running(name, placement.attempt, "", placement.accounting_token, seen_s))
        for name, (alive, seen_s) in self._alive.items():
            if name not in self._placed and seen_s >= since_s:
                found.append(Running(name, None, alive.served or "", alive.accounting_token, seen_s))
        return found

    def ends(self) -> list[Completion]:
        """Every end received, oldest first."""
        return [each for each in self._ended.values() if each is not None]


def _add(entries: OrderedDict[str, T], key: str, value: T) -> None:
    entries[key] = value
    if len(entries) > MAX_ENTRIES:
        entries.popitem(last=False)
