"""Makes SDK calls to the URL in its first argument; long/sdks.py runs it in an environment with the SDKs.

The program prints the names of all calls, reads names from stdin, makes each named call, prints its result.
"""

import asyncio
import gzip
import json
import sys
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import httpx2
import litellm
import ollama
import openai
import zstandard

URL = sys.argv[1]
V1 = f"{URL}/v1"
MODEL = "llama"
FILE = ("ä.wav", b"RIFF\x24\x00\x00\x00WAVEfmt \x10\x00\x00\x00" + bytes(range(256)) * 6000)
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 4
PNGS: Any = [("a.png", PNG), ("b.png", PNG)]
SAY: Any = [{"role": "system", "content": "Be brief. \U0001f999"}, {"role": "user", "content": "Grüße, 世界"}]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "model": {"type": "string"}}}
TOOL = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "function": TOOL}]
FLAT_TOOLS: Any = [{"type": "function", **TOOL}]
CALLED = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
ASKED_TOOL = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
# litellm makes up these fields if a model server's answer lacks them.
MADE_UP = frozenset(("id", "created", "created_at"))


def packing(library: Any, pack: Callable[[bytes], Any], encoding: str) -> Any:
    """An HTTP transport that encodes each request body with `pack`, and names `encoding` in the header."""

    class Packing(library.HTTPTransport):  # type: ignore[misc]
        def handle_request(self, request: Any) -> Any:
            headers = [(key, value) for key, value in request.headers.items() if key != "content-length"]
            headers.append(("content-encoding", encoding))
            content = pack(request.read())
            return super().handle_request(
                library.Request(request.method, request.url, headers=headers, content=content)
            )

    return Packing()


def gzipped(body: bytes) -> bytes:
    return gzip.compress(body, mtime=0)


def http_client(pack: Callable[[bytes], Any], encoding: str) -> Any:
    return httpx2.Client(transport=packing(httpx2, pack, encoding))


once: Any = {"api_key": "k", "max_retries": 0}
oai = openai.OpenAI(base_url=V1, **once)
prefixed = oai.with_options(base_url=f"{URL}/team-a/v1")
azure = openai.AzureOpenAI(azure_endpoint=URL, api_version="2026-01-01", **once)
zipped = oai.with_options(http_client=http_client(gzipped, "gzip"))
zstd = oai.with_options(http_client=http_client(zstandard.ZstdCompressor().compress, "zstd"))
chunked = oai.with_options(http_client=http_client(lambda body: iter((body[:9], body[9:])), "identity"))
claude = anthropic.Anthropic(base_url=URL, **once)
zipped_claude = claude.with_options(http_client=http_client(gzipped, "gzip"))
local = ollama.Client(URL)
zipped_local = ollama.Client(URL, transport=packing(httpx, gzipped, "gzip"))

NAMED: Any = {"model": MODEL}
ASK: Any = {**NAMED, "messages": SAY}
SYSTEM = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}
COUNT: Any = {**NAMED, "messages": [{"role": "user", "content": "Grüße"}], "system": [SYSTEM]}
MESSAGE: Any = {**COUNT, "max_tokens": 64}
CLAUDE_TOOLS: Any = [{"name": "weather", "description": "of a city", "input_schema": SCHEMA}]
LITE: Any = {"num_retries": 0, "api_key": "k"}
VLLM: Any = {**LITE, "model": f"hosted_vllm/{MODEL}", "api_base": V1}
OPENAI: Any = {**LITE, "model": f"openai/{MODEL}", "api_base": V1}
CLAUDES: Any = {**LITE, "model": f"anthropic/{MODEL}", "api_base": URL, "messages": SAY}
LOCAL: Any = {**LITE, "model": f"ollama_chat/{MODEL}", "api_base": URL, "messages": SAY}
GEMINI: Any = {**CLAUDES, "model": f"gemini/{MODEL}", "api_base": f"{URL}/v1beta/models/{MODEL}"}
RANK: Any = {**LITE, "query": "q", "documents": ["one", "two, zwei", "três"], "top_n": 2, "api_base": URL}


def state() -> list[Any]:
    """Call the Responses API with ids of responses that the server stores."""
    first = oai.responses.create(**NAMED, input="Hi", store=True)
    second = oai.responses.create(**NAMED, input="And?", previous_response_id=first.id)
    events = list(oai.responses.create(**NAMED, input="So?", previous_response_id=second.id, stream=True))
    third = oai.responses.retrieve(events[-1].response.id)
    ends = oai.responses.cancel(third.id), oai.responses.delete(first.id)
    return [first, second, events, third, *ends]


def conversation() -> list[Any]:
    made = oai.conversations.create(metadata={"topic": "x"})
    answer = oai.responses.create(**NAMED, input="Hi", conversation=made.id)
    return [made, answer, oai.conversations.retrieve(made.id), oai.conversations.delete(made.id)]


