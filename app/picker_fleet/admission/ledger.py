"""The ledger: one replica's entries of requests in flight and of requests that ended recently.

`Admission` writes it. Queries on the ledger yield the journal of an outage, the tombstones and the leases to
renew. The ledger holds plain data, which `save` copies. Waiting requests are in the queues, which hold the
futures that end their waits; the ledger may have an earlier placement or end of the same id. `ServiceMeter`
adds up the costs of the requests that this replica has placed.
"""

import enum
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import msgspec

from picker_fleet.domain.request import Alive, Completion
from picker_fleet.state import accounting_token

MAX_ENTRIES = 50_000  # beyond, the oldest entries are forgotten; those requests end with their leases
_SPARE = 5_000  # a search for old entries starts with this many entries above MAX_ENTRIES
_FORGET_S = 1.0  # seconds between searches for old entries
METER_WINDOW_S = 10  # whole seconds summed, before the current one
_MAX_METERED_FLOWS = 5000  # maximum flows counted separately in each second
_MAX_LISTED = 200  # maximum flows in a report
_MAX_LISTED_BYTES = 16_000  # approximate limit for the flow names in a report


class Phase(enum.Enum):
    """The last event of a request that this replica knows of.

    | phase     | event    | next      |                                                                     |
    |-----------|----------|-----------|---------------------------------------------------------------------|
    | (unknown) | place    | PLACED    | this replica placed the request                                     |
    | (unknown) | see      | SEEN      | an access log reports the request; another replica placed it        |
    | (unknown) | end      | ENDED     |                                                                     |
    | PLACED    | withdraw | WITHDRAWN | Envoy never got the placement and may send the request elsewhere    |
    | PLACED    | see      | SEEN      | unless this replica owns its stream or placed it without Redis      |
    | WITHDRAWN | see      | SEEN      | the withdrawal released the budget; the end will not do so again    |
    | any       | place    | PLACED    | a new request with the id, or Envoy's retry                         |
    | any       | end      | ENDED     | further ends and late signs of life change nothing, but the end     |
    |           |          |           | after an answer that was unread is counted                          |
    """

    PLACED = enum.auto()
    SEEN = enum.auto()
    WITHDRAWN = enum.auto()
    ENDED = enum.auto()


class Entry(msgspec.Struct, eq=False):
    """One request. Times are seconds of the ledger's clock.

    attempt: None unless this replica placed the request. owned: this replica has the request's stream, and
    alone renews the lease. token: the accounting token; '' if unknown. traceparent: the parent of later
    spans, if the request is traced and owned. unacknowledged: the attempt of a request that its grant placed,
    until Redis has the acknowledgement. endpoint: where this replica placed the request; served: where it
    runs by an access log. local_cost: the budget of a request placed in the present outage. seen_s: time of
    the last sign of life or the placement. journaled: whether the request was placed, was seen or ended in
    the present outage. withdrawn: this replica withdrew the request. end: the end to report to Redis until
    `confirmed`. unread: the endpoint has sent its answer, but the client may not have read it. published: the
    epoch of the shared state that has the tombstone. restored: another replica restored the request after
    its end. answer_bytes: bytes of the answer so far; silences: lease renewals due since the answer grew,
    in the epoch `renewed` of the shared state.
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
        """Whether the request runs, and this replica placed it without Redis in the present outage."""
        return self.phase is Phase.PLACED and self.local_cost is not None

    def renewal(self, token: str, epoch: str) -> str | None:
        """The accounting token to send with a renewal that is due, `token` or ''; None: do not renew.

        If an answer has begun but has stopped growing, its endpoint may have finished while the client does
        not read. Renew such a lease only every other time, so that a metrics page can prove the end; and
        without token, so that the renewal does not restore the request. In each `epoch` of the shared state
        the first renewal has the token, since the request may have been lost.
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
    """The cost that a request's end releases in an outage; None if the end or this replica's withdrawal has
    already released the cost.

    `entry` is the request's entry before the end, None if unknown; `token` the accounting token, '' if
    unknown. `is_late`: the end before the client read the answer may have released the cost at another
    replica, unless that end came here.
    """
    if entry is not None and entry.phase is Phase.ENDED and (entry.journaled or entry.unread):
        return None
    if entry is None or not (entry.withdrawn or entry.is_local):
        is_released = is_late and not (entry is not None and entry.unread)
        return None if is_released else accounting_token.cost_of(token)
    return None if entry.withdrawn else entry.cost


