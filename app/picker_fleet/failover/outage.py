"""One outage: the requests, budget and unreported ends of a replica without Redis (G8; docs/redis.md).

`FailoverGate` makes an `Outage` when Redis is lost, and drops it once every replica uses Redis again.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from picker_fleet.admission.gate import OutageStatus
from picker_fleet.errors import ScriptFailed
from picker_fleet.failover.local_gate import LocalGate, LocalPicker
from picker_fleet.failover.peers import BudgetTransfer
from picker_fleet.request import Alive, Completion, InferenceRequest, Placement
from picker_fleet.state import accounting_token
from picker_fleet.state.store import Store

T = TypeVar("T")

MAX_ENTRIES = 50_000  # of each kind; the journal drops the oldest requests, which end with their leases
_REPORT_SLACK_S = 1.0  # how late an access-log entry of a running request may be
_CHUNK = 512  # renewals in flight at a time; the store sends 16 in a call


def unseen_s(report_s: float) -> float:
    """The silence, in seconds, after which a resync does not restore a request. The access log has an entry
    of each running request every `report_s`, and the replica that receives the next one restores it."""
    return report_s + _REPORT_SLACK_S


@dataclass(frozen=True, slots=True)
class LocalPlacement:
    """A request that this replica placed at `placed_s` without Redis."""

    attempt: str
    accounting_token: str
    endpoint: str
    cost: float
    placed_s: float


class Running(NamedTuple):
    """A request in flight, as a resync reports it to Redis. `attempt` is None unless this replica placed the
    request. `seen_s` is the time of its last sign of life or, without one, of its placement."""

    id: str
    attempt: str | None
    served: str
    accounting_token: str
    seen_s: float


class OutageJournal:
    """Requests seen in flight, and their ends; each end counts once. `placed_s` is in seconds of `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._placed: OrderedDict[str, LocalPlacement] = OrderedDict()
        self._alive: OrderedDict[str, tuple[Alive, float]] = OrderedDict()  # with the time it was seen
        self._ended: OrderedDict[str, Completion | None] = OrderedDict()  # None: withdrawn

    def count_placed(self, since_s: float) -> int:
        """Count the requests placed here and presumed running; peers may have received some of their ends."""
        return sum(each.attempt is not None for each in self.in_flight(since_s))

    def placed(self, request_id: str, placement: LocalPlacement) -> None:
        self._ended.pop(request_id, None)
        _add(self._placed, request_id, placement)

    def withdrawn(self, request_id: str) -> float:
        """Remove a request that never ran. Returns its cost; 0 if it was not placed here."""
        placement = self._placed.pop(request_id, None)
        if placement is None:
            return 0.0
        _add(self._ended, request_id, None)
        return placement.cost

    def alive(self, alive: Alive) -> None:
        if alive.accounting_token and self._ended.get(alive.id) is None:
            _add(self._alive, alive.id, (alive, self._clock()))

    def ended(self, completion: Completion, token: str) -> float | None:
        """Record an end. Returns the cost to release, in the stock's unit: 0 if the request never ran, None
        if the end is known already or the request was withdrawn here, which released its cost.

        `token` is the accounting token; '' if none came with the end.
        """
        if self._ended.get(completion.id) is not None:
            return None
        withdrawn = completion.id in self._ended  # Envoy then sent the request to another replica
        _add(self._ended, completion.id, completion)
        self._alive.pop(completion.id, None)
        placement = self._placed.pop(completion.id, None)
        if withdrawn:
            return None
        return placement.cost if placement is not None else accounting_token.cost_of(token)

    def knows(self, request_id: str) -> bool:
        return request_id in self._placed or request_id in self._alive

    def placement_of(self, request_id: str) -> LocalPlacement | None:
        """The placement of a request; None if the request was not placed here, or has ended."""
        return self._placed.get(request_id)

    def has_ended(self, request_id: str) -> bool:
        return request_id in self._ended

    def endpoint_of(self, request_id: str) -> str:
        """The endpoint of a request placed here; '' for any other request."""
        placement = self._placed.get(request_id)
        return placement.endpoint if placement is not None else ""

    def in_flight(self, since_s: float) -> list[Running]:
        """All requests presumed running: placed here or seen alive since `since_s`.

        Longer-silent requests may have ended at another replica. If such a request runs, the replica that
        receives its next sign of life restores it.
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

    def costs(self) -> list[tuple[str, float]]:
        """Id and cost of each request that was placed or seen alive here and has not ended."""
        seen = [
            (name, accounting_token.cost_of(alive.accounting_token))
            for name, (alive, _) in self._alive.items()
        ]
        return seen + [(name, placement.cost) for name, placement in self._placed.items()]

    def ends(self) -> list[Completion]:
        """Every end received, oldest first."""
        return [each for each in self._ended.values() if each is not None]

    def save(self) -> tuple[Any, ...]:
        """A comparable copy of all entries."""
        return tuple(self._placed.items()), tuple(self._alive.items()), tuple(self._ended.items())

    def restore(self, saved: tuple[Any, ...]) -> None:
        self._placed, self._alive, self._ended = map(OrderedDict, saved)


def _add(entries: OrderedDict[str, T], key: str, value: T) -> None:
    entries[key] = value
    if len(entries) > MAX_ENTRIES:
        entries.popitem(last=False)


@dataclass(slots=True, eq=False)
class Resync:
    """One attempt to report the requests and ends of an outage to Redis, which answers again."""

    began_s: float
    released: float = 0.0  # budget released by ends received since `began_s`, which Redis receives as well
    done: bool = False  # Redis has all requests this replica saw in flight; peers may still resync


@dataclass(eq=False)
class Outage:
    """One replica's state from the loss of Redis until all replicas use Redis again.

    gate: the requests that wait here, and the remaining budget for starting requests.
    picker: chooses their endpoints, and counts requests by endpoint.
    transfer: gets budget from the other replicas while requests wait.
    journal: requests started and ended during the outage, each reported to Redis once on resync.
    bound, share: the fleet's bound of the stock, and this replica's share of the bound.
    clock: in seconds; `began_ms` is the start of the outage by the clock of the shared state.
    resync: the current attempt; None while Redis is unavailable.
    before: id -> cost of the requests known to run when the outage began; `ended_before` has the ids whose
        end this replica had received by then. `initial_free` is the budget at the start.
    """

    gate: LocalGate
    picker: LocalPicker
    transfer: BudgetTransfer
    bound: float
    share: float
    clock: Callable[[], float]
    before: dict[str, float]
    ended_before: frozenset[str]
    began_ms: int
    resync: Resync | None = None
    resync_attempted: bool = False
    placed: int = 0  # requests placed during the outage

    def __post_init__(self) -> None:
        self.initial_free, self.began_s = self.gate.free, self.clock()
        self.journal = OutageJournal(self.clock)

    @property
    def resynced(self) -> bool:
        return self.resync is not None and self.resync.done

    def status(self, mode: str, report_s: float) -> OutageStatus:
        return OutageStatus(
            mode=mode,
            since_s=round(self.clock() - self.began_s, 3),
            bound=self.bound,
            share=self.share,
            free=self.gate.free,
            let_go=self.placed,
            in_flight=self.journal.count_placed(self.clock() - unseen_s(report_s)),
            queued=self.gate.waiting,
            queue_length=self.gate.lengths(),
        )

    def has_another(self, request: InferenceRequest) -> bool:
        """Whether this replica knows another running request with the same id. A request that ran before the
        outage counts as another: Envoy never repeats a request after it has received the placement."""
        placed = self.journal.placement_of(request.id)
        if not request.digest:
            return False  # without a digest two requests cannot be distinguished
        if placed is None:
            return request.id in self.before or self.journal.knows(request.id)
        fields = placed.accounting_token.split("\t")
        same = fields[0], accounting_token.model_of(placed.accounting_token), placed.attempt.partition(".")[2]
        return same != (request.flow, request.model, request.digest)

    def record_placement(self, request_id: str, placement: Placement, cost: float) -> None:
        endpoint = placement.endpoints[0]
        token = placement.accounting_token
        self.journal.placed(
            request_id, LocalPlacement(placement.attempt, token, endpoint, cost, self.clock())
        )
        self.picker.began(endpoint)
        self.placed += 1

    def withdraw(self, request_id: str) -> None:
        self.picker.ended(self.journal.endpoint_of(request_id))
        self.gate.release(self.journal.withdrawn(request_id))

    def end(self, completion: Completion, token: str) -> bool:
        """Account for an end and release its cost; False if the end is known already.

        `token` is the accounting token; '' if none came with the end.
        """
        self.picker.ended(self.journal.endpoint_of(completion.id) or accounting_token.endpoint_of(token))
        if completion.failed:
            self.picker.failed(completion.failed)
        cost = self.journal.ended(completion, token)
        if cost is None:
            return False
        released = self.gate.charge(cost)
        if self.resync is not None:
            self.resync.released += released
        self.gate.release(released)
        return True

    async def restore_running(self, store: Store, report_s: float) -> int:
        """Report the running requests to the shared state. Returns their number.

        `report_s` is the access log's interval between entries of a running request.

        Raises:
            StateUnavailable: Redis is lost again.
            WritesRefused: Redis takes no writes for now.
        """
        running = self.journal.in_flight(self.clock() - unseen_s(report_s))
        for at in range(0, len(running), _CHUNK):
            answers = [
                store.renew(
                    each.id, each.attempt, each.served, each.accounting_token, self.clock() - each.seen_s
                )
                for each in running[at : at + _CHUNK]
            ]
            for answer in answers:
                with contextlib.suppress(ScriptFailed):  # the next sign of life restores that request
                    await answer
        return len(running)
