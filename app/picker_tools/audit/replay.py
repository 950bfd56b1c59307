"""A pool's state as rebuilt from its decision log: requests, flow queues and the settings in force.

The audit's checks read the rebuilt state before the replay applies each entry. If the log begins after the
pool's first decision, the replay ignores requests that began before the log; checks that depend on these
requests start once the last of them has left.
"""

import enum
import math
from dataclasses import dataclass
from typing import Any

import msgspec

from picker_fleet.domain.bands import NAMED
from picker_fleet.domain.request import largest_claim
from picker_tools.audit.flow_queues import FlowQueues
from picker_tools.audit.log import CHARGES, ENDS, THROTTLING, Entry, EntryError
from picker_tools.audit.nodes import Nodes


class BandLimits(msgspec.Struct, frozen=True):
    """The limits of the band with `priority`: maximum waiting requests, and maximum bytes of their bodies."""

    priority: int
    capacity: float = math.inf
    bytes: float = math.inf


class Tenants(msgspec.Struct, frozen=True):
    """The setting that makes each flow a path in a tree of tenants; `separator` divides the path's names."""

    separator: str


class Rules(msgspec.Struct, frozen=True):
    """The settings of order and capacity in a `tuned` entry (docs/redis-schema.md, `base`).

    Settings that the entry lacks have the scripts' defaults.
    """

    fairness: str = "weighted-fair"
    ordering: str = "fcfs"
    band_policy: str = "strict"
    guard_share: float = 0.0
    starvation_ms: int = 0  # a request is overdue after this many ms; 0: after half of its TTL
    upper_per: float = 0.0
    weights: dict[str, float] = {}
    adaptive: bool = False  # if true, both bounds are the sum of the ready endpoints' limits
    caps: dict[str, int] = {}  # endpoint -> its limit of requests
    default_cap: float = math.inf  # the limit of requests of each endpoint that is not in `caps`
    prefill_caps: dict[str, int] = {}  # endpoint -> its limit of prefills
    default_prefill_cap: float = math.inf
    token_caps: dict[str, int] = {}  # endpoint -> its limit in tokens
    default_token_cap: float = math.inf
    bands: tuple[BandLimits, ...] = tuple(BandLimits(band.priority) for band in NAMED)  # named bands first
    paused: bool = False
    # The largest part of the stock's upper bound that one request may take.
    claim_share: float = msgspec.field(default=1.0, name="largest_claim")
    queues: bool = msgspec.field(default=True, name="queue_enabled")  # if false, requests take no stock
    log_max: float = 1  # maximum number of log entries; 0 ends the log
    tenants: Tenants | None = None

    @classmethod
    def parse(cls, note: str) -> "Rules":
        """Parse the settings in `note`, a JSON object.

        Raises:
            EntryError: the text `note` is no JSON object, or a value has the wrong type.
        """
        try:
            settings = msgspec.json.decode(note, type=dict[str, Any])
            # Lua may encode an empty table as an empty list.
            given = {name: value for name, value in settings.items() if value not in ([], None)}
            return msgspec.convert(given, cls, strict=False)
        except msgspec.MsgspecError as fault:
            raise EntryError(f"settings cannot be read: {fault}") from None

    @property
    def separator(self) -> str:
        """The separator of the names in a flow's path; '' if flows form no tree."""
        return self.tenants.separator if self.tenants and self.fairness != "none" else ""

    def flow_key(self, flow: str) -> str:
        """The name of the flow queue for `flow`: the flow itself, or '' if each band has only one queue."""
        return "" if self.fairness == "none" else flow

    def share(self, entry: Entry) -> float:
        """The share that serving the request in `entry` charges to its flow."""
        if self.fairness == "round-robin":
            return 1.0
        if self.fairness == "none":
            return entry.cost
        return entry.cost / (self.weights.get(entry.flow) or entry.weight)

    def due_ms(self, entry: Entry) -> int:
        """The time (ms) at which the request in `entry` becomes overdue."""
        arrived_ms = entry.arrived // 1000
        patience_ms = self.starvation_ms or (entry.deadline_ms - arrived_ms) // 2
        return min(arrived_ms + patience_ms, entry.deadline_ms)

    def ready(self, upper: float) -> int | None:
        """The number of ready endpoints that gives the upper bound `upper`; None if unknown.

        If endpoints have different limits, the result is the largest number that may give `upper`.
        """
        found = [self.default_cap, *self.caps.values()]
        if self.default_token_cap < math.inf:
            found = [self.default_token_cap, *self.token_caps.values()]
        least = min(found) if self.adaptive else self.upper_per
        return round(upper / least) if least > 0 else None

    def limits_at(self, priority: int) -> BandLimits:
        """The limits of the next configured band at or below `priority`; else those of the lowest band."""
        at_or_below = [band for band in self.bands if band.priority <= priority]
        if at_or_below:
            return max(at_or_below, key=lambda band: band.priority)
        return min(self.bands, key=lambda band: band.priority)

    def orders_like(self, other: "Rules | None") -> bool:
        """Whether waiting requests have the same flow queues and order under the settings `other`."""
        return other is not None and self._order == other._order

    @property
    def _order(self) -> tuple[str, str, str]:
        return self.fairness, self.ordering, self.separator


