"""The admin API's answers, as its OpenAPI page describes them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_BANDS: list[dict[str, Any]] = [
    {"band": band, "queued": queued, "virtual_time": at, "active_flows": 1, "oldest_s": age, "weight": weight}
    for band, queued, at, age, weight in (
        ("Critical", 1, 0.0, 0.1, 70), ("Default", 3, 41.5, 0.6, 20), ("Sheddable", 12, 18.0, 4.0, 10),
    )
]  # fmt: skip
_STATE_EXAMPLE: dict[str, Any] = {
    "pool": "default",
    "replica": "r-3f9c",
    "degraded": False,
    "stock": 7,
    "bounds": {"lower": 7.2, "watermark": 8.0, "upper": 8.8},
    "ready_backends": 4,
    "queue_length": {"Critical": 1, "Default": 3, "Sheddable": 12},
    "active_flows": 3,
    "virtual_times": {"Critical": 0.0, "Default": 41.5, "Sheddable": 18.0},
    "replicas": ["r-3f9c", "r-77a0", "r-b1de"],
    "in_flight": {"10.0.0.1:8000": 2, "10.0.0.2:8000": 2, "10.0.0.3:8000": 3},
    "paused": False,
    "tuned_version": "2",
    "unit": "requests",
    "queue_enabled": True,
    "bands": _BANDS,
    "queued": 16,
    "queue_fill": 0.016,
    "overdue": 2,
    "dispatched_total": 120431,
    "guard_dispatches_total": 96,
    "ended_total": 130210,
    "drain_rate": 41.2,
    "pool_age_s": 86400.0,
}
_CONFIG_EXAMPLE: dict[str, Any] = {
    "config": {"pool": "default", "fair_request_queue": {"total_capacity": 2000, "flow_capacity": 100}},
    "weights": {"gold": 3.0},
    "changes": {"fair_request_queue": {"total_capacity": 2000}, "weights": {"gold": 3.0}},
    "paused": False,
    "tuned_version": "2",
    "live": ["fair_request_queue.total_capacity", "weights.FLOW"],
}


_ENDPOINT: dict[str, Any] = {
    "address": "10.0.0.1:8000", "labels": {"zone": "a"}, "status": "down", "in_flight": 2, "max_inflight": 8,
    "waiting": 0.0,
    "running": 2.0, "kv_utilisation": 0.31, "adapters": ["sql"], "waiting_adapters": [], "max_adapters": 4,
    "latency_mean_s": 1.9, "latency_std_s": 0.4, "scraped_s_ago": 0.06,
    "scrape_fault": "no connection: Connection refused",
}  # fmt: skip


def _example(value: Any, extra: Literal["allow", "ignore"] = "ignore") -> ConfigDict:
    return ConfigDict(json_schema_extra={"example": value}, extra=extra)


class Bounds(BaseModel):
    """The whole fleet's bounds of the stock, in its unit (requests or tokens)."""

    model_config = _example(_STATE_EXAMPLE["bounds"])

    lower: float = Field(description="dispatch runs while the stock is below it")
    watermark: float = Field(description="the stock that is aimed at")
    upper: float = Field(description="the stock is never above it")


class BandState(BaseModel):
    """One band of the queue."""

    model_config = _example(_BANDS[1])

    band: Literal["Critical", "Default", "Sheddable"] = Field(description="the band's name")
    queued: int = Field(description="its waiting requests")
    virtual_time: float = Field(description="of fair queueing among its flows")
    active_flows: int = Field(description="flows with a queued request in it")
    oldest_s: float | None = Field(
        description="age of its oldest waiting request (under `edf`, of those each flow serves next);"
        " null: none waits, or not known"
    )
    weight: float | None = Field(description="null unless `band_policy: weighted`")


class State(BaseModel):
    """The shared state as this replica reads it now; further keys may be added."""

    model_config = _example(_STATE_EXAMPLE, extra="allow")

    pool: str = Field(description="names the keyspace in Redis")
    replica: str = Field(description="who answered")
    degraded: bool = Field(description="this replica works without the shared state")
    stock: float = Field(description="what is in flight, fleet-wide, in requests or tokens")
    bounds: Bounds = Field(description="of the stock, fleet-wide")
    ready_backends: int = Field(description="endpoints that take new requests")
    queue_length: dict[str, int] = Field(description="queued requests by band")
    queue_fill: float = Field(0.0, description="the part of the queue's `total_capacity` that is taken")
    active_flows: int = Field(0, description="flows with a queued request")
    virtual_times: dict[str, float] = Field(description="fair queueing's virtual time by band")
    replicas: list[str] = Field(description="ids of the live replicas")
    in_flight: dict[str, int] = Field(default_factory=dict, description="requests by endpoint (ip:port)")
    paused: bool = Field(False, description="nothing is dispatched and nothing goes past the queue")
    tuned_version: str = Field("", description="of the live changes; empty while there never was one")
    unit: Literal["requests", "tokens"] = Field("requests", description="what the stock counts")
    queue_enabled: bool = Field(
        True, description="false: requests are placed as they come; nothing waits or takes of the stock"
    )
    bands: list[BandState] = Field(default_factory=list, description="the queue, the highest band first")
    queued: int = Field(0, description="waiting requests of all bands")
    overdue: int = Field(0, description="of these, past their starvation threshold")
    dispatched_total: int = Field(0, description="grants in this life of the pool")
    guard_dispatches_total: int = Field(0, description="of these, by the starvation guard")
    ended_total: int = Field(0, description="requests that have ended, whatever way")
    drain_rate: float = Field(0.0, description="dispatches a second, smoothed")
    pool_age_s: float = Field(0.0, description="since this life of the pool began")


