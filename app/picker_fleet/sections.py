"""The sections of the settings tree, each with its defaults and the faults it can find by itself.

Names follow spec 003 where it has them. Faults between sections are found in `picker_fleet.config`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    field_validator,
    model_validator,
)

from picker_fleet.allowlist import Api, api_of, trusted_name
from picker_fleet.bands import NAMED, Band, Bands, Criticality, nearest
from picker_fleet.scheduling.scorers import DEFAULT_LATENCY_WEIGHTS, scorer_name, weights_by_name
from picker_fleet.state.primary import redis_url
from picker_fleet.state.schema import BandPolicy, Fairness, Ordering, Overload, WaitSignal
from picker_fleet.units import (
    LEAST_WEIGHT,
    MOST_COST,
    MOST_WEIGHT,
    AutoDuration,
    Count,
    CriticalityName,
    Duration,
    EndpointAddress,
    FilePath,
    Flag,
    HostName,
    HostPort,
    Name,
    Number,
    Priority,
    Token,
    repeated,
    starting_with,
)

# Namespaces with another meaning: the picker's own metadata, and the subset hint.
_OTHER_NAMESPACES = ("picker", "picker.usage", "envoy.lb.subset_hint")


def _of_the_protocol(namespace: str) -> str:
    if namespace in _OTHER_NAMESPACES:
        raise ValueError(
            f"{namespace} is used for something else; valid: any but {', '.join(_OTHER_NAMESPACES)}"
        )
    return namespace


_INTEGER = re.compile(r"[+-]?[0-9]+")
RedisUrl = Annotated[str, AfterValidator(redis_url)]
TrustedHeader = Annotated[str, BeforeValidator(trusted_name)]
MetadataNamespace = Annotated[
    str, AfterValidator(_of_the_protocol), Field(pattern=r"\A[A-Za-z0-9._-]{1,255}\z")
]
# As RFC 1123 has it; it becomes a part of the API server's paths.
KubernetesName = Annotated[str, Field(pattern=r"\A[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?\z")]
AllowedPath = Annotated[
    Api,
    BeforeValidator(api_of),
    PlainSerializer(lambda api: f"{api.methods} {api.path}", return_type=str),
]


class Section(BaseModel):
    """Frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Redis(Section):
    url: RedisUrl = "redis://127.0.0.1:6379/0"
    connect_timeout: Duration = Field(1.0, gt=0)
    # Probes unanswered for so long prove that Redis is away; not below what a busy machine takes to answer.
    silence: Duration = Field(1.0, ge=0.2)


class Tls(Section):
    """TLS of a port: files in PEM, read again when they change. Without `cert` and `key` the replica signs a
    certificate itself. With `client_ca`, clients need a certificate that it has signed."""

    cert: FilePath | None = None
    key: FilePath | None = None
    client_ca: FilePath | None = None

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together: give both, or neither for a self-signed one")
        return self


class ExtProc(Section):
    listen: HostPort = "0.0.0.0:9002"
    tls: Tls | None = None
    health_listen: HostPort | None = None  # gRPC health by itself, beside that at `listen`; never by TLS
    transport: Literal["native", "grpcio"] = "native"  # what carries gRPC (docs/decisions.md, 22)
    max_body_bytes: Count = Field(8 * 1024 * 1024, ge=1024)
    max_buffered_bytes: Count = Field(128 * 1024 * 1024, ge=1024)  # of all bodies that a replica holds
    body_timeout: Duration = Field(60.0, gt=0)  # for a whole body to arrive, without its wait in the queue
    # Steering headers that Envoy sets or has checked; other steering headers are ignored.
    trusted_headers: tuple[TrustedHeader, ...] = ()
    # Of the metadata that names the picked endpoint (spec 002), and of that by which Envoy says who served.
    metadata_namespace: MetadataNamespace = "envoy.lb"
    trusted_hops: Count = Field(0, ge=0, le=16)  # proxies before Envoy that append to x-forwarded-for
    paths: tuple[AllowedPath, ...] = ()  # that model servers get besides those of every engine
    # What model servers get of other paths: nothing, or all but their own administration, each admitted.
    unknown_paths: Literal["refuse", "pass"] = "refuse"
    read_rate: Number = Field(100, gt=0, le=1e6)  # requests without a body, a second and replica
    drain_grace: Duration = 2.0  # NOT_SERVING is announced this long before new streams are refused
    drain_timeout: Duration = 60.0  # what still waits then is refused
    # Clients may choose endpoints, and answers say who served (docs/conformance.md); never in production.
    conformance: Flag = False
    # What Envoy does while no replica answers: refuse with 503, or balance by itself, without any bound.
    on_failure: Literal["deny", "balance"] = "deny"

    @model_validator(mode="after")
    def _a_body_fits(self) -> Self:
        if self.max_body_bytes > self.max_buffered_bytes:
            raise ValueError(
                f"max_body_bytes {self.max_body_bytes} exceeds max_buffered_bytes {self.max_buffered_bytes}"
            )
        return self


