"""The OpenAI and vLLM HTTP surface of one simulated model server, as a raw ASGI application.

`/v1/completions` and `/v1/chat/completions` (POST), `/v1/models`, `/health` and `/metrics` (GET). Every
answer names its server in `x-served-by: ip:port`. A stream's headers go out with its first token, so
that until then a gateway may still take the request elsewhere.
"""

import asyncio
import random
import time
import uuid

import orjson

from picker_fleet.errors import ClientGone
from picker_tools.simulator import asgi
from picker_tools.simulator.answer import Answer
from picker_tools.simulator.asgi import Receive, Reply, Scope, Send
from picker_tools.simulator.ask import Ask, parse
from picker_tools.simulator.engine import NeverFits
from picker_tools.simulator.generation import Generation, Simulator
from picker_tools.simulator.metrics import Page, Tally
from picker_tools.simulator.prefix_cache import prompt_blocks
from picker_tools.simulator.profile import Profile
from picker_tools.simulator.refusal import Refusal
from picker_tools.simulator.words import Words

BURST_TOKENS = 256  # events in one write of a stream that needs no time between tokens
_MAX_ID_CHARS = 128
_STOPPING = Refusal("the server is stopping", status=503, code="shutting_down", kind="server_error")
_METHODS = {
    "/v1/completions": "POST",
    "/v1/chat/completions": "POST",
    "/v1/models": "GET",
    "/health": "GET",
    "/metrics": "GET",
}


class ModelServer:
    """The application; one for each process."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._models = frozenset(profile.models)
        self._loras = frozenset(profile.loras)
        self._simulator = Simulator(
            profile.limits, ttft_s=profile.ttft_ms / 1000, itl_s=profile.itl_ms / 1000
        )
        self._tally = Tally()
        self._page = Page(model=profile.model, limits=profile.limits, has_loras=bool(profile.loras))
        self._failures = random.Random(profile.seed)
        self._started_s = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host, port = scope["server"]
        served_by = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        reply = Reply(send, served_by=served_by.encode())
        try:
            await self._route(scope, receive, reply)
        except Refusal as refusal:
            # What is left of a body that was not read must not be taken for the next request.
            unread = refusal.status in (408, 413)
            extra = ((b"connection", b"close"),) if unread else ()
            await reply.whole(refusal.status, asgi.JSON, refusal.body, *extra)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            if not reply.started:  # the process ends: say so in a way that a gateway may retry
                await reply.whole(503, asgi.JSON, _STOPPING.body)
            raise

    async def _route(self, scope: Scope, receive: Receive, reply: Reply) -> None:
        path = scope["path"]
        allowed = _METHODS.get(path)
        if allowed is None:
            raise Refusal(f"no such path: {path[:100]}", status=404, code="not_found")
        if scope["method"] != allowed:
            raise Refusal(f"{path} takes {allowed}", status=405, code="method_not_allowed")
        if path == "/metrics":
            page = self._page.render(self._simulator.load, self._tally, time.time())
            await reply.whole(200, asgi.TEXT, page)
        elif path == "/health":
            await reply.whole(200, asgi.TEXT, b"")
        elif path == "/v1/models":
            await reply.whole(200, asgi.JSON, self._model_list())
        else:
            await self._complete(scope, receive, reply, chat=path == "/v1/chat/completions")

    async def _complete(self, scope: Scope, receive: Receive, reply: Reply, *, chat: bool) -> None:
        asked = parse(await asgi.read_body(receive), chat=chat, models=self._models)
        if self._failures.random() < self._profile.failure_rate:
            raise Refusal("injected failure", status=500, code="injected_failure", kind="server_error")
        answer = Answer(
            asked,
            answer_id=f"{'chatcmpl' if chat else 'cmpl'}-{_request_id(scope)}",
            created_s=int(time.time()),
            always_usage=self._profile.always_usage,
        )
        with self._begin(asked) as generation:
            # except* and not suppress: the watcher's ClientGone comes in the group's envelope.
            try:
                async with asyncio.TaskGroup() as group:
                    watcher = group.create_task(asgi.watch(receive))
                    if asked.stream:
                        await self._stream(asked, answer, generation, reply)
                    else:
                        await self._whole(asked, answer, generation, reply)
                    watcher.cancel()
            except* ClientGone:
                pass

    def _begin(self, asked: Ask) -> Generation:
        adapter = asked.model if asked.model in self._loras else None
        blocks: tuple[bytes, ...] = ()
        if self._profile.prefix_caching:
            blocks = prompt_blocks(asked.prompt, self._profile.limits.block_size_tokens, adapter)
        try:
            return self._simulator.begin(
                prompt_tokens=asked.prompt_tokens,
                max_tokens=asked.max_tokens,
                adapter=adapter,
                prompt_blocks=blocks,
            )
        except NeverFits as fault:
            raise Refusal(str(fault), code="context_length_exceeded") from None

    async def _stream(self, asked: Ask, answer: Answer, generation: Generation, reply: Reply) -> None:
        words = Words(seed=self._profile.seed, prompt=asked.prompt)
        stride_tokens = 1 if self._profile.itl_ms else BURST_TOKENS
        came = await generation.next_tokens(stride_tokens)
        self._tally.prompt_tokens += asked.prompt_tokens
        await reply.start(200, asgi.EVENTS, (b"cache-control", b"no-cache"))
        part = answer.opening
        while True:
            self._tally.generation_tokens += came
            tokens = words.take(came)
            if generation.is_over:
                break
            await reply.body(part + answer.events(tokens), more=True)
            part = b""
            came = await generation.next_tokens(stride_tokens)
        await reply.body(part + answer.events(tokens[:-1]) + answer.ending(tokens[-1]), more=False)
        self._tally.succeeded[asked.finish_reason] += 1

    async def _whole(self, asked: Ask, answer: Answer, generation: Generation, reply: Reply) -> None:
        # Nobody sees the single tokens: a timer a block is enough to keep the memory in use right.
        stride_tokens = self._profile.limits.block_size_tokens if self._profile.itl_ms else asked.max_tokens
        while came := await generation.next_tokens(stride_tokens):
            self._tally.generation_tokens += came
        self._tally.prompt_tokens += asked.prompt_tokens
        words = Words(seed=self._profile.seed, prompt=asked.prompt)
        await reply.whole(200, asgi.JSON, answer.whole(words.take(asked.max_tokens)))
        self._tally.succeeded[asked.finish_reason] += 1

    def _model_list(self) -> bytes:
        cards: list[dict[str, object]] = []
        for name in self._profile.models:
            parent = self._profile.model if name in self._loras else None
            card = {"id": name, "object": "model", "created": self._started_s, "owned_by": "sim"}
            cards.append({**card, "root": name, "parent": parent})
        return orjson.dumps({"object": "list", "data": cards})


def _request_id(scope: Scope) -> str:
    """The client's `x-request-id`, as vLLM names its answers, or a fresh one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and value:
            return str(value.decode("latin-1"))[:_MAX_ID_CHARS]
    return uuid.uuid4().hex
