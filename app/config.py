"""The one settings tree: a YAML file, overlaid by `PICKER_SECTION__KEY` environment variables.

Frozen after loading; unknown keys are errors, and cross-field faults are found here, before anything
starts. Names follow specs/003 where it has them. Durations are written `30s`, `500ms`, `5m` (a bare
number is seconds) and held as float seconds in fields that end in nothing, milliseconds where a field
says `_ms`.
"""

import math
import re
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from app.errors import ConfigError
from app.request import Band

ENV_PREFIX = "PICKER_"
_DURATION = re.compile(r"^(\d+(?:\.\d+)?)(ms|s|m|h)?$")
_UNIT_S = {"ms": 0.001, "s": 1.0, None: 1.0, "m": 60.0, "h": 3600.0}


def duration_s(value: object) -> float:
    """Seconds in `value`: a number of seconds or a string such as `500ms`, `30s`, `5m`.

    Raises:
        ValueError: `value` is neither, is negative, or is not finite.
    """
    if isinstance(value, bool):
        raise ValueError("a duration such as 30s or 500ms is needed")
    if isinstance(value, int | float):
        if not math.isfinite(value) or value < 0:
            raise ValueError("a duration must be finite and not negative")
        return float(value)
    match = _DURATION.match(str(value).strip())
    if match is None:
        raise ValueError(f"{str(value)[:40]!r} is no duration: write 500ms, 30s, 5m or 1h")
    return float(match[1]) * _UNIT_S[match[2]]


def host_port(value: object) -> str:
    """`host:port`, IPv6 in brackets, as given; the port may be 0 (any free one).

    Raises:
        ValueError: it is not of that form.
    """
    host, port = split_host_port(str(value))
    if not host or not 0 <= port <= 65535:
        raise ValueError(f"{str(value)[:60]!r} is no host:port")
    return str(value)


