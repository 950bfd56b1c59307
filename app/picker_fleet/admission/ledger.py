"""The ledger: one replica's entries of requests in flight and of requests that ended recently.

`Admission` writes the ledger. Queries on the ledger yield the journal of an outage, the tombstones and the
leases to renew. The ledger holds plain data, which `save` copies. A waiting request is not in the ledger but
in a queue, although the ledger may have an earlier placement or end of the same id. `ServiceMeter` adds up
the costs of the requests that this replica has placed.
"""

import enum
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import msgspec

from picker_fleet.domain.request import Alive, Completion
from picker_fleet.state import accounting_token

MAX_ENTRIES = 50_000  # the ledger forgets the oldest further entries; their requests end with their leases
_SPARE = 5_000  # a search for old entries also starts at this many entries above MAX_ENTRIES
_FORGET_S = 1.0  # seconds between searches for old entries
METER_WINDOW_S = 10  # a report sums the costs of this many whole seconds before the current second
_MAX_METERED_FLOWS = 5000  # maximum flows that are counted separately in one second
_MAX_LISTED = 200  # maximum flows that a report of served costs lists
_MAX_LISTED_BYTES = 16_000  # approximate maximum bytes of the flow names that the report lists


class Phase(enum.Enum):
    """The last event of a request that this replica knows of.

    | phase     | event    | next      |                                                                     |
    |-----------|----------|-----------|---------------------------------------------------------------------|
    | (unknown) | place    | PLACED    | this replica placed the request                                     |
    | (unknown) | see      | SEEN      | an access log reports the request; another replica placed it        |
    | (unknown) | end      | ENDED     | this replica did not know of the request before its end             |
    | PLACED    | withdraw | WITHDRAWN | Envoy never got the placement and may send the request elsewhere    |
    | PLACED    | see      | SEEN      | stays PLACED if this replica owns the stream or placed it alone     |
    | WITHDRAWN | see      | SEEN      | the withdrawal released the budget; the end releases none    |
    | any       | place    | PLACED    | a new request with the same id, or Envoy's retry                    |
    | any       | end      | ENDED     | further ends and late access-log entries change nothing;            |
    |           |          |           | but the end that follows a slowly read answer is counted            |
    """

    PLACED = enum.auto()
    SEEN = enum.auto()
    WITHDRAWN = enum.auto()
    ENDED = enum.auto()


class Entry(msgspec.Struct, eq=False):
    """One request in the ledger. Times are seconds of the ledger's clock.

    attempt: None unless this replica placed the request. owned: this replica has the request's stream, and
    alone renews its lease. token: the accounting token; '' if unknown. traceparent: the parent of later spans
    if the request is traced and owned. unacknowledged: the attempt of a request that its grant placed, until
    Redis has the acknowledgement. endpoint: the endpoint on which this replica placed the request; served:
    the endpoint that the access log names. local_cost: the budget of a request placed in the present outage.
    seen_s: time of the placement or of the last access-log entry. journaled: whether the request was placed,
    was seen or ended in the present outage. withdrawn: this replica withdrew the request. end: the end to
    report to Redis until it is `confirmed`. unread: the endpoint has sent its answer, but the client may not
    have read it. published: the epoch of the shared state that has the request's tombstone. restored:
    another replica restored the request after its end. answer_bytes: bytes of the answer so far; silences:
    lease renewals due since the answer last grew, in the epoch `renewed` of the shared state.
    """

    id: str
    phase: Phase
    attempt: str | None = None
    owned: bool = False
    token: str = ""
    traceparent: str = ""
    unacknowledged: str = ""
    endpoint: str = ""
    served: str = ""
    local_cost: float | None = None
    seen_s: float = 0.0
    ended_s: float = 0.0
    end: Completion | None = None
    confirmed: bool = True
    unread: bool = False
    journaled: bool = False
    withdrawn: bool = False
    published: str = ""
    restored: bool = False
    answer_bytes: int = 0
    silences: int = 0
    renewed: str = ""

    @property
    def running(self) -> bool:
        return self.phase is Phase.PLACED or self.phase is Phase.SEEN

    @property
    def is_local(self) -> bool:
        """Whether the request is running and this replica placed it without Redis in the present outage."""
        return self.phase is Phase.PLACED and self.local_cost is not None

    def renewal(self, token: str, epoch: str) -> str | None:
        """The accounting token to send with a lease renewal that is due: `token` or ''. None: no renewal.

        If an answer has begun but has stopped growing, its endpoint may have finished while the client does
        not read. Renew such a lease only every other time, so that a metrics page can prove the end; and
        without token, so that the renewal does not restore the request. The first renewal in each `epoch` of
        the shared state has the token, since the shared state may have lost the request.
        """
        if epoch != self.renewed:
            self.renewed, self.silences = epoch, 0
        silences = self.silences
        self.silences += self.answer_bytes > 0
        return None if silences % 2 else token if silences == 0 else ""

    @property
    def cost(self) -> float:
        """The request's cost, in the stock's unit."""
        return self.local_cost if self.local_cost is not None else accounting_token.cost_of(self.token)