class Http(Section):
    """Checks over HTTP by Envoy's ext_authz (mode `http`).

    Without `listen` a replica does not serve them.
    """

    listen: HostPort | None = None
    tls: Tls | None = None


Role = Literal["viewer", "operator"]


class AdminToken(Section):
    """A viewer may read, an operator also change. The file is read again when it changes."""

    file: FilePath
    role: Role


class Admin(Section):
    listen: HostPort = "0.0.0.0:8081"
    token: Token | None = None
    token_file: FilePath | None = None  # read as `token` where that is not set; an empty file is no token
    tokens: tuple[AdminToken, ...] = Field((), max_length=64)  # besides that one, which is an operator's
    tls: Tls | None = None
    hosts: tuple[HostName, ...] = ()  # it may be read by, besides the loopback and this machine's name
    rate: float = Field(200, gt=0)  # calls a second from one address; a change is ten
    reference_metrics: bool = False  # metrics also under the names of the reference picker


def url_path(path: str) -> str:
    """`path`. Raises ValueError if it is no path of a URL."""
    if not path.startswith("/") or not path.isascii() or not path.isprintable() or " " in path:
        raise ValueError(f"{path[:60]!r} is no path of a URL")
    return path


Port = Annotated[Count, Field(ge=1, le=65535)]
UrlPath = Annotated[str, AfterValidator(url_path)]


class StaticEndpoint(Section):
    address: EndpointAddress
    labels: dict[str, str] = {}
    max_inflight: Count | None = Field(None, ge=1, le=1_000_000)  # requests of the whole fleet at once
    metrics_port: Port | None = None  # of its metrics page, where it differs
    metrics_path: UrlPath | None = None


def unlike(endpoints: tuple[StaticEndpoint, ...]) -> tuple[StaticEndpoint, ...]:
    """`endpoints` as they are. Raises ValueError if one address is listed twice."""
    if twice := repeated(endpoint.address for endpoint in endpoints):
        raise ValueError(f"{twice[0]} is listed twice")
    return endpoints


EndpointList = Annotated[tuple[StaticEndpoint, ...], AfterValidator(unlike)]


class Dns(Section):
    name: Annotated[str, Field(min_length=1, max_length=253)]
    port: Port
    interval: Duration = Field(5.0, ge=0.05)


class Kubernetes(Section):
    """The InferencePool whose pods are the endpoints (inference.networking.k8s.io/v1)."""

    pool: KubernetesName
    namespace: KubernetesName | None = None  # null: that of the credentials


