"""The settings tree, from a YAML file overlaid by environment variables `PICKER_SECTION__KEY`.

Settings are frozen after loading. Unknown keys are errors. This module checks constraints between sections
before anything starts; `sections` defines the sections. Durations are written `30s`, `500ms`, `5m` (a bare
number means seconds) and kept as float seconds. YAML is read in its safe subset, and no key may occur twice
in one mapping. `pools` has settings that differ by pool; `pools_of` returns each pool's whole settings.
"""

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Self

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from picker_fleet.domain import sections
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.request import ANY_LATENCY, LatencyObjective
from picker_fleet.domain.scheduling import Scheduling
from picker_fleet.domain.scraping import Scraping
from picker_fleet.domain.sections import Model, Objective, Section
from picker_fleet.domain.tenants import Tenants
from picker_fleet.domain.units import HostPort, Name, repeated, split_host_port, without_secrets

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # PyYAML without libyaml takes five times as long
    from yaml import SafeLoader  # type: ignore[assignment]

ENV_PREFIX = "PICKER_"
# Environment variables that Kubernetes sets in every pod if a Service is called `picker` or `picker-…`.
_SERVICE_LINK = re.compile(r"PICKER_(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT(_[0-9]+_(TCP|UDP|SCTP)(_\w+)?)?)")

Loc = tuple[str | int, ...]

# Keys that concern the whole process: a pool cannot override them.
OF_PROCESS: Final = (
    "pool",
    "pools",
    "redis",
    "extproc",
    "http",
    "admin",
    "leases",
    "labels",
    "logging",
    "tracing",
)
_MAX_YAML_CHARS = 4 * 2**20  # maximum length of a file; parsing takes several seconds
_NODE_PATH = re.compile(r"\bpath\"?: *\"?([^\s\",}]+)[\s\",}]")
_MAX_YAML_DEPTH = 100
_MOST_REPEATED = 100_000  # maximum values that all aliases of a document repeat
_MOST_DIGITS = 400  # maximum characters of a whole number: in base 60, time grows with their square
SAME: Final = "same"  # in `scheduling.prefer`: stands for the value of this replica's label
MAX_POOLS: Final = 32  # each pool has its own Redis connections, and background work even without load
# The keys whose values are file paths.
_FILES: Final = (
    ("discovery", "file"),
    ("tenants", "file"),
    ("admin", "token_file"),
    ("admin", "tokens", "file"),
    *(("scraping", key) for key in ("ca", "token_file")),
    *((port, "tls", key) for port in ("extproc", "http", "admin") for key in sections.Tls.model_fields),
)
PoolName = Annotated[str, Field(pattern=r"\A[A-Za-z0-9._-]{1,64}\z")]


class _PoolTree(dict[str, Any]):
    """The section of one pool; `shared` is the tree that the section overrides."""

    def __init__(self, own: Mapping[str, Any], shared: Mapping[str, Any]) -> None:
        super().__init__(own)
        self.shared = shared


def _whole_pool(section: object) -> object:
    """The whole tree of a pool: its section laid over the tree that all pools share."""
    if not isinstance(section, _PoolTree):
        return section
    foreign = [key for key in section if key in OF_PROCESS]
    if foreign:
        raise ValueError(
            f"{', '.join(foreign)}: must be set at the top level, for the whole process, not for one pool"
        )
    return overlaid(section.shared, section)