class Ledger:
    """The entries by request id, least recently changed first. All calls come from one event loop.

    The ledger forgets an entry `keep_s` after its last change, unless the request's end is not confirmed or,
    during an outage, the entry is journaled. The oldest entries beyond MAX_ENTRIES are forgotten too, but no
    entry with an owned stream.
    """

    def __init__(self, clock: Callable[[], float], keep_s: float = 30.0) -> None:
        self._clock = clock
        self.keep_s = keep_s
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._forget_s = 0.0  # time of the next search for old entries
        self._forget_length = MAX_ENTRIES + _SPARE  # a search also begins at this number of entries
        self.in_outage = False

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, request_id: str) -> Entry | None:
        return self._entries.get(request_id)

    # Events

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
        """Record that a request, which was just placed, holds `cost` of the local budget."""
        entry = self._entries[request_id]
        entry.local_cost, entry.journaled = cost, True

    def withdraw(self, entry: Entry) -> None:
        """Record that a placement never reached Envoy."""
        entry.owned = False
        if entry.is_local:
            entry.phase, entry.withdrawn, entry.attempt = Phase.WITHDRAWN, True, None
        elif entry.running and not entry.journaled:
            del self._entries[entry.id]

    def see(self, alive: Alive) -> None:
        """Record an access-log entry of a running request; ignore an entry without accounting token."""
        if not alive.accounting_token:
            return
        entry = self._entries.get(alive.id)
        if entry is None:
            entry = self._entries[alive.id] = Entry(alive.id, Phase.SEEN)
        elif entry.phase is Phase.ENDED:
            return
        elif not (entry.owned or entry.is_local):
            entry.phase, entry.attempt = Phase.SEEN, None  # Redis knows who placed the request
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
        """Record that the endpoint has sent its whole answer to a request that may still run here."""
        self.see(Alive(completion.id, completion.served, completion.accounting_token))
        entry = self._entries.get(completion.id)
        if entry is not None and entry.running:
            entry.unread = True

    def finish(self, completion: Completion, token: str, *, is_reported: bool = True) -> Entry:
        """Record a request's end; `token` is its accounting token, '' if unknown. `is_reported`: a report of
        the end is on its way to Redis, which must confirm it."""
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
        """Record that Redis has confirmed a request's end, or never will. False if that was known."""
        if entry.confirmed:
            return False
        entry.confirmed = True
        if not self.in_outage:
            entry.end = None  # a resync reports each end of the outage again
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

    # Questions

    def owned(self) -> list[Entry]:
        """The requests whose streams this replica owns."""
        return [entry for entry in self._entries.values() if entry.owned]

    def running_by_model(self) -> Counter[str]:
        """The number of placed requests whose streams this replica owns, by the model in the request."""
        return Counter(accounting_token.model_of(entry.token) for entry in self.owned())

    def journal(self) -> list[Entry]:
        """The requests that were placed, were seen or ended in the present outage."""
        return [entry for entry in self._entries.values() if entry.journaled]

    def in_flight(self, since_s: float) -> list[Entry]:
        """The journal's requests that are presumed running: placed here or seen since `since_s`.

        Longer-silent requests may have ended at another replica. If such a request still runs, the replica
        that receives its next sign of life restores it.
        """
        return [entry for entry in self.journal() if entry.running and entry.seen_s >= since_s]

    def ended_since(self, since_s: float) -> list[Entry]:
        """The requests with an accounting token whose end was received since `since_s`."""
        return [
            entry
            for entry in self._entries.values()
            if entry.phase is Phase.ENDED and entry.token and entry.ended_s >= since_s
        ]

    def costs(self, since_s: float) -> dict[str, float]:
        """Request id -> cost of each request that runs here, or was placed or seen since `since_s`."""
        return {
            entry.id: entry.cost
            for entry in self._entries.values()
            if entry.running and (entry.owned or entry.seen_s >= since_s)
        }

    def save(self) -> tuple[Any, ...]:
        """Copy the entries, to compare or restore them; omit running requests that only `costs` reads."""
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
                entry.seen_s = now_s  # the request's stream is open: count it as seen now
            if entry.owned or (beyond <= 0 and (entry.journaled or not entry.confirmed)):
                self._entries[entry.id] = entry  # moves the entry to the end of the dict
            else:
                beyond -= 1
        self._forget_length = max(len(self._entries), MAX_ENTRIES) + _SPARE


class ServiceReport(TypedDict):
    """Sums of the costs placed in the last ten whole seconds, for the replica info (docs/redis-schema.md)."""

    priorities: list[tuple[int, float]]  # priority and cost of each band
    flows: list[tuple[int, str, float]]  # priority, name and cost of the busiest flows
    cut: bool  # whether the field `flows` omits some flows


class ServiceMeter:
    """Sums the costs of placed requests by band and flow, in bounded memory.

    Beyond 5000 flows in one second, a further flow counts for its band only.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._seconds: deque[tuple[int, dict[tuple[int, str], float], dict[int, float]]] = deque()
        self._reported: tuple[int, ServiceReport] | None = None  # second of the last report, and that report

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
        """The sums, computed at most once a second. Callers must not change the result."""
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
