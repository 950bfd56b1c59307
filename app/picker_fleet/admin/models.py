"""Response models of the admin API, described by its OpenAPI document; the views (views.py) build them, and
examples.py has an example of each. Ages and durations are in seconds.
"""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

Rounded = Annotated[float, AfterValidator(lambda value: round(value, 6))]
NextCursor = Annotated[str | None, Field(description="where the next page begins; null on the last")]


class _Open(BaseModel):
    """A response model to which later versions may add fields."""

    model_config = ConfigDict(extra="allow")


class Bounds(BaseModel):
    """The whole fleet's bounds of the stock, in its unit (requests or tokens)."""

    lower: float = Field(description="dispatch runs while the stock is below it")
    watermark: float = Field(description="the target of the stock")
    upper: float = Field(description="the stock is never above it")


class BandState(BaseModel):
    """One band of the queue."""

    band: str = Field(description="the band's name; its priority in decimal where it has no other")
    priority: int = Field(description="the highest is served first")
    queued: int = Field(description="its waiting requests")
    queued_bytes: int = Field(description="of their bodies")
    virtual_time: float = Field(description="of fair queueing among its flows")
    active_flows: int = Field(description="flows with a queued request in it")
    oldest_s: Rounded | None = Field(
        description="age of its oldest waiting request; null: none waits, or not known"
    )
    weight: float | None = Field(description="null unless `band_policy: weighted`")
    capacity: int | None = Field(description="most requests that may wait in it; null: no limit of its own")
    bytes: int | None = Field(description="most bytes of bodies that may wait in it; null: no limit")


class State(_Open):
    """The shared state as this replica reads it now; further keys may be added."""

    pool: str = Field(description="names the keyspace in Redis")
    replica: str = Field(description="the replica that answered")
    degraded: bool = Field(description="this replica works without the shared state")
    stock: float = Field(description="what is in flight, fleet-wide, in requests or tokens")
    bounds: Bounds = Field(description="of the stock, fleet-wide")
    ready_backends: int = Field(description="endpoints that take new requests")
    queue_length: dict[str, int] = Field(description="queued requests by band")
    queue_bytes: dict[str, int] = Field(default_factory=dict, description="of their bodies, by band")
    queue_fill: float = Field(0.0, description="the part of the queue's `total_capacity` in use")
    active_flows: int = Field(0, description="flows with a queued request")
    virtual_times: dict[str, float] = Field(description="fair queueing's virtual time by band")
    replicas: list[str] = Field(description="ids of the live replicas")
    in_flight: dict[str, int] = Field(default_factory=dict, description="requests by endpoint (ip:port)")
    paused: bool = Field(False, description="nothing is dispatched and nothing bypasses the queue")
    tuned_version: str = Field("", description="of the live changes; empty if there never was one")
    unit: Literal["requests", "tokens"] = Field("requests", description="what the stock counts")
    queue_enabled: bool = Field(True, description="false: requests are placed on arrival; none waits")
    bands: list[BandState] = Field(default_factory=list, description="the queue, the highest band first")
    queued: int = Field(0, description="waiting requests of all bands")
    overdue: int = Field(0, description="of these, past their starvation threshold")
    dispatched_total: int = Field(0, description="grants since this epoch of the pool began")
    guard_dispatches_total: int = Field(0, description="of these, by the starvation guard")
    ended_total: int = Field(0, description="requests that have ended, with whatever outcome")
    drain_rate: float = Field(0.0, description="dispatches a second, smoothed")
    pool_age_s: float = Field(0.0, description="since this epoch of the pool began")
    now_us: int = Field(0, description="Unix time of Redis in microseconds")


class Config(BaseModel):
    """The configuration in force: the answering replica's own with the fleet's live changes applied."""

    config: dict[str, Any] = Field(description="every section; durations in seconds, secrets left out")
    weights: dict[str, float] = Field(description="weights of single flows, in place of their requests'")
    changes: dict[str, Any] = Field(description="the live changes, in the form of a PATCH")
    paused: bool = Field(description="nothing is dispatched")
    tuned_version: str = Field(description="of the live changes; empty if there never was one")
    live: list[str] = Field(description="the keys that PATCH may change")


class Change(BaseModel):
    """What an operator has changed."""

    at: float = Field(description="Unix time in seconds, of the replica that was asked")
    by: str = Field(description="the name of the token's file, `admin.token`, or the address")
    address: str = Field(description="of the caller; a proxy's, behind one")
    change: str = Field(description="method and path")
    detail: str = Field(description="the body of a PATCH, at most 1000 characters of it")
    outcome: str = Field(description="`made`; `unknown`: the shared state did not answer in time")


class Changes(BaseModel):
    """What operators have changed, the newest first."""

    changes: list[Change] = Field(description="at most 200")


class Dispatch(BaseModel):
    """Whether the fleet dispatches."""

    paused: bool = Field(description="nothing is dispatched and nothing bypasses the queue")
    tuned_version: str = Field(description="of the live changes, this one included")


