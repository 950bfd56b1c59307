"""One replica's own queue, for the time without shared state: the order of docs/fairness.md, in memory. Pure.

The same rules as `lua/lib/queue.lua` and `dispatch.lua`, over one replica's requests and its part of the
capacities: the guard first, then bands, then flows by start-time fair queueing, then requests of the flow.
Not carried over: virtual times (all flows start anew), workloads' rates and average waits (a score has only
the request's own wait and criticality), and parking (a flow's limit is kept by the choice of the endpoint).
"""

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from picker_fleet.errors import InsufficientFlowCapacity, Saturated, TooManyFlows, TotalCapacity
from picker_fleet.live_config import EffectiveConfig
from picker_fleet.request import Band, InferenceRequest

_CREDIT = 1 - 1e-9  # ten tenths are not quite one


@dataclass(frozen=True, slots=True)
class Rules:
    """Capacities are this replica's part; `starvation_s` 0 stands for half of the request's TTL."""

    total_capacity: int
    flow_capacity: int
    max_flows: int
    claim_share: float
    band_policy: str
    band_weights: Mapping[Band, float]
    fairness: str
    ordering: str
    overload: str
    guard_share: float
    starvation_s: float
    weights: Mapping[str, float]
    wait_weight: float
    criticality_weight: float
    wait_cap_s: float

    def charge(self, request: InferenceRequest, cost: float) -> float:
        """What serving `request` costs its flow."""
        if self.fairness == "round-robin":
            return 1.0
        if self.fairness == "none":
            return cost
        return cost / self.weights.get(request.flow, request.weight)

    def score(self, request: InferenceRequest, waited_s: float) -> float:
        """The workload-aware score (spec 001) of one that waits; its workload's rate is not known here."""
        waited = min(waited_s / self.wait_cap_s, 1.0)
        return self.wait_weight * waited + self.criticality_weight * request.workload.criticality / 5


