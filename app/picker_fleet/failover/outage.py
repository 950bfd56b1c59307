"""One outage: what a replica knows and owes while Redis is away (G8; docs/without-redis.md).

`FailoverGate` makes an `Outage` when Redis is lost and drops it, with all that it owns, when every replica is
back.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from picker_fleet.admission import accounting_token
from picker_fleet.errors import ScriptFailed
from picker_fleet.failover.journal import LocalPlacement, OutageJournal, unseen_s
from picker_fleet.failover.local_gate import LocalGate, LocalPicker
from picker_fleet.failover.peers import BudgetTransfer
from picker_fleet.request import Completion, Placement
from picker_fleet.state.store import Store

_CHUNK = 512  # requests on their way at a time; the store sends 16 a call


@dataclass(frozen=True, slots=True)
class OutageStatus:
    """An outage as the admin API shows it. Amounts are in the stock's unit.

    `mode` is the FailoverState; `bound` the fleet's, of which `share` is this replica's part. `in_flight`
    counts the requests placed here whose end was not received here; another replica may have received it.
    """

    mode: str
    since_s: float
    bound: float
    share: float
    free: float
    let_go: int  # requests placed here
    in_flight: int
    queued: int
    queue_length: dict[str, int]  # by band


@dataclass(slots=True, eq=False)
class Resync:
    """One attempt to tell Redis, which answers again, what happened without it."""

    began_s: float
    released: float = 0.0  # by ends received since, which Redis is told of as well
    done: bool = False  # Redis has all that runs; other replicas may still resync


class Outage:
    """What one replica knows and owes from the loss of Redis until all replicas are back.

    gate: the requests that wait here, and the budget that this replica may still start requests with.
    picker: chooses their endpoints, and counts what runs where.
    transfer: gets budget from the other replicas while requests wait.
    journal: requests started and ended meanwhile, to be told to Redis on resync, each once.
    resync: the present attempt; None while Redis is away.
    """

    def __init__(
        self,
        gate: LocalGate,
        picker: LocalPicker,
        transfer: BudgetTransfer,
        bound: float,
        share: float,
        clock: Callable[[], float],
    ) -> None:
        self.gate, self.picker, self.transfer = gate, picker, transfer
        self.journal = OutageJournal(clock)
        self.resync: Resync | None = None
        self.began_s = clock()
        self._clock = clock
        self._bound, self._share = bound, share
        self._placed = 0

    @property
    def resynced(self) -> bool:
        return self.resync is not None and self.resync.done

    def status(self, mode: str) -> OutageStatus:
        return OutageStatus(
            mode=mode,
            since_s=round(self._clock() - self.began_s, 3),
            bound=self._bound,
            share=self._share,
            free=self.gate.free,
            let_go=self._placed,
            in_flight=len(self.journal),
            queued=self.gate.waiting,
            queue_length=self.gate.lengths(),
        )

    def record_placement(self, request_id: str, placement: Placement, cost: float) -> None:
        endpoint = placement.endpoints[0]
        token = placement.accounting_token
        self.journal.placed(
            request_id, LocalPlacement(placement.attempt, token, endpoint, cost, self._clock())
        )
        self.picker.began(endpoint)
        self._placed += 1

    def withdraw(self, request_id: str) -> None:
        """The request never ran."""
        self.picker.ended(self.journal.endpoint_of(request_id))
        self.gate.release(self.journal.withdrawn(request_id))

    def end(self, completion: Completion, token: str) -> bool:
        """Account for an end and release its cost; False if the end is known already.

        `token` is the accounting token, '' if none came with the end.
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
        """Tell the shared state of the requests that run; how many those are.

        `report_s` is how often the access log gives a sign of life.

        Raises:
            StateUnavailable: Redis is lost again.
            WritesRefused: it takes no writes for now.
        """
        running = self.journal.in_flight(self._clock() - unseen_s(report_s))
        for at in range(0, len(running), _CHUNK):
            answers = [
                store.renew(
                    each.id, each.attempt, each.served, each.accounting_token, self._clock() - each.seen_s
                )
                for each in running[at : at + _CHUNK]
            ]
            for answer in answers:
                with contextlib.suppress(ScriptFailed):  # the request's next sign of life is told again
                    await answer
        return len(running)
