"""The HTTP API of one simulated model server, like OpenAI's and vLLM's, as a raw ASGI application.

Serves `/v1/completions`, `/v1/chat/completions` (POST), `/v1/models`, `/health` and `/metrics` (GET). Every
answer names its server in `x-served-by: ip:port`. A stream's headers are sent with the first token, so that
until the first token a gateway can retry the request elsewhere. `POST /sim` changes the server while it runs.
A server can compute prompts for other servers, and can let another server compute a prompt (`transfer.py`).
"""

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

import msgspec
import orjson

from picker_fleet.domain.errors import ClientGone, ConfigError
from picker_tools.simulator.batch import BatchGeneration, BatchSimulator
from picker_tools.simulator.engine import ContextTooLong, EngineLoad, Limits, Sequence, prompt_blocks
from picker_tools.simulator.generation import Generation, Simulator
from picker_tools.simulator.openai_api import Answer, ApiError, CompletionRequest, Words, parse
from picker_tools.simulator.transfer import (
    KV_BANDWIDTH_GB_S,
    PREFILLER_HEADER,
    KeptBlocks,
    Link,
    Pull,
    prefilled,
)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Result = TypeVar("Result")

MAX_BODY_BYTES = 32 * 1024 * 1024

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
TEXT = b"text/plain; version=0.0.4; charset=utf-8"


async def read_body(receive: Receive) -> bytes:
    """Read the whole body of the request.

    Raises:
        ApiError: status 413 if the body exceeds `MAX_BODY_BYTES`. ClientGone: the client disconnected first.
    """
    body = bytearray()
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone("disconnected before its body was complete")
        body += message["body"]
        if len(body) > MAX_BODY_BYTES:
            what = f"the body is larger than {MAX_BODY_BYTES} bytes"
            raise ApiError(what, status=413, code="payload_too_large")
        more = message["more_body"]
    return bytes(body)


async def watch(receive: Receive) -> None:
    """Wait for the client to disconnect. Call this only once the whole body is read.

    Raises:
        ClientGone: the client disconnected.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
    raise ClientGone("disconnected before its answer was complete")


class Reply:
    """Sends the HTTP response to one request."""

    def __init__(self, send: Send, *, served_by: bytes) -> None:
        self._send = send
        self._served_by = served_by
        self.started = False

    async def start(self, status: int, media: bytes, *extra: tuple[bytes, bytes]) -> None:
        headers = [(b"content-type", media), (b"x-served-by", self._served_by), *extra]
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, part: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": part, "more_body": more})

    async def whole(self, status: int, media: bytes, body: bytes, *extra: tuple[bytes, bytes]) -> None:
        await self.start(status, media, (b"content-length", str(len(body)).encode()), *extra)
        await self.body(body, more=False)


@dataclass(frozen=True, slots=True)
class Profile:
    """The simulated server: its models and adapters, speed, capacity and failures.

    `ttft_ms` is the time from admission to the first token, reduced by the cached share of the prompt;
    `itl_ms` is the time between tokens. With a `slowdown` both times are unused: the server
    computes its batch in steps, each `slowdown` times as long as measured (`batch.py`).
    `kv_bandwidth_gb_s` is the transfer speed of a KV cache that another server computed. `failure_rate` is
    the fraction of valid requests that get status 500 instead of an answer. `seed` determines which requests
    fail, and the generated words.
    """

    model: str = "llama"
    loras: tuple[str, ...] = ()
    ttft_ms: float = 20.0
    itl_ms: float = 5.0
    slowdown: float | None = None
    limits: Limits = field(default_factory=Limits)
    kv_bandwidth_gb_s: float = KV_BANDWIDTH_GB_S
    failure_rate: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        names = (self.model, *self.loras)
        if not all(names) or len(set(names)) < len(names):
            raise ConfigError(f"model and loras must be distinct names; given: {', '.join(names)}")

    @property
    def models(self) -> tuple[str, ...]:
        """All names that a request may use as model, the base model first."""
        return (self.model, *self.loras)


class Change(msgspec.Struct, forbid_unknown_fields=True):
    """A change of a running server; the value None changes nothing. `pulled` names kept KV blocks to free."""

    slowdown: Annotated[float, msgspec.Meta(gt=0)] | None = None
    max_num_seqs: Annotated[int, msgspec.Meta(gt=0)] | None = None
    pulled: str | None = None


@dataclass(slots=True)
class Counters:
    """The counters that the metrics page shows. `succeeded` counts finished requests by finish reason."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    succeeded: Counter[str] = field(default_factory=Counter)


