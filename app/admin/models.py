"""The admin API's answers, as its OpenAPI page describes them."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

_STATE_EXAMPLE: dict[str, Any] = {
    "pool": "default",
    "replica": "r-3f9c",
    "degraded": False,
    "stock": 7,
    "bounds": {"lower": 7.2, "watermark": 8.0, "upper": 8.8},
    "ready_backends": 4,
    "queue_length": {"Critical": 0, "Default": 3, "Sheddable": 12},
    "active_flows": 2,
    "virtual_times": {"Critical": 0.0, "Default": 41.5, "Sheddable": 18.0},
    "replicas": ["r-3f9c", "r-77a0", "r-b1de"],
    "in_flight": {"10.0.0.1:8000": 2, "10.0.0.2:8000": 2, "10.0.0.3:8000": 3},
}


class Bounds(BaseModel):
    """The whole fleet's bounds of the stock, in its unit (requests)."""

    lower: float = Field(description="dispatch runs while the stock is below it")
    watermark: float = Field(description="the stock that is aimed at")
    upper: float = Field(description="the stock is never above it")


class State(BaseModel):
    """The shared state as this replica reads it now; further keys may be added."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"example": _STATE_EXAMPLE})

    pool: str
    replica: str = Field(description="who answered")
    degraded: bool = Field(description="this replica works without the shared state")
    stock: float = Field(description="requests in flight, fleet-wide")
    bounds: Bounds
    ready_backends: int = Field(description="endpoints that take new requests")
    queue_length: dict[str, int] = Field(description="queued requests by band")
    active_flows: int = Field(0, description="flows with a queued request")
    virtual_times: dict[str, float] = Field(description="fair queueing's virtual time by band")
    replicas: list[str] = Field(description="ids of the live replicas")
    in_flight: dict[str, int] = Field(default_factory=dict, description="requests by endpoint (ip:port)")


class Health(BaseModel):
    """A replica's health by component: `ok`, or what is wrong with it."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "status": "ok",
                "replica": "r-3f9c",
                "pool": "default",
                "components": {"redis": "ok", "endpoints": "ok", "grpc": "ok"},
            }
        },
        extra="allow",
    )

    status: str = Field(description="`ok`, or `degraded` (healthz) or `unready` (readyz)")
    components: dict[str, str]


class Problem(BaseModel):
    """A fault, as RFC 9457 has it."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    instance: str = Field(description="the path that was asked")
