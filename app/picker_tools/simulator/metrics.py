"""The Prometheus page of a simulated server, with vLLM's names (docs/protocol.md).

Written by hand: it is scraped ten times a second, and every value is already at hand.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from picker_tools.simulator.engine import Limits, Load


@dataclass(slots=True)
class Tally:
    """What only grows. `succeeded` counts finished requests by finish reason."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    succeeded: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Page:
    """Renders the page of one server; `has_loras` says whether it shows adapters at all, as vLLM does."""

    model: str
    limits: Limits
    has_loras: bool

    def render(self, load: Load, tally: Tally, now_s: float) -> bytes:
        """The page in Prometheus' text format; `now_s` is Unix time, the value of the LoRA series."""
        model = f'model_name="{_escaped(self.model)}"'
        lines: list[str] = []

        def add(name: str, kind: str, meaning: str, samples: Mapping[str, float]) -> None:
            lines.append(f"# HELP vllm:{name} {meaning}")
            lines.append(f"# TYPE vllm:{name} {kind}")
            lines.extend(f"vllm:{name}{{{labels}}} {value}" for labels, value in samples.items())

        add("num_requests_running", "gauge", "Requests in the batch.", {model: load.running})
        add("num_requests_waiting", "gauge", "Requests waiting for the batch.", {model: load.waiting})
        add("kv_cache_usage_perc", "gauge", "KV blocks in use; 1 is all.", {model: load.kv_usage})
        if self.has_loras:
            adapters = (
                f'max_lora="{self.limits.max_loras}",'
                f'running_lora_adapters="{_escaped(",".join(load.running_adapters))}",'
                f'waiting_lora_adapters="{_escaped(",".join(load.waiting_adapters))}"'
            )
            add("lora_requests_info", "gauge", "Adapters; the value is a time.", {adapters: now_s})
        cache = f'block_size="{self.limits.block_size_tokens}",num_gpu_blocks="{self.limits.kv_blocks}"'
        add("cache_config_info", "gauge", "The KV cache.", {f"{cache},{model}": 1})
        add("prefix_cache_queries_total", "counter", "Prompt tokens looked up.", {model: load.queried_tokens})
        add("prefix_cache_hits_total", "counter", "Prompt tokens that were cached.", {model: load.hit_tokens})
        add("num_preemptions_total", "counter", "Requests put back to wait.", {model: load.preemptions})
        add("prompt_tokens_total", "counter", "Prompt tokens computed.", {model: tally.prompt_tokens})
        add("generation_tokens_total", "counter", "Tokens generated.", {model: tally.generation_tokens})
        ends = {
            f'finished_reason="{reason}",{model}': tally.succeeded[reason] for reason in ("length", "stop")
        }
        add("request_success_total", "counter", "Finished requests.", ends)
        return ("\n".join(lines) + "\n").encode()


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