def _metrics_page(profile: Profile, load: EngineLoad, counters: Counters, now_s: float) -> bytes:
    """The metrics page in Prometheus' text format, made without a library for speed, since pickers scrape it
    often. As in vLLM, adapters have a series only if the server has adapters; the value of that series is
    `now_s`, a Unix time."""
    model = f'model_name="{_escaped(profile.model)}"'
    lines: list[str] = []

    def add(name: str, kind: str, meaning: str, samples: Mapping[str, float]) -> None:
        lines.append(f"# HELP vllm:{name} {meaning}")
        lines.append(f"# TYPE vllm:{name} {kind}")
        lines.extend(f"vllm:{name}{{{labels}}} {value}" for labels, value in samples.items())

    add("num_requests_running", "gauge", "Requests in the batch.", {model: load.running})
    add("num_requests_waiting", "gauge", "Requests waiting for the batch.", {model: load.waiting})
    add("kv_cache_usage_perc", "gauge", "KV blocks in use; 1 is all.", {model: load.kv_usage})
    if profile.loras:
        adapters = (
            f'max_lora="{profile.limits.max_loras}",'
            f'running_lora_adapters="{_escaped(",".join(load.running_adapters))}",'
            f'waiting_lora_adapters="{_escaped(",".join(load.waiting_adapters))}"'
        )
        add("lora_requests_info", "gauge", "Adapters; the value is a time.", {adapters: now_s})
    cache = f'block_size="{profile.limits.block_size_tokens}",num_gpu_blocks="{profile.limits.kv_blocks}"'
    add("cache_config_info", "gauge", "The KV cache.", {f"{cache},{model}": 1})
    add("prefix_cache_queries_total", "counter", "Prompt tokens looked up.", {model: load.queried_tokens})
    add("prefix_cache_hits_total", "counter", "Prompt tokens that were cached.", {model: load.hit_tokens})
    add("num_preemptions_total", "counter", "Requests put back to wait.", {model: load.preemptions})
    add("prompt_tokens_total", "counter", "Prompt tokens computed.", {model: counters.prompt_tokens})
    add("generation_tokens_total", "counter", "Tokens generated.", {model: counters.generation_tokens})
    ends = {
        f'finished_reason="{reason}",{model}': counters.succeeded[reason] for reason in ("length", "stop")
    }
    add("request_success_total", "counter", "Finished requests.", ends)
    return ("\n".join(lines) + "\n").encode()


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


AnyGeneration = Generation | BatchGeneration
BURST_TOKENS = 256  # maximum events in one write of a stream if `itl_ms` is 0
_MAX_ID_CHARS = 128
_STOPPING = ApiError("the server is stopping", status=503, code="shutting_down", kind="server_error")
_METHODS = {
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/models": "GET",
    "/sim": "POST",
    "/health": "GET",
    "/metrics": "GET",
}


