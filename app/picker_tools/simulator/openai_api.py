"""OpenAI's formats of the simulated model server: bodies of completions, answers and errors. Pure.

A stream has one event for each token (the last one has the finish reason), then `[DONE]`. If the client asked
for usage (`stream_options.include_usage`), usage has its own event, with empty `choices`. Without that option
the last token's event includes usage: a client may then read `choices[0]` of every event.
"""

import hashlib
import itertools
import random
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from picker_fleet.domain.errors import PickerError


class ApiError(PickerError):
    """An error in OpenAI's format, with HTTP status, error type, error code, and the invalid parameter."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "bad_request",
        kind: str = "invalid_request_error",
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind
        self.param = param

    @property
    def body(self) -> bytes:
        return orjson.dumps(
            {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}
        )


class KvTransfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`kv_transfer_params` of a request or of an answer, as vLLM's NixlConnector names them."""

    do_remote_decode: bool = False  # compute the prompt, and keep its blocks for another server
    do_remote_prefill: bool = False  # another server has the prompt's blocks
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None


DEFAULT_MAX_TOKENS = 16  # OpenAI's default for completions, used here for chat too
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A valid request. `prompt` is the request's whole text; `finish_reason` is `length` or `stop`;
    `kv_transfer` says which part of the work another server does (`transfer.py`)."""

    chat: bool
    model: str
    prompt: bytes
    prompt_tokens: int
    max_tokens: int
    stream: bool
    include_usage: bool
    finish_reason: str
    kv_transfer: KvTransfer | None = None


def parse(body: bytes, *, chat: bool, models: Container[str]) -> CompletionRequest:
    """Parse the request in `body`, whose model must be in `models`; ignore all unknown keys.

    Raises:
        ApiError: status 400 for a malformed body, 404 for an unknown model; the message names the key.
    """
    try:
        tree = orjson.loads(body)
    except orjson.JSONDecodeError as fault:
        raise ApiError(f"the body is not JSON: {fault}", code="invalid_json") from None
    if not isinstance(tree, dict):
        raise ApiError("the body must be a JSON object", code="invalid_json")
    model = _model(tree, models)
    prompt, prompt_tokens = _messages(tree) if chat else _prompt(tree)
    limit = _limit(tree, "max_completion_tokens")
    if limit is None:
        limit = _limit(tree, "max_tokens")
    if tree.get("n") not in (None, 1):
        raise ApiError("n must be 1: one answer a request", param="n")
    stream = _flag(tree, "stream")
    options = tree.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise ApiError("stream_options must be an object", param="stream_options")
    return CompletionRequest(
        chat=chat,
        model=model,
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        max_tokens=DEFAULT_MAX_TOKENS if limit is None else limit,
        stream=stream,
        include_usage=options is not None and _flag(options, "include_usage"),
        # A chat without a token limit stops by itself; a completion without a limit has the default limit.
        finish_reason="stop" if chat and limit is None else "length",
        kv_transfer=_kv_transfer(tree),
    )


def _model(tree: dict[str, Any], models: Container[str]) -> str:
    model = tree.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError("model must be a non-empty string", param="model")
    if model not in models:
        raise ApiError(
            f"the model {model[:100]!r} does not exist", status=404, code="model_not_found", param="model"
        )
    return model


def _limit(tree: dict[str, Any], key: str) -> int | None:
    value = tree.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ApiError(f"{key} must be a whole number of at least 1", param=key)
    return value


def _flag(tree: dict[str, Any], key: str) -> bool:
    value = tree.get(key)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{key} must be true or false", param=key)
    return bool(value)


def _kv_transfer(tree: dict[str, Any]) -> KvTransfer | None:
    try:
        return msgspec.convert(tree.get("kv_transfer_params"), KvTransfer | None)
    except msgspec.ValidationError as fault:
        raise ApiError(f"kv_transfer_params: {fault}", param="kv_transfer_params") from None


def _prompt(tree: dict[str, Any]) -> tuple[bytes, int]:
    """Text and token count of `prompt`: a string, a list of one string, or a list of token ids."""
    prompt = tree.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0] if isinstance(prompt[0], str | list) else prompt
    if isinstance(prompt, str):
        return _counted(prompt)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return orjson.dumps(prompt), len(prompt)
    raise ApiError("prompt must be one string or one list of token ids", param="prompt")


def _messages(tree: dict[str, Any]) -> tuple[bytes, int]:
    """Text and token count of `messages`; parts without text (images, tool calls) add no tokens."""
    messages = tree.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ApiError("messages must be a non-empty list", param="messages")
    lines: list[str] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ApiError("each of messages must be an object with a role", param="messages")
        lines.append(message["role"])
        content = message.get("content")
        if isinstance(content, str):
            lines.append(content)
        elif isinstance(content, list):
            lines.extend(_part_text(part) for part in content)
        elif content is not None:
            raise ApiError("content must be a string or a list of parts", param="messages")
    return _counted("\n".join(lines))


def _part_text(part: object) -> str:
    if not isinstance(part, dict):
        raise ApiError("each part of content must be an object", param="messages")
    text = part.get("text", "")
    if not isinstance(text, str):
        raise ApiError("text of a content part must be a string", param="messages")
    return text


def _counted(text: str) -> tuple[bytes, int]:
    prompt = text.encode()
    return prompt, max(1, len(prompt) // BYTES_PER_TOKEN)


_ONSETS = ("b", "br", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v")
_VOWELS = ("a", "e", "i", "o", "u")
_ENDS = ("", "l", "n", "r", "s", "t", "la", "no")
VOCABULARY = tuple(f" {''.join(parts)}".encode() for parts in itertools.product(_ONSETS, _VOWELS, _ENDS))


class Words:
    """Generates the words of the answer to `prompt`, each with a leading space. Depends on `seed`."""

    def __init__(self, *, seed: int, prompt: bytes) -> None:
        # random.Random(prompt) would take milliseconds for 400 KB.
        digest = hashlib.blake2b(prompt, digest_size=8, key=str(seed).encode()[:64]).digest()
        self._random = random.Random(int.from_bytes(digest, "big"))

    def take(self, count: int) -> list[bytes]:
        """The next `count` words; the sequence of words does not depend on how many each call takes."""
        return self._random.choices(VOCABULARY, k=count)


DONE = b"data: [DONE]\n\n"
_PENDING = b'"logprobs":null,"finish_reason":null}]}\n\n'


class Answer:
    """Encodes one answer. `created_s` is a Unix time.

    `cached_tokens` is the number of prompt tokens found in the prefix cache. If another server computed the
    prompt, `prefill_cached_tokens` is that server's number, which the client gets.
    """

    def __init__(self, request: CompletionRequest, *, answer_id: str, created_s: int) -> None:
        self._request = request
        self.prefill_cached_tokens: int | None = None
        kind = "chat.completion" if request.chat else "text_completion"
        if request.chat and request.stream:
            kind = "chat.completion.chunk"
        self._common = {"id": answer_id, "object": kind, "created": created_s, "model": request.model}
        # The events of a stream differ only in one word: encode all else once.
        head = b"data: " + orjson.dumps(self._common)[:-1] + b',"choices":[{"index":0,'
        self._before = head + (b'"delta":{"content":"' if request.chat else b'"text":"')
        self._after = (b'"},' if request.chat else b'",') + _PENDING
        self._role = head + b'"delta":{"role":"assistant","content":""},' + _PENDING

    @property
    def opening(self) -> bytes:
        """The event with the role, which precedes the first token of a chat; b'' for completions."""
        return self._role if self._request.chat else b""

    def events(self, words: list[bytes]) -> bytes:
        """One event for each word of `words`, which must not include the stream's last word."""
        if not words:
            return b""
        return self._before + (self._after + self._before).join(words) + self._after

    def ending(self, word: bytes, cached_tokens: int) -> bytes:
        """The event of the last token, the usage, and the `[DONE]` that ends the stream."""
        text = word.decode()
        finish = {"logprobs": None, "finish_reason": self._request.finish_reason}
        content = {"delta": {"content": text}} if self._request.chat else {"text": text}
        last: dict[str, object] = {**self._common, "choices": [{"index": 0, **content, **finish}]}
        if self._request.include_usage:
            usage = {**self._common, "choices": [], "usage": self._usage(cached_tokens)}
            return _event(last) + _event(usage) + DONE
        last["usage"] = self._usage(cached_tokens)
        return _event(last) + DONE

    def whole(self, words: list[bytes], cached_tokens: int, kv_transfer: KvTransfer | None = None) -> bytes:
        """The body of an answer that is not streamed."""
        text = b"".join(words).decode()
        finish = {"logprobs": None, "finish_reason": self._request.finish_reason}
        content = (
            {"message": {"role": "assistant", "content": text}} if self._request.chat else {"text": text}
        )
        choice = {"index": 0, **content, **finish}
        tree: dict[str, object] = {
            **self._common,
            "choices": [choice],
            "usage": self._usage(cached_tokens),
        }
        if kv_transfer is not None:
            tree["kv_transfer_params"] = msgspec.to_builtins(kv_transfer)
        return orjson.dumps(tree)

    def _usage(self, cached_tokens: int) -> dict[str, object]:
        request = self._request
        if self.prefill_cached_tokens is not None:
            cached_tokens = self.prefill_cached_tokens
        return {
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": request.max_tokens,
            "total_tokens": request.prompt_tokens + request.max_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


def _event(tree: dict[str, object]) -> bytes:
    return b"data: " + orjson.dumps(tree) + b"\n\n"
