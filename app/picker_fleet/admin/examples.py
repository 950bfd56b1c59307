"""Examples of the models in the OpenAPI document.

tests/unit/test_admin_queue_order.py compares the examples with the models.
"""

from typing import Any

from fastapi import FastAPI

from picker_fleet.admin.models import Problem

_CURSOR = "WyJmbG93cyIsMjE0NzQ4MzY0NywiNDEuNSIsImdvbGQiXQ"  # a cursor of the list of flows
_BANDS: list[dict[str, Any]] = [
    {
        "band": band, "priority": priority, "queued": queued, "queued_bytes": 900 * queued,
        "virtual_time": at, "active_flows": 1, "oldest_s": age, "weight": weight, "capacity": 500,
        "bytes": 256 * 1024 * 1024,
    }
    for band, priority, queued, at, age, weight in (
        ("Critical", 10, 1, 0.0, 0.1, 70), ("Default", 0, 3, 41.5, 0.6, 20),
        ("Sheddable", -10, 12, 18.0, 4.0, 10),
    )
]  # fmt: skip
_STATE: dict[str, Any] = {
    "pool": "default", "replica": "r-3f9c", "degraded": False, "stock": 7,
    "bounds": {"lower": 7.2, "watermark": 8.0, "upper": 8.8}, "ready_backends": 4,
    "queue_length": {"Critical": 1, "Default": 3, "Sheddable": 12},
    "queue_bytes": {"Critical": 900, "Default": 2700, "Sheddable": 10800}, "active_flows": 3, "leases": 7,
    "virtual_times": {"Critical": 0.0, "Default": 41.5, "Sheddable": 18.0},
    "replicas": ["r-3f9c", "r-77a0", "r-b1de"],
    "in_flight": {"10.0.0.1:8000": 2, "10.0.0.2:8000": 2, "10.0.0.3:8000": 3},
    "paused": False, "tuned_version": "2", "unit": "requests", "mode": "static",
    "queue_enabled": True, "bands": _BANDS,
    "queued": 16, "queue_fill": 0.016, "overdue": 2, "dispatched_total": 120431,
    "guard_dispatches_total": 96, "ended_total": 130210, "drain_rate": 41.2, "pool_age_s": 86400.0,
    "now_us": 1767225612000000, "tenants": True,
}  # fmt: skip
_CONFIG: dict[str, Any] = {
    "config": {"pool": "default", "fair_request_queue": {"total_capacity": 2000, "flow_capacity": 100}},
    "weights": {"gold": 3.0},
    "changes": {"fair_request_queue": {"total_capacity": 2000}, "weights": {"gold": 3.0}},
    "paused": False, "tuned_version": "2", "live": ["fair_request_queue.total_capacity", "weights.FLOW"],
}  # fmt: skip
_CHANGE: dict[str, Any] = {
    "at": 1767225600.5, "by": "alice", "address": "10.0.0.9", "change": "PATCH /api/v1/config",
    "detail": '{"weights":{"gold":3.0}}', "outcome": "made",
}  # fmt: skip
_ENDPOINT: dict[str, Any] = {
    "address": "10.0.0.1:8000", "labels": {"zone": "a"}, "status": "down", "in_flight": 2,
    "stages": ["decode", "prefill"], "prefills": 1, "prefill_limit": 4,
    "in_flight_tokens": None, "max_inflight": 64,
    "limit": 36, "limit_reason": "engine queued 3 requests at 40 in flight", "limit_changed_s": 41.5,
    "pinned": False, "waiting": 0.0,
    "running": 2.0, "kv_utilisation": 0.31, "adapters": ["sql"], "waiting_adapters": [], "max_adapters": 4,
    "latency_mean_s": 1.9, "latency_std_s": 0.4, "scraped_s_ago": 0.06,
    "scrape_fault": "no connection: Connection refused",
    "scrape_remark": "line 12: not a number",
    "unready": "asleep", "ejected": {"reason": "503", "until": "2026-01-01T00:00:08Z"},
}  # fmt: skip
_FLOW: dict[str, Any] = {
    "flow": "gold", "band": "Default", "queued": 12, "oldest_s": 3.4, "start_tag": 41.5, "weight": 3.0,
    "throttled": False, "in_flight": 4, "served_cost_per_s": 7.2, "share": 0.74, "fair_share": 0.75,
}  # fmt: skip
_REQUEST: dict[str, Any] = {
    "id": "4f1d-9c", "state": "queued", "flow": "gold", "band": "Default", "workload": "chat",
    "model": "llama", "criticality": 3, "cost": 1.0, "age_s": 3.4, "owner": "r-77a0",
}  # fmt: skip
_QUEUED: dict[str, Any] = {
    **_REQUEST, "position": 1, "deadline_in_s": 26.6, "overdue": False, "overdue_in_s": 11.6,
    "score": {"wait": 0.02, "criticality": 0.24, "rate": -0.01, "total": 0.25}, "start_tag": 41.5,
}  # fmt: skip
_RUNNING: dict[str, Any] = {
    **_REQUEST, "state": "placed", "endpoint": "10.0.0.1:8000", "fallbacks": ["10.0.0.2:8000"],
    "prefiller": "10.0.0.3:8000", "lease_in_s": 12.1,
}  # fmt: skip
_WORKLOAD: dict[str, Any] = {
    "id": "chat", "total": 1290, "active": 14, "dispatched": 1281, "rate": 4.7, "average_wait_s": 0.8,
    "last_request_s_ago": 0.1, "score": {"wait": 0.0, "criticality": 0.24, "rate": -0.0094, "total": 0.23},
}  # fmt: skip
_LIMIT: dict[str, Any] = {
    "unit": "tokens", "per": "1m", "amount": 1000000.0, "burst": 200000.0, "remaining": 41250.5,
    "reset_s": 9.5,
}  # fmt: skip
_TENANT: dict[str, Any] = {
    "path": "acme/search", "source": "operator", "settings_of": "acme/search", "weight": 3.0,
    "over_limit": "queue", "limits": [_LIMIT], "in_flight": None, "served_cost": 128411.0, "queued": 12,
    "oldest_s": 3.4, "served_cost_per_s": 7.2, "share": 0.74, "fair_share": 0.75, "waits": True,
    "waits_s": 0.4,
}  # fmt: skip
_REPLICA: dict[str, Any] = {
    "id": "r-3f9c", "live": True, "heartbeat_s_ago": 0.4, "host": "node-1", "degraded": False, "waiting": 5,
    "admin": "http://node-1:8081", "grpc": "node-1:9002", "version": "0.1.0", "started_s_ago": 3600.0,
    "this": True,
}  # fmt: skip
_ORDER = "in dispatch order: flows by start tag; band after band; in a flow by arrival"
HEALTHY: dict[str, Any] = {
    "status": "ok", "replica": "r-3f9c", "pool": "default",
    "components": {"redis": "ok", "endpoints": "ok", "grpc": "ok"},
}  # fmt: skip
_POOL = {"name": "default", "default": True, "ready": True, "path": "/"}

