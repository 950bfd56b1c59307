"""What a case of the picking table consists of: model servers, a request, and the expected answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

PROMPT = {"model": "llama", "prompt": "Say something.", "max_tokens": 4}
LAST_TOKEN = "<the session token of the last answer>"
NOWHERE = "192.0.2.1:8000"  # the address of no endpoint


@dataclass(frozen=True, slots=True)
class Server:
    """A model server and its metrics page.

    `state`: `well`; `broken` (its page cannot be parsed), `stale` (it served one page and then hangs),
    `failing` (it served one page and then errors), `down` (nothing listens there).
    """

    page: bytes = b""
    state: Literal["well", "broken", "stale", "failing", "down"] = "well"
    status: str = "200 OK"
    labels: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Request:
    """A request as Envoy passes it on. Servers are named by letters, A the first.

    `subset` is the gateway's hint: letters and addresses, or any other value; None for none. `chunks` is the
    number of messages that carry the body. A `get` has no body. `metadata` is what Envoy read from the body
    (`headers` mode). `answer` is the model server's response (`standard` mode).
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
class Expected:
    """The first endpoint is one of `any_of`, or all endpoints of the answer are `order`, best first; or the
    request is refused with `status`, `reason` and a text that contains `message`.

    `models`: the model's name in the forwarded body, each of them at least once. `token`: fields of the
    accounting token. `reply`: the body that the client gets, and `usage` the tokens that are counted for it.
    `queued`: it waits until a running one ends.
    """

    any_of: str = ""
    order: str = ""
    status: int = 200
    reason: str = ""
    message: str = ""
    models: tuple[str, ...] = ()
    token: Mapping[str, str] = field(default_factory=dict)
    reply: bytes = b""
    usage: tuple[int, int] | None = None
    queued: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """`group` names the replica's configuration. `before` are requests that have ended, `running` ones that
    are in flight; `drained` are servers that an operator drains; `times` is how often it is sent."""

    name: str
    servers: tuple[Server, ...]
    expected: Expected
    request: Request = field(default_factory=Request)
    group: str = "scored"
    before: tuple[Request, ...] = ()
    running: tuple[Request, ...] = ()
    drained: str = ""
    times: int = 1


def ask(model: str = "llama", **fields: Any) -> Request:
    """A short prompt for `model`."""
    return replace(Request({**PROMPT, "model": model}), **fields)


def ranked(order: str, **fields: Any) -> Expected:
    """All endpoints of the answer, best first."""
    return Expected(order=order, **fields)


def vllm(waiting: float = 0, kv: float = 0.1, *, older: bool = False, **fields: Any) -> Server:
    """A vLLM server without adapters."""
    return server(_vllm_series(waiting, kv, "gpu_cache" if older else "kv_cache"), **fields)


def lora(adapters: str, waiting: float = 0, kv: float = 0.1, *, queued: str = "", slots: int = 4) -> Server:
    """A vLLM server with room for `slots` adapters, which runs `adapters`."""
    info = f'max_lora="{slots}",running_lora_adapters="{adapters}",waiting_lora_adapters="{queued}"'
    return server({**_vllm_series(waiting, kv, "kv_cache"), f"vllm:lora_requests_info{{{info}}}": 1.7e9})


def _vllm_series(waiting: float, kv: float, cache: str) -> dict[str, float]:
    figures = {"num_requests_waiting": waiting, "num_requests_running": 0, f"{cache}_usage_perc": kv}
    return {f'vllm:{name}{{model_name="llama"}}': value for name, value in figures.items()}


def sglang(waiting: float, kv: float) -> Server:
    return server({"sglang:num_queue_reqs": waiting, "sglang:num_running_reqs": 1, "sglang:token_usage": kv})


def tensorrt(waiting: float, kv: float) -> Server:
    names = ("num_requests_waiting", "num_requests_running", "kv_cache_utilization")
    return server({f"trtllm_{name}": value for name, value in zip(names, (waiting, 1, kv), strict=True)})


def server(series: Mapping[str, float], **fields: Any) -> Server:
    """A server whose page has these series."""
    return Server("".join(f"{name} {value}\n" for name, value in series.items()).encode(), **fields)