def split_host_port(address: str) -> tuple[str, int]:
    """('10.0.0.1', 8000) of '10.0.0.1:8000'; brackets around IPv6 are taken off.

    Raises:
        ValueError: no port, or an unbracketed IPv6 address.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or (":" in host and not host.startswith("[")):
        raise ValueError(f"{address[:60]!r} is no host:port (IPv6 goes in brackets)")
    return host.removeprefix("[").removesuffix("]"), int(port)


def endpoint_address(value: object) -> str:
    """An endpoint's `ip:port` in canonical form; IPv6 in brackets.

    Raises:
        ValueError: the host is no IP address (Envoy is told addresses, never names) or the port is 0.
    """
    host, port = split_host_port(str(value))
    if not 1 <= port <= 65535:
        raise ValueError(f"{str(value)[:60]!r}: the port must be 1 to 65535")
    try:
        address = ip_address(host)
    except ValueError:
        raise ValueError(f"{str(value)[:60]!r} is no ip:port; names go in discovery.dns") from None
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


Duration = Annotated[float, BeforeValidator(duration_s)]
HostPort = Annotated[str, BeforeValidator(host_port)]
EndpointAddress = Annotated[str, BeforeValidator(endpoint_address)]
BandName = Annotated[Band, BeforeValidator(Band.parse)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Redis(Section):
    url: str = "redis://127.0.0.1:6379/0"
    call_timeout: Duration = 0.5  # one script call; past it the answer counts as unknown
    connect_timeout: Duration = 1.0

    @model_validator(mode="after")
    def _scheme(self) -> Self:
        if not self.url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("url must begin with redis://, rediss:// or unix://")
        return self


class ExtProc(Section):
    listen: HostPort = "0.0.0.0:9002"
    max_body_bytes: int = Field(16 * 1024 * 1024, ge=1024)
    drain_grace: Duration = 2.0  # NOT_SERVING is announced this long before new streams are refused
    drain_timeout: Duration = 60.0  # what still waits then is refused


class Admin(Section):
    listen: HostPort = "0.0.0.0:8081"
    token: str | None = None


class StaticEndpoint(Section):
    address: EndpointAddress
    labels: dict[str, str] = {}


class Dns(Section):
    name: str = Field(min_length=1)
    port: int = Field(ge=1, le=65535)
    interval: Duration = 5.0


class Discovery(Section):
    """Exactly one source; none at all means a pool without endpoints."""

    static: tuple[StaticEndpoint, ...] | None = None
    file: Path | None = None
    dns: Dns | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        named = [name for name in ("static", "file", "dns") if getattr(self, name) is not None]
        if len(named) > 1:
            raise ValueError(f"give one of static, file, dns; {' and '.join(named)} are set")
        if self.static:
            seen: set[str] = set()
            for endpoint in self.static:
                if endpoint.address in seen:
                    raise ValueError(f"static lists {endpoint.address} twice")
                seen.add(endpoint.address)
        return self


class TargetModel(Section):
    name: str = Field(min_length=1)
    weight: int = Field(1, ge=1)


class Model(Section):
    name: str = Field(min_length=1)
    criticality: BandName = Band.DEFAULT
    weight: float = Field(1.0, gt=0, le=1e6)
    max_inflight_per_endpoint: int | None = Field(None, ge=1)
    target_models: tuple[TargetModel, ...] = ()


class Objective(Section):
    name: str = Field(min_length=1)
    criticality: BandName = Band.DEFAULT
    weight: float = Field(1.0, gt=0, le=1e6)


class FairRequestQueue(Section):
    total_capacity: int = Field(1000, ge=1)
    flow_capacity: int = Field(100, ge=1)
    queue_ttl: Duration = Field(30.0, gt=0)
    flow_key: Literal["fairness-id", "model"] = "fairness-id"
    fairness: Literal["weighted-fair"] = "weighted-fair"
    ordering: Literal["fcfs"] = "fcfs"
    band_policy: Literal["strict"] = "strict"
    overload_status: Literal[503, 429] = 503

    @model_validator(mode="after")
    def _flow_fits(self) -> Self:
        if self.flow_capacity > self.total_capacity:
            raise ValueError(
                f"flow_capacity {self.flow_capacity} exceeds total_capacity {self.total_capacity}"
            )
        return self


class RequestQueueController(Section):
    watermark_per_backend: float = Field(2, gt=0)
    percentage_deviation_for_bounds: float = Field(0.1, gt=0, lt=1)
    lower_bound_per_backend: float | None = Field(None, ge=0)
    upper_bound_per_backend: float | None = None
    unit: Literal["requests"] = "requests"
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
    rate_window: Duration = Field(60.0, gt=0)
    ema_alpha: float = Field(0.2, gt=0, le=1)
    idle_after: Duration = Field(300.0, gt=0)


class Scheduling(Section):
    fallbacks: int = Field(2, ge=0, le=8)


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
            raise ValueError("inflight must be at least twice access_log_interval, or live requests are reaped")
        if self.replica_silence < 2 * self.heartbeat:
            raise ValueError("replica_silence must be at least twice heartbeat")
        return self


class DecisionLog(Section):
    enabled: bool = False
    max_entries: int = Field(100_000, ge=100)


class Settings(Section):
    """A replica's whole configuration."""

    pool: str = Field("default", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    redis: Redis = Redis()
    extproc: ExtProc = ExtProc()
    admin: Admin = Admin()
    discovery: Discovery = Discovery()
    models: tuple[Model, ...] = ()
    objectives: tuple[Objective, ...] = ()
    fair_request_queue: FairRequestQueue = FairRequestQueue()
    request_queue_controller: RequestQueueController = RequestQueueController()
    workloads: Workloads = Workloads()
    scheduling: Scheduling = Scheduling()
    leases: Leases = Leases()
    decision_log: DecisionLog = DecisionLog()

    @model_validator(mode="after")
    def _names_once(self) -> Self:
        for kind in ("models", "objectives"):
            names = [entry.name for entry in getattr(self, kind)]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{kind} names {', '.join(twice)} more than once")
        return self


def load(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Settings of the YAML file at `path` (none: the defaults), overlaid by the environment.

    Raises:
        ConfigError: the file can't be read or parsed, or a key or value is not valid. Its message has
            one line a fault, each naming the key.
    """
    tree: object = {}
    if path is not None:
        try:
            tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as fault:
            raise ConfigError(f"{path}: cannot be read: {fault}") from fault
        except yaml.YAMLError as fault:
            raise ConfigError(f"{path}: is not YAML: {fault}") from fault
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the top level must be a mapping of sections")
    return parse(_overlay(tree, environ))


def parse(tree: Mapping[str, Any]) -> Settings:
    """Settings of an already parsed tree. Raises ConfigError as `load` does."""
    try:
        return Settings.model_validate(tree)
    except ValidationError as fault:
        raise ConfigError("\n".join(_explain(error) for error in fault.errors())) from fault


def _overlay(tree: dict[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX):
            continue
        *sections, key = name.removeprefix(ENV_PREFIX).lower().split("__")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
            if not isinstance(at, dict):
                raise ConfigError(f"{name}: {section} is not a section")
        try:
            at[key] = yaml.safe_load(text)
        except yaml.YAMLError as fault:
            raise ConfigError(f"{name}: its value is not YAML: {fault}") from fault
    return tree


def _explain(error: Any) -> str:
    """`section.key: what is wrong (what would be valid)`."""
    where = ".".join(str(part) for part in error["loc"]) or "configuration"
    if error["type"] == "extra_forbidden":
        parent: Any = Settings
        for part in error["loc"][:-1]:
            if isinstance(part, int):
                continue
            parent = _section_type(parent, str(part))
        valid = ", ".join(parent.model_fields) if parent is not None else ""
        return f"{where}: unknown key" + (f"; valid here: {valid}" if valid else "")
    return f"{where}: {error['msg'].removeprefix('Value error, ')} (got {str(error['input'])[:60]!r})"


def _section_type(parent: Any, field: str) -> Any:
    """The Section class behind `field` of `parent`, through tuples and optionals; None if there is none."""
    if parent is None or field not in parent.model_fields:
        return None
    pending: list[Any] = [parent.model_fields[field].annotation]
    while pending:
        annotation = pending.pop()
        if isinstance(annotation, type) and issubclass(annotation, Section):
            return annotation
        pending.extend(getattr(annotation, "__args__", ()))
    return None