class Eviction(BaseModel):
    """A request that has left the queue; its client is answered with the reason `evicted-queue-pressure`."""

    id: str = Field(description="the request's id")
    result: Literal["evicted"] = Field("evicted", description="always this: anything else is a problem")


class Drained(BaseModel):
    """Whether an operator keeps new requests from an endpoint."""

    address: str = Field(description="ip:port, IPv6 in brackets")
    drained: bool = Field(description="it gets no new requests")


class Ejected(BaseModel):
    """Why an endpoint is ejected. After `until` a probe decides."""

    reason: str = Field(description="a status, or `reset`, `empty`, `error in 200`, `stuck`")
    until: datetime = Field(description="when it may be tried again")


class Endpoint(BaseModel):
    """A model server, as all replicas see it."""

    address: str = Field(description="ip:port, IPv6 in brackets")
    labels: dict[str, str] = Field(description="as discovery gives them")
    status: Literal["ready", "draining", "drained", "down", "ejected"] = Field(
        description="`drained`: by an operator; `down`: connections fail, or `unready` says why; `ejected`: "
        "its answers fail"
    )
    ejected: Ejected | None = Field(None, description="why its answers count as failed, while they do")
    in_flight: int = Field(description="requests placed there, fleet-wide")
    max_inflight: int | None = Field(None, description="its limit of requests in flight; null: none")
    waiting: float | None = Field(None, description="queued requests, from its metrics page")
    running: float | None = Field(None, description="running requests, from its metrics page")
    kv_utilisation: float | None = Field(None, description="from its metrics page, 0 to 1")
    adapters: list[str] = Field(
        default_factory=list, description="LoRA adapters it has loaded, idle ones too"
    )
    waiting_adapters: list[str] = Field(default_factory=list, description="adapters to be loaded")
    max_adapters: int | None = Field(None, description="how many LoRA adapters it can load at once")
    latency_mean_s: Rounded | None = Field(
        None, description="of its last 100 completions; null: not measured"
    )
    latency_std_s: Rounded | None = Field(None, description="their standard deviation")
    scraped_s_ago: float | None = Field(None, description="age of these figures; null: never scraped")
    scrape_fault: str | None = Field(None, description="why the last scrape failed")
    scrape_remark: str | None = Field(None, description="what of its metrics page could not be read")
    unready: str | None = Field(None, description="why it takes no requests although it answers")


class Health(_Open):
    """A replica's health by component: `ok`, or what is wrong with it."""

    status: str = Field(description="`ok`, or `degraded` (healthz) or `unready` (readyz)")
    components: dict[str, str] = Field(description="each part: `ok`, or what is wrong with it")
    replica: str = Field(description="the replica that answered")
    pool: str = Field(description="the pool it serves")


class Pool(_Open):
    """A pool that this replica serves."""

    name: str = Field(description="its name")
    default: bool = Field(description="whether it takes the requests that name no pool")
    ready: bool = Field(description="whether this replica serves its requests")
    path: str = Field(description="where this replica's admin API and dashboard for it begin")


class Pools(_Open):
    """The pools of this replica, the default one first."""

    pools: list[Pool] = Field(description="each with its path")


class Problem(_Open):
    """A fault as RFC 9457 defines it; `application/problem+json`."""

    type: str = Field("about:blank", description="always this: `code` distinguishes faults")
    title: str = Field(description="the status in words")
    status: int = Field(description="the answer's HTTP status")
    code: str = Field(description="names the fault for programs")
    detail: str = Field(description="what is wrong, for people")
    instance: str = Field(description="the path of the call")


class Flow(_Open):
    """A flow that waits, in one band."""

    flow: str = Field(description="the fairness id, else the model; '' under `fairness: none`")
    band: str = Field(description="where these of its requests wait")
    queued: int = Field(description="its waiting requests")
    oldest_s: Rounded = Field(description="age of the oldest of them; under `edf`, of the one served next")
    start_tag: float = Field(description="the flow with the smallest one of its band is served next")
    weight: float = Field(description="its share relative to the other waiting flows")
    throttled: bool = Field(
        description="it is at its limit of requests in flight, and skipped until one ends"
    )
    in_flight: int | None = Field(description="null: not counted, since the flow has no limit")
    served_cost_per_s: Rounded | None = Field(description="fleet-wide, over the last 10 s; null: not known")
    share: Rounded | None = Field(
        description="its part of the cost served in its band; null: none was served"
    )
    fair_share: Rounded | None = Field(
        description="its part of the weights in its band; null with more than 2000 flows"
    )


class Flows(_Open):
    """A page of flows: band by band by start tag, then the throttled ones."""

    flows: list[Flow] = Field(description="in the order in which they are served")
    total: int = Field(description="on all pages")
    cursor: NextCursor


class FlowDetail(_Open):
    """One flow, in every band where it waits."""

    flow: str = Field(description="its name")
    bands: list[Flow] = Field(description="where it waits, band by band")
    served_cost_per_s: dict[str, float] = Field(description="by band, over the last 10 s, as far as known")
    weight_override: float | None = Field(description="set live, in place of its requests' own")
    flow_capacity: int = Field(description="how many of its requests may wait")


