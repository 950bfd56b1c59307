"""One outage of Redis: a replica's requests, budget and unreported ends (G8; docs/redis.md).

The class `Failover` makes an `Outage` when Redis is lost, and drops it once every replica uses Redis again.
"""

import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass

from picker_fleet.admission.ledger import Entry, Ledger, Phase, released_by_end
from picker_fleet.admission.local_gate import LocalGate, LocalPicker
from picker_fleet.admission.peers import EndedCharge
from picker_fleet.admission.quotas import Usage
from picker_fleet.admission.reports import usage_of
from picker_fleet.domain.errors import ScriptFailed
from picker_fleet.domain.request import Alive, Completion, InferenceRequest, Outcome, Placement
from picker_fleet.state import accounting_token
from picker_fleet.state.store import Store

_REPORT_SLACK_S = 1.0  # longest delay, in seconds, of an access-log entry about a running request
_CLOCK_MARGIN_MS = 1000  # two replicas' estimates of Redis's clock differ by at most this
_CHUNK = 512  # maximum renewals in flight at a time; the store sends 16 renewals in a call


def unseen_s(report_s: float) -> float:
    """A resync does not restore a request without an access-log entry for this many seconds. The access log
    has an entry of each running request every `report_s`; the replica that gets the next one restores it."""
    return report_s + _REPORT_SLACK_S


@dataclass(frozen=True, slots=True)
class OutageStatus:
    """An outage as the admin API shows it. Amounts are in the stock's unit.

    The field `mode` is the FailoverState; `bound` is the fleet's bound of the stock, and `share` this
    replica's share of the bound. The field `in_flight` counts requests that this replica placed, that were
    placed or reported running within an access-log interval plus one second, and whose end this replica has
    not received, although another replica may have received that end.
    """

    mode: str
    since_s: float
    bound: float
    share: float
    free: float
    let_go: int  # number of requests that this replica placed in the outage
    in_flight: int
    queued: int
    queue_length: dict[str, int]  # band name -> queued requests


@dataclass(slots=True, eq=False)
class Resync:
    """One attempt to report the requests and ends of an outage to Redis, which answers again."""

    began_s: float
    released: float = 0.0  # budget released by requests that ended since `began_s`
    done: bool = False  # whether Redis has all requests that this replica saw in flight


@dataclass(eq=False)
class Outage:
    """One replica's state from the loss of Redis until all replicas use Redis again.

    gate: the requests that wait here, and the remaining budget for starting requests. picker: chooses
        endpoints, and counts requests by endpoint. ledger: its journaled entries are the requests started,
        seen or ended during the outage; a resync reports each of them once. bound, share: the fleet's bound
        of the stock, and this replica's share of the bound. clock: returns seconds; `began_ms` is the start
        of the outage by Redis's clock. resync: the current attempt to resync; None while Redis is
        unavailable. before: id -> cost of the requests known to run when the outage began; `ended_before` has
        the ids of requests whose end this replica received before the outage. `initial_free` is the free
        budget at the start of the outage, with the budget that requests in the shared queue hold.
    """

    gate: LocalGate
    picker: LocalPicker
    ledger: Ledger
    bound: float
    share: float
    clock: Callable[[], float]
    before: dict[str, float]
    ended_before: frozenset[str]
    began_ms: int
    initial_free: float = 0.0
    resync: Resync | None = None
    resync_attempted: bool = False
    placed: int = 0  # number of requests placed during the outage

    def __post_init__(self) -> None:
        self.began_s = self.clock()
        self.ledger.begin_outage()

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
            in_flight=sum(
                each.attempt is not None for each in self.ledger.in_flight(self.clock() - unseen_s(report_s))
            ),
            queued=self.gate.waiting,
            queue_length=self.gate.lengths(),
        )

    def ended(self, ids: Collection[str]) -> dict[str, EndedCharge]:
        """How the requests `ids` ended whose ends this replica received in this outage."""
        entries = [each for each in map(self.ledger.get, ids) if each is not None and each.journaled]
        return {
            each.id: EndedCharge(each.end.outcome is Outcome.UPSTREAM_FAILED, usage_of(each.end))
            for each in entries
            if each.phase is Phase.ENDED and each.end is not None
        }

    def has_another(self, request: InferenceRequest) -> bool:
        """Whether this replica knows another running request with the id of `request`. A request that ran
        before the outage is another one, since Envoy never repeats a request whose placement it received."""
        if not request.digest:
            return False  # two requests with one id cannot be told apart without digests of their bodies
        entry = self.ledger.get(request.id)
        if entry is None or not entry.is_local:
            seen = entry is not None and entry.running and entry.journaled
            return request.id in self.before or seen
        flow, model = accounting_token.flow_of(entry.token), accounting_token.model_of(entry.token)
        digest = (entry.attempt or "").partition(".")[2]
        return (flow, model, digest) != (request.flow, request.model, request.digest)

    def record_placement(self, request_id: str, placement: Placement, cost: float) -> None:
        self.ledger.place_locally(request_id, cost)
        self.picker.began(placement.endpoints[0])
        self.placed += 1

    def withdraw(self, entry: Entry) -> None:
        """Release the cost of a placement of this outage that never reached Envoy."""
        self.picker.ended(entry.endpoint)
        self.gate.end_charge(entry.id, unserved=True)
        self.gate.release(entry.cost)

    def see(self, alive: Alive) -> None:
        """Record the cost of a request that an access log reports as running, if it ran before the outage."""
        alone_ms = accounting_token.alone_since_ms(alive.accounting_token)
        if alive.accounting_token and (alone_ms is None or alone_ms < self.began_ms + _CLOCK_MARGIN_MS):
            self.before[alive.id] = accounting_token.cost_of(alive.accounting_token)

    def end(self, entry: Entry | None, completion: Completion, token: str) -> bool:
        """Account for a request's end, which its ledger entry `entry` does not yet have. Returns False if
        this replica has accounted for the end before. `token` is the accounting token, '' if unknown."""
        is_local = entry is not None and entry.is_local
        self.picker.ended(
            entry.endpoint if entry is not None and is_local else accounting_token.endpoint_of(token)
        )
        if completion.failed:
            self.picker.failed(completion.failed)
        cost = released_by_end(entry, token, is_late=completion.is_late)
        if cost is None:
            return False
        used = usage_of(completion)
        self.gate.end_charge(
            completion.id,
            unserved=completion.outcome is Outcome.UPSTREAM_FAILED,
            usage=Usage(*used) if used else None,
        )
        released = self.gate.charge(cost)
        if self.resync is not None:
            self.resync.released += released
        self.gate.release(released)
        return True

    async def restore_running(self, store: Store, report_s: float) -> int:
        """Report the running requests to Redis, which restores them. Returns their number.

        Raises:
            StateUnavailable: the connection to Redis is lost again.
            WritesRefused: for now, Redis refuses writes.
        """
        running = self.ledger.in_flight(self.clock() - unseen_s(report_s))
        for at in range(0, len(running), _CHUNK):
            answers = [
                store.renew(each.id, each.attempt, each.served, each.token, self.clock() - each.seen_s)
                for each in running[at : at + _CHUNK]
                if each.running  # some requests may have ended during the resync
            ]
            for answer in answers:
                with contextlib.suppress(ScriptFailed):  # the request's next access-log entry restores it
                    await answer
        return len(running)
