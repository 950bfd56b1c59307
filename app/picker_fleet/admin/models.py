"""Response models of the admin API, described by its OpenAPI document; the views (views.py) build them, and
examples.py has an example of each. Ages and durations in the models are in seconds.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Rounded = Annotated[float, AfterValidator(lambda value: round(value, 6))]
Cursor = Annotated[
    str | None,
    Query(
        description="`cursor` of the previous page; left out for the first page",
        examples=["WyJmbG93cyIsMjE0NzQ4MzY0NywiNDEuNSIsImdvbGQiXQ"],
    ),
]
NextCursor = Annotated[str | None, Field(description="cursor of the next page; null on the last page")]


class _Open(BaseModel):
    """A response model to which later versions may add fields."""

    model_config = ConfigDict(extra="allow")


class Bounds(BaseModel):
    """The whole fleet's bounds of the stock, in the unit of the stock (requests or tokens)."""

    lower: float = Field(description="requests are dispatched while the stock is below this bound")
    watermark: float = Field(description="the stock at which the fleet aims")
    upper: float = Field(description="the stock never exceeds this bound")


class BandState(BaseModel):
    """One band of the queue."""

    band: str = Field(description="the band's name, or its priority in decimal if it has no name")
    priority: int = Field(description="the band with the highest priority is served first")
    queued: int = Field(description="number of requests that wait in the band")
    queued_bytes: int = Field(description="bytes of the bodies of waiting requests")
    virtual_time: float = Field(description="virtual time of fair queueing among the band's flows")
    active_flows: int = Field(description="flows with a queued request in the band")
    oldest_s: Rounded | None = Field(
        description="age of the band's oldest waiting request; null: none waits, or unknown"
    )
    weight: float | None = Field(description="the band's weight; null unless `band_policy: weighted`")
    capacity: int | None = Field(description="limit of requests that wait in the band; null: no limit")
    bytes: int | None = Field(description="limit of bytes of waiting bodies; null: no limit")


class State(_Open):
    """The shared state as this replica reads it now; later versions may add keys."""

    pool: str = Field(description="the pool's name, also in its Redis keys")
    replica: str = Field(description="the replica that answered")
    degraded: bool = Field(description="this replica works without the shared state")
    stock: float = Field(description="requests or tokens in flight, fleet-wide")
    bounds: Bounds = Field(description="the stock's bounds, fleet-wide")
    ready_backends: int = Field(description="endpoints that take new requests")
    queue_length: dict[str, int] = Field(description="queued requests by band")
    queue_bytes: dict[str, int] = Field(default_factory=dict, description="bytes of queued bodies by band")
    queue_fill: float = Field(0.0, description="the part of the queue's `total_capacity` in use")
    active_flows: int = Field(0, description="flows with a queued request")
    leases: int = Field(0, description="requests in flight that have a lease")
    virtual_times: dict[str, float] = Field(description="fair queueing's virtual time by band")
    replicas: list[str] = Field(description="ids of the live replicas")
    in_flight: dict[str, int] = Field(default_factory=dict, description="requests in flight by endpoint")
    paused: bool = Field(False, description="no request is dispatched or bypasses the queue")
    tuned_version: str = Field("", description="version of the live changes; empty if there were none")
    unit: Literal["requests", "tokens"] = Field("requests", description="the unit of the stock")
    mode: Literal["adaptive", "static"] = Field(
        "static",
        description="`adaptive`: the fleet finds the endpoints' limits; their sum is both bounds",
    )
    queue_enabled: bool = Field(True, description="false: requests are placed on arrival and never wait")
    bands: list[BandState] = Field(default_factory=list, description="the queue, the highest band first")
    queued: int = Field(0, description="waiting requests of all bands")
    overdue: int = Field(0, description="waiting requests past their starvation threshold")
    dispatched_total: int = Field(0, description="grants since this epoch of the pool began")
    guard_dispatches_total: int = Field(0, description="grants by the starvation guard in this epoch")
    ended_total: int = Field(0, description="requests that have ended, with any outcome")
    drain_rate: float = Field(0.0, description="dispatches a second, smoothed")
    pool_age_s: float = Field(0.0, description="seconds since this epoch of the pool began")
    now_us: int = Field(0, description="Unix time of Redis in microseconds")
    tenants: bool = Field(False, description="the configuration has `tenants`")