# By model (models.py).
EXAMPLES: dict[str, Any] = {
    "Bounds": _STATE["bounds"],
    "BandState": _BANDS[1],
    "State": _STATE,
    "Config": _CONFIG,
    "Change": _CHANGE,
    "Changes": {"changes": [_CHANGE]},
    "Dispatch": {"paused": True, "tuned_version": "3"},
    "Eviction": {"id": "4f1d-9c", "result": "evicted"},
    "Drained": {"address": "10.0.0.1:8000", "drained": True},
    "Ejected": _ENDPOINT["ejected"],
    "Endpoint": _ENDPOINT,
    "Health": HEALTHY,
    "Pool": _POOL,
    "Pools": {"pools": [_POOL]},
    "Problem": {
        "type": "about:blank", "title": "Not Found", "status": 404, "code": "unknown_path",
        "detail": "GET /api/v1/nonsense: Not Found", "instance": "/api/v1/nonsense",
    },
    "Flow": _FLOW,
    "Flows": {"flows": [_FLOW], "total": 1, "cursor": _CURSOR},
    "FlowDetail": {
        "flow": "gold", "bands": [_FLOW], "weight_override": 3.0, "flow_capacity": 100,
        "served_cost_per_s": {"Critical": 0.0, "Default": 7.2, "Sheddable": 0.0},
    },
    "Score": _QUEUED["score"],
    "Queued": _QUEUED,
    "Queue": {"requests": [_QUEUED], "total": 1, "cursor": _CURSOR, "order": _ORDER},
    "Running": _RUNNING,
    "Inflight": {"requests": [_RUNNING], "total": 1, "cursor": _CURSOR},
    "RequestStatus": {
        **_QUEUED, "position": 4,
        "why": "flow gold has 3 requests before it; the stock (8) is at its bounds (7.2 to 8.8)",
        "explanation": {"request_id": "4f1d-9c", "chosen": [], "candidates": [], "excluded": {}},
    },
    "Workload": _WORKLOAD,
    "Workloads": {"workloads": [_WORKLOAD], "total": 1, "cursor": _CURSOR},
    "TenantLimit": _LIMIT,
    "Tenant": _TENANT,
    "Tenants": {"tenant": _TENANT, "children": [_TENANT], "total": 1, "cursor": _CURSOR},
    "TenantChange": {
        "path": "acme/search", "old": None,
        "new": {"limits": [{"unit": "tokens", "amount": 1000000, "per_ms": 60000, "burst": 200000}]},
    },
    "Replica": _REPLICA,
    "Replicas": {"replicas": [_REPLICA]},
}  # fmt: skip


def add(app: FastAPI) -> None:
    """Add the model of faults and an example of each model to the OpenAPI document of `app`."""
    openapi = app.openapi

    def with_examples() -> dict[str, Any]:
        document = openapi()
        schemas = document["components"]["schemas"]
        schemas["Problem"] = Problem.model_json_schema(mode="serialization")
        for name, schema in schemas.items():
            schema["example"] = EXAMPLES[name]
        return document

    app.openapi = with_examples  # type: ignore[method-assign]
