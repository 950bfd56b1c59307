"""The simulated model server's formats, as of OpenAI's API: request bodies, answers and errors. Pure.

A stream has one event for each token (the last one has the finish reason), then `[DONE]`. If the client asked
for usage (`stream_options.include_usage`), usage has its own event, with empty `choices`. If the client did
not ask, the last token's event includes usage, so that the client can read `choices[0]` of every event.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

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


DEFAULT_MAX_TOKENS = 16  # OpenAI's default for completions; the simulator uses it for chats, too
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A valid request. `prompt` is its whole text; `finish_reason` is `length` or `stop`; `kv_transfer` says
    which part of the work another server does (`transfer.py`)."""

    chat: bool
    model: str
    prompt: bytes
    prompt_tokens: int
    max_tokens: int
    stream: bool
    include_usage: bool
    finish_reason: str
    kv_transfer: KvTransfer | None = None


_KEYS = re.compile(r"(?:\$\.|field `)(\w+)")  # finds the keys that an error message of msgspec names
_Limit = Annotated[int, msgspec.Meta(ge=1)] | None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Body(msgspec.Struct):
    """The keys that bodies of completions and chats have in common; all other keys are ignored."""

    model: str
    max_tokens: _Limit = None
    max_completion_tokens: _Limit = None
    n: Literal[1] | None = None  # a request may ask for one answer only
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    kv_transfer_params: KvTransfer | None = None


class _Part(msgspec.Struct):
    text: str = ""  # parts without text (images, tool calls) add no tokens


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None

    @property
    def texts(self) -> list[str]:
        content = self.content or ""
        return [self.role, *([content] if isinstance(content, str) else (part.text for part in content))]


class _Chat(_Body, kw_only=True):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]


class _Completion(_Body, kw_only=True):
    prompt: str | list[str | int | list[int]]


def parse(body: bytes, *, chat: bool, models: Container[str]) -> CompletionRequest:
    """Parse the request in `body`, whose model must be in `models`; ignore all unknown keys.

    Raises:
        ApiError: status 400 for a malformed body, 404 for an unknown model; the message names the key.
    """
    form: type[_Chat | _Completion] = _Chat if chat else _Completion
    try:
        given = msgspec.json.decode(body, type=form)
    except msgspec.ValidationError as fault:
        key = next(reversed(_KEYS.findall(str(fault))), None)  # the last match is the path's first key
        raise ApiError(f"{key or 'the body'}: {fault}", param=key) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise ApiError(f"the body is not JSON: {fault}", code="invalid_json") from None
    if given.model not in models:
        what = f"the model {given.model[:100]!r} does not exist"
        raise ApiError(what, status=404, code="model_not_found", param="model")
    if isinstance(given, _Chat):
        prompt, prompt_tokens = _counted("\n".join(text for each in given.messages for text in each.texts))
    else:
        prompt, prompt_tokens = _prompt(given.prompt)
    limit = given.max_completion_tokens or given.max_tokens
    return CompletionRequest(
        chat=chat,
        model=given.model,
        prompt=prompt,
        prompt_tokens=prompt_tokens,
        max_tokens=limit or DEFAULT_MAX_TOKENS,
        stream=bool(given.stream),
        include_usage=bool(given.stream_options and given.stream_options.include_usage),
        # A chat without a token limit stops by itself; a completion without a limit has the default limit.
        finish_reason="stop" if chat and limit is None else "length",
        kv_transfer=given.kv_transfer_params,
    )


def _prompt(prompt: str | Sequence[str | int | list[int]]) -> tuple[bytes, int]:
    """The text and token count of a prompt: a string, a list of one string, or a list of token ids."""
    if not isinstance(prompt, str) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _counted(prompt)
    if prompt and all(isinstance(token, int) for token in prompt):
        return orjson.dumps(prompt), len(prompt)
    raise ApiError("prompt: must be one string or one list of token ids", param="prompt")


def _counted(text: str) -> tuple[bytes, int]:
    prompt = text.encode()
    return prompt, max(1, len(prompt) // BYTES_PER_TOKEN)


_ONSETS = ("b", "br", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "st", "t", "tr", "v")
_VOWELS = ("a", "e", "i", "o", "u")
_ENDS = ("", "l", "n", "r", "s", "t", "la", "no")
VOCABULARY = tuple(f" {''.join(parts)}".encode() for parts in itertools.product(_ONSETS, _VOWELS, _ENDS))


class Words:
    """Generates the words of the answer to `prompt`, each with a leading space, by the `seed`."""

    def __init__(self, *, seed: int, prompt: bytes) -> None:
        # random.Random(prompt) would take milliseconds for 400 KB.
        digest = hashlib.blake2b(prompt, digest_size=8, key=str(seed).encode()[:64]).digest()
        self._random = random.Random(int.from_bytes(digest, "big"))

    def take(self, count: int) -> list[bytes]:
        """The next `count` words. The sequence of words is the same however many words each call takes."""
        return self._random.choices(VOCABULARY, k=count)


DONE = b"data: [DONE]\n\n"
_PENDING = b'"logprobs":null,"finish_reason":null}]}\n\n'


class Answer:
    """Encodes one answer. `created_s` is a Unix time.

    `cached_tokens` is the number of prompt tokens found in the prefix cache. If another server computed the
    prompt, the client gets that server's number, `prefill_cached_tokens`.
    """

    def __init__(self, request: CompletionRequest, *, answer_id: str, created_s: int) -> None:
        self._request = request
        self.prefill_cached_tokens: int | None = None
        kind = "chat.completion" if request.chat else "text_completion"
        if request.chat and request.stream:
            kind = "chat.completion.chunk"
        self._common = {"id": answer_id, "object": kind, "created": created_s, "model": request.model}
        # The events of a stream differ only in one word, so encode the rest only once.
        head = b"data: " + orjson.dumps(self._common)[:-1] + b',"choices":[{"index":0,'
        self._before = head + (b'"delta":{"content":"' if request.chat else b'"text":"')
        self._after = (b'"},' if request.chat else b'",') + _PENDING
        self._role = head + b'"delta":{"role":"assistant","content":""},' + _PENDING

    @property
    def opening(self) -> bytes:
        """The event with the role, which precedes the first token of a chat's answer; b'' for completions."""
        return self._role if self._request.chat else b""

    def events(self, words: list[bytes]) -> bytes:
        """One event for each of `words`, which must not include the stream's last word."""
        if not words:
            return b""
        return self._before + (self._after + self._before).join(words) + self._after

    def ending(self, word: bytes, cached_tokens: int) -> bytes:
        """The end of a stream: the event of the last token, the usage, and `[DONE]`."""
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
