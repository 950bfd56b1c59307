"""The checks of G1 (capacity), G4 (order), G5 (deadlines) and G6 (conservation)."""

import heapq
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from picker_tools.audit.log import CHARGES, ENDS, GUARD, Entry
from picker_tools.audit.replay import (
    RUNNING,
    STATES_BEFORE,
    Replay,
    RequestState,
    Step,
    largest_bound,
    same,
)

KEPT = 50  # maximum violations that a finding keeps; it counts all violations


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise: a description, and the log entries that prove the violation."""

    promise: str
    what: str
    evidence: tuple[Entry, ...]


@dataclass(slots=True)
class Finding:
    """The audit's result for one promise: number, title, and how often it was checked and was broken."""

    promise: str
    title: str
    checked: int = 0
    broken: int = 0
    violations: list[Violation] = field(default_factory=list)

    def add(self, what: str, *evidence: Entry) -> None:
        self.broken += 1
        if len(self.violations) < KEPT:
            self.violations.append(Violation(self.promise, what, evidence))


class Check:
    """The check of one promise. The method `check` sees each step before the replay applies the step."""

    PROMISE = ""
    TITLE = ""  # the promise in one line

    def __init__(self, finding: Finding, replay: Replay) -> None:
        self._finding = finding
        self._replay = replay

    def check(self, step: Step) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Complete the check after the last step."""

    def _with_previous(self, entry: Entry) -> list[Entry]:
        return [self._replay.last, entry] if self._replay.last else [entry]


class Capacity(Check):
    """Checks G1 whenever a request takes stock or an endpoint. No other event raises these counts, so the
    check covers all times.

    A limit that the fleet has found counts from its `tuned` entry on. Running requests may exceed a newly
    found limit, but while they do, no request may be admitted.

    Requests that are restored, that Envoy moved to a fallback, or that return to the queue are counted, too.
    No limit is checked for these four kinds of requests, since they were admitted before.
    """

    PROMISE = "G1"
    TITLE = "stock within its bound; endpoints, flows and bands within their limits"

    def __init__(self, finding: Finding, replay: Replay) -> None:
        super().__init__(finding, replay)
        self._in_flight: Counter[str] = Counter()  # flow with a limit -> its granted and placed requests
        self._placed: Counter[tuple[str, str]] = Counter()  # (flow with a limit, endpoint) -> placed requests
        self._on: Counter[str] = Counter()  # endpoint -> number of all placed requests
        self._prefilling: Counter[str] = Counter()  # endpoint -> number of prefills in flight
        self._waiting: Counter[int] = Counter()  # band -> number of waiting requests
        self._waiting_bytes: Counter[int] = Counter()  # band -> bytes of waiting requests' bodies

    def check(self, step: Step) -> None:
        entry, request = step.entry, step.request
        if request is None:
            return
        if step.enters_queue or step.leaves_queue:
            first, change = request.first_entry, 1 if step.enters_queue else -1
            self._waiting[first.band] += change
            self._waiting_bytes[first.band] += change * first.body_bytes
            if entry.event == "queued":
                self._check_band(entry)
        if step.takes_stock:
            self._count(self._in_flight, entry, entry.flow, 1)
            if entry.event != "restored":
                self._check_take(entry)
        elif step.returns_stock:
            self._count(self._in_flight, entry, entry.flow, -1)
        if request.endpoint and (step.returns_stock or entry.event == "moved"):
            self._count(self._placed, entry, (entry.flow, request.endpoint), -1)
            self._on[request.endpoint] -= 1
            if self._on[request.endpoint] <= 0:
                del self._on[request.endpoint]
        is_new_place = step.before is not RequestState.PLACED or entry.event == "moved"
        if entry.endpoint and step.after is RequestState.PLACED and is_new_place:
            self._count(self._placed, entry, (entry.flow, entry.endpoint), 1)
            self._on[entry.endpoint] += 1
            if entry.event not in ("restored", "moved"):
                self._check_placement(entry)
        self._check_prefill(step, request.prefill)

    def _check_prefill(self, step: Step, reserved: str) -> None:
        """Check the reservation of a prefill endpoint; `reserved` is the endpoint reserved before the entry.
        Every entry of a placed request names its prefill endpoint until the prefill or the request ends."""
        entry = step.entry
        if step.before is not RequestState.PLACED:
            if step.after is RequestState.PLACED and entry.prefill:
                self._prefilling[entry.prefill] += 1
                rules, count = self._replay.rules, self._prefilling[entry.prefill]
                if rules is not None and count > (
                    most := rules.prefill_caps.get(entry.prefill, rules.default_prefill_cap)
                ):
                    what = f"{count} prefills on {entry.prefill}, {most:g} allowed"
                    self._finding.add(f"endpoint limit passed: {what}", entry)
            return
        if entry.prefill != reserved and entry.event not in CHARGES:
            what = f"prefill on {entry.prefill or 'no endpoint'}, reserved on {reserved or 'none'}"
            self._finding.add(what, *self._with_previous(entry))
        if reserved and (entry.event == "prefilled" or step.returns_stock):
            self._prefilling[reserved] -= 1

    def _check_band(self, entry: Entry) -> None:
        rules = self._replay.rules
        if rules is None:
            return
        self._finding.checked += 1
        limits, count = rules.limits_at(entry.priority), self._waiting[entry.band]
        size_bytes = self._waiting_bytes[entry.band]
        where = f"priority {entry.priority}"
        if count > limits.capacity:
            self._finding.add(f"{count} requests wait in {where}, {limits.capacity:g} allowed", entry)
        if size_bytes > limits.bytes:
            self._finding.add(f"{size_bytes} bytes wait in {where}, {limits.bytes:.0f} allowed", entry)

    def _check_take(self, entry: Entry) -> None:
        replay, finding = self._replay, self._finding
        finding.checked += 1
        before = replay.stock
        queues = replay.rules is None or replay.rules.queues  # without the queue, requests take no stock
        if queues and entry.stock > entry.upper and not same(entry.stock, entry.upper):
            finding.add(f"over-admission: stock {entry.stock:g} past the bound {entry.upper:g}", entry)
        if queues and entry.event == "granted" and before is not None and before >= entry.lower:
            what = f"dispatched at a stock of {before:g}, not below the lower bound {entry.lower:g}"
            finding.add(what, *self._with_previous(entry))
        rules = replay.rules
        if rules is None:
            return
        if rules.paused:
            finding.add("stock was taken while the pool is paused", entry)
        count, ready = self._in_flight[entry.flow], rules.ready(entry.upper)
        if entry.limit and ready is not None and count > entry.limit * ready:
            what = f"{count} of flow {entry.flow!r} in flight, {entry.limit} on each of {ready} endpoints"
            finding.add(f"flow limit passed: {what} allowed", *self._others(entry))

    def _check_placement(self, entry: Entry) -> None:
        self._finding.checked += 1
        count = self._placed[entry.flow, entry.endpoint]
        if entry.limit and count > entry.limit:
            what = f"{count} of flow {entry.flow!r} on {entry.endpoint}, {entry.limit} allowed"
            self._finding.add(f"endpoint limit passed: {what}", *self._others(entry, entry.endpoint))
        rules = self._replay.rules
        if rules is None:
            return
        if self._on[entry.endpoint] > (most := rules.caps.get(entry.endpoint, rules.default_cap)):
            what = f"{self._on[entry.endpoint]} requests on {entry.endpoint}, {most:g} allowed"
            self._finding.add(f"endpoint limit passed: {what}", entry)
        if (most := rules.token_caps.get(entry.endpoint, rules.default_token_cap)) < math.inf:
            tokens = self._tokens_beside(entry)
            if tokens >= most:
                what = f"{tokens:g} tokens on {entry.endpoint}, {most:g} allowed"
                self._finding.add(f"endpoint limit passed: one more request beside {what}", entry)

    def _tokens_beside(self, entry: Entry) -> float:
        """The stock taken by other requests on the endpoint that `entry` names."""
        return sum(
            request.stock_taken or 0.0
            for name, request in self._replay.requests.items()
            if request.endpoint == entry.endpoint and name != entry.request
        )

    def _others(self, entry: Entry, endpoint: str = "") -> list[Entry]:
        """The entries of up to five running requests of the flow that `entry` names, and `entry` itself."""
        found = [
            request.charge_entry
            for request in self._replay.requests.values()
            if request.state in RUNNING
            and request.first_entry.flow == entry.flow
            and endpoint in ("", request.endpoint)
        ]
        return [*found[:5], entry]

    @staticmethod
    def _count(counts: Counter[Any], entry: Entry, key: object, change: int) -> None:
        if not entry.limit:
            return
        counts[key] += change
        if counts[key] <= 0:
            del counts[key]


_Key = tuple[int, str, str]  # band, flow, workload


class Order(Check):
    """Checks G4: `fcfs` serves requests in order of arrival, `edf` by deadline minus predicted time. The log
    has no rates, so for `workload-aware` the check covers only the order of arrival within one workload of a
    flow. The starvation guard serves requests out of turn by design (G3), so its dispatches are exempt.
    """

    PROMISE = "G4"
    TITLE = "requests in order within a flow, bands in order of priority"

    def __init__(self, finding: Finding, replay: Replay) -> None:
        super().__init__(finding, replay)
        self._rules = replay.rules
        # Waiting request -> its rank when it entered the queue. A waiting request keeps this rank even if a
        # newer stream brings another prediction.
        self._queues: dict[_Key, dict[str, int]] = {}

    def check(self, step: Step) -> None:
        entry, replay = step.entry, self._replay
        if replay.rules is not self._rules:
            if replay.rules is None or not replay.rules.orders_like(self._rules):
                self._queues.clear()  # the order of requests that already wait is not checked
            self._rules = replay.rules
        if step.enters_queue and (key := self._key(entry)) is not None:
            self._queues.setdefault(key, {})[entry.request] = self._rank(entry)
        elif entry.event == "bypassed" and step.takes_stock:
            self._finding.checked += 1
            if replay.queued and not self._may_overtake(entry):
                self._finding.add(f"{entry.request} bypassed a queue of {replay.queued}", entry)
        elif entry.event == "granted" and step.leaves_queue and replay.settled and entry.by != GUARD:
            self._finding.checked += 1
            self._check_band(entry)
            self._check_turn(entry)
        if step.leaves_queue and step.request is not None:
            key = self._key(step.request.first_entry)
            if key in self._queues:
                self._queues[key].pop(entry.request, None)
                if not self._queues[key]:
                    del self._queues[key]

    def _may_overtake(self, entry: Entry) -> bool:
        """Whether, with tenants, all waiting requests are throttled, and the flow of `entry` is not."""
        replay = self._replay
        if replay.rules is None or not replay.rules.separator:
            return False
        queue = replay.flow_queues.at((entry.band, entry.flow))
        return not replay.settled or (queue.throttled_by is None and not replay.flow_queues.have_turns)

    def _check_band(self, entry: Entry) -> None:
        replay = self._replay
        if replay.rules is None or replay.rules.band_policy != "strict":
            return
        for band in replay.flow_queues.above(entry.priority):
            earlier = (
                request.first_entry
                for request in replay.requests.values()
                if request.state is RequestState.QUEUED
                and request.first_entry.band == band
                and replay.flow_queues.at((band, request.flow_key)).throttled_by is None
            )
            waits = replay.flow_queues.priorities[band]
            what = f"priority {entry.priority} served while priority {waits} waits"
            self._finding.add(what, *itertools.islice(earlier, 1), entry)
            return

    def _check_turn(self, entry: Entry) -> None:
        key, requests = self._key(entry), self._replay.requests
        queue = self._queues.get(key, {}) if key else {}
        rank = queue.get(entry.request, self._rank(entry))
        before = [(each, name) for name, each in queue.items() if each < rank]
        for _, first in sorted(before):
            if first in requests and requests[first].state is RequestState.QUEUED:  # and not lost
                what = f"{entry.request} served before {first}, which comes first in its flow"
                self._finding.add(what, requests[first].first_entry, entry)
                return

    def _key(self, entry: Entry) -> _Key | None:
        """The flow queue in which the order of `entry` is checked; None if its order is not checked."""
        rules = self._replay.rules
        if rules is None:
            return None
        if rules.ordering != "workload-aware":
            return entry.band, rules.flow_key(entry.flow), ""
        return (entry.band, rules.flow_key(entry.flow), entry.workload) if entry.workload else None

    def _rank(self, entry: Entry) -> int:
        if self._replay.rules is not None and self._replay.rules.ordering == "edf":
            return (entry.deadline_ms - entry.early_ms) * 1000 + entry.arrived % 1000
        return entry.arrived


ANSWER_MS = 1000  # a client gets an answer within this many ms after its request's deadline
_WAITING = (RequestState.QUEUED, RequestState.ORPHANED)


class Deadline(Check):
    """Checks G5. A request breaks G5 if it is dispatched after its deadline, or still waits when a decision
    is made more than a second after its deadline. Only a decision can expire a request.
    """

    PROMISE = "G5"
    TITLE = "no request is dispatched, or left waiting, past its deadline"

    def __init__(self, finding: Finding, replay: Replay) -> None:
        super().__init__(finding, replay)
        self._ends: list[tuple[int, str]] = []  # a heap of deadline (ms) and id of requests that are not late
        self._last: Entry | None = None

    def check(self, step: Step) -> None:
        entry = step.entry
        if self._last is not None and entry.time_us != self._last.time_us:
            self._check_waiting(self._last)  # a later time: the decision before is complete
        self._last = entry
        if entry.event in ("granted", "bypassed"):
            self._finding.checked += 1
            if entry.time_us > entry.deadline_ms * 1000:
                late_ms = entry.time_us / 1000 - entry.deadline_ms
                self._finding.add(f"{entry.request} dispatched {late_ms:g} ms past its deadline", entry)
        if step.enters_queue and step.before is RequestState.ABSENT:
            heapq.heappush(self._ends, (entry.deadline_ms, entry.request))
        if entry.event in ("expired", "abandoned"):
            self._finding.checked += 1

    def close(self) -> None:
        if self._last is not None:
            self._check_waiting(self._last)

    def _check_waiting(self, entry: Entry) -> None:
        while self._ends and self._ends[0][0] + ANSWER_MS < entry.now_ms:
            deadline_ms, request_id = heapq.heappop(self._ends)
            request = self._replay.requests.get(request_id)
            if request and request.state in _WAITING and request.first_entry.deadline_ms == deadline_ms:
                what = f"is still {request.state.value} {entry.now_ms - deadline_ms} ms past its deadline"
                self._finding.add(f"{request_id} {what}", request.first_entry, entry)


class Conservation(Check):
    """Checks G6 at every entry: stock and queue length must follow from the preceding entry. The check
    reports a wrong number once, and continues with the logged number.
    """

    PROMISE = "G6"
    TITLE = "each request begins and ends once, counts add up"

    def __init__(self, finding: Finding, replay: Replay) -> None:
        super().__init__(finding, replay)
        self._left_over = 0.0

    def check(self, step: Step) -> None:
        self._finding.checked += 1
        if step.entry.request:
            self._check_event(step)
        self._check_counts(step)
        if step.entry.event == "restored":
            self._check_largest_bound(step.entry)
        self._check_idle(step)

    def _check_event(self, step: Step) -> None:
        entry = step.entry
        request = self._replay.requests.get(entry.request)
        if request is None:
            # An entry of an unknown request may belong to a request that began before the log.
            all_known = self._replay.complete or not self._replay.has_unseen_requests
            possible = STATES_BEFORE[entry.event]
            may_be_orphaned = not self._replay.complete and RequestState.ORPHANED in possible
            if RequestState.ABSENT in possible or not all_known or may_be_orphaned:
                return
            what = "ends without having begun, or twice" if entry.event in ENDS else "has not begun"
            self._finding.add(f"request {entry.request} {what}: {entry.event}", entry)
        elif request.state not in STATES_BEFORE[entry.event]:
            begins = STATES_BEFORE[entry.event] == {RequestState.ABSENT}
            what = "begins twice" if begins else f"{entry.event} while {request.state.value}"
            self._finding.add(f"request {entry.request} {what}", request.first_entry, entry)
        elif step.returns_stock and request.endpoint and entry.endpoint != request.endpoint:
            what = f"was counted on {request.endpoint} and is returned to {entry.endpoint!r}"
            self._finding.add(f"request {entry.request} {what}", request.charge_entry, entry)

    def _check_counts(self, step: Step) -> None:
        entry, replay = step.entry, self._replay
        stock, queued = replay.stock_after(step), replay.queued_after(step)
        if stock is not None and not same(stock, entry.stock):
            what = f"stock is {entry.stock:.17g}, expected {stock:.17g}"
            self._finding.add(what, *self._with_previous(entry))
        if queued is not None and queued != entry.queued:
            self._finding.add(f"{entry.queued} are queued, expected {queued}", *self._with_previous(entry))

    def _check_largest_bound(self, entry: Entry) -> None:
        """Check that a restored request respected the upper bound of all endpoints, ready or not."""
        bound, rules = largest_bound(entry), self._replay.rules
        per_endpoint = rules.upper_per if rules else 0.0
        endpoints = round(bound / per_endpoint) if per_endpoint > 0 else 0
        is_a_bound = rules is None or same(bound, endpoints * per_endpoint) or same(bound, entry.upper)
        if entry.note and (bound < entry.upper or not is_a_bound):
            self._finding.add(f"request {entry.request} is restored under a bound of {bound:.17g}", entry)

    def _check_idle(self, step: Step) -> None:
        """Check that the stock is 0 only if no request runs, and that the queue is empty if it counts 0."""
        entry, replay = step.entry, self._replay
        if replay.has_unseen_requests:
            return
        running = replay.running + step.takes_stock - step.returns_stock
        waiting = replay.waiting + step.enters_queue - step.leaves_queue
        if running == 0:
            if entry.stock not in (0, self._left_over):
                what = f"no request runs, but the stock is {entry.stock:.17g}"
                self._finding.add(what, *self._with_previous(entry))
            self._left_over = entry.stock
        elif entry.stock == 0:
            self._find_lost(entry, RUNNING)
        if entry.queued == 0 and waiting > 0:
            self._find_lost(entry, frozenset({RequestState.QUEUED}))

    def _find_lost(self, entry: Entry, states: frozenset[RequestState]) -> None:
        for request_id, request in list(self._replay.requests.items()):
            costs_nothing = request.state in RUNNING and not request.stock_taken
            if request_id != entry.request and request.state in states and not costs_nothing:
                what = f"was {request.state.value} and is lost: it never ended, but the pool counts 0"
                self._finding.add(f"request {request_id} {what}", request.charge_entry, entry)
                self._replay.lose(request_id)