class Discovery(Section):
    """At most one source; none at all means a pool without endpoints."""

    static: EndpointList | None = None
    file: FilePath | None = None  # as written in a configuration file it is relative to that file
    dns: Dns | None = None
    kubernetes: Kubernetes | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        sources = ("static", "file", "dns", "kubernetes")
        named = [name for name in sources if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError(f"give one of {', '.join(sources)}; {' and '.join(named)} are set")
        return self


class TargetModel(Section):
    name: Name
    weight: Count = Field(1, ge=1)


class _Ranked(Section):
    """Whose requests are of a band: by the name of one of the three, or by a priority."""

    name: Name
    criticality: CriticalityName = Criticality.DEFAULT
    priority: Priority | None = None

    @model_validator(mode="after")
    def _one_band(self) -> Self:
        if self.priority is not None and "criticality" in self.model_fields_set:
            raise ValueError("give criticality or priority, not both")
        return self

    def band(self, bands: Bands) -> Band:
        """The band of its requests, of those that are configured as `bands`."""
        if self.priority is not None:
            return bands.of(self.priority)
        return bands.named(self.criticality)


class Model(_Ranked):
    weight: Number = Field(1.0, ge=LEAST_WEIGHT, le=MOST_WEIGHT)
    max_inflight_per_endpoint: Count | None = Field(None, ge=1, le=65_535)  # of each of its flows
    max_model_len: Count | None = Field(None, ge=1, le=100_000_000)  # tokens of prompt and answer together
    target_models: tuple[TargetModel, ...] = ()
    endpoint_labels: Mapping[Name, str] = Field(default={})  # of endpoints that may serve it; all of them


class Objective(_Ranked):
    weight: Number = Field(1.0, ge=LEAST_WEIGHT, le=MOST_WEIGHT)
    max_inflight_per_endpoint: Count | None = Field(None, ge=1, le=65_535)  # of each flow that it is given to


BandWeight = Annotated[Number, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT)]
MOST_BAND_BYTES = 2**50  # sums stay exact
_MOST_BANDS = 64  # as many as can be in use at once (lua/lib/bands.lua)


def _band_name(name: str) -> str:
    """The three as they are spelled, in whatever case; others as they are."""
    return next((each for each in Criticality if each.lower() == name.lower()), name)


class PriorityBand(Section):
    """A band of the queue. What is not given is that of the nearest of the three bands at or below its
    priority; for one of the three, its default."""

    priority: Priority
    name: Annotated[Name, Field(max_length=64), AfterValidator(_band_name)] | None = None
    weight: BandWeight | None = None
    preemptible: Flag | None = None
    guaranteed: Flag | None = None
    capacity: Count | None = Field(None, ge=1)
    bytes: int | None = Field(None, strict=True, ge=1, le=MOST_BAND_BYTES)  # of the bodies that wait

    @property
    def label(self) -> str:
        return self.name if self.name is not None else str(self.priority)

    def over(self, band: Band) -> Band:
        """`band` with what is given here; its name, priority and weight are this one's."""
        return replace(band, name=self.label, **self.model_dump(exclude_none=True, exclude={"name"}))


def _configured(given: Iterable[PriorityBand]) -> dict[str, Band]:
    """The bands by name: the three, then the others that are `given`, the highest first."""
    by_name = {band.label: band for band in given}
    named = {band.name: by_name.pop(band.name).over(band) if band.name in by_name else band for band in NAMED}
    others = sorted(by_name.values(), key=lambda band: -band.priority)
    return named | {band.label: band.over(nearest(named.values(), band.priority)) for band in others}


