"""Start-time fair queueing: bands, in each band flow queues, in each flow queue requests. Pure.

`local_queue.py` serves an outage with it. The model that the scripts of `lua/` are compared with call by call
(tests/model) extends it by what only the shared queue does: throttling, corrections, rebased tags. So that
comparison proves the queue of an outage as well.

The order: first the most overdue request of all, as often as the guard has credit; then the band (`strict`:
the highest; `weighted`: the least tag); in it the flow queue with the least start tag, ties by name; in that
the request by arrival, deadline or score.

Why flows get their shares (G2; Goyal, Vin, Cheng 1996; on several servers: Jin, Chase, Kaur, SFQ(D), 2004).
A flow queue that becomes backlogged starts at S = max(v, F): v is the band's virtual time, F where the flow
queue was charged up to before. A turn takes the least S, sets v = S, and moves the tag on by the share c/w:
cost over weight. While f is backlogged, v <= S_f <= v + s_f, s_f being its largest share: no tag is below v,
since the turn takes the least and newcomers start at v or above; and S_f was at most v when f was last served
or started, and v never falls. What f is served in an interval is the growth of S_f, so it differs from the
growth of v by at most s_f, and what f and g are served for their weights differs by at most s_f + s_g.
One tag a flow queue, not one a request: a request that leaves early leaves no gap.

A client with a new flow for each request would hold v where it is. So newcomers that are owed nothing are
counted like one flow of weight 1; when they are NEWCOMERS shares ahead of v, the next one starts a share
later.

Why nobody starves (G3). The guard's credit grows by `guard_share` with each grant, and a whole one serves the
most overdue request. So of n grants at least the whole part of n * guard_share go to overdue requests, the
longest overdue first, whatever band and flow they are of. What the guard serves is charged to its flow queue,
and does not move v.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from picker_fleet.bands import Bands

NEWCOMERS = 100
GUARD_LOOKS_AT = 16  # of the most overdue: the flow queues of those before may be throttled
_WHOLE_CREDIT = 1 - 1e-9  # of 1: the sum of ten times 0.1 is slightly less
_RELAXED = 0.9  # of the capacity; below it, preemptions are forgotten


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings of docs/redis-schema.md that decide who waits and who is next. `starvation_ms` 0 stands
    for half of a request's TTL."""

    total_capacity: int
    flow_capacity: int
    max_flows: float
    fairness: str
    ordering: str
    overload: str
    band_policy: str
    bands: Bands
    guard_share: float
    starvation_ms: float
    weights: Mapping[str, float]
    wait_signal: str
    wait_weight: float
    criticality_weight: float
    rate_weight: float
    wait_cap_ms: float
    rate_cap: float


class Queueable(Protocol):
    """A request. `workload` is '' if it is anonymous. The queue sets `due_ms`, when it becomes overdue, and
    `flow_queue`, the name of the one it is in."""

    due_ms: float
    flow_queue: str
    id: str
    flow: str
    priority: int
    weight: float
    cost: float
    workload: str
    criticality: int
    arrived: float  # in µs
    deadline_ms: float
    body_bytes: int


class WorkloadMetrics(Protocol):
    """What a score needs of a registered workload in its flow: arrivals a second, the average wait in ms."""

    def rate_of(self, flow: str, workload: str) -> float: ...
    def wait_ms_of(self, flow: str, workload: str) -> float: ...


R = TypeVar("R", bound=Queueable)
M = TypeVar("M")