def rules_of(effective: EffectiveConfig, live: int) -> Rules:
    """The rules in force, the capacities divided among `live` replicas, with room for one at least."""
    queue, workloads = effective.settings.fair_request_queue, effective.settings.workloads
    return Rules(
        total_capacity=max(1, queue.total_capacity // max(live, 1)),
        flow_capacity=max(1, queue.flow_capacity // max(live, 1)),
        max_flows=max(1, queue.max_flows // max(live, 1)),
        claim_share=effective.settings.claim_share,
        band_policy=queue.band_policy,
        band_weights=queue.band_weights,
        fairness=queue.fairness,
        ordering=queue.ordering,
        overload=queue.overload,
        guard_share=queue.guard_share,
        starvation_s=queue.starvation_after or 0.0,
        weights=effective.weights,
        wait_weight=workloads.wait_weight,
        criticality_weight=workloads.criticality_weight,
        wait_cap_s=workloads.wait_cap,
    )


@dataclass(slots=True, eq=False)
class Waiting:
    """A queued request. Times are seconds of the caller's clock."""

    request: InferenceRequest
    cost: float
    arrived_s: float
    deadline_s: float
    due_s: float  # overdue from then on
    lane: "_Lane"
    queued: bool = True


@dataclass(slots=True, eq=False)
class _Lane:
    """What waits of one flow; `tag` is its start tag while anything does, else where it would go on."""

    name: str
    band: Band
    tag: float = 0.0
    length: int = 0
    heap: list[tuple[float, int, Waiting]] = field(
        default_factory=list
    )  # by the ordering; holds the gone too
    preempted: int = 0  # when it last had to make room


class _BandQueue:
    def __init__(self) -> None:
        self.v = 0.0  # virtual time: the greatest start tag served by turn
        self.tag = 0.0  # of the band itself, where bands are weighted
        self.queued = 0
        self.lanes: dict[str, _Lane] = {}
        self.turns: list[tuple[float, str]] = []  # (tag, lane): those that are no longer so are passed over


class LocalQueue:
    """Who waits, and who is next. `now_s` never goes back."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._bands = {band: _BandQueue() for band in Band}
        self._numbers = itertools.count(1)
        self._overdue: list[tuple[float, int, Waiting]] = []
        self._credit = 1.0
        self._bv = 0.0  # virtual time across bands

    def __len__(self) -> int:
        return sum(band.queued for band in self._bands.values())

    @property
    def capacity(self) -> int:
        """How many may wait."""
        return self._rules.total_capacity

    def lengths(self) -> dict[str, int]:
        """Queued requests by band."""
        return {band.label: queue.queued for band, queue in self._bands.items()}

    def offer(
        self, request: InferenceRequest, cost: float, arrived_s: float
    ) -> tuple[Waiting, Waiting | None]:
        """Queue `request`; its place, and who had to make room for it.

        Raises:
            Saturated, InsufficientFlowCapacity, TooManyFlows, TotalCapacity: as the shared queue would.
        """
        rules, band = self._rules, self._bands[request.band]
        name = "" if rules.fairness == "none" else request.flow
        lane = band.lanes.get(name)
        if rules.overload == "reject-noncritical" and request.band is not Band.CRITICAL:
            raise Saturated("only critical requests may wait", retry_after_s=1)
        if rules.fairness != "none" and lane is not None and lane.length >= rules.flow_capacity:
            raise InsufficientFlowCapacity("this flow's part of the queue is full", retry_after_s=1)
        new = request.band is not Band.CRITICAL and (lane is None or not lane.length)
        if new and self._flows() >= rules.max_flows:
            raise TooManyFlows("too many other flows wait", retry_after_s=1)
        victim = None
        if len(self) >= rules.total_capacity:
            victim = self._newest_below(request.band) if rules.overload == "preempt" else None
            if victim is None:
                raise TotalCapacity("the queue is full", retry_after_s=1)
            self.remove(victim)
        if lane is None:
            lane = band.lanes[name] = _Lane(name, request.band)
        patience_s = rules.starvation_s or request.ttl_s / 2
        deadline_s = arrived_s + request.ttl_s
        due_s = min(arrived_s + patience_s, deadline_s)
        waiting = Waiting(request, cost, arrived_s, deadline_s, due_s, lane)
        self._insert(waiting, band)
        return waiting, victim

    def _flows(self) -> int:
        """How many flows have something waiting."""
        if len(self) < self._rules.max_flows:
            return len(self)  # there are no more than that
        return sum(lane.length > 0 for band in self._bands.values() for lane in band.lanes.values())

    def remove(self, waiting: Waiting) -> None:
        """Take it out unserved, if it is still in; its flow keeps its tag."""
        if waiting.queued:
            self._take_out(waiting)
            self._forget_if_empty()

    def turn(self, now_s: float) -> tuple[Waiting, bool] | None:
        """Who is to be served next, and whether the guard says so; None if nobody waits."""
        if self._credit >= _CREDIT and self._rules.guard_share > 0:
            first = _top(self._overdue)
            if first is not None and first.due_s <= now_s:
                return first, True
        for band in self._in_turn():
            lane = self._least_tag(band)
            if lane is not None:
                return self._head(lane, now_s), False
        return None

    def serve(self, waiting: Waiting, by_guard: bool) -> None:
        """Take out who `turn` named, and charge its flow."""
        rules, lane = self._rules, waiting.lane
        band = self._bands[lane.band]
        self._take_out(waiting)
        if not by_guard:
            band.v = max(band.v, lane.tag)
            self._bv = max(self._bv, band.tag)
        lane.tag += rules.charge(waiting.request, waiting.cost)
        if lane.length:
            heapq.heappush(band.turns, (lane.tag, lane.name))
        band.tag += waiting.cost / rules.band_weights[lane.band]
        self._credit = min(self._credit - by_guard + rules.guard_share, 1 + rules.guard_share)
        self._forget_if_empty()

    def all(self) -> Iterator[Waiting]:
        """Everyone who waits, oldest first."""
        lanes = (lane for band in self._bands.values() for lane in band.lanes.values())
        found = [each for lane in lanes for _, _, each in lane.heap if each.queued]
        return iter(sorted(found, key=lambda each: each.arrived_s))

    def _insert(self, waiting: Waiting, band: _BandQueue) -> None:
        lane, number = waiting.lane, next(self._numbers)
        edf = self._rules.ordering == "edf"
        heapq.heappush(lane.heap, (waiting.deadline_s if edf else waiting.arrived_s, number, waiting))
        heapq.heappush(self._overdue, (waiting.due_s, number, waiting))
        if not band.queued:
            band.tag = max(band.tag, self._bv)
        band.queued += 1
        lane.length += 1
        if lane.length == 1:
            lane.tag = max(band.v, lane.tag)
            heapq.heappush(band.turns, (lane.tag, lane.name))

    def _in_turn(self) -> list[_BandQueue]:
        bands = [queue for queue in self._bands.values() if queue.queued]
        return sorted(bands, key=lambda band: band.tag) if self._rules.band_policy == "weighted" else bands

    def _least_tag(self, band: _BandQueue) -> _Lane | None:
        while band.turns:
            tag, name = band.turns[0]
            lane = band.lanes[name]
            if lane.length and lane.tag == tag:
                return lane
            heapq.heappop(band.turns)
        return None

    def _head(self, lane: _Lane, now_s: float) -> Waiting:
        head = _top(lane.heap)
        assert head is not None
        if self._rules.ordering == "workload-aware":
            waiting = (each for _, _, each in lane.heap if each.queued)
            # Ties to who came first.
            score = self._rules.score
            return max(
                waiting, key=lambda each: (score(each.request, now_s - each.arrived_s), -each.arrived_s)
            )
        return head

    def _newest_below(self, band: Band) -> Waiting | None:
        """Of the lowest band below `band`: the newest of the flow preempted longest ago (spec 003);
        under `edf` its latest deadline."""
        for lower in reversed(Band):
            if lower <= band:
                return None
            lanes = [lane for lane in self._bands[lower].lanes.values() if lane.length]
            if lanes:
                lane = min(lanes, key=lambda lane: (lane.preempted, lane.name))
                lane.preempted = next(self._numbers)
                return max((entry for entry in lane.heap if entry[2].queued), key=lambda entry: entry[:2])[2]
        return None

    def _take_out(self, waiting: Waiting) -> None:
        waiting.queued = False
        waiting.lane.length -= 1
        self._bands[waiting.lane.band].queued -= 1

    def _forget_if_empty(self) -> None:
        """When nobody waits, flows without a debt leave no trace."""
        if len(self):
            return
        self._overdue.clear()
        for band in self._bands.values():
            band.turns.clear()
            band.lanes = {name: lane for name, lane in band.lanes.items() if lane.tag > band.v}
            for lane in band.lanes.values():
                lane.heap.clear()


def _top(heap: list[tuple[float, int, Waiting]]) -> Waiting | None:
    """The first of a heap that still waits."""
    while heap:
        if heap[0][2].queued:
            return heap[0][2]
        heapq.heappop(heap)
    return None
