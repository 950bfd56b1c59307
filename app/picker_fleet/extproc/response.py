"""The response phases of `standard` mode: each message is passed on and read for usage."""

import json
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from picker_fleet.extproc import codec
from picker_fleet.request import Completion, Outcome

_STATUS = ":status"
_ENCODING = "content-encoding"
_WANTED = frozenset((_STATUS, _ENCODING))

_HEAD_BYTES = 4096
_TAIL_BYTES = 16_384
_MAX_TOKENS = 1e9  # a higher number is not a count and must not be charged
_USAGE = re.compile(r'"usage"\s*:\s*(?=\{)')
_DECODER = json.JSONDecoder()


class ModelRename:
    """Replaces `"model":"target"` by the client's name in an answer that comes in chunks.

    Only that exact field changes, with at most one space after its colon as servers write it, in plain JSON
    and in server-sent events alike. A chunk's end that may be the beginning of the field is kept back for
    the next one; an event ends with a line break, so whole events are never delayed.
    """

    __slots__ = ("_kept_back", "_mine", "_pattern", "_spellings")

    def __init__(self, target: str, mine: str) -> None:
        names = {orjson.dumps(target), json.dumps(target).encode()}
        self._spellings = sorted(b'"model":' + space + name for name in names for space in (b"", b" "))
        self._pattern = re.compile(b"|".join(re.escape(spelling) for spelling in self._spellings))
        self._mine = b'"model":' + json.dumps(mine).encode()
        self._kept_back = b""

    def push(self, chunk: bytes, *, ended: bool) -> bytes:
        """The bytes to send on after `chunk`; with `ended`, all that is left."""
        data = self._pattern.sub(lambda _: self._mine, self._kept_back + chunk)
        keep = 0 if ended else self._partial(data)
        self._kept_back = data[len(data) - keep :]
        return data[: len(data) - keep]

    def _partial(self, data: bytes) -> int:
        """Length of the longest end of `data` that begins a spelling without completing it."""
        longest = 0
        for spelling in self._spellings:
            for size in range(min(len(spelling) - 1, len(data)), longest, -1):
                if data.endswith(spelling[:size]):
                    longest = size
                    break
        return longest


class UsageTail:
    """Keeps an answer's last 16 KiB (and at most one chunk more), where its usage usually is, and its first
    4 KiB, for servers that send it before a long text.

    Nothing is parsed until the end: that costs the same for one token as for ten thousand. Text inside a
    JSON string can't be mistaken for the field, because its quotes are escaped.
    """

    __slots__ = ("_chunks", "_head", "_size")

    def __init__(self) -> None:
        self._head = b""
        self._chunks: deque[bytes] = deque()
        self._size = 0

    def add(self, chunk: bytes) -> None:
        if len(self._head) < _HEAD_BYTES:
            self._head += chunk[: _HEAD_BYTES - len(self._head)]
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) >= _TAIL_BYTES:
            self._size -= len(self._chunks.popleft())

    def tokens(self) -> tuple[int | None, int | None]:
        """(prompt, completion) tokens of the last usage that has any; None for what is missing.

        Read from a plain JSON answer, the last SSE event with one, or the Responses API's
        `response.completed`, which calls them input and output tokens.
        """
        for part in (b"".join(self._chunks)[-_TAIL_BYTES:], self._head):
            text = part.decode(errors="replace")
            at = len(text)
            while (at := text.rfind('"usage"', 0, at)) >= 0:
                match = _USAGE.match(text, at)
                if match is None:
                    continue
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
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_TOKENS:
            return value
    return None