class FairRequestQueue(Section):
    total_capacity: Count = Field(1000, ge=1)
    flow_capacity: Count = Field(100, ge=1)
    max_flows: Count = Field(10_000, ge=1)  # that have a request waiting, in all bands
    # Of the bound, that one request takes at most, whatever it claims; only under `unit: tokens`.
    claim_share: Number = Field(0.25, gt=0, le=1)
    # Flows whose names are not configured: how many one address may begin at one replica.
    new_flows_per_minute: Count = Field(1000, ge=1, le=1_000_000)
    queue_ttl: Duration = Field(30.0, gt=0)
    flow_key: Literal["fairness-id", "model"] = "fairness-id"
    band_policy: BandPolicy = "strict"
    # Bands besides Critical, Default and Sheddable, or these with other priorities and attributes. A priority
    # that no band has gets one of its own while it is in use.
    priority_bands: tuple[PriorityBand, ...] = Field((), max_length=_MOST_BANDS - len(NAMED))
    # By the band's name. Whatever is not named keeps its own.
    band_weights: dict[str, BandWeight] = Field(default={}, validate_default=True)
    fairness: Fairness = "weighted-fair"
    ordering: Ordering = "fcfs"
    overload: Overload = "preempt"
    starvation_after: Annotated[Duration, Field(gt=0)] | None = None  # null: half a request's TTL
    guard_share: Number = Field(0.1, ge=0, lt=1)
    # Stands for an answer of unknown length where the flow has had none yet; only under `unit: tokens`.
    default_answer_tokens: Count = Field(256, ge=1, le=1_000_000)
    overload_status: Literal[503, 429] = 503
    # While no endpoint is ready requests wait for their TTL at most, as for a pool that is scaled to zero.
    queue_without_endpoints: Flag = False

    @field_validator("priority_bands")
    @classmethod
    def _bands_once(cls, given: tuple[PriorityBand, ...]) -> tuple[PriorityBand, ...]:
        if len({band.label for band in given}) < len(given):
            raise ValueError("a name is given to two bands")
        if twice := repeated(band.priority for band in _configured(given).values()):
            raise ValueError(f"priority {twice[0]} is given to two bands")
        for band in given:
            if _INTEGER.fullmatch(band.label) and band.label != str(band.priority):
                raise ValueError(f"the name {band.label} is another priority")
        return given

    @field_validator("band_weights")
    @classmethod
    def _weights_of_bands(cls, given: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        bands = _configured(info.data.get("priority_bands", ()))
        weights = {_band_name(name): weight for name, weight in given.items()}
        for name in weights:
            if name not in bands:
                raise ValueError(f"{name[:40]!r} is no band; valid: {', '.join(bands)}")
        return {name: band.weight for name, band in bands.items()} | weights

    @property
    def bands(self) -> Bands:
        found = _configured(self.priority_bands).values()
        return Bands(replace(band, weight=self.band_weights[band.name]) for band in found)

    @model_validator(mode="after")
    def _flow_fits(self) -> Self:
        if self.flow_capacity > self.total_capacity:
            raise ValueError(
                f"flow_capacity {self.flow_capacity} exceeds total_capacity {self.total_capacity}"
            )
        if self.starvation_after is not None and self.starvation_after > self.queue_ttl:
            raise ValueError(
                f"starvation_after {self.starvation_after:g}s exceeds queue_ttl {self.queue_ttl:g}s"
            )
        return self


class RequestQueueController(Section):
    """Bounds per ready backend, in `unit`."""

    enabled: Flag = True  # False: requests are placed as they come, and nobody waits
    watermark_per_backend: Number = Field(2, gt=0, le=MOST_COST)
    percentage_deviation_for_bounds: Number = Field(0.1, gt=0, lt=1)
    lower_bound_per_backend: Number | None = Field(None, ge=0, le=MOST_COST)
    upper_bound_per_backend: Number | None = Field(None, gt=0, le=MOST_COST)
    unit: Literal["requests", "tokens"] = "requests"
    expiry_cleanup_interval: Duration = Field(1.0, gt=0)

    @property
    def upper_per_backend(self) -> float:
        if self.upper_bound_per_backend is not None:
            return self.upper_bound_per_backend
        return self.watermark_per_backend * (1 + self.percentage_deviation_for_bounds)

    @property
    def lower_per_backend(self) -> float:
        if self.lower_bound_per_backend is not None:
            return self.lower_bound_per_backend
        return self.watermark_per_backend * (1 - self.percentage_deviation_for_bounds)

    @model_validator(mode="after")
    def _tokens_are_chosen(self) -> Self:
        # Two requests are a sensible default, two tokens are not.
        if self.unit == "tokens" and "watermark_per_backend" not in self.model_fields_set:
            raise ValueError("unit tokens needs watermark_per_backend (and bounds, if set) in tokens")
        return self

    @model_validator(mode="after")
    def _band_holds_watermark(self) -> Self:
        if self.lower_per_backend > self.watermark_per_backend:
            raise ValueError(
                f"lower_bound_per_backend {self.lower_per_backend:g} is above "
                f"watermark_per_backend {self.watermark_per_backend:g}"
            )
        if self.upper_per_backend < self.watermark_per_backend:
            raise ValueError(
                f"upper_bound_per_backend {self.upper_per_backend:g} is below "
                f"watermark_per_backend {self.watermark_per_backend:g}"
            )
        return self


class Workloads(Section):
    """Workload statistics (spec 001), and the weights and caps of the workload-aware score."""

    wait_weight: Number = Field(0.4, ge=0)
    criticality_weight: Number = Field(0.4, ge=0)
    rate_weight: Number = Field(0.2, ge=0)
    wait_cap: Duration = Field(60.0, gt=0)
    rate_cap: Number = Field(100, gt=0)  # requests/s
    rate_window: Duration = Field(60.0, gt=0)
    ema_alpha: Number = Field(0.2, gt=0, le=1)
    idle_after: Duration = Field(300.0, gt=0)
    max_workloads: int = Field(20_000, ge=1)  # ids beyond them are treated as anonymous
    wait_signal: WaitSignal = "request"


ScorerName = Annotated[str, AfterValidator(scorer_name)]
ScorerWeight = Annotated[Number, Field(gt=0, le=1e6)]


class OutlierDetection(Section):
    """When an endpoint that fails is ejected (docs/picking.md). `retry_budget_percent` is Envoy's."""

    enabled: Flag = True
    base_ejection_time: Duration = Field(1.0, ge=0.1, le=300)  # doubled each time while it goes on failing
    max_ejection_time: Duration = Field(8.0, ge=0.1, le=300)
    max_ejection_percent: Count = Field(50, ge=0, le=100)  # of the endpoints that are ready
    retry_budget_percent: Count = Field(20, ge=0, le=100)  # retries, of the requests that run

    @model_validator(mode="after")
    def _doubles_up_to_the_longest(self) -> Self:
        if self.max_ejection_time < self.base_ejection_time:
            raise ValueError(
                f"max_ejection_time {self.max_ejection_time:g}s is below "
                f"base_ejection_time {self.base_ejection_time:g}s"
            )
        return self


class Latency(Section):
    """What the scorer `latency` adds up (spec 004): alpha·mean + beta·load + gamma·std."""

    alpha: Number = Field(DEFAULT_LATENCY_WEIGHTS.alpha, ge=0, le=1e6)
    beta: Number = Field(DEFAULT_LATENCY_WEIGHTS.beta, ge=0, le=1e6)
    gamma: Number = Field(DEFAULT_LATENCY_WEIGHTS.gamma, ge=0, le=1e6)

    @model_validator(mode="after")
    def _anything_counts(self) -> Self:
        if self.alpha == self.beta == self.gamma == 0:
            raise ValueError("one of alpha, beta and gamma must be above 0, or all endpoints cost the same")
        return self


# Headers and members of bodies that name a client's session.
SessionKey = Literal["session-id", "x-session-affinity", "prompt_cache_key", "user", "metadata.user_id"]


class Scheduling(Section):
    """How an endpoint is chosen. Without scorers: the one with the fewest requests in flight."""

    scorers: Annotated[dict[ScorerName, ScorerWeight], BeforeValidator(weights_by_name)] = {}
    session_keys: tuple[SessionKey, ...] = ()  # what the scorer session-affinity goes by besides tokens
    latency: Latency = Latency()
    fallbacks: Count = Field(2, ge=0, le=8)
    adapters: tuple[Name, ...] = ()  # names of LoRA adapters, besides those that endpoints report
    endpoint_labels: Mapping[Name, str] = Field(default={})  # that endpoints need to get any request

    @model_validator(mode="after")
    def _keys_are_scored(self) -> Self:
        if self.session_keys and "session-affinity" not in self.scorers:
            raise ValueError("session_keys needs the scorer session-affinity, by which they count")
        return self


class Series(NamedTuple):
    """A series of a metrics page, and the labels that a sample of it must have to count."""

    name: str
    labels: frozenset[tuple[str, str]] = frozenset()


_SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)[ ]*(?:\{(.*)\})?")
_SELECTED = re.compile(r'[ ]*([a-zA-Z_][a-zA-Z0-9_]*)[ ]*=[ ]*(?:"([^"\\]*)"|([^",{}= ]+))[ ]*(?:,|$)')


