"""The admin API's lists, as its OpenAPI page describes them. Ages and durations in seconds."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from picker_fleet.admin.cursor import encode

BandName = Literal["Critical", "Default", "Sheddable"]
_CURSOR = "where the next page begins; null on the last"
CURSORS = {
    name: encode(name, *place)
    for name, place in {
        "flows": (1, "41.5", "gold"),
        "queue": (1, "41.5", "gold"),
        "inflight": ("1767225612345.0", "4f1d-9c"),
        "workloads": ("64", 0),
    }.items()
}
Next = Annotated[str | None, Field(description=_CURSOR)]
_FLOW: dict[str, Any] = {
    "flow": "gold", "band": "Default", "queued": 12, "oldest_s": 3.4, "start_tag": 41.5, "weight": 3.0,
    "parked": False, "in_flight": 4, "served_cost_per_s": 7.2, "share": 0.74, "fair_share": 0.75,
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
    "lease_in_s": 12.1,
}  # fmt: skip
_WORKLOAD: dict[str, Any] = {
    "id": "chat", "total": 1290, "active": 14, "dispatched": 1281, "rate": 4.7, "average_wait_s": 0.8,
    "last_request_s_ago": 0.1, "score": {"wait": 0.0, "criticality": 0.24, "rate": -0.0094, "total": 0.23},
}  # fmt: skip
_REPLICA: dict[str, Any] = {
    "id": "r-3f9c", "live": True, "heartbeat_s_ago": 0.4, "host": "node-1", "degraded": False, "waiting": 5,
    "admin": "http://node-1:8081", "grpc": "node-1:9002", "version": "0.1.0", "started_s_ago": 3600.0,
    "this": True,
}  # fmt: skip
_ORDER = "in dispatch order: flows by start tag; band after band; in a flow by arrival"


def _example(value: dict[str, Any]) -> ConfigDict:
    return ConfigDict(extra="allow", json_schema_extra={"example": value})


class Flow(BaseModel):
    """A flow that waits, in one band."""

    model_config = _example(_FLOW)

    flow: str = Field(description="the fairness id, else the model; '' under `fairness: none`")
    band: BandName = Field(description="where these of its requests wait")
    queued: int = Field(description="its waiting requests")
    oldest_s: float = Field(description="age of the oldest of them; under `edf`, of the one served next")
    start_tag: float = Field(description="the flow with the least one of its band is served next")
    weight: float = Field(description="its share, against those of the others that wait")
    parked: bool = Field(
        description="it is at its limit of requests in flight, and passed over until one ends"
    )
    in_flight: int | None = Field(description="null: not counted, since the flow has no limit")
    served_cost_per_s: float | None = Field(
        description="of the last 10 s, all replicas added; null: not known"
    )
    share: float | None = Field(description="of the band's service in that time; null: the band had none")
    fair_share: float | None = Field(
        description="its weight, of the weights of all flows of the band that wait; null with more than 2000"
    )


class Flows(BaseModel):
    """A page of flows: those in turn by start tag, band by band, then the parked ones."""

    model_config = _example({"flows": [_FLOW], "total": 1, "cursor": CURSORS["flows"]})

    flows: list[Flow] = Field(description="in the order in which they are served")
    total: int = Field(description="on all pages")
    cursor: Next


class FlowDetail(BaseModel):
    """One flow, in every band where it waits."""

    model_config = _example(
        {
            "flow": "gold",
            "bands": [_FLOW],
            "served_cost_per_s": {"Critical": 0.0, "Default": 7.2, "Sheddable": 0.0},
            "weight_override": 3.0,
            "flow_capacity": 100,
        }
    )

    flow: str = Field(description="its name")
    bands: list[Flow] = Field(description="where it waits, band by band")
    served_cost_per_s: dict[str, float] = Field(description="by band, over the last 10 s, as far as known")
    weight_override: float | None = Field(description="set live, in place of its requests' own")
    flow_capacity: int = Field(description="how many of its requests may wait")


class Score(BaseModel):
    """Parts of a request's score under `ordering: workload-aware`; null: it depends on the request."""

    model_config = ConfigDict(json_schema_extra={"example": _QUEUED["score"]})

    wait: float | None = Field(description="for its wait")
    criticality: float | None = Field(description="for its criticality")
    rate: float | None = Field(description="not above 0")
    total: float | None = Field(description="their sum: the highest is served first")


class _Request(BaseModel):
    id: str = Field(description="its `x-request-id`, or one that the replica made")
    flow: str = Field(description="the fairness id, else the model")
    band: BandName = Field(description="from its objective, else its model")
    workload: str | None = Field(description="null for an anonymous one")
    model: str = Field(description="as the client named it")
    criticality: int = Field(description="of its workload, 1 to 5")
    cost: float = Field(description="in the stock's unit")
    age_s: float = Field(description="since it arrived")
    owner: str = Field(description="the replica that holds its client, or did")


