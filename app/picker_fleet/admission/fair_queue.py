"""Start-time fair queueing. A band consists of flow queues; a flow queue consists of requests. Pure.

The module `local_queue.py` uses this queue during an outage. Tests compare a reference model (tests/model)
with the Lua scripts call by call. That model adds to this queue only features of the shared queue, namely
corrections and rebased tags, so the same tests also check the local queue.

The order of service: while the starvation guard has credit, the request that is overdue for longest comes
first. Otherwise choose a band (`strict`: the highest; `weighted`: the least tag), then its flow queue with
the least start tag (ties by name), then that flow queue's first request by arrival, deadline or score. With
tenants, flows are leaves of a tree: choose at each node of the tree the child with the least start tag, down
to a flow queue. The module `tenant_tree.py` proves the shares (G2).

Why no request starves (G3). Each grant adds `guard_share` to the starvation guard's credit, and the guard
spends a credit of 1 to serve the request that is overdue for longest, in any band and flow. So of n grants at
least floor(n * guard_share) go to overdue requests. A grant by the guard charges the flow queue, but does not
move the virtual time v.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from picker_fleet.admission.tenant_tree import INNER, Level, Order, ScoredSet
from picker_fleet.domain.bands import Bands
from picker_fleet.domain.tenants import Tree

GUARD_LOOKS_AT = 16  # how many of the most overdue requests the guard examines to find one it may serve
_WHOLE_CREDIT = 1 - 1e-9  # a credit of 1 within rounding: 0.1 added ten times is less than 1
_RELAXED = 0.9  # the queue drops the preemption history below this part of its capacity


@dataclass(frozen=True, slots=True)
class Policy:
    """The settings (docs/redis-schema.md) that decide which requests may wait, and in which order. If
    `starvation_ms` is 0, half of a request's TTL counts. Each flow is a leaf of the `tree` of tenants."""

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
    tree: Tree | None = None


class Queueable(Protocol):
    """A request that can be queued; its `workload` is '' if it is anonymous. The queue sets `due_ms`, the
    time at which the request becomes overdue, and `flow_queue`, the name of its flow queue."""

    due_ms: float
    flow_queue: str
    id: str
    flow: str
    priority: int
    weight: float
    cost: float
    workload: str
    criticality: int
    arrived: float  # time of the request's arrival, in µs
    deadline_ms: float
    body_bytes: int

    @property
    def early_ms(self) -> float:
        """How long before its deadline the request is due, under the ordering `edf`."""


class WorkloadMetrics(Protocol):
    """A registered workload's arrivals a second and average wait (ms) in one flow, for scores."""

    def rate_of(self, flow: str, workload: str) -> float: ...
    def wait_ms_of(self, flow: str, workload: str) -> float: ...


R = TypeVar("R", bound=Queueable)


class QueueFull(Exception):
    """Raised if the queue refuses a request. `reason` is a refusal code of `lua/admit.lua`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class Context:
    """The inputs of the queue's decisions: the policy in force, the time (µs), and the workloads' figures."""

    policy: Policy
    now_us: Callable[[], float]
    workloads: WorkloadMetrics


class FlowQueue(Generic[R]):
    """The waiting requests of one flow, or, under `fairness: none`, of a band. The attribute `levels` is the
    path from the band to this flow queue.

    The ordering `workload-aware` (spec 001) serves the request with the highest score, wait_weight * min(wait
    / wait_cap, 1) + g, where g = criticality_weight * criticality / 5 - rate_weight * min(rate / rate_cap,
    1). Only the oldest request of each workload competes. Below the wait cap all scores grow at the same
    speed, so the heap `growing` sorts requests by a constant, arrival - g * wait_cap / wait_weight. The heap
    `static` sorts requests whose score does not grow, by -score.
    """

    def __init__(self, context: Context, levels: Sequence[Level]) -> None:
        self._context = context
        self.levels = levels
        self.requests: ScoredSet[R] = ScoredSet()
        self.growing: ScoredSet[R] = ScoredSet()
        self.static: ScoredSet[R] = ScoredSet()
        self._lines: dict[str, ScoredSet[R]] = {}  # workload -> its waiting requests in order of arrival

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
        """The request to preempt first: the last in arrival or, under `edf`, the request with the latest
        deadline minus predicted time."""
        return self.requests.last()

    def refresh(self) -> None:
        """Update the score of each workload's oldest request, since a workload's rate falls with time."""
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
            self._index(growing)  # moves the request to `static`, since its wait has reached the cap
        static = self.static.first()
        if growing is None or static is None:
            return growing or static
        grown = (now_us - self.growing.score(growing)) / cap_us * policy.wait_weight
        return static if -self.static.score(static) >= grown else growing


class BandQueue(Order, Generic[R]):
    """One band: the root of a tree, all flow queues with requests, and the tree's inner nodes by path."""

    def __init__(self) -> None:
        super().__init__()
        self.tag = 0.0  # the band's tag under the band policy `weighted`
        self.queued = 0  # number of queued requests in the band
        self.bytes = 0  # total size of the queued requests' bodies
        self.queues: dict[str, FlowQueue[R]] = {}  # flow queues with requests, by name
        self.inner: dict[str, Order] = {}  # path of an inner node -> the order of its children
        self.preempted: dict[str, int] = {}  # flow queue -> the number of its last preemption

    def levels(self, child: str, tree: Tree | None) -> list[Level]:
        """The path from the band's root to `child`, which is a flow queue or an inner node."""
        if tree is None:
            return [Level(self, child, child)]
        order: Order = self
        found = []
        *above, path = tree.paths(child.removesuffix(INNER))
        for each in above:
            found.append(Level(order, each + INNER, each))
            order = self.inner.setdefault(each, Order())
        return [*found, Level(order, child, path)]

    def first(self) -> str | None:
        """The flow queue whose turn is next; None if no flow queue takes turns."""
        child = self.turns.first()
        while child is not None and self.inner and child.endswith(INNER):
            child = self.inner[child.removesuffix(INNER)].turns.first()
        return child

    def orders(self) -> Iterator[Order]:
        yield self
        yield from self.inner.values()