def released_by_end(entry: Entry | None, token: str, *, is_late: bool = False) -> float | None:
    """The cost that a request's end releases in an outage; None if the end, or a withdrawal by this replica,
    has already released the cost.

    `entry` is the request's entry before the end, None if unknown; `token` is the accounting token, '' if
    unknown. `is_late`: another replica may already have released the cost, when it received the endpoint's
    whole answer before the client had read it.
    """
    if entry is not None and entry.phase is Phase.ENDED and (entry.journaled or entry.unread):
        return None
    if entry is None or not (entry.withdrawn or entry.is_local):
        is_released = is_late and not (entry is not None and entry.unread)
        return None if is_released else accounting_token.cost_of(token)
    return None if entry.withdrawn else entry.cost


class Ledger:
    """The entries of requests by id, least recently changed first. All calls come from one event loop.

    The ledger forgets an entry `keep_s` seconds after its last change, but keeps it while Redis has not
    confirmed the request's end and, during an outage, if it is journaled. The ledger also forgets the oldest
    entries beyond MAX_ENTRIES, but never a request whose stream this replica owns.
    """

    def __init__(self, clock: Callable[[], float], keep_s: float = 30.0) -> None:
        self._clock = clock
        self.keep_s = keep_s
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._forget_s = 0.0  # time of the next search for old entries
        self._forget_length = MAX_ENTRIES + _SPARE  # a search for old entries also begins at this length
        self.in_outage = False

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, request_id: str) -> Entry | None:
        return self._entries.get(request_id)

    # Record events of requests.

    def place(self, request_id: str, attempt: str, token: str, endpoint: str, *, owned: bool) -> Entry:
        """Add the entry of a request that this replica has placed."""
        self._entries.pop(request_id, None)
        now_s = self._clock()
        entry = self._entries[request_id] = Entry(
            request_id, Phase.PLACED, attempt, owned, token, endpoint=endpoint, seen_s=now_s
        )
        self._forget(now_s)
        return entry

    def place_locally(self, request_id: str, cost: float) -> None:
        """Record that a request that was just placed holds `cost` of the local budget."""
        entry = self._entries[request_id]
        entry.local_cost, entry.journaled = cost, True

    def withdraw(self, entry: Entry) -> None:
        """Record that a request's placement never reached Envoy."""
        entry.owned = False
        if entry.is_local:
            entry.phase, entry.withdrawn, entry.attempt = Phase.WITHDRAWN, True, None
        elif entry.running and not entry.journaled:
            del self._entries[entry.id]

    def see(self, alive: Alive) -> None:
        """Record that an access-log entry reports a running request; ignore an entry without token."""
        if not alive.accounting_token:
            return
        entry = self._entries.get(alive.id)
        if entry is None:
            entry = self._entries[alive.id] = Entry(alive.id, Phase.SEEN)
        elif entry.phase is Phase.ENDED:
            return
        elif not (entry.owned or entry.is_local):
            entry.phase, entry.attempt = Phase.SEEN, None  # Redis knows which replica placed the request
        entry.seen_s = self._clock()
        entry.journaled = entry.journaled or self.in_outage
        if entry.phase is Phase.SEEN:
            entry.token, entry.served = alive.accounting_token, alive.served or ""
        self.grow(alive.id, alive.answer_bytes)
        self._entries.move_to_end(alive.id)
        self._forget(entry.seen_s)

    def grow(self, request_id: str, answer_bytes: int) -> None:
        """Record that the endpoint has sent `answer_bytes` of its answer so far."""
        entry = self._entries.get(request_id)
        if entry is not None and answer_bytes > entry.answer_bytes:
            entry.answer_bytes, entry.silences = answer_bytes, 0

    def answer(self, completion: Completion) -> None:
        """Record that the endpoint has sent its whole answer, if the ledger has the request as running."""
        self.see(Alive(completion.id, completion.served, completion.accounting_token))
        entry = self._entries.get(completion.id)
        if entry is not None and entry.running:
            entry.unread = True

    def finish(self, completion: Completion, token: str, *, is_reported: bool = True) -> Entry:
        """Record a request's end; `token` is its accounting token, '' if unknown. `is_reported`: a report of
        the end is on its way to Redis, which must confirm the end."""
        entry = self._entries.get(completion.id)
        if entry is None:
            entry = self._entries[completion.id] = Entry(completion.id, Phase.ENDED)
        entry.phase, entry.owned, entry.end, entry.confirmed = Phase.ENDED, False, completion, not is_reported
        entry.token, entry.unread = token or entry.token, not completion.is_read
        entry.attempt, entry.endpoint, entry.served, entry.seen_s = None, "", "", 0.0
        entry.traceparent = entry.unacknowledged = ""
        entry.ended_s, entry.published = self._clock(), ""
        if self.in_outage:
            entry.journaled, entry.local_cost = True, None
        self._entries.move_to_end(completion.id)
        self._forget(entry.ended_s)
        return entry

    def confirm(self, entry: Entry) -> bool:
        """Record that Redis has confirmed a request's end, or never will; return whether this is new."""
        if entry.confirmed:
            return False
        entry.confirmed = True
        if not self.in_outage:
            entry.end = None  # in an outage the end is kept, since a resync reports it again
        return True

    def begin_outage(self) -> None:
        self.in_outage = True

    def end_outage(self) -> None:
        """Empty the journal. Treat all requests that may still run as seen now."""
        self.in_outage, now_s = False, self._clock()
        for entry in self._entries.values():
            if entry.journaled:
                entry.journaled = entry.withdrawn = False
                entry.local_cost = None
                if entry.running:
                    entry.seen_s = now_s

    # Answer queries.

    def owned(self) -> list[Entry]:
        """The requests whose streams this replica owns."""
        return [entry for entry in self._entries.values() if entry.owned]

    def running_by_model(self) -> Counter[str]:
        """The number of requests whose streams this replica owns, by the model that the request names."""
        return Counter(accounting_token.model_of(entry.token) for entry in self.owned())

    def journal(self) -> list[Entry]:
        """The requests that were placed, were seen or ended in the present outage."""
        return [entry for entry in self._entries.values() if entry.journaled]

    def in_flight(self, since_s: float) -> list[Entry]:
        """The journal's requests that are presumed running: placed here or seen running since `since_s`.

        A request that was last seen earlier may have ended at another replica. If the request still runs, the
        replica that receives its next access-log entry restores it.
        """
        return [entry for entry in self.journal() if entry.running and entry.seen_s >= since_s]

    def ended_since(self, since_s: float) -> list[Entry]:
        """The requests with an accounting token whose end this replica received since `since_s`."""
        return [
            entry
            for entry in self._entries.values()
            if entry.phase is Phase.ENDED and entry.token and entry.ended_s >= since_s
        ]

    def costs(self, since_s: float) -> dict[str, float]:
        """The cost, by request id, of each running request that is owned, or was placed or seen since
        `since_s`."""
        return {
            entry.id: entry.cost
            for entry in self._entries.values()
            if entry.running and (entry.owned or entry.seen_s >= since_s)
        }

    def save(self) -> tuple[Any, ...]:
        """A copy of the entries, to compare or restore. Requests known only by their cost are left out."""
        kept = (each for each in self if each.owned or each.journaled or not each.running)
        return self.in_outage, tuple(msgspec.structs.astuple(entry) for entry in kept)

    def restore(self, saved: tuple[Any, ...]) -> None:
        self.in_outage, entries = saved
        self._entries = OrderedDict((fields[0], Entry(*fields)) for fields in entries)

    def _forget(self, now_s: float) -> None:
        is_due = now_s >= self._forget_s and not self.in_outage
        if not is_due and len(self._entries) < self._forget_length:
            return
        self._forget_s = now_s + _FORGET_S
        beyond = len(self._entries) - MAX_ENTRIES
        for _ in range(len(self._entries)):
            entry = next(iter(self._entries.values()))
            if beyond <= 0 and max(entry.seen_s, entry.ended_s) >= now_s - self.keep_s:
                break
            del self._entries[entry.id]
            if entry.owned:
                entry.seen_s = now_s  # the request's stream is open, so the request counts as seen now
            if entry.owned or (beyond <= 0 and (entry.journaled or not entry.confirmed)):
                self._entries[entry.id] = entry  # moves the entry to the end of the dict
            else:
                beyond -= 1
        self._forget_length = max(len(self._entries), MAX_ENTRIES) + _SPARE