class RequestState(enum.StrEnum):
    """The states of a request. `ORPHANED`: the request waits, but the replica with its stream is silent."""

    ABSENT = "absent"
    QUEUED = "queued"
    ORPHANED = "orphaned"
    GRANTED = "granted"
    PLACED = "placed"


_PRESENT = frozenset(RequestState) - {RequestState.ABSENT}
RUNNING = frozenset({RequestState.GRANTED, RequestState.PLACED})
_WAITING = frozenset({RequestState.QUEUED, RequestState.ORPHANED})

# Event -> the states of a request in which the event may happen to the request.
STATES_BEFORE: dict[str, frozenset[RequestState]] = {
    "queued": frozenset({RequestState.ABSENT}),
    "bypassed": frozenset({RequestState.ABSENT}),
    "restored": frozenset({RequestState.ABSENT}),
    "refused": frozenset({RequestState.ABSENT, RequestState.GRANTED}),
    "granted": frozenset({RequestState.QUEUED}),
    "placed": frozenset({RequestState.GRANTED}),
    "requeued": frozenset({RequestState.GRANTED}),
    "orphaned": frozenset({RequestState.QUEUED}),
    "adopted": _PRESENT,
    "moved": frozenset({RequestState.PLACED}),
    "prefilled": frozenset({RequestState.PLACED}),
    "corrected": RUNNING,
    "completed": RUNNING,
    "client_gone": RUNNING,
    "upstream_failed": RUNNING,
    "reclaimed": RUNNING,
    "withdrawn": _PRESENT,
    "cancelled": _PRESENT,
    "expired": _WAITING | {RequestState.GRANTED},
    "abandoned": frozenset({RequestState.ORPHANED}),
    "preempted": frozenset({RequestState.QUEUED}),
    "evicted": _WAITING,
    **dict.fromkeys(CHARGES, frozenset(RequestState)),
}
_STATE_AFTER = {
    "queued": RequestState.QUEUED,
    "requeued": RequestState.QUEUED,
    "orphaned": RequestState.ORPHANED,
    "granted": RequestState.GRANTED,
    "placed": RequestState.PLACED,
    "bypassed": RequestState.PLACED,
    "restored": RequestState.PLACED,
}


def state_after(event: str, before: RequestState) -> RequestState:
    if event in ENDS:
        return RequestState.ABSENT
    if event == "adopted" and before is RequestState.ORPHANED:
        return RequestState.QUEUED
    return _STATE_AFTER.get(event, before)


@dataclass(slots=True)
class OpenRequest:
    """A request that has begun and has not ended.

    `flow_key` names the request's last flow queue; `stock_taken` is the stock that the request holds (None if
    unknown). `grant_entry` is the log entry of its grant, whose start tag is where the charge began.
    """

    first_entry: Entry
    state: RequestState
    flow_key: str
    stock_taken: float | None = 0.0
    endpoint: str = ""
    prefill: str = ""  # the endpoint that computes the prompt; '' without one, or once it is done
    grant_entry: Entry | None = None

    @property
    def queue_key(self) -> tuple[int, str]:
        return self.first_entry.band, self.flow_key

    @property
    def charge_entry(self) -> Entry:
        """The log entry of the request's grant; without a grant, the entry of its beginning."""
        return self.grant_entry or self.first_entry


@dataclass(frozen=True, slots=True)
class Step:
    """A log entry and its request's transition; `request` is None if the replay does not know the request."""

    entry: Entry
    request: OpenRequest | None
    before: RequestState
    after: RequestState

    @property
    def enters_queue(self) -> bool:
        return self.after is RequestState.QUEUED and self.before is not RequestState.QUEUED

    @property
    def leaves_queue(self) -> bool:
        return self.before is RequestState.QUEUED and self.after is not RequestState.QUEUED

    @property
    def takes_stock(self) -> bool:
        return self.after in RUNNING and self.before not in RUNNING

    @property
    def returns_stock(self) -> bool:
        return self.before in RUNNING and self.after not in RUNNING


