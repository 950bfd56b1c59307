"""The sections of the settings tree, with their defaults and the checks within one section.

config.py loads all sections and checks them together; none changes later. Settings are named as in spec 003.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, Self

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

from picker_fleet.domain import extensions
from picker_fleet.domain.allowlist import Api, api_of, trusted_name
from picker_fleet.domain.bands import (
    NAMED,
    Band,
    BandPolicy,
    Bands,
    Criticality,
    Fairness,
    Ordering,
    Overload,
    WaitSignal,
    nearest,
)
from picker_fleet.domain.redis_address import redis_url
from picker_fleet.domain.request import LatencyObjective
from picker_fleet.domain.units import (
    LEAST_WEIGHT,
    MOST_COST,
    MOST_WEIGHT,
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
    http_url,
    repeated,
)

# Metadata namespaces with a fixed meaning: the picker's own metadata, and the subset hint.
_OTHER_NAMESPACES = ("picker", "picker.usage", "envoy.lb.subset_hint")


def _unused_elsewhere(namespace: str) -> str:
    if namespace in _OTHER_NAMESPACES:
        others = ", ".join(_OTHER_NAMESPACES)
        raise ValueError(f"{namespace} is used for something else; valid: any but {others}")
    return namespace


_INTEGER = re.compile(r"[+-]?[0-9]+")
MetadataNamespace = Annotated[
    str, AfterValidator(_unused_elsewhere), Field(pattern=r"\A[A-Za-z0-9._-]{1,255}\z")
]
# A subdomain name (RFC 1123), which becomes part of paths on the Kubernetes API server.
KubernetesName = Annotated[str, Field(pattern=r"\A[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?\z")]
AllowedPath = Annotated[
    Api,
    BeforeValidator(api_of),
    PlainSerializer(lambda api: f"{api.methods} {api.path}", return_type=str),
]


class Section(BaseModel):
    """Base of all sections: frozen; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Redis(Section):
    url: Annotated[str, AfterValidator(redis_url)] = "redis://127.0.0.1:6379/0"
    connect_timeout: Duration = Field(1.0, gt=0)
    # Redis counts as lost once it has not answered probes for this long. A merely busy Redis answers sooner.
    silence: Duration = Field(1.0, ge=0.2)


class Tls(Section):
    """TLS of a port, from PEM files that are read again after a change. Without `cert` and `key` the replica
    uses a self-signed certificate. With `client_ca`, clients need a certificate that this CA has signed."""

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
    health_listen: HostPort | None = None  # a port only for gRPC health checks, always without TLS
    transport: Literal["native", "grpcio"] = "native"  # the gRPC implementation (docs/decisions.md, 22)
    max_body_bytes: Count = Field(8 * 1024 * 1024, ge=1024)
    max_buffered_bytes: Count = Field(128 * 1024 * 1024, ge=1024)  # limit of all bodies in a replica
    body_timeout: Duration = Field(60.0, gt=0)  # time for a body to arrive, the wait in the queue excluded
    # Headers for flow, band or model that Envoy sets or checks; the picker ignores headers not listed here.
    trusted_headers: tuple[Annotated[str, BeforeValidator(trusted_name)], ...] = ()
    # Namespace of the metadata that name the picked endpoint (spec 002) and the endpoint that served.
    metadata_namespace: MetadataNamespace = "envoy.lb"
    trusted_hops: Count = Field(0, ge=0, le=16)  # how many proxies before Envoy append to x-forwarded-for
    paths: tuple[AllowedPath, ...] = ()  # paths allowed in addition to allowlist.APIS
    # Requests for unlisted paths: refuse all, or pass all except requests that could administer an engine.
    unknown_paths: Literal["refuse", "pass"] = "refuse"
    read_rate: Number = Field(100, gt=0, le=1e6)  # limit of `read` requests a second in each replica
    drain_grace: Duration = 2.0  # a drain reports NOT_SERVING this long before streams are refused
    drain_timeout: Duration = 60.0  # a drain refuses requests that still wait after this time
    # A test mode, never for production: clients may choose their endpoints (docs/conformance.md).
    conformance: Flag = False
    # If no replica answers, Envoy refuses requests with 503 (deny) or balances without limits (balance).
    on_failure: Literal["deny", "balance"] = "deny"

    @model_validator(mode="after")
    def _a_body_fits(self) -> Self:
        if self.max_body_bytes > self.max_buffered_bytes:
            raise ValueError(
                f"max_body_bytes {self.max_body_bytes} exceeds max_buffered_bytes {self.max_buffered_bytes}"
            )
        return self


class Http(Section):
    """Mode `http`: Envoy's ext_authz filter asks over HTTP. Without `listen` the mode is off."""

    listen: HostPort | None = None
    tls: Tls | None = None


