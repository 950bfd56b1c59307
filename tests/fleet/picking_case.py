"""What a case of the picking table is: model servers, a request, and the answer it must have."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

PROMPT = {"model": "llama", "prompt": "Say something.", "max_tokens": 4}
GIVEN = "<as the last answer told it>"  # a session's token
NOWHERE = "192.0.2.1:8000"  # an address that is no endpoint's


@dataclass(frozen=True, slots=True)
class Server:
    """A model server: the metrics page it serves, or what keeps it from serving one.

    `state`: `well`; `broken` (its page cannot be used), `stale` (it served one page and then hangs),
    `failing` (it served one page and then errors), `down` (nothing listens there). Its address is of `host`.
    """

    page: bytes = b""
    state: Literal["well", "broken", "stale", "failing", "down"] = "well"
    status: str = "200 OK"
    labels: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as Envoy passes it on. Servers are named by letters, A the first.

    `subset` is the gateway's hint: letters and addresses, or any other value; None for none. `chunks` is in
    how many pieces the body comes. `get` is a request without a body. `metadata` is what Envoy read from the
    body (`headers` mode). `answer` is what the model server says (`standard` mode).
    """

    body: Mapping[str, Any] | bytes = field(default_factory=lambda: PROMPT)
    headers: Mapping[str, str | bytes] = field(default_factory=dict)
    subset: object = None
    mode: Literal["lean", "standard", "headers"] = "lean"
    chunks: int = 1
    get: bool = False
    metadata: Mapping[str, Any] | None = None
    answer: tuple[bytes, ...] = (b'{"usage": {"prompt_tokens": 3, "completion_tokens": 4}}',)

    @property
    def raw(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass(frozen=True, slots=True)
class Want:
    """The answer: an endpoint of those in `to`, or a refusal of `status` with `reason`, which says `says`.

    `order`: all endpoints of the answer, best first. `model`: the body goes on under this name, or under each
    of these. `accounting_token`: its fields. `reply`: what the client is told by the model server, and
    `tokens` what is counted for it. `same`: where those before it went. `queued`: it waits for the held ones.
    """

    to: str = ""
    order: str = ""
    status: int = 200
    reason: str = ""
    says: str = ""
    model: str | tuple[str, ...] = ""
    accounting_token: Mapping[str, str] = field(default_factory=dict)
    reply: bytes = b""
    tokens: tuple[int, int] | None = None
    same: bool = False
    queued: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """`group` names the replica's configuration. `before` are requests that have ended, `held` ones still
    in flight; `drained` letters of servers that an operator has drained; `times` how often it is asked."""

    name: str
    servers: tuple[Server, ...]
    ask: Ask
    want: Want
    group: str = "scored"
    before: tuple[Ask, ...] = ()
    held: tuple[Ask, ...] = ()
    drained: str = ""
    times: int = 1


def ask(model: str = "llama", **fields: Any) -> Ask:
    """A short prompt for `model`."""
    return replace(Ask({**PROMPT, "model": model}), **fields)


def vllm(
    waiting: float = 0,
    kv: float = 0.1,
    *,
    loras: str | None = None,
    queued_loras: str = "",
    max_lora: int = 4,
    running: float = 0,
    older: bool = False,
    **fields: Any,
) -> Server:
    """A vLLM server; `loras` are the adapters it runs, None if it knows of none."""
    model = 'model_name="llama"'
    lines = [
        f"vllm:num_requests_waiting{{{model}}} {waiting}",
        f"vllm:num_requests_running{{{model}}} {running}",
        f"vllm:{'gpu_cache' if older else 'kv_cache'}_usage_perc{{{model}}} {kv}",
    ]
    if loras is not None:
        lines.append(
            f'vllm:lora_requests_info{{max_lora="{max_lora}",running_lora_adapters="{loras}",'
            f'waiting_lora_adapters="{queued_loras}"}} 1.7e9'
        )
    return Server(_page(lines), **fields)


def sglang(waiting: float, kv: float, **fields: Any) -> Server:
    lines = [f"sglang:num_queue_reqs {waiting}", "sglang:num_running_reqs 1", f"sglang:token_usage {kv}"]
    return Server(_page(lines), **fields)


def tensorrt(waiting: float, kv: float, **fields: Any) -> Server:
    lines = [
        f"trtllm_num_requests_waiting {waiting}",
        "trtllm_num_requests_running 1",
        f"trtllm_kv_cache_utilization {kv}",
    ]
    return Server(_page(lines), **fields)


def own(waiting: float, kv: float) -> Server:
    """A server of an engine that nobody has heard of."""
    return Server(_page([f"acme_backlog {waiting}", f"acme_cache_fill {kv}"]))


def _page(lines: list[str]) -> bytes:
    return ("\n".join(lines) + "\n").encode()