class ModelServer:
    """The ASGI application of one simulated model server."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._models = frozenset(profile.models)
        self._loras = frozenset(profile.loras)
        self._simulator = (
            Simulator(profile.limits, ttft_s=profile.ttft_ms / 1000, itl_s=profile.itl_ms / 1000)
            if profile.slowdown is None
            else BatchSimulator(profile.limits, slowdown=profile.slowdown)
        )
        self._kept = KeptBlocks(self._simulator.free)
        self._link = Link(profile.kv_bandwidth_gb_s)
        self._freeing: set[asyncio.Task[None]] = set()
        self._is_paced = bool(profile.itl_ms) or profile.slowdown is not None
        self._counters = Counters()
        self._failures = random.Random(profile.seed)
        self._started_s = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host, port = scope["server"]
        served_by = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        reply = Reply(send, served_by=served_by.encode())
        try:
            await self._route(scope, receive, reply)
        except ApiError as error:
            # Close the connection, so that the unread rest of the body is not parsed as the next request.
            extra = ((b"connection", b"close"),) if error.status == 413 else ()
            await reply.whole(error.status, JSON, error.body, *extra)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if not reply.started:  # the process is stopping: a gateway may retry a request that gets 503
                await reply.whole(503, JSON, _STOPPING.body)
            raise

    async def _route(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        path = scope["path"]
        allowed = _METHODS.get(path)
        if allowed is None:
            raise ApiError(f"no such path: {path[:100]}", status=404, code="not_found")
        if scope["method"] != allowed:
            raise ApiError(f"{path} takes {allowed}", status=405, code="method_not_allowed")
        if path == "/metrics":
            page = _metrics_page(self._profile, self._simulator.engine.load(), self._counters, time.time())
            await reply.whole(200, TEXT, page)
        elif path == "/health":
            await reply.whole(200, TEXT, b"")
        elif path == "/v1/models":
            await reply.whole(200, JSON, self._model_list())
        elif path == "/sim":
            self._change(await read_body(receive))
            await reply.whole(200, TEXT, b"")
        else:
            await self._complete(scope, receive, reply, chat=path == "/v1/chat/completions")

    def _change(self, body: bytes) -> None:
        """Change slowdown or batch size as the JSON `body` says, such as `{"slowdown": 3, "max_num_seqs":
        8}`. Running sequences continue. The key `pulled` names KV blocks, kept for a decode server, to free.

        Raises:
            ApiError: status 400 for a bad value, or if speed or size of a server that started without a
            slowdown would change; 404 if no KV blocks are kept as ID.
        """
        try:
            change = msgspec.json.decode(body, type=Change)
        except msgspec.MsgspecError as fault:
            raise ApiError(str(fault)) from None
        if change.pulled is not None:
            if not self._kept.free(change.pulled):
                raise ApiError(f"no KV blocks are kept as {change.pulled[:100]!r}", status=404)
            return
        if not isinstance(self._simulator, BatchSimulator):
            raise ApiError("the server runs without --slowdown")
        if change.slowdown is not None:
            self._simulator.slowdown = change.slowdown
        if change.max_num_seqs is not None:
            self._simulator.engine.limits = replace(
                self._simulator.engine.limits, max_num_seqs=change.max_num_seqs
            )

    async def _complete(self, scope: Scope, receive: Receive, reply: Reply, *, chat: bool) -> None:
        body = await read_body(receive)
        request = parse(body, chat=chat, models=self._models)
        if self._failures.random() < self._profile.failure_rate:
            raise ApiError("injected failure", status=500, code="injected_failure", kind="server_error")
        request_id = _header(scope, b"x-request-id")[:_MAX_ID_CHARS]
        answer = Answer(
            request,
            answer_id=f"{'chatcmpl' if chat else 'cmpl'}-{request_id or uuid.uuid4().hex}",
            created_s=int(time.time()),
        )
        if prefiller := _header(scope, PREFILLER_HEADER):
            prefill = prefilled(prefiller, scope["path"], body, request_id)
            if (done := await _while_connected(receive, prefill)) is not None:
                request = replace(request, kv_transfer=done[0])
                answer.prefill_cached_tokens = done[1]
        pull = None
        if request.kv_transfer is not None and request.kv_transfer.do_remote_prefill:
            pull = Pull(request.kv_transfer, self._link)
        try:
            with self._begin(request, pull) as generation:
                if request.stream:
                    work = self._stream(request, answer, generation, reply)
                else:
                    work = self._whole(request, answer, generation, reply, scope["server"])
                await _while_connected(receive, work)
        finally:
            if pull is not None:
                self._freeing.add(task := asyncio.create_task(pull.abandon()))
                task.add_done_callback(self._freeing.discard)

    def _begin(self, request: CompletionRequest, pull: Pull | None) -> AnyGeneration:
        adapter = request.model if request.model in self._loras else None
        blocks = prompt_blocks(request.prompt, self._profile.limits.block_size_tokens, adapter)
        kv = request.kv_transfer
        sequence = Sequence(
            request.prompt_tokens,
            request.max_tokens,
            adapter,
            blocks,
            keeps_blocks=kv is not None and kv.do_remote_decode and not request.stream,
            pulls=pull is not None,
        )
        try:
            return self._simulator.begin(sequence, pull)
        except ContextTooLong as fault:
            raise ApiError(str(fault), code="context_length_exceeded") from None

    async def _stream(
        self, request: CompletionRequest, answer: Answer, generation: AnyGeneration, reply: Reply
    ) -> None:
        words = Words(seed=self._profile.seed, prompt=request.prompt)
        stride = 1 if self._is_paced else BURST_TOKENS
        count = await generation.next_tokens(stride)
        self._counters.prompt_tokens += request.prompt_tokens
        await reply.start(200, EVENTS, (b"cache-control", b"no-cache"))
        part = answer.opening
        while True:
            self._counters.generation_tokens += count
            tokens = words.take(count)
            if generation.is_over:
                break
            await reply.body(part + answer.events(tokens), more=True)
            part = b""
            count = await generation.next_tokens(stride)
        ending = answer.ending(tokens[-1], generation.sequence.cached_tokens)
        await reply.body(part + answer.events(tokens[:-1]) + ending, more=False)
        self._counters.succeeded[request.finish_reason] += 1

    async def _whole(
        self,
        request: CompletionRequest,
        answer: Answer,
        generation: AnyGeneration,
        reply: Reply,
        server: tuple[str, int],
    ) -> None:
        # The client does not see single tokens, so one timer for each KV block keeps the KV usage exact.
        stride = self._profile.limits.block_size_tokens if self._is_paced else request.max_tokens
        while count := await generation.next_tokens(stride):
            self._counters.generation_tokens += count
        self._counters.prompt_tokens += request.prompt_tokens
        words = Words(seed=self._profile.seed, prompt=request.prompt)
        kept = self._kept.keep(generation.sequence, *server) if generation.sequence.keeps_blocks else None
        body = answer.whole(words.take(request.max_tokens), generation.sequence.cached_tokens, kept)
        await reply.whole(200, JSON, body)
        self._counters.succeeded[request.finish_reason] += 1

    def _model_list(self) -> bytes:
        cards: list[dict[str, object]] = []
        for name in self._profile.models:
            parent = self._profile.model if name in self._loras else None
            card = {"id": name, "object": "model", "created": self._started_s, "owned_by": "sim"}
            cards.append({**card, "root": name, "parent": parent})
        return orjson.dumps({"object": "list", "data": cards})


def _header(scope: Scope, wanted: bytes) -> str:
    """The value of the first header named `wanted`; '' if there is no such header."""
    return next((str(value.decode("latin-1")) for name, value in scope["headers"] if name == wanted), "")


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Do `work` unless the client disconnects first. Call this only once the whole body is read.

    Raises:
        ClientGone: the client disconnected.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(watch(receive))
            result = await work
            watcher.cancel()
    except* ClientGone as gone:
        raise ClientGone(str(gone.exceptions[0])) from None
    return result
