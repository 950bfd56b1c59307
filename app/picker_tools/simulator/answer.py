"""Builds answers in OpenAI's format, whole or as server-sent events. Pure.

A stream has one event for each token, the last with the finish reason, then `[DONE]`. If the client asked for
usage (`stream_options.include_usage`), usage has its own event, with empty `choices`. Otherwise the last
token's event includes usage: such clients may read `choices[0]` of every event.
"""

import hashlib
import itertools
import random

import orjson

from picker_tools.simulator.request import CompletionRequest

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
        """The next `count` words; the sequence of words does not depend on the sizes of `count`."""
        return self._random.choices(VOCABULARY, k=count)


DONE = b"data: [DONE]\n\n"
_PENDING = b'"logprobs":null,"finish_reason":null}]}\n\n'


class Answer:
    """Encodes one answer. `created_s` is Unix time.

    `cached_tokens` is the number of prompt tokens found in the prefix cache.
    """

    def __init__(self, request: CompletionRequest, *, answer_id: str, created_s: int) -> None:
        self._request = request
        kind = "chat.completion" if request.chat else "text_completion"
        if request.chat and request.stream:
            kind = "chat.completion.chunk"
        self._common = {"id": answer_id, "object": kind, "created": created_s, "model": request.model}
        # A stream's events differ only in one word: encode the rest once.
        head = b"data: " + orjson.dumps(self._common)[:-1] + b',"choices":[{"index":0,'
        self._before = head + (b'"delta":{"content":"' if request.chat else b'"text":"')
        self._after = (b'"},' if request.chat else b'",') + _PENDING
        self._role = head + b'"delta":{"role":"assistant","content":""},' + _PENDING

    @property
    def opening(self) -> bytes:
        """The event with the role that precedes a chat's first token; b'' for completions."""
        return self._role if self._request.chat else b""

    def events(self, words: list[bytes]) -> bytes:
        """One event for each of `words`, which must not include the stream's last word."""
        if not words:
            return b""
        return self._before + (self._after + self._before).join(words) + self._after

    def ending(self, word: bytes, cached_tokens: int) -> bytes:
        """The last token's event, usage, and the `[DONE]` that ends the stream."""
        text = word.decode()
        finish = {"logprobs": None, "finish_reason": self._request.finish_reason}
        content = {"delta": {"content": text}} if self._request.chat else {"text": text}
        last: dict[str, object] = {**self._common, "choices": [{"index": 0, **content, **finish}]}
        if self._request.include_usage:
            usage = {**self._common, "choices": [], "usage": self._usage(cached_tokens)}
            return _event(last) + _event(usage) + DONE
        last["usage"] = self._usage(cached_tokens)
        return _event(last) + DONE

    def whole(self, words: list[bytes], cached_tokens: int) -> bytes:
        """The body of an answer that is not streamed."""
        text = b"".join(words).decode()
        finish = {"logprobs": None, "finish_reason": self._request.finish_reason}
        content = (
            {"message": {"role": "assistant", "content": text}} if self._request.chat else {"text": text}
        )
        choice = {"index": 0, **content, **finish}
        return orjson.dumps({**self._common, "choices": [choice], "usage": self._usage(cached_tokens)})

    def _usage(self, cached_tokens: int) -> dict[str, object]:
        request = self._request
        return {
            "prompt_tokens": request.prompt_tokens,
            "completion_tokens": request.max_tokens,
            "total_tokens": request.prompt_tokens + request.max_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


def _event(tree: dict[str, object]) -> bytes:
    return b"data: " + orjson.dumps(tree) + b"\n\n"