@lru_cache(maxsize=1000)
def series_of(text: str) -> Series:
    """The series that `text` selects: `name` or `name{label="value",...}`; the quotes may be left out.

    Raises:
        ValueError: it selects none.
    """
    match = _SERIES.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:60]!r} is no name of a Prometheus series")
    labels, at, selector = set(), 0, match[2] or ""
    while at < len(selector):
        label = _SELECTED.match(selector, at)
        if label is None:
            raise ValueError(f"{text[:60]!r} selects by no label=value pairs")
        labels.add((label[1], label[2] if label[2] is not None else label[3]))
        at = label.end()
    return Series(match[1], frozenset(labels))


# How series that differ in one label are one figure. `same`: each has the whole figure, and the highest
# counts. `total`: the series with the label empty has the sum of the others. Those that differ in other
# labels add up.
Aggregation = Literal["same", "total"]
_RANKS: Mapping[str, Aggregation] = MappingProxyType(
    {"tp_rank": "same", "pp_rank": "same", "moe_ep_rank": "same"}
)


@dataclass(frozen=True, slots=True)
class Engine:
    """Series of one engine's metrics page, and the paths that tell its state.

    A meaning may have several series, of which the first that the page has counts. `awake` is 0 while the
    engine sleeps. `aggregation` says of labels how series that differ in them are one figure. `probe_path`
    costs the engine next to nothing to answer; with the status `unready`, or another 5xx, it takes no
    requests. If `health_path` is not '', only that says so, and it is asked seldom: SGLang's generates a
    token. `sleep_path` and `models_path` ('': none) tell whether it sleeps, if the page does not, and which
    adapters can be used.
    """

    name: str
    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    kv_utilisation: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    awake: tuple[str, ...] = ()
    aggregation: Mapping[str, Aggregation] = field(default_factory=lambda: _RANKS)
    path: str = "/metrics"
    probe_path: str = "/health"
    unready: int = 503  # status
    health_path: str = ""
    sleep_path: str = ""
    models_path: str = ""