class FairQueue(Generic[R]):
    """The waiting requests of all bands, in order. The function `next_number` numbers preemptions."""

    def __init__(self, context: Context, next_number: Callable[[], int]) -> None:
        self._context, self._next_number = context, next_number
        self.bands: dict[int, BandQueue[R]] = {}  # bands by priority, the highest priority first
        self.bv = 0.0  # the virtual time by which weighted bands take turns
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
        """The band of `priority`; the first call with a priority creates its band."""
        if priority not in self.bands:
            self.bands[priority] = BandQueue()
            self.bands = dict(sorted(self.bands.items(), reverse=True))
        return self.bands[priority]

    def name_of(self, r: R) -> str:
        """The name of request r's flow queue under the policy in force."""
        return "" if self.policy.fairness == "none" else r.flow

    def length(self, r: R) -> int:
        queue = self.band(r.priority).queues.get(self.name_of(r))
        return len(queue.requests) if queue is not None else 0

    def share(self, r: R) -> float:
        """The share of request r: serving r raises the tag of its flow queue by this share."""
        policy = self.policy
        if policy.fairness == "round-robin":
            return 1.0
        if policy.fairness == "none":
            return r.cost
        node = policy.tree.node(r.flow) if policy.tree is not None else None
        return r.cost / (policy.weights.get(r.flow, r.weight) if node is None else node.weight)

    def shares(self, r: R, levels: Sequence[Level]) -> list[float]:
        """The shares of request r at each of the `levels` of its flow queue."""
        tree, own = self.policy.tree, self.share(r)
        if tree is None or len(levels) == 1:
            return [own]
        if self.policy.fairness == "round-robin":
            return [1.0] * len(levels)
        nodes = [tree.node(path) for _, _, path in levels[:-1]]
        return [r.cost / (1.0 if node is None else node.weight) for node in nodes] + [own]

    def make_room(self, r: R) -> R | None:
        """The request to preempt so that request r can wait; None if there is room for r. Chosen is the
        newest request of the least recently preempted flow queue, in the lowest preemptible band below r's
        band (spec 003).

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
        """Queue request r. Request r is overdue after `starvation_ms`, or, if that is 0, half of its TTL."""
        band, r.flow_queue = self.band(r.priority), self.name_of(r)
        arrived_ms = r.arrived // 1000
        patience_ms = self.policy.starvation_ms or (r.deadline_ms - arrived_ms) // 2
        r.due_ms = min(arrived_ms + patience_ms, r.deadline_ms)
        if r.flow_queue not in band.queues:
            queue = FlowQueue[R](self._context, band.levels(r.flow_queue, self.policy.tree))
            band.queues[r.flow_queue] = queue
            self._start(band, r, queue.levels)
        band.queues[r.flow_queue].insert(r)
        band.queued += 1
        band.bytes += r.body_bytes
        self._queued += 1

    def _start(self, band: BandQueue[R], r: R, levels: Sequence[Level]) -> None:
        """Let a newly backlogged flow queue take turns, and each ancestor whose children took no turns."""
        for (order, child, _), share in zip(levels[::-1], self.shares(r, levels)[::-1], strict=True):
            had_turns = len(order.turns) > 0
            self._take_turns(band, order, child, order.start_tag(child, share))
            if had_turns:
                break

    def _take_turns(self, band: BandQueue[R], order: Order, child: str, tag: float) -> None:
        if order is band and not band.turns:
            band.tag = max(band.tag, self.bv)  # a band that was idle does not catch up on missed turns
        order.turns.put(child, tag, child)

    def throttle(self, r: R, child: str) -> None:
        """Let `child`, the flow queue of request r or a node above it, take no turns; keep its start tag."""
        levels = self.bands[r.priority].queues[r.flow_queue].levels
        depth = [level.child for level in levels].index(child)
        order = levels[depth].order
        order.throttled[child] = order.turns.score(child)
        order.turns.remove(child)
        if not order.turns:
            self._leave(levels[:depth])

    def unthrottle(self, priority: int, child: str) -> bool:
        """Let `child`, a throttled flow queue or inner node, take turns again; it does not catch up on missed
        turns. Returns False if the child was not throttled."""
        band = self.bands[priority]
        *above, (order, _, _) = band.levels(child, self.policy.tree)
        if child not in order.throttled:
            return False
        tag = max(order.v, order.throttled.pop(child))
        had_turns = len(order.turns) > 0
        self._take_turns(band, order, child, tag)
        for order, node, _ in reversed(above):
            if had_turns:
                break
            had_turns = len(order.turns) > 0
            self._take_turns(band, order, node, max(order.v, order.finish.get(node, 0.0)))
        return True

    def _leave(self, levels: Sequence[Level]) -> None:
        """Remove a child from its order, and each ancestor that has no other child that takes turns."""
        for order, child, _ in reversed(levels):
            order.leave(child)
            if order.turns:
                break

    def charge(self, order: Order, child: str, share: float) -> None:
        """Raise the start tag of a backlogged child by `share`."""
        order.set_tag(child, order.tag_of(child) + share)

    def charge_band(self, r: R, cost: float) -> None:
        """Charge `cost` to the band of request r if bands are weighted; a negative cost is a refund."""
        if self.policy.band_policy == "weighted":
            self.bands[r.priority].tag += cost / self.policy.bands.of(r.priority).weight

    def mark_overdue(self, r: R) -> None:
        """Allow the starvation guard to serve a request. Requests that become overdue in the same ms keep
        their order of arrival."""
        self.overdue.put(r, r.due_ms * 1000 + r.arrived % 1000, r.id)

    def next_turn(self) -> tuple[R, bool] | None:
        """The next request, and whether the starvation guard selects it; None if no request can be served."""
        if self.policy.guard_share > 0 and self.credit >= _WHOLE_CREDIT:
            r = self._most_overdue()
            if r is not None:
                return r, True
        for band in self.bands_in_order():
            name = band.first()
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
        """Whether request r can be served: its flow queue and all nodes above take turns."""
        levels = self.bands[r.priority].queues[r.flow_queue].levels
        return all(child in order.turns for order, child, _ in levels)

    def bands_in_order(self) -> list[BandQueue[R]]:
        bands = list(self.bands.values())
        return sorted(bands, key=lambda band: band.tag) if self.policy.band_policy == "weighted" else bands

    def serve(self, r: R, by_guard: bool) -> float:
        """Remove request r, which `next_turn` returned; charge its flow queue and the nodes above it. Returns
        the start tag that the flow queue had."""
        band, guard_share = self.bands[r.priority], self.policy.guard_share
        levels = band.queues[r.flow_queue].levels
        start = 0.0
        for (order, child, _), share in zip(levels, self.shares(r, levels), strict=True):
            start = order.tag_of(child)
            self.charge(order, child, share)
            if not by_guard:
                order.v = max(order.v, start)
        self.remove(r)
        if not by_guard and self.policy.band_policy == "weighted":
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
            self._leave(queue.levels)
            del band.queues[r.flow_queue]

    def forget_finish_tags(self, at_rest: bool) -> None:
        """Drop finish tags at or below v, which have no effect; if `at_rest` (no request runs), drop all."""
        for band in self.bands.values():
            for order in band.orders():
                order.forget_finish_tags(at_rest)
            if band.inner:
                above = {path for queue in band.queues.values() for _, _, path in queue.levels[:-1]}
                band.inner = {at: order for at, order in band.inner.items() if order.finish or at in above}