def openai_helper() -> Any:
    with oai.chat.completions.stream(**ASK) as stream:
        return [each.type for each in stream], stream.get_final_completion()


def claude_helper(**more: Any) -> Any:
    with claude.messages.stream(**MESSAGE, **more) as stream:
        return list(stream), stream.get_final_message()


def left_stream() -> Any:
    with oai.chat.completions.create(**ASK, stream=True) as stream:
        return next(stream)


async def asynchronous() -> list[Any]:
    """Make calls with each SDK's asyncio client; OpenAI's client uses aiohttp."""
    client = openai.AsyncOpenAI(base_url=V1, http_client=openai.DefaultAioHttpClient(), **once)
    events = [each async for each in await client.chat.completions.create(**ASK, stream=True)]
    text = await client.audio.transcriptions.create(**NAMED, file=FILE)
    message = await anthropic.AsyncAnthropic(base_url=URL, **once).messages.create(**MESSAGE)
    chat = await ollama.AsyncClient(URL).chat(**ASK)
    return [events, text, message, chat, without(plain(await litellm.acompletion(**VLLM, messages=SAY)))]


chat, heard, lite = oai.chat.completions.create, oai.audio.transcriptions.create, litellm.completion
zipped_chat, embed, rank = zipped.chat.completions.create, oai.embeddings.create, litellm.rerank
# fmt: off
CALLS: dict[str, Callable[[], Any]] = {
    "openai: chat": lambda: chat(**ASK),
    "openai: image": lambda: chat(**NAMED, messages=[{"role": "user", "content": [PICTURE]}]),
    "openai: stream": lambda: chat(**ASK, stream=True, stream_options={"include_usage": True}),
    "openai: helper of streams": openai_helper,
    "openai: a stream that is left": left_stream,
    "openai: tools": lambda: chat(**ASK, tools=TOOLS, tool_choice="required"),
    "openai: tools, streamed": lambda: chat(**ASK, tools=TOOLS, stream=True),
    "openai: result of a tool": lambda: chat(**NAMED, messages=[*SAY, ASKED_TOOL, RESULT]),
    "openai: compressed answer": lambda: chat(model="packed", messages=SAY),
    "openai: compressed stream": lambda: chat(model="packed", messages=SAY, stream=True),
    "openai: gzip": lambda: zipped_chat(**ASK),
    "openai: gzip, streamed": lambda: zipped_chat(**ASK, stream=True),
    "openai: gzip, responses": lambda: zipped.responses.create(**NAMED, input="Hi"),
    "openai: gzip, embeddings": lambda: zipped.embeddings.create(**NAMED, input=["a", "b"]),
    "openai: zstd": lambda: zstd.chat.completions.create(**ASK),
    "openai: a body without a length": lambda: chunked.chat.completions.create(**ASK),
    "openai: prompts": lambda: oai.completions.create(**NAMED, prompt=["a", "b", "c"], n=2, max_tokens=4),
    "openai: prompts of tokens": lambda: oai.completions.create(**NAMED, prompt=[[1, 2], [3]]),
    "openai: prompts, streamed": lambda: oai.completions.create(**NAMED, prompt=["a", "b"], stream=True),
    "openai: embeddings": lambda: oai.embeddings.create(**NAMED, input=["a", "b"]),
    "openai: embeddings of tokens": lambda: embed(**NAMED, input=[[1], [3]], encoding_format="float"),
    "openai: responses": lambda: oai.responses.create(**NAMED, input=SAY, tools=FLAT_TOOLS),
    "openai: responses, streamed": lambda: oai.responses.create(**NAMED, input="Hi", stream=True),
    "openai: responses with state": state,
    "openai: conversation": conversation,
    "openai: transcription": lambda: heard(**NAMED, file=FILE, language="de"),
    "openai: transcription, streamed": lambda: heard(**NAMED, file=FILE, stream=True),
    "openai: translation": lambda: oai.audio.translations.create(**NAMED, file=FILE),
    "openai: speech": lambda: oai.audio.speech.create(**NAMED, voice="alloy", input="Hi"),
    "openai: made image": lambda: oai.images.generate(**NAMED, prompt="a llama"),
    "openai: edited image": lambda: oai.images.edit(**NAMED, image=PNGS, prompt="grey"),
    "openai: moderation": lambda: oai.moderations.create(**NAMED, input="x"),
    "openai: models": lambda: oai.models.list(),
    "openai: a model": lambda: oai.models.retrieve("org/llama"),
    "openai: behind a prefix": lambda: prefixed.chat.completions.create(**ASK),
    "openai: a fault of the client": lambda: chat(model="faulty", messages=SAY),
    "openai: no such model": lambda: chat(model="absent", messages=SAY),
    "azure: chat": lambda: azure.chat.completions.create(**ASK),
    "azure: stream": lambda: azure.chat.completions.create(**ASK, stream=True),
    "azure: embeddings": lambda: azure.embeddings.create(**NAMED, input="a"),
    "azure: transcription": lambda: azure.audio.transcriptions.create(**NAMED, file=FILE),
    "anthropic: message": lambda: claude.messages.create(**MESSAGE),
    "anthropic: events": lambda: claude.messages.create(**MESSAGE, stream=True),
    "anthropic: helper of streams": claude_helper,
    "anthropic: tools": lambda: claude.messages.create(**MESSAGE, tools=CLAUDE_TOOLS),
    "anthropic: tools, streamed": lambda: claude_helper(tools=CLAUDE_TOOLS),
    "anthropic: counted tokens": lambda: claude.messages.count_tokens(**COUNT),
    "anthropic: beta": lambda: claude.beta.messages.create(**MESSAGE, betas=["x-1"]),
    "anthropic: models": lambda: claude.models.list(),
    "anthropic: gzip": lambda: zipped_claude.messages.create(**MESSAGE),
    "anthropic: compressed answer": lambda: claude.messages.create(**MESSAGE | {"model": "packed"}),
    "anthropic: a fault of the client": lambda: claude.messages.create(**MESSAGE | {"model": "faulty"}),
    "ollama: chat": lambda: local.chat(**ASK),
    "ollama: stream": lambda: local.chat(**ASK, stream=True),
    "ollama: tools": lambda: local.chat(**ASK, tools=TOOLS),
    "ollama: gzip": lambda: zipped_local.chat(**ASK),
    "ollama: generate": lambda: local.generate(**NAMED, prompt="Hi", images=[PNG]),
    "ollama: generate, streamed": lambda: local.generate(**NAMED, prompt="Hi", stream=True),
    "ollama: embed": lambda: local.embed(**NAMED, input=["a", "b"]),
    "ollama: embeddings": lambda: local.embeddings(**NAMED, prompt="a"),
    "ollama: list": lambda: local.list(),
    "ollama: show": lambda: local.show(**NAMED),
    "ollama: running": lambda: local.ps(),
    "litellm: chat": lambda: lite(**VLLM, messages=SAY),
    "litellm: stream": lambda: lite(**VLLM, messages=SAY, stream=True),
    "litellm: tools": lambda: lite(**VLLM, messages=SAY, tools=TOOLS),
    "litellm: prompts": lambda: litellm.text_completion(
        **VLLM | {"model": f"text-completion-openai/{MODEL}"}, prompt=["a", "b"]),
    "litellm: embeddings": lambda: litellm.embedding(**VLLM, input=["a", "b"]),
    "litellm: transcription": lambda: litellm.transcription(**VLLM, file=FILE),
    "litellm: responses": lambda: litellm.responses("Hi", **OPENAI),
    "litellm: image": lambda: litellm.image_generation(**OPENAI, prompt="x"),
    "litellm: anthropic": lambda: lite(**CLAUDES),
    "litellm: anthropic, streamed": lambda: lite(**CLAUDES, stream=True),
    "litellm: ollama": lambda: lite(**LOCAL),
    "litellm: ollama, streamed": lambda: lite(**LOCAL, stream=True),
    "litellm: gemini": lambda: lite(**GEMINI),
    "litellm: gemini, streamed": lambda: lite(**GEMINI, stream=True),
    "litellm: rerank, vLLM": lambda: rank(f"hosted_vllm/{MODEL}", **RANK),
    "litellm: rerank, Cohere": lambda: rank(f"cohere/{MODEL}", **RANK),
    "litellm: rerank, Jina": lambda: rank(f"jina_ai/{MODEL}", **RANK | {"api_base": f"{V1}/rerank"}),
    "litellm: rerank, Infinity": lambda: rank(f"infinity/{MODEL}", **RANK),
    "all: asyncio": lambda: asyncio.run(asynchronous()),
}
# fmt: on


def plain(value: Any) -> Any:
    """`value`, a call's result, converted to JSON types."""
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json", warnings=False))
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(content := getattr(value, "content", None), bytes):
        return content.hex()
    if hasattr(value, "__iter__") and not isinstance(value, str):
        return [plain(each) for each in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


def without(value: Any) -> Any:
    if isinstance(value, list):
        return [without(each) for each in value]
    if isinstance(value, dict):
        return {key: without(each) for key, each in value.items() if key not in MADE_UP}
    return value


def main() -> None:
    output, sys.stdout = sys.stdout, sys.stderr  # litellm prints hints
    print(json.dumps(list(CALLS)), file=output, flush=True)
    for line in sys.stdin:
        name = line.rstrip("\n")
        try:
            answer = plain(CALLS[name]())
        except Exception as fault:
            answer = {"raised": type(fault).__name__, "status": getattr(fault, "status_code", None)}
            answer["said"] = getattr(fault, "body", None) or str(fault)
        print(json.dumps(without(answer) if name.startswith("litellm") else answer), file=output, flush=True)


if __name__ == "__main__":
    main()
