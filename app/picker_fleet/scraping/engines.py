"""Which series of an engine's metrics page means what (PROTOCOL, model-server metrics).

A meaning may have several names, newest first; the first that the page has counts. SGLang splits its queue by
priority and gives the sum as well, with the label empty; `part_label` names that label.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from picker_fleet.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Engine:
    """Names of one engine's series, the path of its page, and one that costs it next to nothing to answer."""

    name: str
    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    kv_utilisation: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    part_label: str | None = None
    path: str = "/metrics"
    probe_path: str = "/health"


VLLM = Engine(
    "vllm",
    waiting=("vllm:num_requests_waiting",),
    running=("vllm:num_requests_running",),
    kv_utilisation=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    adapters=("vllm:lora_requests_info",),
)
SGLANG = Engine(
    "sglang",
    waiting=("sglang:num_queue_reqs",),
    running=("sglang:num_running_reqs",),
    kv_utilisation=("sglang:token_usage",),
    part_label="priority",
    probe_path="/ping",  # its /health generates a token
)
TENSORRT_LLM = Engine(
    "tensorrt-llm",
    waiting=("trtllm_num_requests_waiting",),
    running=("trtllm_num_requests_running",),
    kv_utilisation=("trtllm_kv_cache_utilization",),
    path="/prometheus/metrics",
)
ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (VLLM, SGLANG, TENSORRT_LLM)}

_MEANINGS = ("waiting", "running", "kv_utilisation", "adapters")
_NAME_MARKS = frozenset("_:")


def engine_of(name: str, names: Mapping[str, str] | None = None) -> Engine:
    """The engine called `name`, or one made of `names`: meaning -> series, and `path` and `probe_path` if
    they are others.

    With both, `names` replaces what it names of the known engine; what it does not name stays.

    Raises:
        ConfigError: an unknown engine without `names`, an unknown meaning, or a series that cannot be one.
    """
    known = ENGINES.get(name)
    given = dict(names or {})
    if known is None and not given:
        raise ConfigError(f"engine {name!r} is not one of {', '.join(ENGINES)}, and no series are named")
    base = known or Engine(name)
    path, probe_path = given.pop("path", base.path), given.pop("probe_path", base.probe_path)
    for key, value in (("path", path), ("probe_path", probe_path)):
        if not value.startswith("/") or not value.isascii() or not value.isprintable() or " " in value:
            raise ConfigError(f"{key} {value[:60]!r} of engine {name!r} is no path of a URL")
    for meaning, series in given.items():
        if meaning not in _MEANINGS:
            raise ConfigError(
                f"{meaning!r} of engine {name!r} is not one of {', '.join(_MEANINGS)}, path, probe_path"
            )
        if not _is_series(series):
            raise ConfigError(f"{series[:60]!r} of engine {name!r} is no name of a Prometheus series")
    chosen = {
        meaning: (given[meaning],) if meaning in given else getattr(base, meaning) for meaning in _MEANINGS
    }
    return Engine(name, part_label=base.part_label, path=path, probe_path=probe_path, **chosen)


def _is_series(name: str) -> bool:
    letters = name.isascii() and all(mark.isalnum() or mark in _NAME_MARKS for mark in name)
    return bool(name) and letters and not name[0].isdigit()
