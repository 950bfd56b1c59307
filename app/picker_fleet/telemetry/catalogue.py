"""Every metric of a pool: name, help text and labels. metrics.py makes and counts them."""

from collections.abc import Mapping
from typing import Final

Labels = tuple[str, ...]

_DECISION = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0)
_DURATION = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_FIRST_BYTE = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_REDIS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5)
_ITEMS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


_MODEL = ("model", "target_model")

# Name, a counter's without the suffix `_total` -> help text and labels.
COUNTERS: Final[Mapping[str, tuple[str, Labels]]] = {
    "epp_requests": ("Decisions sent to Envoy, by code.", (*_MODEL, "code", "mode")),
    "epp_request_errors": ("Decisions that were refusals.", (*_MODEL, "code")),
    "epp_bypass": ("Requests that bypassed the queue.", _MODEL),
    "epp_requests_expired": ("Requests dropped past their TTL.", _MODEL),
    "epp_requests_cancelled": ("Requests whose client disconnected before the decision.", _MODEL),
    "epp_preemptions": ("Requests preempted for a higher band.", ("band",)),
    "epp_evictions": ("Requests an operator took out of the queue.", ("band",)),
    "epp_queue_push_errors": ("Requests the queue refused.", (*_MODEL, "error_type")),
    "epp_popper_dequeue_attempts": ("Dispatch attempts.", ()),
    "epp_popper_dequeue_successes": ("Dispatch attempts that served a request.", ()),
    "epp_adoptions": ("Requests adopted from another replica.", ()),
    "epp_lease_reclaims": ("Requests released because their lease ended.", ()),
    "epp_completions": ("Requests that ended, by outcome.", ("model", "outcome")),
    "epp_responses": ("Answers by HTTP status, or 0.", ("model", "status")),
    "epp_input_tokens": ("Prompt tokens, as model servers count them.", ("model",)),
    "epp_output_tokens": ("Completion tokens, as model servers count them.", ("model",)),
    "epp_access_log_entries": ("Access-log entries, by what they report.", ("kind",)),
    "epp_access_log_rejected": (
        "Access-log entries without a valid accounting token, by fault.",
        ("reason",),
    ),
    "epp_redis_errors": ("Failed script calls, by kind of failure.", ("script", "kind")),
    "epp_failover_transitions": ("Changes of the failover state, by cause.", ("to", "cause")),
    "epp_stood_still_seconds": ("Seconds in which this replica did not run.", ()),
    "epp_background_failures": ("Failures of background tasks, each followed by a new attempt.", ("task",)),
    "epp_strays": ("Entries dropped because their request has no record.", ()),
    "epp_redis_keys_lost": ("How often Redis had lost keys of the pool.", ()),
    "epp_ghosts": ("Requests released early: their endpoint no longer had them.", ()),
    "epp_scrapes": ("Metrics pages of model servers read, by result.", ("endpoint", "result")),
    "epp_probes": ("Probes that model servers answered, between two scrapes.", ("endpoint",)),
    "epp_endpoint_faults": ("Attempts that failed on an endpoint, or found it full.", ("endpoint", "reason")),
    "epp_extension_faults": ("Calls of extensions without a result, or left out.", ("extension", "reason")),
    "epp_endpoint_ejections": ("Ejections of an endpoint that failed.", ("endpoint", "reason")),
    "epp_scrape_readings": ("Readings published to the fleet, or lost.", ("result",)),
    "epp_split_requests": ("Requests whose prompt another endpoint prefills.", (*_MODEL, "mode")),
    "epp_endpoint_limit_moves": ("Limits that this replica moved, as the leader.", ("direction",)),
    "epp_tenant_served_cost": ("Cost served for a tenant.", ("tenant",)),
    "epp_tenant_over_limit": (
        "Requests that a tenant's limit refused or demoted.",
        ("tenant", "unit", "action"),
    ),
    "epp_dispatches": ("Requests dispatched from the queue, fleet-wide.", ()),
    "epp_guard_dispatches": ("Requests dispatched by the starvation guard.", ()),
    "epp_ended": ("Requests in flight that ended, fleet-wide.", ()),
}
GAUGES: Final[Mapping[str, tuple[str, Labels]]] = {
    "epp_queue_length": ("Requests of this replica that wait in the queue.", _MODEL),
    "epp_buffered_bytes": ("Bytes of bodies that this replica holds.", ()),
    "epp_degraded": ("1 while this replica works without the shared state.", ()),
    "epp_failover_state": ("1 for the failover state of this replica.", ("state",)),
    "epp_redis_answer_age_seconds": ("Time since Redis last answered.", ()),
    "epp_redis_unfit": ("1 for each fault that makes the Redis server unfit.", ("fault",)),
    "epp_scrape_endpoints": ("Endpoints that this replica scrapes.", ()),
    "epp_scrape_age_seconds": ("Age of an endpoint's last reading.", ("endpoint",)),
    "epp_endpoint_score": ("Score of an endpoint by scorer.", ("endpoint", "scorer")),
    "epp_band_queue_length": ("Queued requests, fleet-wide.", ("band",)),
    "epp_band_queue_bytes": ("Bytes of the bodies of queued requests, fleet-wide.", ("band",)),
    "epp_endpoint_in_flight": ("Requests in flight on an endpoint.", ("endpoint",)),
    "epp_endpoint_limit": ("Limit of requests (or tokens) in flight.", ("endpoint",)),
    "epp_endpoint_prefills": ("Prompts that an endpoint prefills for others.", ("endpoint",)),
    "epp_endpoint_prefill_limit": ("Limit of prompts that an endpoint prefills for others.", ("endpoint",)),
    "epp_limit_min": ("The least limit that the fleet may find.", ()),
    "epp_limit_max": ("The highest limit that the fleet may find.", ()),
    "epp_tenant_remaining": ("Units left of a tenant's limit.", ("tenant", "unit", "per")),
    "epp_stock_level": ("Requests or tokens in flight, fleet-wide.", ()),
    "epp_lower_bound": ("While the stock is below this bound, requests are dispatched.", ()),
    "epp_watermark": ("The stock at which the fleet aims.", ()),
    "epp_upper_bound": ("The stock never exceeds this bound.", ()),
    "epp_queue_fill": ("The part of the queue's total capacity in use.", ()),
    "epp_active_flows": ("Flows with a queued request.", ()),
    "epp_overdue_requests": ("Queued requests past their starvation threshold.", ()),
    "epp_leases": ("Requests in flight that have a lease.", ()),
    "epp_ready_backends": ("Endpoints that take new requests.", ()),
    "epp_live_replicas": ("Replicas that send heartbeats.", ()),
    "epp_paused": ("1 while dispatch is paused, fleet-wide.", ()),
}
HISTOGRAMS: Final[Mapping[str, tuple[str, tuple[float, ...], Labels]]] = {
    "epp_decision_latency_seconds": (
        "Time from a request's first message to its decision.",
        _DECISION,
        ("mode",),
    ),
    "epp_queue_latency_seconds": ("Time in the queue.", _QUEUE, (*_MODEL, "success")),
    "epp_request_duration_seconds": ("Time until the last byte of the answer.", _DURATION, ("model",)),
    "epp_time_to_first_token_seconds": ("Time until the answer's first byte.", _FIRST_BYTE, ("model",)),
    "epp_redis_call_seconds": ("Time of one script call.", _REDIS, ("script",)),
    "epp_redis_call_items": ("Items in one script call.", _ITEMS, ("script",)),
    "epp_scrape_seconds": ("Duration of a scrape.", _REDIS, ("result",)),
}
# The metric of each field of the shared state.
POOL_GAUGES: Final = {
    "stock": "epp_stock_level",
    "lower": "epp_lower_bound",
    "watermark": "epp_watermark",
    "upper": "epp_upper_bound",
    "queue_fill": "epp_queue_fill",
    "active_flows": "epp_active_flows",
    "overdue": "epp_overdue_requests",
    "leases": "epp_leases",
    "ready_backends": "epp_ready_backends",
    "replicas": "epp_live_replicas",
    "paused": "epp_paused",
}
POOL_TOTALS: Final = {
    "dispatched_total": "epp_dispatches",
    "guard_dispatches_total": "epp_guard_dispatches",
    "ended_total": "epp_ended",
}