class QueueFull(Exception):
    """A request may not wait; `reason` as `lua/admit.lua` names it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class Context:
    """What every decision depends on: the policy in force, the time (µs), and the workloads."""

    policy: Policy
    now_us: Callable[[], float]
    workloads: WorkloadMetrics


class ScoredSet(Generic[M]):
    """Members by score, ties by name, as a sorted set of Redis orders them.

    The first takes O(log n): entries of members that have left or moved stay in the heap until they come up.
    """

    def __init__(self) -> None:
        self._entries: dict[M, tuple[float, str, int, M]] = {}
        self._heap: list[tuple[float, str, int, M]] = []
        self._puts = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[M]:
        return iter(self._entries)

    def __contains__(self, member: object) -> bool:
        return member in self._entries

    def put(self, member: M, score: float, name: str) -> None:
        self._puts += 1
        entry = self._entries[member] = (score, name, self._puts, member)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, entry)

    def remove(self, member: M) -> bool:
        """Whether it was a member."""
        return self._entries.pop(member, None) is not None

    def score(self, member: M) -> float:
        return self._entries[member][0]

    def scores(self) -> dict[str, float]:
        return {name: score for score, name, _, _ in self._entries.values()}

    def first(self) -> M | None:
        while self._heap:
            member = self._heap[0][3]
            if self._entries.get(member) is self._heap[0]:
                return member
            heapq.heappop(self._heap)
        return None

    def lowest(self, count: int) -> list[M]:
        """The first `count` in order; takes O(n)."""
        return [entry[3] for entry in heapq.nsmallest(count, self._entries.values())]

    def last(self) -> M:
        """Takes O(n)."""
        return max(self._entries.values())[3]


class FlowQueue(Generic[R]):
    """The waiting requests of one flow, or of a band under `fairness: none`. `tag` is its start tag.

    `workload-aware` (spec 001): the score is wait_weight * min(wait / wait_cap, 1) + g, the highest first,
    where g = criticality_weight * criticality / 5 - rate_weight * min(rate / rate_cap, 1). Only the oldest
    request of each workload competes. Below the cap all scores grow at the same speed, so `growing` orders by
    a key that time does not change: arrival less the time that g is worth. `static` has the others by -score.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.tag = 0.0
        self.requests: ScoredSet[R] = ScoredSet()
        self.growing: ScoredSet[R] = ScoredSet()
        self.static: ScoredSet[R] = ScoredSet()
        self._lines: dict[str, ScoredSet[R]] = {}  # workload -> its requests by arrival

    @property
    def _by_score(self) -> bool:
        return self._context.policy.ordering == "workload-aware"

    def insert(self, r: R) -> None:
        edf = self._context.policy.ordering == "edf"
        self.requests.put(r, r.deadline_ms * 1000 + r.arrived % 1000 if edf else r.arrived, r.id)
        if not self._by_score:
            return
        if not r.workload:
            self._index(r)
            return
        line = self._lines.setdefault(r.workload, ScoredSet())
        former = line.first()
        if former is not None:
            self._unindex(former)
        line.put(r, r.arrived, r.id)
        self._index_first(line)

    def remove(self, r: R) -> None:
        self.requests.remove(r)
        indexed, line = self._unindex(r), self._lines.get(r.workload)
        if line is not None and line.remove(r) and not line:
            del self._lines[r.workload]
        elif line is not None and indexed:
            self._index_first(line)

    def head(self) -> R | None:
        return self._best() if self._by_score else self.requests.first()

    def newest(self) -> R:
        """The request that is preempted first: under `edf` the latest deadline."""
        return self.requests.last()

    def reorder(self) -> None:
        """Order all requests by the policy in force."""
        former = list(self.requests)
        self.requests, self.growing, self.static, self._lines = ScoredSet(), ScoredSet(), ScoredSet(), {}
        for r in former:
            self.insert(r)

    def refresh(self) -> None:
        """Index the heads of workloads again: rates fall without arrivals too."""
        for line in self._lines.values():
            self._index_first(line)

    def _index_first(self, line: ScoredSet[R]) -> None:
        head = line.first()
        assert head is not None
        self._index(head)

    def _index(self, r: R) -> None:
        policy, workloads = self._context.policy, self._context.workloads
        rate = workloads.rate_of(r.flow, r.workload) if r.workload else 0.0
        g = policy.criticality_weight * r.criticality / 5
        g -= policy.rate_weight * min(rate / policy.rate_cap, 1)
        self._unindex(r)
        cap_us = policy.wait_cap_ms * 1000
        if policy.wait_signal == "workload_average" and r.workload:
            waited = min(workloads.wait_ms_of(r.flow, r.workload) / policy.wait_cap_ms, 1)
        elif policy.wait_weight == 0 or self._context.now_us() - r.arrived >= cap_us:
            waited = 1.0
        else:
            self.growing.put(r, r.arrived - cap_us / policy.wait_weight * g, r.id)
            return
        self.static.put(r, -(policy.wait_weight * waited + g), r.id)

    def _unindex(self, r: R) -> bool:
        grew = self.growing.remove(r)
        return self.static.remove(r) or grew

    def _best(self) -> R | None:
        policy, now_us = self._context.policy, self._context.now_us()
        cap_us = policy.wait_cap_ms * 1000
        while (growing := self.growing.first()) is not None and now_us - growing.arrived >= cap_us:
            self._index(growing)  # its key overstates its score by now
        static = self.static.first()
        if growing is None or static is None:
            return growing or static
        grown = (now_us - self.growing.score(growing)) / cap_us * policy.wait_weight
        return static if -self.static.score(static) >= grown else growing


