"""The queue's rules as one of several replicas keeps them by itself. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from picker_fleet.admission.tuning import Effective
from picker_fleet.request import Band, InferenceRequest


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
        """The workload-aware score (specs/001) of one that waits; its workload's rate is not known here."""
        waited = min(waited_s / self.wait_cap_s, 1.0)
        return self.wait_weight * waited + self.criticality_weight * request.workload.criticality / 5


def rules_of(effective: Effective, live: int) -> Rules:
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