class Settings(Section):
    """A replica's whole configuration."""

    pool: PoolName = "default"
    # By pool: settings that differ from the top level. Requests that name no pool go to the pool `pool`.
    pools: Mapping[PoolName, Annotated["PoolSettings", BeforeValidator(_whole_pool)]] = Field(
        default={}, max_length=MAX_POOLS
    )
    redis: sections.Redis = sections.Redis()
    extproc: sections.ExtProc = sections.ExtProc()
    http: sections.Http = sections.Http()
    admin: sections.Admin = sections.Admin()
    labels: Mapping[Name, str] = Field(default={})  # labels of this replica, such as its zone
    discovery: sections.Discovery = sections.Discovery()
    models: tuple[Model, ...] = ()
    default_model: Name | None = None  # the model assumed for requests that name no model
    objectives: tuple[Objective, ...] = ()
    fair_request_queue: sections.FairRequestQueue = sections.FairRequestQueue()
    request_queue_controller: sections.RequestQueueController = sections.RequestQueueController()
    tenants: Tenants | None = None
    workloads: sections.Workloads = sections.Workloads()
    scheduling: Scheduling = Scheduling()
    outlier_detection: sections.OutlierDetection = sections.OutlierDetection()
    scraping: Scraping = Scraping()
    leases: sections.Leases = sections.Leases()
    decision_log: sections.DecisionLog = sections.DecisionLog()
    logging: sections.Logging = sections.Logging()
    tracing: sections.Tracing = sections.Tracing()

    @property
    def promises_latencies(self) -> bool:
        """Whether a model or an objective has a latency objective."""
        return any(each.latency != ANY_LATENCY for each in (*self.models, *self.objectives))

    def promised_latency(self, model: str) -> LatencyObjective:
        """The strictest configured latency objective of requests for `model`. Requests with an objective may
        name any model."""
        models = (each for each in self.models if each.name == model)
        promised = [ANY_LATENCY, *(each.latency for each in (*models, *self.objectives))]
        return LatencyObjective(*map(min, zip(*promised, strict=True)))

    @property
    def preferred_labels(self) -> dict[str, str]:
        """The values of `scheduling.prefer`, where `same` is this replica's value, without the labels that
        this replica lacks."""
        prefer = self.scheduling.prefer.items()
        values = {key: self.labels.get(key, "") if value == SAME else value for key, value in prefer}
        return {key: value for key, value in values.items() if value}

    @model_validator(mode="before")
    @classmethod
    def _pools_over_the_rest(cls, tree: object) -> object:
        pools = tree.get("pools") if isinstance(tree, Mapping) else None
        if not isinstance(tree, Mapping) or not isinstance(pools, Mapping):
            return tree
        shared = {key: value for key, value in tree.items() if key != "pools"}
        own = {
            name: _PoolTree(section or {}, {**shared, "pool": name})
            if isinstance(section, Mapping | None)
            else section
            for name, section in pools.items()
        }
        return {**shared, "pools": own}

    @model_validator(mode="after")
    def _pools_fit(self) -> Self:
        if not self.pools:
            return self
        if self.pool not in self.pools:
            raise ValueError(
                f"pool {self.pool} is not one of pools, which are {', '.join(self.pools)}; "
                "it says which of them takes requests that name none"
            )
        if any(not name.strip(".") for name in self.pools):
            raise ValueError("pools: a name needs more than dots")
        spellings = [name.lower() for name in self.pools]
        if len(set(spellings)) < len(spellings):
            raise ValueError("pools: two names differ in upper and lower case only")
        if self.extproc.max_body_bytes > self.extproc.max_buffered_bytes // 2:
            raise ValueError(
                f"extproc.max_body_bytes {self.extproc.max_body_bytes} is more than half of "
                f"max_buffered_bytes {self.extproc.max_buffered_bytes}, which pools share"
            )
        return self

    @model_validator(mode="after")
    def _names_once(self) -> Self:
        for kind in ("models", "objectives"):
            if twice := repeated(entry.name for entry in getattr(self, kind)):
                raise ValueError(f"{kind} names {', '.join(sorted(twice))} more than once")
        return self

    @model_validator(mode="after")
    def _guarantees_fit(self) -> Self:
        # The queue guarantees each flow of a guaranteed band `flow_capacity` places (spec 003).
        queue = self.fair_request_queue
        bands = queue.bands
        critical = sum(model.band(bands).guaranteed for model in self.models)
        if critical * queue.flow_capacity > queue.total_capacity:
            raise ValueError(
                f"ErrTooManyFlows: {critical} Critical models (or of another guaranteed band) with "
                f"fair_request_queue.flow_capacity {queue.flow_capacity} each need "
                f"{critical * queue.flow_capacity} places; "
                f"fair_request_queue.total_capacity is {queue.total_capacity}"
            )
        return self

    @model_validator(mode="after")
    def _limits_have_flows(self) -> Self:
        for kind in ("models", "objectives"):
            entries = getattr(self, kind)
            limited = [entry.name for entry in entries if entry.max_inflight_per_endpoint is not None]
            if limited and self.fair_request_queue.fairness == "none":
                raise ValueError(
                    "fair_request_queue.fairness none keeps no flows apart, so max_inflight_per_endpoint of "
                    f"{kind} {', '.join(limited)} cannot be kept; use weighted-fair or round-robin"
                )
        return self

    @model_validator(mode="after")
    def _tenants_have_flows(self) -> Self:
        if self.tenants is None:
            return self
        queue = self.fair_request_queue
        if queue.fairness == "none":
            raise ValueError(
                "fair_request_queue.fairness none keeps no flows apart, so tenants have no shares and no "
                "limits; use weighted-fair or round-robin"
            )
        headers = self.tenants.headers or ()
        if headers and queue.flow_key == "model":
            raise ValueError("fair_request_queue.flow_key model ignores tenants.headers; remove one of them")
        for name in headers:
            if name not in self.extproc.trusted_headers:
                raise ValueError(
                    f"tenants.headers: extproc.trusted_headers does not name {name}; name it there once "
                    "Envoy sets it, or removes it from clients' requests"
                )
        return self

    @model_validator(mode="after")
    def _stage_headers_are_not_trusted(self) -> Self:
        stages = self.scheduling.stages
        for name in {stages.header, stages.encode.header}.intersection(self.extproc.trusted_headers):
            raise ValueError(
                f"scheduling.stages: extproc.trusted_headers names {name}, too; use another name"
            )
        return self

    @model_validator(mode="after")
    def _silence_within_leases(self) -> Self:
        # A lease must outlast `redis.silence`: a grant that Redis answers late still belongs to its request.
        silence_s, lease_s = self.redis.silence, self.leases.inflight
        if silence_s > lease_s / 2:
            raise ValueError(
                f"redis.silence {silence_s:g}s must be at most half of leases.inflight {lease_s:g}s"
            )
        return self

    @model_validator(mode="after")
    def _listeners_differ(self) -> Self:
        places = {
            "extproc.listen": self.extproc.listen,
            "extproc.health_listen": self.extproc.health_listen,
            "http.listen": self.http.listen,
            "admin.listen": self.admin.listen,
            **{f"pools.{name}.listen": pool.listen for name, pool in self.pools.items()},
        }
        keys: dict[str, str] = {}
        for key, place in places.items():
            if place is not None and split_host_port(place)[1] != 0 and place in keys:
                raise ValueError(f"{keys[place]} and {key} are both {place}")
            keys[place or ""] = key
        return self

    @property
    def claim_share(self) -> float:
        """The largest share of the stock's bound that one request takes. 0: each request takes 1 unit,
        whatever its cost, since the fleet finds limits of requests."""
        controller = self.request_queue_controller
        finds_requests = controller.is_adaptive and controller.unit == "requests"
        return 0.0 if finds_requests else self.fair_request_queue.claim_share