class Config(BaseModel):
    """The configuration in force: the answering replica's own, with the fleet's live changes in it."""

    model_config = _example(_CONFIG_EXAMPLE)

    config: dict[str, Any] = Field(description="every section; durations in seconds, secrets left out")
    weights: dict[str, float] = Field(description="weights of single flows, in place of their requests'")
    changes: dict[str, Any] = Field(description="the live changes, as a PATCH would bring them about")
    paused: bool = Field(description="nothing is dispatched")
    tuned_version: str = Field(description="of the live changes; empty while there never was one")
    live: list[str] = Field(description="the keys that PATCH may change")


class Dispatch(BaseModel):
    """Whether the fleet dispatches."""

    model_config = _example({"paused": True, "tuned_version": "3"})

    paused: bool = Field(description="nothing is dispatched and nothing goes past the queue")
    tuned_version: str = Field(description="of the live changes, this one included")


class Eviction(BaseModel):
    """A request that has left the queue; its client is told so with the reason `evicted-queue-pressure`."""

    model_config = _example({"id": "4f1d-9c", "result": "evicted"})

    id: str = Field(description="the request's id")
    result: Literal["evicted"] = Field("evicted", description="always this: anything else is a problem")


class Drained(BaseModel):
    """Whether an operator keeps new requests from an endpoint."""

    model_config = _example({"address": "10.0.0.1:8000", "drained": True})

    address: str = Field(description="ip:port, IPv6 in brackets")
    drained: bool = Field(description="it gets no new requests")


class Endpoint(BaseModel):
    """A model server, as all replicas see it."""

    model_config = _example(_ENDPOINT)

    address: str = Field(description="ip:port, IPv6 in brackets")
    labels: dict[str, str] = Field(description="as discovery gives them")
    status: Literal["ready", "draining", "drained", "down"] = Field(
        description="`draining`: so discovery says; `drained`: by an operator; `down`: connections fail"
    )
    in_flight: int = Field(description="requests placed there, fleet-wide")
    max_inflight: int | None = Field(None, description="how many it may have, fleet-wide; null: any number")
    waiting: float | None = Field(None, description="of its own metrics page: queued requests")
    running: float | None = Field(None, description="of its own metrics page")
    kv_utilisation: float | None = Field(None, description="of its own metrics page, 0 to 1")
    adapters: list[str] = Field(default_factory=list, description="LoRA adapters it runs")
    waiting_adapters: list[str] = Field(default_factory=list, description="LoRA adapters that wait for room")
    max_adapters: int | None = Field(None, description="LoRA adapters it can run at once")
    latency_mean_s: float | None = Field(
        None, description="of its last 100 completions; with `latency` scoring"
    )
    latency_std_s: float | None = Field(None, description="their standard deviation")
    scraped_s_ago: float | None = Field(None, description="age of these figures; null: never scraped")
    scrape_fault: str | None = Field(None, description="why the last scrape failed")


HEALTHY: dict[str, Any] = {
    "status": "ok",
    "replica": "r-3f9c",
    "pool": "default",
    "components": {"redis": "ok", "endpoints": "ok", "grpc": "ok"},
}


class Health(BaseModel):
    """A replica's health by component: `ok`, or what is wrong with it."""

    model_config = _example(HEALTHY, extra="allow")

    status: str = Field(description="`ok`, or `degraded` (healthz) or `unready` (readyz)")
    components: dict[str, str] = Field(description="each part: `ok`, or what is wrong with it")
    replica: str = Field(description="who answered")
    pool: str = Field(description="the pool it serves")


class Problem(BaseModel):
    """A fault, as RFC 9457 has it; `application/problem+json`."""

    model_config = _example(
        {
            "type": "about:blank",
            "title": "Not Found",
            "status": 404,
            "code": "unknown_path",
            "detail": "GET /api/v1/nonsense: Not Found",
            "instance": "/api/v1/nonsense",
        },
        extra="allow",
    )

    type: str = Field("about:blank", description="always this: `code` tells faults apart")
    title: str = Field(description="the status in words")
    status: int = Field(description="the answer's HTTP status")
    code: str = Field(description="names the fault for programs")
    detail: str = Field(description="what is wrong, for people")
    instance: str = Field(description="the path that was asked")
