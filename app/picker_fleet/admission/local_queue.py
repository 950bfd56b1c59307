"""One replica's local queue during an outage: a `FairQueue` within the replica's share of the capacities.

`LocalGate` calls this queue, which differs from the shared queue: virtual times begin at 0 in each outage. A
score uses only the request's own wait and criticality, because a workload's rate and average wait are
unknown. The local queue does not enforce a flow's limit per endpoint.
"""

import asyncio
import itertools
import math
from dataclasses import dataclass, field, replace

from picker_fleet.admission.fair_queue import Context, FairQueue, Policy, QueueFull
from picker_fleet.admission.tenant_tree import ScoredSet
from picker_fleet.admission.waits import REFUSALS
from picker_fleet.domain.bands import Band, Bands
from picker_fleet.domain.config import EffectiveConfig
from picker_fleet.domain.request import InferenceRequest
from picker_fleet.domain.tenants import Tree
from picker_fleet.state.schema import Refusal


@dataclass(frozen=True, slots=True)
class Rules:
    """One replica's queueing policy, and the largest part of the bound that one request may take."""

    policy: Policy
    claim_share: float


def rules_of(effective: EffectiveConfig, live: int, tree: Tree | None = None) -> Rules:
    """The rules of one of `live` replicas: its capacities and byte limits are at least 1, and 1/`live` of the
    fleet's. `tree` has the nodes of tenants; None without tenants."""
    queue, workloads = effective.settings.fair_request_queue, effective.settings.workloads

    def part(capacity: int) -> int:
        return max(1, capacity // max(live, 1))

    def part_of(band: Band) -> Band:
        return replace(
            band, capacity=band.capacity and part(band.capacity), bytes=band.bytes and part(band.bytes)
        )

    policy = Policy(
        total_capacity=part(queue.total_capacity),
        flow_capacity=part(queue.flow_capacity),
        max_flows=part(queue.max_flows),
        fairness=queue.fairness,
        ordering=queue.ordering,
        overload=queue.overload,
        band_policy=queue.band_policy,
        bands=Bands(map(part_of, queue.bands)),
        guard_share=queue.guard_share,
        starvation_ms=(queue.starvation_after or 0.0) * 1000,
        weights=effective.weights,
        wait_signal="request",
        wait_weight=workloads.wait_weight,
        criticality_weight=workloads.criticality_weight,
        rate_weight=0.0,
        wait_cap_ms=workloads.wait_cap * 1000,
        rate_cap=math.inf,
        tree=tree,
    )
    return Rules(policy, effective.settings.claim_share)


class _UnknownWorkloads:
    def rate_of(self, flow: str, workload: str) -> float:
        return 0.0

    def wait_ms_of(self, flow: str, workload: str) -> float:
        return 0.0


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in the local queue. Fields ending in `_s` are seconds of the caller's clock; the fields of
    `Queueable` have the units given there. The gate resolves `turn` with True once it has acquired the cost,
    or with False if the shared queue must admit the request."""

    request: InferenceRequest
    cost: float
    arrived_s: float
    deadline_s: float
    id: str
    flow: str
    priority: int
    weight: float
    workload: str
    criticality: int
    arrived: float
    deadline_ms: float
    body_bytes: int
    due_ms: float = 0.0
    flow_queue: str = ""
    queued: bool = False
    turn: "asyncio.Future[bool]" = field(init=False, repr=False)

    @property
    def early_ms(self) -> float:
        return self.request.early_ms

    @classmethod
    def of(cls, r: InferenceRequest, cost: float, arrived_s: float) -> "Waiting":
        deadline_s = arrived_s + r.ttl_s
        workload = r.workload.id
        return cls(
            r, cost, arrived_s, deadline_s, r.id, r.flow, r.band.priority, r.weight, workload,
            r.workload.criticality, arrived_s * 1e6, deadline_s * 1000 // 1, r.body_bytes,
        )  # fmt: skip


class LocalQueue:
    """One replica's waiting requests, in order. The queue's time never goes back, even if `now_s` does."""

    def __init__(self, rules: Rules) -> None:
        self._now_us = 0.0
        context = Context(rules.policy, lambda: self._now_us, _UnknownWorkloads())
        self._queue: FairQueue[Waiting] = FairQueue(context, itertools.count(1).__next__)
        self._due: ScoredSet[Waiting] = ScoredSet()  # requests that are not yet overdue, by `due_ms`

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def capacity(self) -> int:
        return self._queue.policy.total_capacity

    @property
    def lowest_band(self) -> Band:
        """The lowest of the bands that are configured or have had a waiting request."""
        bands = self._queue.policy.bands
        return bands.of(min(*self._queue.bands, *(band.priority for band in bands)))

    def lengths(self) -> dict[str, int]:
        bands = self._queue.policy.bands
        waiting = {bands.of(priority): band.queued for priority, band in self._queue.bands.items()}
        configured = dict.fromkeys(bands, 0)
        return {band.name: length for band, length in (configured | waiting).items()}

    def offer(
        self, request: InferenceRequest, cost: float, arrived_s: float
    ) -> tuple[Waiting, Waiting | None]:
        """Queue `request`. Returns the request's entry, and the entry preempted to make room, or None.

        Raises:
            Saturated, InsufficientFlowCapacity, TooManyFlows, BandCapacity, BandBytes, TotalCapacity: the
                queue refuses the request, as the shared queue would.
        """
        waiting = Waiting.of(request, cost, arrived_s)
        self._now_us = max(self._now_us, waiting.arrived)
        try:
            preempted = self._queue.make_room(waiting)
        except QueueFull as full:
            error, why = REFUSALS[Refusal(full.reason)]
            raise error(why, retry_after_s=1) from None
        if preempted is not None:
            self.remove(preempted)
        self._queue.insert(waiting)
        self._due.put(waiting, waiting.due_ms, waiting.id)
        waiting.queued = True
        return waiting, preempted

    def remove(self, waiting: Waiting) -> None:
        """Remove a request if it is still queued, without charging its flow queue."""
        if waiting.queued:
            self._queue.remove(waiting)
            self._left(waiting)

    def turn(self, now_s: float) -> tuple[Waiting, bool] | None:
        """The next request, and whether the starvation guard selects it; None if all waiting requests are
        throttled."""
        self._now_us = max(self._now_us, now_s * 1e6)
        while (due := self._due.first()) is not None and due.due_ms * 1000 <= self._now_us:
            self._due.remove(due)
            self._queue.mark_overdue(due)
        return self._queue.next_turn()

    def serve(self, waiting: Waiting, by_guard: bool) -> None:
        """Remove the request that `turn` returned, and charge its flow queue."""
        self._queue.serve(waiting, by_guard)
        self._left(waiting)

    def throttle(self, waiting: Waiting, child: str) -> None:
        """Serve no request below node `child` (tenant_tree.py) of the request's band, until `unthrottle`."""
        self._queue.throttle(waiting, child)

    def unthrottle(self, child: str) -> None:
        for priority in self._queue.bands:
            self._queue.unthrottle(priority, child)

    def all(self) -> list[Waiting]:
        """All waiting requests, the oldest first."""
        return sorted(self._queue.requests(), key=lambda each: each.arrived_s)

    def _left(self, waiting: Waiting) -> None:
        waiting.queued = False
        self._due.remove(waiting)
        self._queue.forget_preemptions()
        if not len(self):
            self._queue.forget_finish_tags(at_rest=False)