# In this order: a page that has the series of several counts as the first one's.
ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "vllm",
            waiting=("vllm:num_requests_waiting",),
            running=("vllm:num_requests_running",),
            kv_utilisation=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
            adapters=("vllm:lora_requests_info",),
            awake=('vllm:engine_sleep_state{sleep_state="awake"}',),
            sleep_path="/is_sleeping",
            models_path="/v1/models",
        ),
        Engine(
            "sglang",
            waiting=("sglang:num_queue_reqs",),
            running=("sglang:num_running_reqs",),
            kv_utilisation=("sglang:token_usage",),
            aggregation={**_RANKS, "priority": "total"},
            probe_path="/ping",
            health_path="/health",
        ),
        Engine(
            "tensorrt-llm",
            waiting=("trtllm_num_requests_waiting",),
            running=("trtllm_num_requests_running",),
            kv_utilisation=("trtllm_kv_cache_utilization",),
            path="/prometheus/metrics",
        ),
        Engine(
            "triton-tensorrt-llm",
            waiting=('nv_trt_llm_request_metrics{request_type="waiting"}',),
            running=('nv_trt_llm_request_metrics{request_type="scheduled"}',),
            kv_utilisation=('nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction"}',),
            probe_path="/v2/health/ready",
            unready=400,
        ),
        Engine(
            "triton",
            waiting=("nv_inference_pending_request_count",),
            probe_path="/v2/health/ready",
            unready=400,
        ),
        Engine("tgi", waiting=("tgi_queue_size",), running=("tgi_batch_current_size",)),
        Engine(
            "llama.cpp",
            waiting=("llamacpp:requests_deferred",),
            running=("llamacpp:requests_processing",),
            kv_utilisation=("llamacpp:kv_cache_usage_ratio",),
        ),
    )
}
_ALSO_CALLED: Mapping[str, str] = {
    "trtllm": "tensorrt-llm",
    "trtllm-serve": "tensorrt-llm",
    "text-generation-inference": "tgi",
    "llamacpp": "llama.cpp",
    "llama-cpp": "llama.cpp",
}
AUTO = "auto"
_MEANINGS = ("waiting", "running", "kv_utilisation", "adapters", "awake")
_PATHS = ("path", "probe_path")
_ENGINE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")


def _known_engine(name: str) -> Engine | None:
    name = name.lower()
    return ENGINES.get(_ALSO_CALLED.get(name, name))


Scheme = Literal["http", "https"]