class Response:
    """A model server's answer on its way back; settles its request exactly once (G6).

    `request_id` is '' if nothing was admitted, and then nothing is settled. `rename` restores the client's
    model name; None if it was not changed. `client_headers` are added for the client. Times are counted
    from `started_s`. The metadata `namespace` says who served; `tells_served` passes it on to the client, as
    the conformance suite wants it. `waited_s` and `target_model` are the completion's.
    """

    __slots__ = (
        "_client_headers",
        "_clock",
        "_ends",
        "_first_byte_s",
        "_namespace",
        "_placed_s",
        "_rename",
        "_request_id",
        "_served",
        "_settle",
        "_started_s",
        "_status",
        "_target_model",
        "_tells_served",
        "_usage",
        "_waited_s",
        "ended",
        "streaming",
    )

    def __init__(
        self,
        request_id: str,
        rename: ModelRename | None,
        *,
        settle: Callable[[Completion], object],
        clock: Callable[[], float],
        started_s: float,
        placed_s: float,
        namespace: str,
        client_headers: Mapping[str, str],
        waited_s: float | None = None,
        target_model: str = "",
        tells_served: bool = False,
    ) -> None:
        self.ended = self.streaming = False
        self._tells_served = tells_served
        self._namespace = namespace
        self._client_headers = client_headers
        self._waited_s = waited_s
        self._target_model = target_model
        self._request_id = request_id
        self._rename = rename
        self._settle = settle
        self._clock = clock
        self._started_s = started_s
        self._placed_s = placed_s
        self._status = 0
        self._served: str | None = None
        self._first_byte_s: float | None = None
        self._usage = UsageTail()

    def pass_on(self, part: str, message: Any) -> list[bytes]:
        """What goes back for one message of the response; `part` says which it is."""
        if part == "response_body":
            return self._chunk(message.response_body)
        if part == "response_headers":
            return self._headers(message)
        rest = self._rename.push(b"", ended=True) if self._rename is not None else b""
        self._end(Outcome.COMPLETED)
        trailers = [codec.RESPONSE_TRAILERS]
        return [codec.response_body(rest, ended=False), *trailers] if rest else trailers

    def cut(self) -> None:
        """The stream ended before the answer did: its client is gone, or Envoy gave it up."""
        self._end(Outcome.CLIENT_GONE)

    def _headers(self, message: Any) -> list[bytes]:
        headers = message.response_headers
        self._first_byte_s = self._clock() - self._started_s
        found = codec.read_headers(headers, _WANTED)
        status = found.get(_STATUS, b"")
        self._status = int(status) if status.isdigit() and len(status) == 3 else 0
        about = codec.read_metadata(message, self._namespace)
        served = (about or {}).get(codec.SERVED)
        self._served = served if isinstance(served, str) and served else None
        added = self._client_headers
        if self._tells_served:
            missing = "envoy lb metadata" if about is None else "destination endpoint served metadata"
            added = {**added, codec.TEST_SERVED: self._served or f"fail: missing {missing}"}
        if _ENCODING in found:
            self._rename = None  # names can't be found in compressed text
        if headers.end_of_stream:
            self._end(Outcome.COMPLETED)
        return [codec.response_headers(added, sized=self._rename is None)]

    def _chunk(self, part: Any) -> list[bytes]:
        body, ended = part.body, part.end_of_stream
        self._usage.add(body)
        if self._rename is not None:
            body = self._rename.push(body, ended=ended)
        if ended:
            self._end(Outcome.COMPLETED)
        self.streaming = not ended
        return [codec.response_body(body, ended=ended)]

    def _end(self, outcome: Outcome) -> None:
        if self.ended:
            return
        self.ended = True
        if not self._request_id:
            return
        ended_s = self._clock()
        prompt_tokens, completion_tokens = self._usage.tokens()
        self._settle(
            Completion(
                id=self._request_id,
                outcome=Outcome.UPSTREAM_FAILED if self._status >= 500 else outcome,
                status=self._status,
                served=self._served,
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                duration_s=ended_s - self._started_s,
                first_byte_s=self._first_byte_s,
                service_s=ended_s - self._placed_s,
                waited_s=self._waited_s,
                target_model=self._target_model,
            )
        )