class Queued(_Request):
    """A request that waits."""

    model_config = _example(_QUEUED)

    state: Literal["queued", "held"] = Field(
        description="`held`: its replica is silent; it waits for adoption"
    )
    position: int | None = Field(description="in the order of the list, 1 first, as far as foretold")
    deadline_in_s: float = Field(description="what is left of its TTL")
    overdue: bool = Field(description="past its starvation threshold: the guard may serve it out of turn")
    overdue_in_s: float = Field(description="negative once it is")
    score: Score | None = Field(description="null unless `ordering: workload-aware`")
    start_tag: float | None = Field(description="of its flow, when it is foretold to be served")


class Queue(BaseModel):
    """A page of waiting requests, in the order that `order` tells."""

    model_config = _example({"requests": [_QUEUED], "total": 1, "cursor": CURSORS["queue"], "order": _ORDER})

    requests: list[Queued] = Field(description="in the order that `order` tells")
    total: int = Field(description="on all pages")
    cursor: Next
    order: str = Field(description="what the order goes by, and how far it is foretold")


class Running(_Request):
    """A request in flight."""

    model_config = _example(_RUNNING)

    state: Literal["granted", "placed", "queued", "held"] = Field(
        description="`granted`: its turn has come, its endpoint is being chosen"
    )
    endpoint: str | None = Field(description="`ip:port` where it was sent; null: not chosen yet")
    fallbacks: list[str] = Field(description="where Envoy tries next, in this order")
    lease_in_s: float = Field(description="until it is given up unless somebody reports it")


class Inflight(BaseModel):
    """A page of requests in flight, by when their leases end."""

    model_config = _example({"requests": [_RUNNING], "total": 1, "cursor": CURSORS["inflight"]})

    requests: list[Running] = Field(description="those first whose lease ends first")
    total: int = Field(description="on all pages")
    cursor: Next


class Whereabouts(BaseModel):
    """Where one request is and why; besides these, what `queue` or `inflight` tells of it."""

    model_config = _example(
        {
            **_QUEUED,
            "position": 4,
            "why": "flow gold has 3 requests before it; the stock (8) is at its bounds (7.2 to 8.8)",
            "explanation": {"request_id": "4f1d-9c", "chosen": [], "candidates": [], "excluded": {}},
        }
    )

    id: str = Field(description="as it was asked for")
    state: Literal["queued", "held", "granted", "placed", "unknown-to-the-pool"] = Field(
        description="`unknown-to-the-pool`: it has ended, and this replica remembers placing it"
    )
    why: str = Field(description="a sentence on what it waits for, or where it went")
    explanation: dict[str, Any] | None = Field(
        description="why it went where it went, or nowhere; null unless this replica placed or refused it"
    )


class Workload(BaseModel):
    """What is known of a workload that names itself."""

    model_config = _example(_WORKLOAD)

    id: str = Field(description="as its requests name it")
    total: int = Field(description="requests so far")
    active: int = Field(description="of these, not ended")
    dispatched: int = Field(description="of all so far, those that were let through")
    rate: float = Field(description="requests/s over the sliding window")
    average_wait_s: float = Field(description="an exponential moving average")
    last_request_s_ago: float = Field(description="since its newest request")
    score: Score | None = Field(description="of a request that would arrive now; null unless workload-aware")


class Workloads(BaseModel):
    """A page of workloads, in no order."""

    model_config = _example({"workloads": [_WORKLOAD], "total": 1, "cursor": CURSORS["workloads"]})

    workloads: list[Workload] = Field(description="in no order")
    total: int = Field(description="on all pages")
    cursor: Next


class Replica(BaseModel):
    """A replica, as its last heartbeat told; null: it did not say."""

    model_config = _example(_REPLICA)

    id: str = Field(description="of this life: a fresh one at each start")
    live: bool = Field(description="its heartbeat is younger than `leases.replica_silence`")
    heartbeat_s_ago: float = Field(description="since it was heard of")
    host: str | None = Field(description="its machine's name")
    degraded: bool | None = Field(description="it works without the shared state")
    waiting: int | None = Field(description="requests whose clients it holds until their turn comes")
    admin: str | None = Field(description="where its admin API is")
    grpc: str | None = Field(description="where Envoy asks it")
    version: str | None = Field(description="of the package")
    started_s_ago: float | None = Field(description="how long it runs")
    this: bool = Field(description="it is the one that answers")


class Replicas(BaseModel):
    """All replicas that are known; silent ones until the sweep has seen to what they left."""

    model_config = _example({"replicas": [_REPLICA]})

    replicas: list[Replica] = Field(description="live ones first")