def same(left: float, right: float) -> bool:
    """Whether two numbers are equal apart from rounding."""
    return math.isclose(left, right, rel_tol=1e-12, abs_tol=1e-9)


def largest_bound(restored: Entry) -> float:
    """The upper bound if all endpoints were ready, from the note of a restored request's log entry.

    Raises:
        EntryError: the entry's note is no finite number.
    """
    if not math.isfinite(restored.number):
        raise EntryError(f"entry {restored.seq}: note is {restored.note[:80]!r}")
    return restored.number


class Replay:
    """The pool's state after the log entries so far. Call `advance` once the checks have seen a step.

    requests: open requests by id. rules: the settings in force; None while unknown. nodes: the tenants'
    settings in force. waiting, orphaned, running: the number of known requests in that state. stock, queued:
    the values in the last entry; None before the first entry. reordering: requests that waited when the order
    changed. The log does not show when the sweep reorders a request in `reordering`, so the checks do not
    check order while such a request waits.
    """

    def __init__(self, rules: Rules | None = None) -> None:
        self.requests: dict[str, OpenRequest] = {}
        self.flow_queues = FlowQueues(rules.separator if rules else "")
        self.rules = rules
        self.nodes = Nodes()
        self.reordering: set[str] = set()
        self.orphaned = 0
        self.stock: float | None = None
        self.queued: int | None = None
        self.last: Entry | None = None
        self.complete = False  # whether the log begins with the pool's first decision
        self.waiting = 0
        self._in_use = 0.0  # the stock that known requests hold
        self._unseen_waiting = True  # whether requests from before the log may wait
        self._unseen_running = True

    @property
    def settled(self) -> bool:
        """Whether the replay knows all flow queues and their order, so that the checks can rely on them."""
        return self.rules is not None and not self.reordering and not self._unseen_waiting

    @property
    def running(self) -> int:
        return len(self.requests) - self.waiting - self.orphaned

    @property
    def has_unseen_requests(self) -> bool:
        """Whether the pool may have a request that began before the log."""
        return self._unseen_waiting or self._unseen_running

    def step(self, entry: Entry) -> Step:
        """The transition of a request's state that `entry` causes. An event that is impossible in the
        request's state changes nothing, unless it ends the request."""
        if self.last is None:
            self._join(entry)
        if not entry.request:
            return Step(entry, None, RequestState.ABSENT, RequestState.ABSENT)
        request = self.requests.get(entry.request)
        before = request.state if request else RequestState.ABSENT
        if request is None and self._is_unseen_entering(entry):
            after = RequestState.QUEUED
        elif before in STATES_BEFORE[entry.event] or (request and entry.event in ENDS):
            after = state_after(entry.event, before)
        else:
            after = before
        if request is None and after is not RequestState.ABSENT:
            request = OpenRequest(entry, RequestState.ABSENT, self._flow_key(entry))
        return Step(entry, request, before, after)

    def stock_after(self, step: Step) -> float | None:
        """The stock that the pool must have after `step`; None if unknown."""
        if self.stock is None:
            return None
        if step.takes_stock:
            return self.stock + self._stock_taken_by(step.entry)
        if step.returns_stock and step.request:
            taken = step.request.stock_taken
            return None if taken is None else max(0.0, self.stock - taken)
        if step.request is None and step.entry.request and self._unseen_running:
            return None  # a request that the replay does not know has ended
        return self.stock

    def queued_after(self, step: Step) -> int | None:
        """The number of queued requests that the pool must have after `step`; None if unknown."""
        if self.queued is None or (step.request is None and step.entry.request and self._unseen_waiting):
            return None
        return self.queued + step.enters_queue - step.leaves_queue

    def advance(self, step: Step) -> None:
        """Apply `step` to the rebuilt state."""
        entry, request = step.entry, step.request
        was_settled = self.settled
        if entry.flow or entry.event == "rebased":
            self.flow_queues.priorities[entry.band] = entry.priority
        if entry.event == "tuned":
            self._tune(Rules.parse(entry.note))
        elif entry.event == "tenant":
            self.nodes.change(entry)
        elif entry.event == "collected":
            self.flow_queues.collect(entry.band)
        elif entry.event in THROTTLING:
            queue = self.flow_queues.at((entry.band, entry.flow))
            self.flow_queues.set_throttled(queue, entry.event == "throttled")
        elif request is not None:
            self._move(step, request)
        self.stock, self.queued, self.last = entry.stock, entry.queued, entry
        if self._unseen_waiting and self.waiting == entry.queued:
            self._unseen_waiting = False
        if self._unseen_running and not self._unseen_waiting and same(self._in_use, entry.stock):
            self._unseen_running = False
        if self.settled and not was_settled:
            self.flow_queues.unthrottle_empty()

    def lose(self, request_id: str) -> None:
        """Forget a request that the pool has lost."""
        request = self.requests.pop(request_id)
        if request.state is RequestState.QUEUED:
            self._leave(request_id, request)
        self._in_use -= request.stock_taken or 0.0

    def _stock_taken_by(self, entry: Entry) -> float:
        """How much of the pool's stock, the requests or tokens in flight, the request in `entry` takes."""
        rules = self.rules or Rules()
        if not rules.queues:
            return 0.0
        bound = largest_bound(entry) if entry.event == "restored" else entry.upper
        return min(entry.cost, largest_claim(rules.claim_share, bound))

    def _join(self, entry: Entry) -> None:
        """Decide by the first entry whether the pool was empty before the log."""
        first = Step(entry, None, RequestState.ABSENT, state_after(entry.event, RequestState.ABSENT))
        stock = self._stock_taken_by(entry) if first.takes_stock else 0.0
        if entry.seq == 1 and same(entry.stock, stock) and entry.queued == first.enters_queue:
            self.complete = True
            self._unseen_waiting = self._unseen_running = False
            self.stock, self.queued = 0.0, 0

    def _is_unseen_entering(self, entry: Entry) -> bool:
        """Whether `entry` returns an orphaned or granted request, which was not seen before, to the queue."""
        return (
            not self.complete
            and entry.event in ("adopted", "requeued")
            and self.queued is not None
            and entry.queued == self.queued + 1
        )

    def _flow_key(self, entry: Entry) -> str:
        return self.rules.flow_key(entry.flow) if self.rules else entry.flow

    def _tune(self, rules: Rules) -> None:
        if not rules.orders_like(self.rules):
            self.reordering = {
                name for name, request in self.requests.items() if request.state is RequestState.QUEUED
            }
            if self.reordering or rules.separator != self.flow_queues.separator:
                self.flow_queues.clear()
        self.rules = rules
        self.flow_queues.separator = rules.separator
        self.flow_queues.priorities |= enumerate(band.priority for band in rules.bands[: len(NAMED)])

    def _move(self, step: Step, request: OpenRequest) -> None:
        entry = step.entry
        if step.leaves_queue:
            self._leave(entry.request, request)
        if step.returns_stock:
            self._in_use -= request.stock_taken or 0.0
            request.stock_taken, request.endpoint, request.prefill = 0.0, "", ""
        if step.takes_stock:
            shown = None if self.stock is None else entry.stock - self.stock
            stock_taken = self._stock_taken_by(entry)
            request.stock_taken = stock_taken if shown is None or same(shown, stock_taken) else shown
            self._in_use += request.stock_taken
        if step.enters_queue:
            self._enter(entry, request)
        if entry.event == "granted":
            request.grant_entry = entry
        if step.after is RequestState.PLACED and entry.event in ("bypassed", "placed", "restored", "moved"):
            request.endpoint = entry.endpoint
            request.prefill = entry.prefill
        if entry.event == "prefilled":
            request.prefill = ""
        self.orphaned += (step.after is RequestState.ORPHANED) - (step.before is RequestState.ORPHANED)
        request.state = step.after
        if step.after is RequestState.ABSENT:
            self.requests.pop(entry.request, None)
        else:
            self.requests[entry.request] = request
        if not self.running:
            self._in_use = 0.0  # without requests no stock is in use: drop rounding errors

    def _enter(self, entry: Entry, request: OpenRequest) -> None:
        request.flow_key = self._flow_key(entry)
        queue = self.flow_queues.at((entry.band, request.flow_key))
        if entry.tag is not None and entry.event != "requeued":
            self.flow_queues.set_throttled(queue, False)  # a flow that becomes backlogged is not throttled
        self.flow_queues.wait(queue, 1)
        self.waiting += 1

    def _leave(self, request_id: str, request: OpenRequest) -> None:
        self.waiting -= 1
        if request_id in self.reordering:
            self.reordering.discard(request_id)
            return
        queue = self.flow_queues.at(request.queue_key)
        self.flow_queues.wait(queue, -1)
        if not queue.waiting and self.settled:
            self.flow_queues.set_throttled(queue, False)