Role = Literal["viewer", "operator"]


class AdminToken(Section):
    """A viewer may read, an operator may also change settings. A changed token file is read again."""

    file: FilePath
    role: Role


class Admin(Section):
    listen: HostPort = "0.0.0.0:8081"
    token: Token | None = None
    token_file: FilePath | None = None  # file with the token if `token` is unset; empty file: no token
    tokens: tuple[AdminToken, ...] = Field((), max_length=64)  # further tokens, each with a role
    tls: Tls | None = None
    hosts: tuple[HostName, ...] = ()  # accepted Host headers besides loopback and this machine's name
    rate: float = Field(200, gt=0)  # API calls a second from one address; a change counts as ten calls
    reference_metrics: bool = False  # also show metrics under the reference picker's names


def url_path(path: str) -> str:
    """Return `path`, or raise ValueError if it is no path of a URL."""
    if not path.startswith("/") or not path.isascii() or not path.isprintable() or " " in path:
        raise ValueError(f"{path[:60]!r} is no path of a URL")
    return path


Port = Annotated[Count, Field(ge=1, le=65535)]
UrlPath = Annotated[str, AfterValidator(url_path)]


class StaticEndpoint(Section):
    address: EndpointAddress
    labels: dict[str, str] = {}
    max_inflight: Count | None = Field(None, ge=1, le=1_000_000)  # limit of requests in flight, fleet-wide
    metrics_port: Port | None = None  # port of the metrics page; None: the port of requests
    metrics_path: UrlPath | None = None


def unlike(endpoints: tuple[StaticEndpoint, ...]) -> tuple[StaticEndpoint, ...]:
    """Return `endpoints`, or raise ValueError if an address is listed twice."""
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
    namespace: KubernetesName | None = None  # null: the namespace of the Kubernetes credentials


class Discovery(Section):
    """The source of the pool's endpoints, at most one; without a source the pool has no endpoints."""

    static: EndpointList | None = None
    file: FilePath | None = None  # a path relative to the configuration file that names it
    dns: Dns | None = None
    kubernetes: Kubernetes | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        named = [name for name, value in self if value is not None]
        if len(named) > 1:
            sources = ", ".join(type(self).model_fields)
            raise ValueError(f"give one of {sources}; {' and '.join(named)} are set")
        return self


class TargetModel(Section):
    name: Name
    weight: Count = Field(1, ge=1)


