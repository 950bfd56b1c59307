"""A model server with many APIs, for long/sdks.py, which records requests and answers equal requests equally.

Answers of model `packed` are compressed if the client accepts gzip; `faulty` gets 400, and `absent` gets 404.
"""

import asyncio
import contextlib
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, NamedTuple

import brotli
import zstandard
from model_servers import Ends, Received, http_answer, listening

_USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
_IN_OUT = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
_WORDS = ("Grüße", " \U0001f999 世界", ' {"model": "llama"}')
_ARGUMENTS = '{"city": "Ulm", "model": "llama"}'
_DECODERS = {
    "gzip": gzip.decompress, "deflate": zlib.decompress, "br": brotli.decompress,
    "zstd": lambda text: zstandard.ZstdDecompressor().decompressobj().decompress(text),
}  # fmt: skip
_PIECE_BYTES = 37  # size of a streamed answer's chunks, so that chunks end inside events and characters


class Request(NamedTuple):
    """One request as the server received it."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    address: str  # the server that received the request


def _chat(tools: bool) -> Any:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": _ARGUMENTS}}
    message = {"role": "assistant", "content": "".join(_WORDS)} | ({"tool_calls": [call]} if tools else {})
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if tools else "stop"}
    return {"id": "c-1", "object": "chat.completion", "created": 1, "model": "llama", "choices": [choice]} | {
        "usage": _USAGE
    }


def _chat_events(tools: bool) -> Iterator[Any]:
    function = {"name": "weather", "arguments": ""}
    deltas: list[Any] = [{"role": "assistant", "content": ""}, *({"content": word} for word in _WORDS)]
    if tools:
        deltas.append(
            {"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]}
        )
        deltas += [
            {"tool_calls": [{"index": 0, "function": {"arguments": part}}]}
            for part in re.findall(".{1,9}", _ARGUMENTS)
        ]
    for number, delta in enumerate([*deltas, {}]):
        end = ("tool_calls" if tools else "stop") if number == len(deltas) else None
        yield _chunk([{"index": 0, "delta": delta, "finish_reason": end}])
    yield _chunk([]) | {"usage": _USAGE}


def _chunk(choices: list[Any]) -> dict[str, Any]:
    chunk = {"id": "c-1", "object": "chat.completion.chunk", "created": 1, "model": "llama"}
    return {**chunk, "choices": choices}


def _response(name: str, text: str = "", status: str = "completed") -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    output = {"id": "m", "type": "message", "role": "assistant", "status": status, "content": [part]}
    return {"id": name, "object": "response", "created_at": 1, "model": "llama", "status": status} | {
        "output": [output], "tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "usage": _IN_OUT,
    }  # fmt: skip


def _response_events(name: str) -> Iterator[Any]:
    at = {"item_id": "m", "output_index": 0, "content_index": 0}
    yield {"type": "response.created", "response": _response(name, status="in_progress")}
    for word in _WORDS:
        yield {"type": "response.output_text.delta", "delta": word, "logprobs": [], **at}
    yield {"type": "response.completed", "response": _response(name, "".join(_WORDS))}


def _claude(tools: bool) -> Any:
    content: list[Any] = [{"type": "text", "text": "".join(_WORDS)}]
    if tools:
        content.append({"type": "tool_use", "id": "t", "name": "weather", "input": json.loads(_ARGUMENTS)})
    usage = {"input_tokens": 7, "output_tokens": 3, "cache_read_input_tokens": 5}
    return {"id": "msg", "type": "message", "role": "assistant", "model": "llama", "content": content} | {
        "stop_reason": "tool_use" if tools else "end_turn", "stop_sequence": None, "usage": usage,
    }  # fmt: skip


def _claude_events(tools: bool) -> Iterator[Any]:
    whole = _claude(tools)
    yield {"type": "message_start", "message": whole | {"content": [], "stop_reason": None}}
    yield {"type": "ping"}
    for at, block in enumerate(whole["content"]):
        is_text = block["type"] == "text"
        empty = {"text": ""} if is_text else {"input": {}}
        yield {"type": "content_block_start", "index": at, "content_block": block | empty}
        for part in _WORDS if is_text else re.findall(".{1,9}", _ARGUMENTS):
            kind, key = ("text_delta", "text") if is_text else ("input_json_delta", "partial_json")
            yield {"type": "content_block_delta", "index": at, "delta": {"type": kind, key: part}}
        yield {"type": "content_block_stop", "index": at}
    delta = {"stop_reason": whole["stop_reason"]}
    yield {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 3}}
    yield {"type": "message_stop"}


def _ollama(key: str, value: Any, *, done: bool = True) -> dict[str, Any]:
    counts = {"prompt_eval_count": 7, "eval_count": 3, "done_reason": "stop"} if done else {}
    return {"model": "llama", "created_at": "2026-01-01T00:00:00Z", key: value, "done": done} | counts


def _ollama_message(text: str, tools: bool) -> dict[str, Any]:
    call = {"function": {"name": "weather", "arguments": json.loads(_ARGUMENTS)}}
    return {"role": "assistant", "content": text} | ({"tool_calls": [call]} if tools else {})


def _embedding(numbers: Any) -> Any:
    rows = [{"object": "embedding", "index": at, "embedding": numbers} for at in range(2)]
    usage = {"prompt_tokens": 4, "total_tokens": 4}
    return {"object": "list", "model": "llama", "data": rows, "usage": usage}


_TEXT = {"text": "".join(_WORDS)}
_PART = {"content": {"role": "model", "parts": [_TEXT]}, "finishReason": "STOP", "index": 0}
_COUNTS = {"promptTokenCount": 7, "candidatesTokenCount": 3, "totalTokenCount": 10}
_MODEL = {"id": "org/llama", "object": "model", "created": 1, "owned_by": "x"}
_RANKS = [{"index": 1, "relevance_score": 0.9}, {"index": 0, "relevance_score": 0.1}]
_TAG = {"model": "llama", "name": "llama", "size": 1, "digest": "x", "details": {"family": "llama"}}
_IMAGES = {"created": 1, "data": [{"b64_json": "AAAA"}]}
# Path suffix → answer, for answers that do not depend on the request's body.
_FIXED: dict[str, Any] = {
    "/rerank": {"id": "r", "results": _RANKS, "meta": {}, "usage": {"total_tokens": 5}},
    "/audio/transcriptions": _TEXT, "/audio/translations": _TEXT, "/audio/speech": bytes(range(256)) * 999,
    "/images/generations": _IMAGES, "/images/edits": _IMAGES,
    "/moderations": {"id": "m", "model": "llama", "results": [{"flagged": False, "categories": {}}]},
    "/messages/count_tokens": {"input_tokens": 7}, "/models": {"object": "list", "data": [_MODEL]},
    "/models/org%2Fllama": _MODEL, "/models/org/llama": _MODEL,
    ":generateContent": {"candidates": [_PART], "usageMetadata": _COUNTS, "modelVersion": "llama"},
    "/api/embed": {"model": "llama", "embeddings": [[0.5, 1], [2, 3]], "prompt_eval_count": 4},
    "/api/embeddings": {"embedding": [0.5, 1]}, "/api/tags": {"models": [_TAG]},
    "/api/ps": {"models": [_TAG]},
    "/api/show": {"license": "x", "details": {"family": "llama"}, "model_info": {"x.y": 1}},
}  # fmt: skip


class Server:
    """Listens at `address` during `listening`, and adds each request to `requests`, which servers may share.

    `kept`: ids of the responses and conversations that this server stores. `service_s`: time until an answer.
    """

    def __init__(self, requests: list[Request], service_s: float = 0.0) -> None:
        self.requests = requests
        self._service_s = service_s
        self.address = ""
        self.kept: set[str] = set()

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator["Server"]:
        async with listening(self._serve) as self.address:
            yield self

    async def _serve(self, received: Received, ends: Ends) -> bool:
        _, writer = ends
        if received.headers.get("user-agent") == "picker":  # a scrape or a probe
            writer.write(http_answer(b""))
            return True
        request = Request(*received, self.address)
        self.requests.append(request)
        await asyncio.sleep(self._service_s)
        await self._answer(request, writer)
        return True

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        text = request.body
        if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
            text = _DECODERS[encoding](text)
        is_form = request.headers.get("content-type", "").startswith("multipart")
        asked = json.loads(text) if text and not is_form else {}
        if is_form:
            asked = {"stream": b'name="stream"\r\n\r\ntrue' in text, "model": "llama"}
            assert b"\r\n\r\nllama\r\n" in text, "the form has no field `model`"
        status, kind, answer = self._said(request, asked)
        packs = asked.get("model") == "packed" and "gzip" in request.headers.get("accept-encoding", "")
        answer = gzip.compress(answer, mtime=0) if packs else answer
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\nx-engine: here\r\n"
        head += "content-encoding: gzip\r\nvary: accept-encoding\r\n" if packs else ""
        if kind in ("application/json", "audio/wav"):
            writer.write(f"{head}content-length: {len(answer)}\r\n\r\n".encode() + answer)
            return await writer.drain()
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        for at in range(0, len(answer), _PIECE_BYTES):
            piece = answer[at : at + _PIECE_BYTES]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        return await writer.drain()

    def _said(self, request: Request, asked: dict[str, Any]) -> tuple[int, str, bytes]:
        """Status, content type and body of the answer to a request, whose JSON body or form is `asked`."""
        path, model = request.path.partition("?")[0], asked.get("model")
        tools, streams = bool(asked.get("tools")), asked.get("stream", "/api/" in path)
        if model in ("faulty", "absent"):
            fault = {"type": "invalid_request_error", "message": f"not so: {model}", "code": None}
            return _told({"type": "error", "error": fault}, status=400 if model == "faulty" else 404)
        fixed = None if asked.get("stream") else next((end for end in _FIXED if path.endswith(end)), None)
        if fixed is not None:
            found = _FIXED[fixed]
            return (200, "audio/wav", found) if isinstance(found, bytes) else _told(found)
        if path.endswith(":streamGenerateContent"):
            return _told({}, [_FIXED[":generateContent"]], True)
        if path.endswith("/chat/completions"):
            return _told(_chat(tools), _chat_events(tools), streams)
        if path.endswith("/completions"):
            choices = [{"index": at, "text": word, "finish_reason": "stop"} for at, word in enumerate(_WORDS)]
            whole = {"id": "c", "object": "text_completion", "created": 1, "model": "llama"}
            each = (whole | {"choices": [choice]} for choice in choices)
            return _told(whole | {"choices": choices, "usage": _USAGE}, each, streams)
        if path.endswith("/embeddings"):
            is_text = asked.get("encoding_format") == "base64"
            return _told(_embedding("AAAAPwAAgD8=" if is_text else [0.5, 1]))
        if path.endswith("/messages"):
            return _told(_claude(tools), _claude_events(tools), streams, names=True)
        if path.endswith("/audio/transcriptions"):
            return _told({}, ({"type": "transcript.text.delta", "delta": word} for word in _WORDS), True)
        if path.endswith(("/api/chat", "/api/generate")):
            key = "message" if path.endswith("chat") else "response"
            texts = [_ollama_message(word, tools) if key == "message" else word for word in _WORDS]
            lines = [_ollama(key, each, done=at == len(texts) - 1) for at, each in enumerate(texts)]
            text = b"".join(_json(each, indent=None) + b"\n" for each in lines)
            return (200, "application/x-ndjson", text) if streams else _told(lines[-1])
        return self._of_state(request.method, path, request.body, asked, streams)

    def _of_state(
        self, method: str, path: str, body: bytes, asked: dict[str, Any], streams: bool
    ) -> tuple[int, str, bytes]:
        """Answer a call of the Responses API with a stored id; a server knows only the ids that it made."""
        parts = re.fullmatch(".*/(responses|conversations)(?:/([^/]+)(/cancel)?)?", path)
        named = parts[2] if parts else None
        needed = {named, asked.get("previous_response_id"), asked.get("conversation")} - {None}
        if not parts or not needed <= self.kept:
            return _told({"error": {"message": f"{path}: {sorted(needed)} is not here"}}, status=404)
        name = named or f"{parts[1]}_{hashlib.sha256(body).hexdigest()[:16]}"
        self.kept.add(name)
        if method == "DELETE":
            return _told({"id": name, "deleted": True, "object": "deleted"})
        if parts[1] == "conversations":
            return _told({"id": name, "object": "conversation", "created_at": 1, "metadata": {}})
        return _told(_response(name, "".join(_WORDS)), _response_events(name), streams, names=True)


def _json(tree: Any, indent: int | None = 1) -> bytes:
    return json.dumps(tree, ensure_ascii=False, indent=indent).encode()


def _told(
    whole: Any, events: Any = (), streams: bool = False, *, names: bool = False, status: int = 200
) -> tuple[int, str, bytes]:
    if not streams:
        return status, "application/json", _json(whole)
    text = b""
    for each in events:
        text += b"event: %b\n" % each["type"].encode() if names else b""
        text += b"data: %b\n\n" % _json(each, None)
    return 200, "text/event-stream", text + (b"" if names else b"data: [DONE]\n\n")
