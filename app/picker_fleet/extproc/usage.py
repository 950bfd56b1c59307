"""Token usage of an answer that streams by, whatever its length and however it is cut."""

import json
import re
from collections import deque

_HEAD_BYTES = 4096
_TAIL_BYTES = 16_384
_MOST_TOKENS = 1e9  # what is above is no count, and must not be charged to anyone
_USAGE = re.compile(r'"usage"\s*:\s*(?=\{)')
_DECODER = json.JSONDecoder()


class UsageTail:
    """Keeps an answer's last 16 KiB (and at most one chunk more), where its usage stands, and its first
    4 KiB, for servers that tell it before a long text.

    Nothing is parsed until the end: that costs the same for one token as for ten thousand. Text inside a
    JSON string can't be mistaken for the field, because its quotes are escaped.
    """

    __slots__ = ("_chunks", "_head", "_size")

    def __init__(self) -> None:
        self._head = b""
        self._chunks: deque[bytes] = deque()
        self._size = 0

    def feed(self, chunk: bytes) -> None:
        if len(self._head) < _HEAD_BYTES:
            self._head += chunk[: _HEAD_BYTES - len(self._head)]
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) >= _TAIL_BYTES:
            self._size -= len(self._chunks.popleft())

    def tokens(self) -> tuple[int | None, int | None]:
        """(prompt, completion) tokens of the last usage that has any; None for what is not told.

        Read from a plain JSON answer, the last SSE event with one, or the Responses API's
        `response.completed`, which calls them input and output tokens.
        """
        for part in (b"".join(self._chunks)[-_TAIL_BYTES:], self._head):
            text = part.decode(errors="replace")
            for match in reversed(list(_USAGE.finditer(text))):
                try:
                    usage, _ = _DECODER.raw_decode(text, match.end())
                except (ValueError, RecursionError):
                    continue
                prompt = _count(usage, "prompt_tokens", "input_tokens")
                completion = _count(usage, "completion_tokens", "output_tokens")
                if prompt is not None or completion is not None:
                    return prompt, completion
        return None, None


def _count(usage: dict[str, object], *names: str) -> int | None:
    for name in names:
        value = usage.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS:
            return value
    return None