@dataclass(slots=True)
class BandQueue(Generic[R]):
    """One band. `turns` has the backlogged flow queues by tag, without those that are throttled."""

    v: float = 0.0  # virtual time: the greatest start tag that was served by turn
    newcomers: float = 0.0  # up to where those are charged that started at v
    tag: float = 0.0  # of the band itself, where bands are weighted
    queued: int = 0
    bytes: int = 0  # of the bodies of those that wait
    queues: dict[str, FlowQueue[R]] = field(default_factory=dict)  # the backlogged ones
    turns: ScoredSet[str] = field(default_factory=ScoredSet)
    finish: dict[str, float] = field(default_factory=dict)  # flow queue -> its tag when it drained
    preempted: dict[str, int] = field(default_factory=dict)  # flow queue -> when last, by number


class FairQueue(Generic[R]):
    """Who waits, and who is next. `next_number` counts up; preemptions are ordered by it."""

    def __init__(self, context: Context, next_number: Callable[[], int]) -> None:
        self._context, self._next_number = context, next_number
        self.bands: dict[int, BandQueue[R]] = {}  # by priority, the highest first
        self.bv = 0.0  # virtual time across bands
        self.credit = 1.0  # of the guard
        self.overdue: ScoredSet[R] = ScoredSet()
        self._queued = 0
        self._preempts = False  # under pressure it is kept who was preempted when

    def __len__(self) -> int:
        return self._queued

    @property
    def policy(self) -> Policy:
        return self._context.policy

    def requests(self) -> Iterator[R]:
        for band in self.bands.values():
            for queue in band.queues.values():
                yield from queue.requests

    def band(self, priority: int) -> BandQueue[R]:
        """The band of that priority, made when it is first asked for."""
        if priority not in self.bands:
            self.bands[priority] = BandQueue()
            self.bands = dict(sorted(self.bands.items(), reverse=True))
        return self.bands[priority]

    def name_of(self, r: R) -> str:
        """The flow queue of r under the policy in force."""
        return "" if self.policy.fairness == "none" else r.flow

    def length(self, r: R) -> int:
        queue = self.band(r.priority).queues.get(self.name_of(r))
        return len(queue.requests) if queue is not None else 0

    def share(self, r: R) -> float:
        """What serving r costs its flow queue."""
        if self.policy.fairness == "round-robin":
            return 1.0
        if self.policy.fairness == "none":
            return r.cost
        return r.cost / self.policy.weights.get(r.flow, r.weight)

    def make_room(self, r: R) -> R | None:
        """The request that has to leave if r is to wait, if any has to: the newest of the least recently
        preempted flow queue of the lowest preemptible band below (spec 003).

        Raises:
            QueueFull: r may not wait.
        """
        policy, band = self.policy, self.policy.bands.of(r.priority)
        if policy.overload == "reject-noncritical" and not band.guaranteed:
            raise QueueFull("saturated")
        if policy.fairness != "none" and self.length(r) >= policy.flow_capacity:
            raise QueueFull("insufficient-flow-capacity")
        flows = sum(len(each.queues) for each in self.bands.values())
        if not band.guaranteed and flows >= policy.max_flows and not self.length(r):
            raise QueueFull("too-many-flows")
        if band.capacity is not None and self.band(r.priority).queued >= band.capacity:
            raise QueueFull("band-capacity")
        if band.bytes is not None and self.band(r.priority).bytes + r.body_bytes > band.bytes:
            raise QueueFull("band-bytes")
        if len(self) < policy.total_capacity:
            return None
        for lower in self._preemptible_below(r.priority) if policy.overload == "preempt" else ():
            if lower.queues:
                self._preempts = True
                _, name = min((lower.preempted.get(name, 0), name) for name in lower.queues)
                lower.preempted[name] = self._next_number()
                return lower.queues[name].newest()
        raise QueueFull("total-capacity")

    def _preemptible_below(self, priority: int) -> Iterator[BandQueue[R]]:
        """The lowest first."""
        for each in sorted(each for each in self.bands if each < priority):
            if self.policy.bands.of(each).preemptible:
                yield self.bands[each]

    def forget_preemptions(self) -> None:
        """Who was preempted when is forgotten once the pressure has ended."""
        if self._preempts and len(self) < _RELAXED * self.policy.total_capacity:
            self._preempts = False
            for band in self.bands.values():
                band.preempted = {}

    def insert(self, r: R) -> None:
        """Queue r at its place. It is overdue after half of its TTL, or after `starvation_ms`."""
        band, r.flow_queue = self.band(r.priority), self.name_of(r)
        arrived_ms = r.arrived // 1000
        patience_ms = self.policy.starvation_ms or (r.deadline_ms - arrived_ms) // 2
        r.due_ms = min(arrived_ms + patience_ms, r.deadline_ms)
        if r.flow_queue not in band.queues:
            band.queues[r.flow_queue] = FlowQueue(self._context)
            start = self._start_tag(band, band.finish.get(r.flow_queue, 0.0), self.share(r))
            self.activate(band, r.flow_queue, start)
        band.queues[r.flow_queue].insert(r)
        band.queued += 1
        band.bytes += r.body_bytes
        self._queued += 1

    def activate(self, band: BandQueue[R], name: str, tag: float) -> None:
        """A flow queue takes turns from now on. A band that had none does not catch up on turns it missed."""
        if not band.turns:
            band.tag = max(band.tag, self.bv)
        band.queues[name].tag = tag
        band.turns.put(name, tag, name)

    def _start_tag(self, band: BandQueue[R], finish: float, share: float) -> float:
        if finish > band.v:
            return finish
        reached = max(band.newcomers, band.v)
        if reached - band.v >= NEWCOMERS * share:
            return band.v + share
        band.newcomers = reached + share
        return band.v

    def charge(self, band: BandQueue[R], name: str, share: float) -> None:
        """Move the tag of a backlogged flow queue by `share`."""
        queue = band.queues[name]
        queue.tag += share
        if name in band.turns:
            band.turns.put(name, queue.tag, name)

    def charge_band(self, r: R, cost: float) -> None:
        """Charge r's band, where bands have shares; a negative cost refunds."""
        if self.policy.band_policy == "weighted":
            self.bands[r.priority].tag += cost / self.policy.bands.of(r.priority).weight

    def mark_overdue(self, r: R) -> None:
        """From now on the guard may serve r; requests of one ms in the order of their arrival."""
        self.overdue.put(r, r.due_ms * 1000 + r.arrived % 1000, r.id)

    def next_turn(self) -> tuple[R, bool] | None:
        """The request to serve next, and whether the guard says so; None if there is none to serve."""
        if self.policy.guard_share > 0 and self.credit >= _WHOLE_CREDIT:
            r = self._most_overdue()
            if r is not None:
                return r, True
        for band in self.bands_in_order():
            name = band.turns.first()
            r = band.queues[name].head() if name is not None else None
            if r is not None:
                return r, False
        return None

    def _most_overdue(self) -> R | None:
        first = self.overdue.first()
        if first is None or self._takes_turns(first):
            return first
        return next(filter(self._takes_turns, self.overdue.lowest(GUARD_LOOKS_AT)), None)

    def _takes_turns(self, r: R) -> bool:
        """Whether its flow queue is not throttled."""
        return r.flow_queue in self.bands[r.priority].turns

    def bands_in_order(self) -> list[BandQueue[R]]:
        bands = list(self.bands.values())
        return sorted(bands, key=lambda band: band.tag) if self.policy.band_policy == "weighted" else bands

    def serve(self, r: R, by_guard: bool) -> float:
        """Take out r, which `next_turn` named, and charge its flow queue. Returns the start tag."""
        band, guard_share = self.bands[r.priority], self.policy.guard_share
        start = band.queues[r.flow_queue].tag
        self.charge(band, r.flow_queue, self.share(r))
        self.remove(r)
        if not by_guard:
            band.v = max(band.v, start)
            if self.policy.band_policy == "weighted":
                self.bv = max(self.bv, band.tag)
        self.charge_band(r, r.cost)
        self.credit = min(self.credit - by_guard + guard_share, 1 + guard_share)
        return start

    def remove(self, r: R) -> None:
        """Take r out; the tag of its flow queue stays."""
        band = self.bands[r.priority]
        queue = band.queues[r.flow_queue]
        queue.remove(r)
        self.overdue.remove(r)
        band.queued -= 1
        band.bytes -= r.body_bytes
        self._queued -= 1
        if not queue.requests:
            band.finish[r.flow_queue] = queue.tag
            band.turns.remove(r.flow_queue)
            del band.queues[r.flow_queue]

    def forget_finish_tags(self, at_rest: bool) -> None:
        """Forget tags at or below v, which have no effect. `at_rest`: nothing runs, so none owes anything."""
        for band in self.bands.values():
            if at_rest:
                band.v = max([band.v, *band.finish.values()])
            band.finish = {name: tag for name, tag in band.finish.items() if tag > band.v}