class Score(BaseModel):
    """Parts of a request's score under `ordering: workload-aware`; null: it depends on the request."""

    wait: Rounded | None = Field(description="for its wait")
    criticality: Rounded | None = Field(description="for its criticality")
    rate: Rounded | None = Field(description="not above 0")
    total: Rounded | None = Field(description="their sum: the highest is served first")


class _Request(_Open):
    id: str = Field(description="its `x-request-id`, or one that the replica made")
    flow: str = Field(description="the fairness id, else the model")
    band: str = Field(description="from its objective, else its model")
    workload: str | None = Field(description="null for an anonymous one")
    model: str = Field(description="as the client named it")
    criticality: int = Field(description="of its workload, 1 to 5")
    cost: float = Field(description="in the stock's unit")
    age_s: Rounded = Field(description="since it arrived")
    owner: str = Field(description="the replica that its client is or was connected to")


class Queued(_Request):
    """A request that waits."""

    state: Literal["queued", "orphaned"] = Field(
        description="`orphaned`: its replica is silent; it waits for adoption"
    )
    position: int | None = Field(description="predicted position in the order of the list, 1 first")
    deadline_in_s: Rounded = Field(description="what is left of its TTL")
    overdue: bool = Field(description="the starvation guard may serve it out of turn")
    overdue_in_s: Rounded = Field(description="negative once it is overdue")
    score: Score | None = Field(description="null unless `ordering: workload-aware`")
    start_tag: float | None = Field(description="predicted start tag of its flow when the request is served")


class Queue(_Open):
    """A page of waiting requests, in the order that `order` describes."""

    requests: list[Queued] = Field(description="in the order that `order` describes")
    total: int = Field(description="on all pages")
    cursor: NextCursor
    order: str = Field(description="what the order depends on, and how far the prediction goes")


class Running(_Request):
    """A request in flight."""

    state: Literal["granted", "placed", "queued", "orphaned"] = Field(
        description="`granted`: its turn has come, its endpoint is being chosen"
    )
    endpoint: str | None = Field(description="`ip:port` where it was sent; null: not chosen yet")
    fallbacks: list[str] = Field(description="where Envoy tries next, in this order")
    lease_in_s: Rounded = Field(description="until it is given up, unless its lease is renewed")


class Inflight(_Open):
    """A page of requests in flight, in the order in which their leases end."""

    requests: list[Running] = Field(description="in the order in which their leases end")
    total: int = Field(description="on all pages")
    cursor: NextCursor


class RequestStatus(_Open):
    """Where one request is and why, with the fields of `queue` or `inflight` for it."""

    id: str = Field(description="as it was asked for")
    state: Literal["queued", "orphaned", "granted", "placed", "unknown-to-the-pool"] = Field(
        description="`unknown-to-the-pool`: it has ended, and this replica remembers placing it"
    )
    why: str = Field(description="one sentence: what it waits for, or where it went")
    explanation: dict[str, Any] | None = Field(
        description="how its endpoint was chosen; null unless this replica placed or refused it"
    )


class Workload(_Open):
    """A workload that its requests name."""

    id: str = Field(description="as its requests name it")
    total: int = Field(description="requests so far")
    active: int = Field(description="of these, not ended")
    dispatched: int = Field(description="of all so far, those dispatched")
    rate: Rounded = Field(description="requests/s over the sliding window")
    average_wait_s: Rounded = Field(description="an exponential moving average")
    last_request_s_ago: Rounded = Field(description="since its newest request")
    score: Score | None = Field(description="of a request that would arrive now; null unless workload-aware")


class Workloads(_Open):
    """A page of workloads, in no order."""

    workloads: list[Workload] = Field(description="in no order")
    total: int = Field(description="on all pages")
    cursor: NextCursor


class Replica(_Open):
    """A replica, as its last heartbeat reported it; null: not reported."""

    id: str = Field(description="a new one at each start")
    live: bool = Field(description="its heartbeat is younger than `leases.replica_silence`")
    heartbeat_s_ago: float = Field(description="age of its last heartbeat")
    host: str | None = Field(description="its machine's name")
    degraded: bool | None = Field(description="it works without the shared state")
    waiting: int | None = Field(description="waiting requests whose clients are connected to it")
    admin: str | None = Field(description="where its admin API is")
    grpc: str | None = Field(description="where Envoy calls it")
    version: str | None = Field(description="of the package")
    started_s_ago: float | None = Field(description="since it started, 10 s less at most")
    this: bool = Field(description="it is the one that answers")


class Replicas(_Open):
    """All known replicas; a silent one until its requests have been swept."""

    replicas: list[Replica] = Field(description="live ones first")


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
    """Decision-log entries since the last event, newest last; `skipped` counts the omitted entries."""

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
    """Sent in place of a snapshot if Redis cannot be read; `detail` says why."""

    at: float  # Unix time
    detail: str
