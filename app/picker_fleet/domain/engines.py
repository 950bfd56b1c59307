"""The engines of model servers: the series of their metrics pages, and the paths that report their state.

The configuration's section `scraping` selects an engine and overrides its series; endpoints/ reads the pages.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple


class Series(NamedTuple):
    """A series of a metrics page: only samples with all of `labels` count."""

    name: str
    labels: frozenset[tuple[str, str]] = frozenset()


_SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)[ ]*(?:\{(.*)\})?")
_SELECTED = re.compile(r'[ ]*([a-zA-Z_][a-zA-Z0-9_]*)[ ]*=[ ]*(?:"([^"\\]*)"|([^",{}= ]+))[ ]*(?:,|$)')


@lru_cache(maxsize=1000)
def series_of(text: str) -> Series:
    """The series that `text` selects, of the form `name` or `name{label="value",...}`; quotes are optional.

    Raises:
        ValueError: the selector `text` does not have this form.
    """
    match = _SERIES.fullmatch(text)
    if match is None:
        raise ValueError(f"{text[:60]!r} is no name of a Prometheus series")
    labels, at, selector = set(), 0, match[2] or ""
    while at < len(selector):
        label = _SELECTED.match(selector, at)
        if label is None:
            raise ValueError(f"{text[:60]!r} has no valid label=value pairs")
        labels.add((label[1], label[2] if label[2] is not None else label[3]))
        at = label.end()
    return Series(match[1], frozenset(labels))


# How to combine series that differ in one label. `same`: each series has the whole value; take the highest
# value. `total`: take the series whose label is empty, which has the sum of the other series. Series that
# differ in a label without a mode are added up.
Aggregation = Literal["same", "total"]
_RANKS: Mapping[str, Aggregation] = MappingProxyType(
    {"tp_rank": "same", "pp_rank": "same", "moe_ep_rank": "same"}
)


@dataclass(frozen=True, slots=True)
class Engine:
    """The series of one engine's metrics page, and the paths that report its state.

    A field may list several series; the first listed series on the page supplies the value. `preemptions`
    counts how often the engine has interrupted a request for want of KV cache. `awake` is 0 while the engine
    sleeps. The product of the series `kv_size` is the number of tokens in the KV cache (of an info series:
    the product of its labels `num_gpu_blocks` and `block_size`). `prefix_queries` counts the prompts' tokens
    looked up in the prefix cache, `prefix_hits` the tokens found. `started` is when the engine's process
    started. `aggregation` says for each label how to combine series that differ in that label. `probe_path`
    is cheap to answer; the status `unready`, 500, 502, 503 or 504 means that the engine takes no requests. If
    `health_path` is set, only the status of that path counts; the path is requested seldom, since SGLang
    generates a token for each request. `sleep_path` reports whether the engine sleeps if the page does not;
    `models_path` lists usable adapters ('' for a path: the engine has none)."""

    name: str
    waiting: tuple[str, ...] = ()
    running: tuple[str, ...] = ()
    kv_utilisation: tuple[str, ...] = ()
    preemptions: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()
    awake: tuple[str, ...] = ()
    kv_size: tuple[str, ...] = ()
    prefix_queries: tuple[str, ...] = ()
    prefix_hits: tuple[str, ...] = ()
    started: tuple[str, ...] = ("process_start_time_seconds",)
    aggregation: Mapping[str, Aggregation] = field(default_factory=lambda: _RANKS)
    path: str = "/metrics"
    probe_path: str = "/health"
    unready: int = 503  # HTTP status
    health_path: str = ""
    sleep_path: str = ""
    models_path: str = ""


# The order of engines matters: if a page has as many metrics of two engines, the first engine counts.
ENGINES: Mapping[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "vllm",
            waiting=("vllm:num_requests_waiting",),
            running=("vllm:num_requests_running",),
            kv_utilisation=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
            preemptions=("vllm:num_preemptions_total",),
            adapters=("vllm:lora_requests_info",),
            awake=('vllm:engine_sleep_state{sleep_state="awake"}',),
            kv_size=("vllm:cache_config_info",),
            prefix_queries=("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
            prefix_hits=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
            sleep_path="/is_sleeping",
            models_path="/v1/models",
        ),
        Engine(
            "sglang",
            waiting=("sglang:num_queue_reqs",),
            running=("sglang:num_running_reqs",),
            kv_utilisation=("sglang:token_usage",),
            # SGLang retracts requests. `sglang:num_retracted_reqs` is no counter: it restarts at each update
            # (SGLang, python/sglang/srt/observability/metrics_collector.py).
            preemptions=("sglang:num_retracted_requests_total",),
            kv_size=("sglang:max_total_num_tokens",),
            prefix_queries=("sglang:prompt_tokens_total",),
            prefix_hits=('sglang:cached_tokens_total{cache_source="device"}', "sglang:cached_tokens_total"),
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
            kv_size=(
                'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"}',
                'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"}',
            ),
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


def known_engine(name: str) -> Engine | None:
    """The engine called `name`, in upper or lower case, by any of its names; None: no such engine."""
    name = name.lower()
    return ENGINES.get(_ALSO_CALLED.get(name, name))