class Config(BaseModel):
    """The configuration in force: the answering replica's, with the fleet's live changes applied."""

    config: dict[str, Any] = Field(description="every section; durations in seconds, secrets left out")
    weights: dict[str, float] = Field(description="live weights by flow, which override the requests' own")
    changes: dict[str, Any] = Field(description="the live changes, in the form of a PATCH")
    paused: bool = Field(description="no request is dispatched")
    tuned_version: str = Field(description="version of the live changes; empty if there were none")
    live: list[str] = Field(description="the keys that PATCH may change")


class Change(BaseModel):
    """A change that an operator has made."""

    at: float = Field(description="Unix time in seconds, by the clock of the replica that was called")
    by: str = Field(description="token's file, `admin.token`, address; or `configuration`, `tenants.file`")
    address: str = Field(description="address of the caller or of its proxy")
    change: str = Field(description="method and path of the call")
    detail: str = Field(description="the body of a PATCH, or the former and the new value of a tenant")
    outcome: str = Field(description="`made`; `unknown`: the shared state did not answer in time")


class Changes(BaseModel):
    """The changes that operators have made, the newest first."""

    changes: list[Change] = Field(description="the last 200 changes at most")


class TenantLimit(BaseModel):
    """A limit of a tenant's node, and the unused rest of the limit."""

    unit: str = Field(
        description="`requests`, `tokens`, `prompt_tokens`, `answer_tokens`, `parallel` (requests in flight) "
        "or `budget` (cost units)"
    )
    per: str | None = Field(
        description="`1s`, `1m`, `1h`, `1d`; of a budget `day`, `week`, `month`; null for `parallel`"
    )
    amount: float = Field(description="units granted in each period")
    burst: float = Field(description="most units granted at once")
    remaining: float = Field(description="units left now; negative: usage was more than the estimate")
    reset_s: Rounded | None = Field(
        description="seconds until the whole limit is free again, or until the budget's period ends"
    )


class Tenant(_Open):
    """A node of the tree of tenants."""

    path: str = Field(description="the node's path; ends in `*`: settings for nodes without their own")
    source: Literal["configuration", "operator", "default"] = Field(
        description="where its settings come from; `operator`: a live change"
    )
    settings_of: str | None = Field(description="the path that has the settings; null: nothing is set")
    weight: float = Field(description="its weight among its siblings")
    over_limit: Literal["queue", "demote", "reject"] = Field(description="treatment of requests over a limit")
    limits: list[TenantLimit] = Field(description="its limits and budget, with their balances")
    in_flight: int | None = Field(
        description="requests in flight, and waiting requests unless `over_limit` is `queue`; null: not "
        "counted, without a limit of `parallel`"
    )
    served_cost: float | None = Field(
        description="cost of all requests served; null: not counted, without settings for its own path"
    )
    queued: int = Field(description="waiting requests of the flows below")
    oldest_s: Rounded | None = Field(description="age of the oldest such request; null: none waits")
    served_cost_per_s: Rounded | None = Field(description="cost served a second over 10 s; null: unknown")
    share: Rounded | None = Field(
        description="its part of the cost served for all siblings with requests that may start; null: "
        "unknown, or none of its requests may start"
    )
    fair_share: Rounded | None = Field(description="its part by weights; null: as for `share`")
    waits: bool = Field(description="its requests wait for its balance, or until a request ends")
    waits_s: Rounded | None = Field(description="seconds until its requests may start; null: none or unknown")


class Tenants(_Open):
    """A node of the tree of tenants, and a page of its children by path."""

    tenant: Tenant | None = Field(description="the node; null: the root")
    children: list[Tenant] = Field(description="children with settings or requests, by path")
    total: int = Field(description="number of children on all pages")
    cursor: NextCursor


class TenantChange(BaseModel):
    """A change of a node, for the whole fleet."""

    path: str = Field(description="the node's path")
    old: dict[str, Any] | None = Field(description="the former settings or balance; null: none")
    new: dict[str, Any] | None = Field(description="the settings or balance now in force; null: none")


class TopUp(BaseModel):
    """The body of a top-up."""

    model_config = ConfigDict(extra="forbid")

    unit: Literal["requests", "tokens", "prompt_tokens", "answer_tokens", "budget"]
    per: Literal["1s", "1m", "1h", "1d", "day", "week", "month"]
    amount: float = Field(gt=0, le=1e12)


