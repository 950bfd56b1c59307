"""Start-time fair queueing: a band consists of flow queues, and a flow queue of requests. Pure.

The module `local_queue.py` uses this queue during an outage. The reference model in tests/model, which tests
compare with the Lua scripts call by call, extends it with features that only the shared queue has:
throttling, corrections and rebased tags. So comparing the model with the scripts also tests the local queue.

The order of service: while the starvation guard has credit, the longest overdue request comes first.
Without credit, choose a band (`strict`: the highest; `weighted`: the least tag), then its flow queue with the
least start tag (ties by name), then that flow queue's first request by arrival, deadline or score.

Why flows get their shares (G2; Goyal, Vin, Cheng 1996; on several servers: Jin, Chase, Kaur, SFQ(D), 2004).
A flow queue that becomes backlogged starts at S = max(v, F): v is the band's virtual time, F is the flow
queue's tag when its last request left. A turn serves the flow queue with the least S, sets v = S, and adds
the share c/w (cost over weight) to that tag. While f is backlogged, v <= S_f <= v + s_f, s_f being its
largest share: no tag is below v, because turns take the least tag and newcomers start at v or above; and S_f
was at most v when f was last served or started, and v never falls. The service of flow queue f in an interval
is the growth of its tag S_f, which differs from the growth of v by at most f's largest share s_f. So the
services of flow queues f and g, each divided by its weight, differ by at most s_f + s_g, the sum of their
largest shares.
The tag belongs to the flow queue, not to a request, so a request that leaves early leaves no gap.

A client that uses a new flow for each request could keep the virtual time v from growing. So all flow queues
that start with F <= v together count like one flow of weight 1: once these newcomers are NEWCOMERS shares
ahead of v, the next newcomer starts a share later.

Why no request starves (G3). Each grant adds `guard_share` to the guard's credit, and a credit of 1 serves the
most overdue request. So of n grants at least floor(n * guard_share) go to overdue requests, the longest
overdue first, in any band and flow. Service by the guard charges the flow queue, but does not move the
virtual time v.
"""

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from picker_fleet.domain.bands import Bands

NEWCOMERS = 100
GUARD_LOOKS_AT = 16  # most overdue requests that the guard examines: throttled flow queues' do not count
_WHOLE_CREDIT = 1 - 1e-9  # a credit of 1, less rounding: ten times 0.1 adds up to less than 1
_RELAXED = 0.9  # part of the capacity below which the queue drops the preemption history


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings (docs/redis-schema.md) that decide which requests may wait, and in which order.
    `starvation_ms` 0 stands for half of a request's TTL."""

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
    """A request. The workload is '' for an anonymous request. The queue sets `due_ms`, the time at which the
    request becomes overdue, and `flow_queue`, the name of its flow queue."""

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

    @property
    def early_ms(self) -> float:
        """How long before its deadline the ordering `edf` serves the request."""


class WorkloadMetrics(Protocol):
    """A registered workload's arrivals a second and average wait (ms) in one flow, which scores use."""

    def rate_of(self, flow: str, workload: str) -> float: ...
    def wait_ms_of(self, flow: str, workload: str) -> float: ...


R = TypeVar("R", bound=Queueable)
M = TypeVar("M")


class QueueFull(Exception):
    """The queue refuses a request. The attribute `reason` is a code of `lua/admit.lua`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class Context:
    """Inputs of queue decisions: the policy in force, the time (µs), and the workloads' figures."""

    policy: Policy
    now_us: Callable[[], float]
    workloads: WorkloadMetrics


class ScoredSet(Generic[M]):
    """A set of members ordered by score, ties by name, like a sorted set of Redis.

    The method `first` takes O(log n) amortised: entries of removed or moved members stay in the heap until
    they reach its top.
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
        """Remove `member`. Returns False if the member was not in the set."""
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
        """The first `count` members in order; takes O(n)."""
        return [entry[3] for entry in heapq.nsmallest(count, self._entries.values())]

    def last(self) -> M:
        """The member with the highest score; takes O(n)."""
        return max(self._entries.values())[3]


class FlowQueue(Generic[R]):
    """The waiting requests of one flow, or of a band under `fairness: none`. The attribute `tag` is the flow
    queue's start tag.

    Under `workload-aware` (spec 001) the highest score is served first: wait_weight * min(wait / wait_cap, 1)
    + g, where g = criticality_weight * criticality / 5 - rate_weight * min(rate / rate_cap, 1). Only the
    oldest request of each workload competes. Below the wait cap all scores grow at the same speed, so the
    heap `growing` sorts by a constant, arrival - g * wait_cap / wait_weight. The heap `static` sorts the
    other requests by -score.
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
        score = r.arrived
        if self._context.policy.ordering == "edf":
            score = (r.deadline_ms - r.early_ms) * 1000 + r.arrived % 1000
        self.requests.put(r, score, r.id)
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
        """The request to preempt first: the last arrival, or under `edf` the latest deadline less
        predicted time."""
        return self.requests.last()

    def reorder(self) -> None:
        """Sort all requests again by the policy in force."""
        former = list(self.requests)
        self.requests, self.growing, self.static, self._lines = ScoredSet(), ScoredSet(), ScoredSet(), {}
        for r in former:
            self.insert(r)

    def refresh(self) -> None:
        """Update the score of each workload's oldest request: a workload's rate falls with time."""
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
            self._index(growing)  # the request's wait has reached the cap: move the request to `static`
        static = self.static.first()
        if growing is None or static is None:
            return growing or static
        grown = (now_us - self.growing.score(growing)) / cap_us * policy.wait_weight
        return static if -self.static.score(static) >= grown else growing