class PoolSettings(Settings):
    """The settings of one pool in a configuration with several pools."""

    listen: HostPort | None = None  # an ext_proc port of this pool only, for proxies that cannot name a pool

    @property
    def own(self) -> dict[str, Any]:
        """The settings given for this pool, without the keys that concern the whole process."""
        return self.model_dump(exclude_unset=True, exclude={*OF_PROCESS, "listen"})


Settings.model_rebuild()


def pools_of(settings: Settings) -> dict[str, Settings]:
    """The settings of each pool by name, the default pool first."""
    if not settings.pools:
        return {settings.pool: settings}
    trees = {
        name: pool.model_dump(exclude_unset=True, exclude={"listen"}) for name, pool in settings.pools.items()
    }
    return {
        name: parse(trees[name])
        for name in (settings.pool, *(each for each in trees if each != settings.pool))
    }


@dataclass(frozen=True, slots=True)
class EffectiveConfig:
    """The configuration with live changes applied, and the live weights of flows by name."""

    settings: Settings
    weights: Mapping[str, float]


def load(
    path: Path | None,
    environ: Mapping[str, str],
    *,
    defaults: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """Settings of the YAML file at `path` (None: the defaults), overlaid by the environment.

    The file overrides the tree `defaults`; the tree `flags` overrides the environment.

    Relative paths in the file (`discovery.file`, `admin.token_file`, paths in `admin.tokens`, `tls` and
    `scraping`) are relative to the file; in the environment, to the working directory. The token in
    `admin.token_file` becomes `admin.token`.

    Raises:
        ConfigError: the file cannot be read or parsed, or a key or value is not valid. The message has one
            line for each fault, with the key, and the environment variable if the value came from one.
    """
    tree: Any = {}
    if path is not None:
        try:
            tree = read_yaml(path.read_text(encoding="utf-8"))
        except OSError as fault:
            raise ConfigError(f"{path}: cannot be read: {fault.strerror or fault}") from fault
        except UnicodeDecodeError as fault:
            raise ConfigError(f"{path}: is not UTF-8 at byte {fault.start}") from fault
        except YamlFault as fault:
            raise ConfigError(f"{path}: {fault}") from fault
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the top level must be a mapping of sections")
    if path is not None:
        _find_files(tree, path.parent)
    below = overlaid(defaults or {}, tree)
    variables = _overlay(below, environ)
    whole = overlaid(below, flags or {})
    _read_token(whole)
    return _validated(whole, variables)


def _find_files(tree: dict[str, Any], folder: Path) -> None:
    """Resolve relative file paths in `tree` against `folder`, the folder of the configuration file."""
    pools = tree.get("pools")
    for top in (tree, *(pools.values() if isinstance(pools, dict) else ())):
        for *above, key in _FILES:
            section = top
            for name in above:
                section = section.get(name) if isinstance(section, dict) else None
            for each in section if isinstance(section, list) else (section,):
                if isinstance(each, dict) and isinstance(file := each.get(key), str) and file:
                    each[key] = str(folder / file)


def overlaid(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `above` over `below`, key by key in nested mappings; `discovery` is replaced as a whole."""
    tree = dict(below)
    for key, value in above.items():
        under = tree.get(key)
        if isinstance(under, Mapping) and isinstance(value, Mapping) and key != "discovery":
            tree[key] = overlaid(under, value)
        else:
            tree[key] = value
    return tree


def parse(tree: Mapping[str, Any]) -> Settings:
    """The settings from the parsed tree of a YAML file. Raises ConfigError, as `load` does."""
    return _validated(tree, {})


def _read_token(tree: dict[str, Any]) -> None:
    """Set `admin.token` from the file `admin.token_file`, unless the token is set."""
    admin = tree.get("admin")
    if not isinstance(admin, dict) or admin.get("token") is not None:
        return
    file = admin.get("token_file")
    if not isinstance(file, str) or not file:
        return
    try:
        text = Path(file).read_text(encoding="ascii", errors="replace").strip()
    except OSError as fault:
        raise ConfigError(f"admin.token_file: {file} cannot be read: {fault.strerror or fault}") from fault
    if text:
        admin["token"] = text


def _validated(tree: Mapping[str, Any], variables: Mapping[Loc, str]) -> Settings:
    try:
        return Settings.model_validate(tree)
    except ValidationError as fault:
        errors = fault.errors()
        # A fault at the top level recurs in every pool: report the fault once.
        shared = {(error["loc"], error["msg"]) for error in errors}
        told = [
            error
            for error in errors
            if error["loc"][:1] != ("pools",) or (error["loc"][2:], error["msg"]) not in shared
        ]
        raise ConfigError("\n".join(_explain(error, variables, tree) for error in told)) from fault


def _overlay(tree: dict[str, Any], environ: Mapping[str, str]) -> dict[Loc, str]:
    """Write the environment's values into `tree`; return the variable that set each location."""
    variables: dict[Loc, str] = {}
    for name, text in sorted(environ.items()):
        if not name.startswith(ENV_PREFIX) or ("__" not in name and _SERVICE_LINK.fullmatch(name)):
            continue
        loc = tuple(name.removeprefix(ENV_PREFIX).lower().split("__"))
        at = tree
        for section in loc[:-1]:
            if at.get(section) is None:
                at[section] = {}
            at = at[section]
            if not isinstance(at, dict):
                raise ConfigError(f"{name}: {section} is not a section")
        try:
            # For a key of type text, take the variable's value verbatim: a token made of digits is no number.
            at[loc[-1]] = text if _is_text(loc) else yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as fault:
            raise ConfigError(f"{name}: its value is not YAML: {_yaml_reason(fault)}") from fault
        variables[loc] = name
    return variables


def _explain(error: Any, variables: Mapping[Loc, str], tree: Mapping[str, Any]) -> str:
    """Format a validation error on one line, as `section.key: fault (got value)`."""
    loc: Loc = error["loc"]
    where = _place(loc, tree)
    is_unknown, is_section = error["type"] == "extra_forbidden", error["type"] == "model_type"
    for set_by, name in reversed(list(variables.items())):
        if loc[: len(set_by)] == set_by or (is_unknown and set_by[: len(loc)] == loc):
            where = f"{name}: {where}"
            break
    if is_unknown or is_section:
        parent = _section(loc if is_section else loc[:-1])
        not_here = OF_PROCESS if parent is PoolSettings else ()
        fields = parent.model_fields if parent is not None else ()
        valid = ", ".join(name for name in fields if name not in not_here)
        text = "must be a mapping" if is_section else "unknown key"
        text += f"; valid here: {valid}" if valid else ""
    else:
        text = error["msg"].removeprefix("Value error, ").replace("valid tuple", "valid list")
        given = error["input"]
        # Do not show a whole section, which is long, or a value given in its place, which may be a secret.
        shows = not isinstance(given, dict | list | tuple) and _section(loc) is None and not _is_secret(loc)
        if error["type"] != "missing" and shows:
            text += f" (got {without_secrets(str(given))[:60]!r})"
    return " ".join(f"{where}: {text}".split())


def _place(loc: Loc, tree: Mapping[str, Any]) -> str:
    """The keys of `loc`, joined by dots; a tenant node's number is followed by its path."""
    parts: list[str] = []
    at: Any = tree
    for key in loc if loc[-1:] != ("[key]",) else loc[:-1]:  # pydantic's mark of an invalid key
        try:
            at = at[key]
        except (LookupError, TypeError):
            at = None
        is_node = isinstance(key, int) and parts[-2:] == ["tenants", "nodes"] and isinstance(at, Mapping)
        parts.append(f"{key} ({str(at.get('path'))[:60]})" if is_node else str(key))
    return ".".join(parts) or "configuration"


def _is_secret(loc: Loc) -> bool:
    return loc[:2] in (("redis", "url"), ("admin", "token"))


def _yaml_reason(fault: Exception) -> str:
    """The YAML problem and its position, without the surrounding text, which may contain a secret."""
    problem, mark = getattr(fault, "problem", None), getattr(fault, "problem_mark", None)
    if isinstance(fault, yaml.reader.ReaderError):
        return f"it has a forbidden character at position {fault.position}"
    if problem is None:
        return "it is nested too deeply" if isinstance(fault, RecursionError) else type(fault).__name__
    where = f" in line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    said = re.sub(r"(alias|anchor|tag) '.*'", r"\1", " ".join(str(problem).split()))
    return f"{said[:200]}{where}"


def _is_text(loc: tuple[str, ...]) -> bool:
    parent = _section(loc[:-1])
    if parent is None or loc[-1] not in parent.model_fields:
        return False
    annotation = parent.model_fields[loc[-1]].annotation
    return annotation is str or _is_secret(loc)


def _section(loc: Loc) -> type[Section] | None:
    """The Section class at `loc`, through tuples and optionals; None if there is none."""
    parent: type[Section] | None = Settings
    if loc[:1] == ("pools",) and len(loc) > 1:
        parent, loc = PoolSettings, loc[2:]
    for part in loc:
        if isinstance(part, int):
            continue
        if parent is None or part not in parent.model_fields:
            return None
        pending: list[Any] = [parent.model_fields[part].annotation]
        parent = None
        while pending and parent is None:
            annotation = pending.pop()
            if isinstance(annotation, type) and issubclass(annotation, Section):
                parent = annotation
            pending.extend(getattr(annotation, "__args__", ()))
    return parent


class YamlFault(ValueError):
    """Unusable YAML; the message is one line, with the position of the fault."""


class _Loader(SafeLoader):
    """Rejects duplicate keys: SafeLoader would silently keep only the last of equal keys, and so drop perhaps
    half a file."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen and key.value != "<<":
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} is there twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > _MOST_DIGITS:
            problem = f"a number has more than {_MOST_DIGITS} characters"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return int(super().construct_yaml_int(node))


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _check_shape(text: str) -> None:
    """Raise RecursionError if the YAML `text` nests too deeply; ValueError if its aliases repeat too many
    values: 300 bytes of aliases of aliases can stand for millions of values."""
    values = repeated = 0
    inside: list[tuple[str | None, int]] = []  # anchor of each open collection, and the values before it
    sizes: dict[str | None, int] = {}  # anchor -> number of values that its aliases repeat
    for event in yaml.parse(text, Loader=SafeLoader):  # libyaml's loader would overflow the stack
        if isinstance(event, yaml.AliasEvent):
            size = sizes.get(event.anchor, 0)
            values, repeated = values + size, repeated + size
            if repeated > _MOST_REPEATED:
                line = getattr(event.start_mark, "line", 0) + 1
                raise ValueError(f"aliases repeat more than {_MOST_REPEATED} values in line {line}")
        elif isinstance(event, yaml.CollectionStartEvent):
            inside.append((event.anchor, values))
            values += 1
            if len(inside) > _MAX_YAML_DEPTH:
                raise RecursionError
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = inside.pop()
            sizes[anchor] = values - before
        elif isinstance(event, yaml.ScalarEvent):
            values += 1
            sizes[event.anchor] = 1


def read_yaml(text: str) -> object:
    """The single YAML document in `text`; None if it is empty.

    Raises:
        YamlFault: the text is too long, cannot be parsed, has a key twice, nests too deeply, or has aliases
            for too many values.
    """
    if len(text) > _MAX_YAML_CHARS:
        # Only a list of tenants grows this long: name the node at which the text becomes too long.
        paths = _NODE_PATH.findall(text, _MAX_YAML_CHARS - 4096, _MAX_YAML_CHARS)
        where = f" at the node {paths[-1][:60]}" if paths else ""
        raise YamlFault(f"is longer than {_MAX_YAML_CHARS // 2**20} MiB{where}")
    try:
        _check_shape(text)
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.YAMLError as fault:
        raise YamlFault(f"is not YAML: {_yaml_reason(fault)}") from fault
    except RecursionError as fault:
        raise YamlFault("is not YAML: it is nested too deeply") from fault
    except ValueError as fault:  # too many aliases, or an invalid timestamp such as 2026-99-99
        raise YamlFault(f"is not YAML: {fault}") from fault