class Dispatch(BaseModel):
    """Whether the fleet dispatches requests."""

    paused: bool = Field(description="no request is dispatched or bypasses the queue")
    tuned_version: str = Field(description="version of the live changes, including this one")


class Eviction(BaseModel):
    """A request that was evicted; its client gets a refusal with the reason `evicted-queue-pressure`."""

    id: str = Field(description="the request's id")
    result: Literal["evicted"] = Field("evicted", description="always `evicted`; a failure is a problem")


class Drained(BaseModel):
    """Whether an operator keeps new requests from an endpoint."""

    address: str = Field(description="ip:port, IPv6 in brackets")
    drained: bool = Field(description="the endpoint gets no new requests")


class Ejected(BaseModel):
    """The ejection of an endpoint. After the time `until` a probe decides whether the ejection ends."""

    reason: str = Field(description="an HTTP status, or `reset`, `empty`, `error in 200`, `stuck`")
    until: datetime = Field(description="when the endpoint may be tried again")


class Endpoint(BaseModel):
    """A model server, with values on which all replicas agree."""

    address: str = Field(description="ip:port, IPv6 in brackets")
    labels: dict[str, str] = Field(description="labels from discovery")
    status: Literal["ready", "draining", "drained", "down", "ejected"] = Field(
        description="`drained`: by an operator; `down`: connections fail, or `unready` says why; `ejected`: "
        "its answers fail"
    )
    ejected: Ejected | None = Field(None, description="why the endpoint is ejected; null: not ejected")
    stages: list[Literal["decode", "prefill", "encode"]] = Field(
        default=["decode"],
        description="`decode`: generates answers; `prefill`: computes prompts for others; `encode`: encodes "
        "media for others",
    )
    in_flight: int = Field(description="requests in flight on the endpoint, fleet-wide")
    prefills: int | None = Field(
        None, description="prompts that it computes for others, fleet-wide; null: not of the stage prefill"
    )
    prefill_limit: int | None = Field(None, description="limit in force of `prefills`; null: no limit")
    in_flight_tokens: int | None = Field(
        None, description="tokens in flight, if the fleet finds limits in tokens; otherwise null"
    )
    max_inflight: int | None = Field(None, description="limit that discovery gives; null: no limit")
    limit: int | None = Field(
        None, description="limit in force, in requests or tokens in flight; null: no limit, or no decoding"
    )
    limit_reason: str | None = Field(
        None,
        description="why the limit last moved (without decoding: `prefill_limit`), in mode `adaptive`; null: "
        "unknown, or mode `static`",
    )
    limit_changed_s: Rounded | None = Field(
        None,
        description="seconds since the limit last moved; null: unknown, or not found by the fleet",
    )
    pinned: bool = Field(False, description="an operator has set the limit, in mode `adaptive`")
    waiting: float | None = Field(None, description="queued requests on its metrics page")
    running: float | None = Field(None, description="running requests on its metrics page")
    kv_utilisation: float | None = Field(None, description="KV-cache use on its metrics page, 0 to 1")
    adapters: list[str] = Field(default_factory=list, description="loaded LoRA adapters, including idle ones")
    waiting_adapters: list[str] = Field(default_factory=list, description="LoRA adapters to be loaded")
    max_adapters: int | None = Field(None, description="number of LoRA adapters that can be loaded at once")
    latency_mean_s: Rounded | None = Field(
        None, description="mean latency of its last 100 completions; null: not measured"
    )
    latency_std_s: Rounded | None = Field(None, description="standard deviation of these 100 latencies")
    scraped_s_ago: float | None = Field(None, description="age of the metrics; null: never scraped")
    scrape_fault: str | None = Field(None, description="why the last scrape failed")
    scrape_remark: str | None = Field(None, description="parts of its metrics page that cannot be parsed")
    unready: str | None = Field(None, description="why a server that answers takes no requests")


class Health(_Open):
    """A replica's health: for each component `ok` or its fault."""

    status: str = Field(description="`ok`, or `degraded` (healthz) or `unready` (readyz)")
    components: dict[str, str] = Field(description="each component's state: `ok`, or its fault")
    replica: str = Field(description="the replica that answered")
    pool: str = Field(description="the replica's default pool")