class Scraping(Section):
    """`auto`: as often as figures are used, at most 1 % of either side's time; stale after 3 intervals."""

    interval: AutoDuration = Field(None, ge=0.01)
    stale_after: AutoDuration = Field(None, gt=0)
    engine: str = AUTO
    engine_label: str = _ENGINE_LABELS[0]  # of endpoints, whose value is the name of their engine
    series: Mapping[str, str] = Field(default={})  # meaning -> series, where they differ from the engine's
    aggregation: Mapping[str, Aggregation | Literal["sum"]] = Field(
        default={}
    )  # of labels, as the engine has it

    # Of the metrics pages: their port, where it is not that of requests, and how they are read.
    port: Port | None = None
    scheme: Scheme = "http"
    probe_scheme: Scheme | None = None  # of signs of life, at the port of requests; null: as `scheme`
    ca: FilePath | None = None  # that must have signed the certificates of `https`; null: any certificate
    token_file: FilePath | None = None  # a bearer token, sent with each request for a page

    @model_validator(mode="after")
    def _fresh_between_scrapes(self) -> Self:
        if self.stale_after and self.interval and self.stale_after < self.interval:
            raise ValueError("stale_after must be at least interval, or every figure counts as unknown")
        return self

    @model_validator(mode="after")
    def _of_a_known_engine(self) -> Self:
        if self.engine != AUTO and _known_engine(self.engine) is None and not self.series:
            raise ValueError(
                f"engine {self.engine!r} is not one of {AUTO}, {', '.join(ENGINES)}, and no series are named"
            )
        for meaning, text in self.series.items():
            if meaning in _PATHS:
                url_path(text)
            elif meaning in _MEANINGS:
                series_of(text)
            else:
                raise ValueError(f"{meaning!r} is not one of {', '.join((*_MEANINGS, *_PATHS))}")
        return self

    def engine_named(self, labels: Mapping[str, str]) -> str:
        """What the labels of an endpoint call its engine; '' if they do not."""
        return next((labels[key] for key in (self.engine_label, *_ENGINE_LABELS) if key in labels), "")

    def engines(self, named: str = "") -> tuple[Engine, ...]:
        """The engines that an endpoint may be whose labels call its engine `named`. If there are several, its
        page tells which of them it is."""
        labelled, configured = _known_engine(named), _known_engine(self.engine)
        if labelled is not None and labelled is not configured:
            # The series of another engine that is configured are not its own.
            return (self._own(labelled) if self.engine == AUTO else labelled,)
        if self.engine != AUTO:
            return (self._own(configured or Engine(self.engine)),)
        own = (self._own(Engine("series")),) if self.series else ()
        return (*map(self._own, ENGINES.values()), *own)

    def _own(self, engine: Engine) -> Engine:
        """`engine` with what is configured. Where it was found, its own series come behind the configured
        ones."""
        given: dict[str, Any] = {
            key: text if key in _PATHS else (text, *(getattr(engine, key) if self.engine == AUTO else ()))
            for key, text in self.series.items()
        }
        aggregation = {**engine.aggregation, **self.aggregation}
        merged = {label: how for label, how in aggregation.items() if how != "sum"}
        return replace(engine, aggregation=merged, **given)


class Leases(Section):
    """How long a silent request, replica or grant is believed."""

    inflight: Duration = Field(15.0, ge=1)  # must outlive Envoy's access-log flush interval
    access_log_interval: Duration = Field(5.0, ge=1)
    replica_silence: Duration = Field(5.0, ge=1)
    adoption_grace: Duration = Field(3.0, gt=0)
    heartbeat: Duration = Field(1.0, gt=0)

    @model_validator(mode="after")
    def _renewed_in_time(self) -> Self:
        if self.inflight < 2 * self.access_log_interval:
            raise ValueError(
                "inflight must be at least twice access_log_interval, or leases of running requests run out"
            )
        if self.replica_silence < 2 * self.heartbeat:
            raise ValueError("replica_silence must be at least twice heartbeat")
        return self


class DecisionLog(Section):
    enabled: Flag = False
    max_entries: Count = Field(100_000, ge=100)


class Logging(Section):
    format: Literal["text", "json"] = "text"
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"  # DEBUG has a line for each decision


class Tracing(Section):
    """OpenTelemetry spans of requests; needs `picker-fleet[tracing]`."""

    enabled: Flag = False
    endpoint: Annotated[str, AfterValidator(starting_with("http://", "https://"))] = "http://127.0.0.1:4317"
    sample: Number = Field(0.1, ge=0, le=1)  # of requests without a traceparent; others are sampled by theirs