class ServiceReport(TypedDict):
    """The costs placed in the last ten whole seconds, for the replica info (docs/redis-schema.md)."""

    priorities: list[tuple[int, float]]  # the priority and cost of each band
    flows: list[tuple[int, str, float]]  # the band's priority, name and cost of each of the busiest flows
    cut: bool  # whether the field `flows` omits some flows


class ServiceMeter:
    """Sums the costs of placed requests by band and flow, in bounded memory.

    In one second, flows beyond the first 5000 count only for their bands.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._seconds: deque[tuple[int, dict[tuple[int, str], float], dict[int, float]]] = deque()
        self._reported: tuple[int, ServiceReport] | None = None  # (second, the last report made in it)

    def record(self, priority: int, flow: str, cost: float) -> None:
        second = int(self._clock_s())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, {}, {}))
            self._forget(second)
        _, flows, bands = self._seconds[-1]
        bands[priority] = bands.get(priority, 0.0) + cost
        key = priority, flow
        if key in flows or len(flows) < _MAX_METERED_FLOWS:
            flows[key] = flows.get(key, 0.0) + cost

    def report(self) -> ServiceReport:
        """The sums of costs, computed at most once a second. Callers must not change the result."""
        second = int(self._clock_s())
        if self._reported is None or self._reported[0] != second:
            self._reported = second, self._add_up(second)
        return self._reported[1]

    def _add_up(self, second: int) -> ServiceReport:
        self._forget(second)
        bands: Counter[int] = Counter()
        flows: Counter[tuple[int, str]] = Counter()
        for begun, costs, totals in self._seconds:
            if begun != second:
                flows.update(costs)
                bands.update(totals)
        listed: list[tuple[int, str, float]] = []
        room = _MAX_LISTED_BYTES
        for (priority, flow), cost in flows.most_common(_MAX_LISTED):
            room -= len(flow) + 16
            if room < 0:
                break
            listed.append((priority, flow, round(cost, 3)))
        of_bands: list[tuple[int, float]] = [
            (priority, round(cost, 3)) for priority, cost in sorted(bands.items())
        ]
        return {"priorities": of_bands, "flows": listed, "cut": len(listed) < len(flows)}

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] < second - METER_WINDOW_S:
            self._seconds.popleft()