class Pool(_Open):
    """A pool that this replica serves."""

    name: str = Field(description="the pool's name")
    default: bool = Field(description="whether requests that name no pool go to this pool")
    ready: bool = Field(description="whether this replica serves the pool's requests")
    path: str = Field(description="path prefix of the pool's admin API and dashboard")


class Pools(_Open):
    """The pools of this replica, the default one first."""

    pools: list[Pool] = Field(description="the pools, the default pool first")


class Problem(_Open):
    """A problem document of RFC 9457, of type `application/problem+json`."""

    type: str = Field("about:blank", description="always `about:blank`: `code` names the fault")
    title: str = Field(description="the status in words")
    status: int = Field(description="the answer's HTTP status")
    code: str = Field(description="names the fault for programs")
    detail: str = Field(description="describes the fault for people")
    instance: str = Field(description="the path of the call")


class Flow(_Open):
    """A flow with waiting requests in one band."""

    flow: str = Field(description="the fairness id, else the model; '' under `fairness: none`")
    band: str = Field(description="the band")
    queued: int = Field(description="the flow's waiting requests in the band")
    oldest_s: Rounded = Field(description="age of the oldest request; under `edf`, of the next to be served")
    start_tag: float = Field(description="the band's flow with the smallest start tag is served next")
    weight: float = Field(description="the flow's share, relative to the weights of the waiting flows")
    throttled: bool = Field(
        description="dispatch skips the flow: the flow, its endpoints or its tenants are at a limit"
    )
    in_flight: int | None = Field(description="requests in flight; null: not counted, the flow has no limit")
    served_cost_per_s: Rounded | None = Field(description="cost served a second, over 10 s; null: unknown")
    share: Rounded | None = Field(
        description="the flow's fraction of the cost served in the band; null: none was served"
    )
    fair_share: Rounded | None = Field(
        description="the flow's fraction of the weights in the band; null with more than 2000 flows"
    )


class Flows(_Open):
    """A page of flows, ordered by band and start tag, the throttled flows last."""

    flows: list[Flow] = Field(description="the flows in the order in which they are served")
    total: int = Field(description="number of flows on all pages")
    cursor: NextCursor


class FlowDetail(_Open):
    """One flow, in every band where it waits."""

    flow: str = Field(description="the flow's name")
    bands: list[Flow] = Field(description="the flow in each band where it waits")
    served_cost_per_s: dict[str, float] = Field(description="cost served a second, by band, over 10 s")
    weight_override: float | None = Field(description="live weight, which overrides the requests' own")
    flow_capacity: int = Field(description="how many requests of the flow may wait")


class Score(BaseModel):
    """Parts of a request's score under `ordering: workload-aware`; null if a part depends on the request."""

    wait: Rounded | None = Field(description="score for the time that the request has waited")
    criticality: Rounded | None = Field(description="score for the workload's criticality")
    rate: Rounded | None = Field(description="score for the workload's request rate, at most 0")
    total: Rounded | None = Field(description="sum of the parts: the highest is served first")


class _Request(_Open):
    id: str = Field(description="the request's `x-request-id`, or an id made by the replica")
    flow: str = Field(description="the fairness id, else the model")
    band: str = Field(description="the band of its objective, else of its model")
    workload: str | None = Field(description="the workload's id; null for an anonymous workload")
    model: str = Field(description="the model that the client named")
    criticality: int = Field(description="the workload's criticality, 1 to 5")
    cost: float = Field(description="the request's cost in the stock's unit")
    age_s: Rounded = Field(description="seconds since the request arrived")
    owner: str = Field(description="the replica that the client is or was connected to")


class Queued(_Request):
    """A request that waits in the queue."""

    state: Literal["queued", "orphaned"] = Field(
        description="`orphaned`: its replica is silent, and the request waits for adoption"
    )
    position: int | None = Field(description="predicted position in the order of the list, 1 first")
    deadline_in_s: Rounded = Field(description="seconds until the request's TTL ends")
    overdue: bool = Field(description="the starvation guard may serve the request out of turn")
    overdue_in_s: Rounded = Field(description="seconds until the request is overdue; negative afterwards")
    score: Score | None = Field(description="the request's score; null unless `ordering: workload-aware`")
    start_tag: float | None = Field(description="predicted start tag of the flow when it is served")