@dataclass(slots=True)
class BandQueue(Generic[R]):
    """One band. The attribute `turns` has the backlogged flow queues that are not throttled, by tag."""

    v: float = 0.0  # virtual time: the greatest start tag served, not counting service by the guard
    newcomers: float = 0.0  # common tag of the flow queues that started at v, charged as one flow
    tag: float = 0.0  # the band's tag under the band policy `weighted`
    queued: int = 0  # number of queued requests in the band
    bytes: int = 0  # total size of the queued requests' bodies
    queues: dict[str, FlowQueue[R]] = field(default_factory=dict)  # name -> flow queue with requests
    turns: ScoredSet[str] = field(default_factory=ScoredSet)
    finish: dict[str, float] = field(default_factory=dict)  # flow queue -> its tag when its last request left
    preempted: dict[str, int] = field(default_factory=dict)  # flow queue -> number of its last preemption


class FairQueue(Generic[R]):
    """The waiting requests of all bands, and their order. `next_number()` numbers preemptions."""

    def __init__(self, context: Context, next_number: Callable[[], int]) -> None:
        self._context, self._next_number = context, next_number
        self.bands: dict[int, BandQueue[R]] = {}  # bands by priority, the highest first
        self.bv = 0.0  # virtual time of the order of bands
        self.credit = 1.0  # the starvation guard's credit
        self.overdue: ScoredSet[R] = ScoredSet()
        self._queued = 0
        self._preempts = False  # whether any band has a preemption history

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
        """The band of that priority; the first call for a priority creates its band."""
        if priority not in self.bands:
            self.bands[priority] = BandQueue()
            self.bands = dict(sorted(self.bands.items(), reverse=True))
        return self.bands[priority]

    def name_of(self, r: R) -> str:
        """The flow queue of request r under the policy in force."""
        return "" if self.policy.fairness == "none" else r.flow

    def length(self, r: R) -> int:
        queue = self.band(r.priority).queues.get(self.name_of(r))
        return len(queue.requests) if queue is not None else 0

    def share(self, r: R) -> float:
        """The share of request r, by which serving r raises the tag of its flow queue."""
        if self.policy.fairness == "round-robin":
            return 1.0
        if self.policy.fairness == "none":
            return r.cost
        return r.cost / self.policy.weights.get(r.flow, r.weight)

    def make_room(self, r: R) -> R | None:
        """The request to preempt so that request r can wait; None if there is room. The preempted request is
        the newest of the least recently preempted flow queue, in the lowest preemptible band below r's band
        (spec 003).

        Raises:
            QueueFull: request r may not wait.
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
        """The preemptible bands below `priority`, the lowest first."""
        for each in sorted(each for each in self.bands if each < priority):
            if self.policy.bands.of(each).preemptible:
                yield self.bands[each]

    def forget_preemptions(self) -> None:
        """Drop the preemption history once the queue is less than 90 % full."""
        if self._preempts and len(self) < _RELAXED * self.policy.total_capacity:
            self._preempts = False
            for band in self.bands.values():
                band.preempted = {}

    def insert(self, r: R) -> None:
        """Queue request r in order. It becomes overdue after `starvation_ms` (0: after half of its TTL)."""
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
        """Let a flow queue take turns. A band that was idle does not catch up on missed turns."""
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
        """Raise the tag of a backlogged flow queue by `share`."""
        queue = band.queues[name]
        queue.tag += share
        if name in band.turns:
            band.turns.put(name, queue.tag, name)

    def charge_band(self, r: R, cost: float) -> None:
        """Charge the band of request r, if bands are weighted; a negative cost is a refund."""
        if self.policy.band_policy == "weighted":
            self.bands[r.priority].tag += cost / self.policy.bands.of(r.priority).weight

    def mark_overdue(self, r: R) -> None:
        """Let the guard serve it. Requests that become overdue in the same ms keep their arrival order."""
        self.overdue.put(r, r.due_ms * 1000 + r.arrived % 1000, r.id)

    def next_turn(self) -> tuple[R, bool] | None:
        """The request to serve next, and whether the guard selects it; None if no request can be served."""
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
        """Whether the flow queue of request r takes turns, that is, is not throttled."""
        return r.flow_queue in self.bands[r.priority].turns

    def bands_in_order(self) -> list[BandQueue[R]]:
        bands = list(self.bands.values())
        return sorted(bands, key=lambda band: band.tag) if self.policy.band_policy == "weighted" else bands

    def serve(self, r: R, by_guard: bool) -> float:
        """Remove request r, which `next_turn` returned, and charge its flow queue. Returns the start tag."""
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
        """Remove request r without charging its flow queue."""
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
        """Drop finish tags at or below v: useless. `at_rest`: no request runs, so drop all tags."""
        for band in self.bands.values():
            if at_rest:
                band.v = max([band.v, *band.finish.values()])
            band.finish = {name: tag for name, tag in band.finish.items() if tag > band.v}
