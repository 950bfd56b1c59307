"""What every replica must agree on, as one of them publishes it: settings under the scripts' own names."""

from collections.abc import Mapping

from picker_fleet.config import Settings
from picker_fleet.request import Band
from picker_fleet.scheduling.chooser import with_in_flight
from picker_fleet.scheduling.scheduler import Scheduler

# How fast a flow's mean answer follows its answers; a few dozen make a mean.
_ANSWER_ALPHA = 0.2


def published(settings: Settings, weights: Mapping[str, float]) -> dict[str, object]:
    """The shared settings, named as docs/redis-schema.md lists them; durations in ms.

    `weights` are those of single flows, in place of the ones their requests bring.
    """
    queue = settings.fair_request_queue
    controller, workloads = settings.request_queue_controller, settings.workloads
    leases, log = settings.leases, settings.decision_log
    return {
        "upper_per": controller.upper_per_backend,
        "lower_per": controller.lower_per_backend,
        "total_capacity": queue.total_capacity,
        "flow_capacity": queue.flow_capacity,
        "max_flows": queue.max_flows,
        "claim_share": settings.claim_share,
        "lease_ms": leases.inflight * 1000,
        "silence_ms": leases.replica_silence * 1000,
        "fallbacks": settings.scheduling.fallbacks,
        "log_max": log.max_entries if log.enabled else 0,
        "max_workloads": workloads.max_workloads,
        "window_ms": workloads.rate_window * 1000,
        "ema_alpha": workloads.ema_alpha,
        "guard_share": queue.guard_share,
        "starvation_ms": _whole_ms(queue.starvation_after),
        "band_policy": queue.band_policy,
        "band_weights": [queue.band_weights[band] for band in Band],
        "fairness": queue.fairness,
        "ordering": queue.ordering,
        "wait_signal": workloads.wait_signal,
        "wait_weight": workloads.wait_weight,
        "criticality_weight": workloads.criticality_weight,
        "rate_weight": workloads.rate_weight,
        "wait_cap_ms": workloads.wait_cap * 1000,
        "rate_cap": workloads.rate_cap,
        "overload": queue.overload,
        "weights": dict(weights),
        "paused": 0,
        "queue_enabled": int(controller.enabled),
        "live_weight": Scheduler(with_in_flight(_scorers(settings))).live_weight,
        "default_answer": queue.default_answer_tokens,
        "answer_alpha": _ANSWER_ALPHA,
    }


def _scorers(settings: Settings) -> dict[str, float]:
    return {scorer.name: scorer.weight for scorer in settings.scheduling.scorers}


def _whole_ms(seconds: float | None) -> int:
    """At least 1 for a time that is set: 0 stands for none."""
    return 0 if seconds is None else max(1, round(seconds * 1000))