class Objective(Section):
    """The band, weight and limit of the requests that name this objective in a header."""

    name: Name
    criticality: CriticalityName = Criticality.DEFAULT
    priority: Priority | None = None
    weight: Number = Field(1.0, ge=LEAST_WEIGHT, le=MOST_WEIGHT)
    max_inflight_per_endpoint: Count | None = Field(None, ge=1, le=65_535)  # of each flow
    # The promised time to the first token, and time per output token.
    slo_ttft: Annotated[Duration, Field(gt=0)] | None = None
    slo_tpot: Annotated[Duration, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _one_band(self) -> Self:
        if self.priority is not None and "criticality" in self.model_fields_set:
            raise ValueError("give criticality or priority, not both")
        return self

    @property
    def latency(self) -> LatencyObjective:
        return LatencyObjective(self.slo_ttft or math.inf, self.slo_tpot or math.inf)

    def band(self, bands: Bands) -> Band:
        """The band, among the configured `bands`, for requests with this objective."""
        if self.priority is not None:
            return bands.of(self.priority)
        return bands.named(self.criticality)


class Model(Objective):
    """A model; its band, weight and limit apply to requests without an objective."""

    max_model_len: Count | None = Field(None, ge=1, le=100_000_000)  # limit of prompt plus answer in tokens
    target_models: tuple[TargetModel, ...] = ()
    endpoint_labels: Mapping[Name, str] = Field(default={})  # labels of the endpoints that serve the model


class Outside(Section):
    """An extension (domain/extensions.py) and the parameters, which the extension itself checks."""

    name: Name
    parameters: dict[str, Any] = {}


def _usable(group: str, chosen: Outside) -> Outside:
    extensions.check(group, chosen.name, chosen.parameters)
    return chosen


OutsideFilter = Annotated[Outside, AfterValidator(partial(_usable, extensions.FILTERS))]
OutsideOrdering = Annotated[Outside, AfterValidator(partial(_usable, extensions.ORDERINGS))]
OutsideCost = Annotated[Outside, AfterValidator(partial(_usable, extensions.COST_ESTIMATORS))]


BandWeight = Annotated[Number, Field(ge=LEAST_WEIGHT, le=MOST_WEIGHT)]
MOST_BAND_BYTES = 2**50  # Lua's doubles sum byte limits up to this exactly
_MOST_BANDS = 64  # maximum bands, as in lua/lib/bands.lua


def _band_name(name: str) -> str:
    """A band's name, unchanged unless `name` spells Critical, Default or Sheddable in another case."""
    return next((each for each in Criticality if each.lower() == name.lower()), name)


class PriorityBand(Section):
    """A band of the queue. Critical, Default and Sheddable have defaults. Any other band inherits unset
    attributes from the nearest of these three bands at or below its own priority, or else from the lowest
    band."""

    priority: Priority
    name: Annotated[Name, Field(max_length=64), AfterValidator(_band_name)] | None = None
    weight: BandWeight | None = None
    preemptible: Flag | None = None
    guaranteed: Flag | None = None
    capacity: Count | None = Field(None, ge=1)
    bytes: int | None = Field(None, strict=True, ge=1, le=MOST_BAND_BYTES)  # maximum bytes of waiting bodies

    @property
    def label(self) -> str:
        return self.name if self.name is not None else str(self.priority)

    def over(self, band: Band) -> Band:
        """A copy of `band` with the attributes that this section sets, including name and priority."""
        return replace(band, name=self.label, **self.model_dump(exclude_none=True, exclude={"name"}))


def _configured(given: Iterable[PriorityBand]) -> dict[str, Band]:
    """The bands by name, first Critical, Default, Sheddable, then other `given` bands by descending
    priority."""
    by_name = {band.label: band for band in given}
    named = {band.name: by_name.pop(band.name).over(band) if band.name in by_name else band for band in NAMED}
    others = sorted(by_name.values(), key=lambda band: -band.priority)
    return named | {band.label: band.over(nearest(named.values(), band.priority)) for band in others}


class FairRequestQueue(Section):
    total_capacity: Count = Field(1000, ge=1)
    flow_capacity: Count = Field(100, ge=1)
    max_flows: Count = Field(10_000, ge=1)  # limit of flows with waiting requests, over all bands
    # The largest share of the stock's bound that one request takes, whatever its cost; at least 1 unit.
    claim_share: Number = Field(0.25, gt=0, le=1)
    # How many flows without a configured name one client address may start per minute at each replica.
    new_flows_per_minute: Count = Field(1000, ge=1, le=1_000_000)
    queue_ttl: Duration = Field(30.0, gt=0)
    flow_key: Literal["fairness-id", "model"] = "fairness-id"
    band_policy: BandPolicy = "strict"
    # Bands besides Critical, Default and Sheddable, or changes to these three bands. Any other priority gets
    # a dynamic band while requests have that priority.
    priority_bands: tuple[PriorityBand, ...] = Field((), max_length=_MOST_BANDS - len(NAMED))
    # The weights of bands, by band name. A band that is not listed keeps its weight.
    band_weights: dict[str, BandWeight] = Field(default={}, validate_default=True)
    fairness: Fairness = "weighted-fair"
    ordering: Ordering = "fcfs"
    due: OutsideOrdering | None = None  # under `edf`: an extension that says when each request is due
    cost: OutsideCost | None = None  # an extension that estimates costs
    overload: Overload = "preempt"
    starvation_after: Annotated[Duration, Field(gt=0)] | None = None  # null: half of the request's TTL
    guard_share: Number = Field(0.1, ge=0, lt=1)
    # The assumed length of a flow's answers until one of its requests has completed; for `unit: tokens`.
    default_answer_tokens: Count = Field(256, ge=1, le=1_000_000)
    overload_status: Literal[503, 429] = 503
    # If no endpoint is ready, queue requests until their TTL, for example in a pool that is scaled to zero.
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
                raise ValueError(f"the name {band.label} spells another priority")
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
    def _due_counts(self) -> Self:
        if self.due is not None and "ordering" not in self.model_fields_set:
            raise ValueError("due counts under ordering edf: set ordering, too")
        return self

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


# Keys that set the bounds of the stock by hand, and so imply the mode `static`.
_BOUNDS = (
    "watermark_per_backend",
    "percentage_deviation_for_bounds",
    "lower_bound_per_backend",
    "upper_bound_per_backend",
)
# Keys of the mode `adaptive`.
_LIMITS = ("min_per_backend", "max_per_backend", "initial_per_backend", "pinned")
MOST_LIMIT = int(MOST_COST)
_INITIAL_LIMIT = {"requests": 8, "tokens": 4096}
EndpointLimit = Annotated[Count, Field(ge=1, le=MOST_LIMIT)]


class RequestQueueController(Section):
    """The bounds of the stock (admitted work).

    Mode `adaptive`: the fleet finds a limit for each endpoint, and both bounds are the sum of the ready
    endpoints' limits (docs/limits.md). Mode `static`: the bounds are configured for each ready endpoint.
    Limits and bounds are in `unit`. Without `mode`, a configuration that names a watermark or a bound is
    static.
    """

    enabled: Flag = True  # False: requests are placed on arrival and never queued
    mode: Literal["adaptive", "static"] | None = None
    min_per_backend: EndpointLimit = 1
    max_per_backend: EndpointLimit | None = None
    initial_per_backend: EndpointLimit | None = None
    pinned: Mapping[EndpointAddress, EndpointLimit] = Field(default={}, max_length=1000)
    watermark_per_backend: Number = Field(2, gt=0, le=MOST_COST)
    percentage_deviation_for_bounds: Number = Field(0.1, gt=0, lt=1)
    lower_bound_per_backend: Number | None = Field(None, ge=0, le=MOST_COST)
    upper_bound_per_backend: Number | None = Field(None, gt=0, le=MOST_COST)
    unit: Literal["requests", "tokens"] = "requests"
    expiry_cleanup_interval: Duration = Field(1.0, gt=0)

    @property
    def is_adaptive(self) -> bool:
        if self.mode is not None:
            return self.mode == "adaptive"
        return not self.bounds_named

    @property
    def bounds_named(self) -> tuple[str, ...]:
        """The configured keys that belong to the mode `static`."""
        return self._named(_BOUNDS)

    @property
    def ignored(self) -> tuple[str, ...]:
        """The configured keys that belong to the other mode, and so have no effect."""
        return self._named(_BOUNDS if self.is_adaptive else _LIMITS)

    def _named(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(
            name for name in names if getattr(self, name) is not None and name in self.model_fields_set
        )

    @property
    def why_static(self) -> str | None:
        """A hint for operators whose configuration is static although it names no mode; else None."""
        if self.mode is not None or self.is_adaptive:
            return None
        named = ", ".join(self.bounds_named)
        return f"static, since it names {named}; remove {named} to let the fleet find its limits"

    @property
    def initial_limit(self) -> int:
        """The limit of a new endpoint in mode `adaptive`."""
        initial = self.initial_per_backend or _INITIAL_LIMIT[self.unit]
        return max(self.min_per_backend, min(initial, self.max_per_backend or MOST_LIMIT))

    @property
    def upper_per_backend(self) -> float:
        if self.is_adaptive:
            return float(self.initial_limit)
        if self.upper_bound_per_backend is not None:
            return self.upper_bound_per_backend
        return self.watermark_per_backend * (1 + self.percentage_deviation_for_bounds)

    @property
    def lower_per_backend(self) -> float:
        if self.is_adaptive:
            return self.upper_per_backend
        if self.lower_bound_per_backend is not None:
            return self.lower_bound_per_backend
        return self.watermark_per_backend * (1 - self.percentage_deviation_for_bounds)

    @model_validator(mode="after")
    def _limits_fit(self) -> Self:
        least, most = self.min_per_backend, self.max_per_backend
        if most is not None and most < least:
            raise ValueError(f"max_per_backend {most} is below min_per_backend {least}")
        return self

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        if self.is_adaptive:
            return self
        # The default watermark of 2 per endpoint is sensible in requests, not in tokens.
        if self.unit == "tokens" and "watermark_per_backend" not in self.model_fields_set:
            raise ValueError("unit tokens needs watermark_per_backend (and bounds, if set) in tokens")
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
    max_workloads: int = Field(20_000, ge=1)  # requests of further workloads count as anonymous
    wait_signal: WaitSignal = "request"


class OutlierDetection(Section):
    """Ejection of endpoints that fail (docs/picking.md). `retry_budget_percent` configures Envoy."""

    enabled: Flag = True
    base_ejection_time: Duration = Field(1.0, ge=0.1, le=300)  # each further ejection lasts twice as long
    max_ejection_time: Duration = Field(8.0, ge=0.1, le=300)
    max_ejection_percent: Count = Field(50, ge=0, le=100)  # of ready endpoints
    retry_budget_percent: Count = Field(20, ge=0, le=100)  # share of requests that may be retries

    @model_validator(mode="after")
    def _doubles_up_to_the_longest(self) -> Self:
        if self.max_ejection_time < self.base_ejection_time:
            raise ValueError(
                f"max_ejection_time {self.max_ejection_time:g}s is below "
                f"base_ejection_time {self.base_ejection_time:g}s"
            )
        return self


class Leases(Section):
    """The times for which a request, replica or grant counts as alive without a sign of life."""

    inflight: Duration = Field(15.0, ge=1)  # a lease must exceed Envoy's access-log flush interval
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
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"  # DEBUG logs a line for each decision


class Tracing(Section):
    """OpenTelemetry spans of requests; needs `picker-fleet[tracing]`."""

    enabled: Flag = False
    endpoint: Annotated[str, AfterValidator(http_url)] = "http://127.0.0.1:4317"
    sample: Number = Field(0.1, ge=0, le=1)  # share of requests without a traceparent that are traced