class Queue(_Open):
    """A page of waiting requests, in the order that `order` describes."""

    requests: list[Queued] = Field(description="the requests, in the order that `order` describes")
    total: int = Field(description="number of requests on all pages")
    cursor: NextCursor
    order: str = Field(description="describes the order and the limits of its prediction")


class Running(_Request):
    """A request in flight."""

    state: Literal["granted", "placed", "queued", "orphaned"] = Field(
        description="`granted`: the request's turn has come, and its endpoint is being chosen"
    )
    endpoint: str | None = Field(description="`ip:port` of the chosen endpoint; null: not chosen yet")
    fallbacks: list[str] = Field(description="endpoints that Envoy tries next, in this order")
    prefiller: str | None = Field(
        None, description="the endpoint that computes the prompt; null: the prompt is computed, or not apart"
    )
    lease_in_s: Rounded = Field(description="seconds until the request's lease ends unless renewed")


class Inflight(_Open):
    """A page of requests in flight, in the order in which their leases end."""

    requests: list[Running] = Field(description="the requests, by the time at which their leases end")
    total: int = Field(description="number of requests on all pages")
    cursor: NextCursor


class RequestStatus(_Open):
    """Where one request is and why, with the request's fields in the list `queue` or `inflight`."""

    id: str = Field(description="the id in the path")
    state: Literal["queued", "orphaned", "granted", "placed", "unknown-to-the-pool"] = Field(
        description="`unknown-to-the-pool`: Redis has no record, but this replica placed or refused it"
    )
    why: str = Field(description="one sentence: why the request waits, or where it went")
    explanation: dict[str, Any] | None = Field(
        description="how its endpoint was chosen; null unless this replica placed or refused the request"
    )


class Workload(_Open):
    """A workload that requests have named."""

    id: str = Field(description="the workload's id")
    total: int = Field(description="number of its requests so far")
    active: int = Field(description="number of its requests that wait or run")
    dispatched: int = Field(description="number of its requests dispatched so far")
    rate: Rounded = Field(description="requests/s over the sliding window")
    average_wait_s: Rounded = Field(description="exponential moving average of the time in the queue")
    last_request_s_ago: Rounded = Field(description="seconds since its newest request")
    score: Score | None = Field(description="score of a request that arrives now; null unless workload-aware")


class Workloads(_Open):
    """A page of workloads, in no particular order."""

    workloads: list[Workload] = Field(description="the workloads, in no particular order")
    total: int = Field(description="number of workloads on all pages")
    cursor: NextCursor


class Replica(_Open):
    """A replica, as its last heartbeat described it; a value that the heartbeat lacked is null."""

    id: str = Field(description="the replica's id, which is new at each start")
    live: bool = Field(description="its last heartbeat is younger than `leases.replica_silence`")
    heartbeat_s_ago: float = Field(description="age of its last heartbeat in seconds")
    host: str | None = Field(description="name of its machine")
    degraded: bool | None = Field(description="the replica works without the shared state")
    waiting: int | None = Field(description="waiting requests whose clients are connected to the replica")
    admin: str | None = Field(description="address of its admin API")
    grpc: str | None = Field(description="address of its gRPC port")
    version: str | None = Field(description="version of the package")
    started_s_ago: float | None = Field(description="seconds since its start; up to 10 s too low")
    this: bool = Field(description="whether this replica answered the call")


class Replicas(_Open):
    """All known replicas; a silent replica is listed until its requests have been swept."""

    replicas: list[Replica] = Field(description="the replicas, live replicas first")


# Events of the event stream


class Decision(BaseModel):
    """An entry of the decision log."""

    seq: int
    at: float  # Unix time
    event: str
    request: str | None
    flow: str | None
    band: str | None
    workload: str | None
    endpoint: str | None
    stock: float
    queued: int
    by: str | None
    note: str


class Decisions(BaseModel):
    """Decision-log entries since the last event, newest last; `skipped` counts the entries left out."""

    entries: list[Decision]
    skipped: int


class Snapshot(BaseModel):
    """The fleet's state at one moment, with the first flows and the busiest workloads."""

    at: float  # Unix time
    state: State
    flows: list[Flow]
    flows_total: int
    workloads: list[Workload]
    workloads_total: int
    endpoints: list[Endpoint]
    replicas: list[Replica]


class Unavailable(BaseModel):
    """The event in place of a snapshot if Redis cannot be read; the field `detail` says why."""

    at: float  # Unix time
    detail: str
