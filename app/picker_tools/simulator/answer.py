"""OpenAI's answer shapes, whole and as server-sent events. Pure.

A stream has one event a token, the last with the finish reason, then `[DONE]`. Usage comes in an event
of its own with empty `choices` if the client asked for it (`stream_options.include_usage`). If it did
not but the server always tells, usage rides on the last token's event: a client that reads `choices[0]`
of every event must not meet one without.
"""

import orjson

from picker_tools.simulator.ask import Ask

DONE = b"data: [DONE]\n\n"
_PENDING = b'"logprobs":null,"finish_reason":null}]}\n\n'


class Answer:
    """The bytes of one answer. `created_s` is Unix time."""

    def __init__(self, ask: Ask, *, answer_id: str, created_s: int, always_usage: bool) -> None:
        self._ask = ask
        self._always_usage = always_usage
        kind = "chat.completion" if ask.chat else "text_completion"
        if ask.chat and ask.stream:
            kind = "chat.completion.chunk"
        self._common = {"id": answer_id, "object": kind, "created": created_s, "model": ask.model}
        self._usage = {
            "prompt_tokens": ask.prompt_tokens,
            "completion_tokens": ask.max_tokens,
            "total_tokens": ask.prompt_tokens + ask.max_tokens,
        }
        # Events of one stream differ in their word only: what surrounds it is made once.
        head = b"data: " + orjson.dumps(self._common)[:-1] + b',"choices":[{"index":0,'
        self._before = head + (b'"delta":{"content":"' if ask.chat else b'"text":"')
        self._after = (b'"},' if ask.chat else b'",') + _PENDING
        self._role = head + b'"delta":{"role":"assistant","content":""},' + _PENDING

    @property
    def opening(self) -> bytes:
        """What comes before a stream's first token: chat names the role, completions have nothing."""
        return self._role if self._ask.chat else b""

    def events(self, words: list[bytes]) -> bytes:
        """One event for each of `words`, none of them the stream's last."""
        if not words:
            return b""
        return self._before + (self._after + self._before).join(words) + self._after

    def ending(self, word: bytes) -> bytes:
        """The event of the last token, usage, and the end of the stream."""
        text = word.decode()
        finish = {"logprobs": None, "finish_reason": self._ask.finish_reason}
        content = {"delta": {"content": text}} if self._ask.chat else {"text": text}
        last: dict[str, object] = {**self._common, "choices": [{"index": 0, **content, **finish}]}
        if self._ask.include_usage:
            usage = {**self._common, "choices": [], "usage": self._usage}
            return _event(last) + _event(usage) + DONE
        if self._always_usage:
            last["usage"] = self._usage
        return _event(last) + DONE

    def whole(self, words: list[bytes]) -> bytes:
        """The body of an answer that is not streamed."""
        text = b"".join(words).decode()
        finish = {"logprobs": None, "finish_reason": self._ask.finish_reason}
        content = {"message": {"role": "assistant", "content": text}} if self._ask.chat else {"text": text}
        choice = {"index": 0, **content, **finish}
        return orjson.dumps({**self._common, "choices": [choice], "usage": self._usage})


def _event(tree: dict[str, object]) -> bytes:
    return b"data: " + orjson.dumps(tree) + b"\n\n"
