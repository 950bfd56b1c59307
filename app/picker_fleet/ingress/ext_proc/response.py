"""Forwards a model server's response to the client in `standard` mode, and reads its token usage.

exchange.py makes a `Response` for each placed request and gives it Envoy's messages. A `Response` changes
nothing in the body except the model's name.
"""

import json
import re
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec
import orjson

from picker_fleet.domain.allowlist import SERVED
from picker_fleet.domain.errors import MALFORMED
from picker_fleet.domain.request import Completion, Outcome, fault_of, hold_of
from picker_fleet.ingress import quota_headers
from picker_fleet.ingress.context import PRESSURE, Decision, ExchangeContext
from picker_fleet.ingress.ext_proc import codec
from picker_fleet.ingress.media import only
from picker_fleet.scheduling.sessions import SESSION_HEADER

_STATUS = ":status"
_ENCODING = "content-encoding"
_RETRY_AFTER = "retry-after"
_CONTENT_TYPE = "content-type"
_WANTED = frozenset((_STATUS, _ENCODING, _RETRY_AFTER, _CONTENT_TYPE))

_UNCOMPRESSED = (b"", b"identity")
_HEAD_BYTES = 4096
_TAIL_BYTES = 16_384  # keep this many bytes of the end of a streamed answer
_WHOLE_BYTES = 65_536  # keep this many bytes of the end of an answer in plain JSON
_USAGE_BYTES = 4096  # read at most this much of a usage object in an answer that was not kept whole
_FEW = 8  # maximum usage members to read in an answer, the last one first
_MOST_ANSWERS = 1024  # maximum answers in a list to read: 64 KiB of `{}` take 10 ms
# Read no usage if a chunk decompresses to more bytes, or all chunks to more than this and their size times
# `_MOST_INFLATION`: text of answers is compressed to a fifth to a thirtieth, a bomb to a thousandth.
_MOST_INFLATED_BYTES, _MOST_INFLATION = 2 * 1024 * 1024, 64
_MAX_TOKENS, _MOST_DIGITS = 1e9, 10  # ignore larger numbers, which cannot be token counts

# Matches a string (group 1: its closing quote, unset if cut off), brackets, or the blank line after an event.
_TOKEN = re.compile(rb'"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+(")?|[{\[]++|[}\]]++|\n(?:\r?\n)++')
# The outer group is not possessive, since before Python 3.11.5 re matches such groups wrongly (gh-106052).
_NO_BRACKETS = re.compile(rb'(?:[^"{}\[\]\n]++|"[^"\\\n]*+(?:\\.[^"\\\n]*+)*+")*')
_REST_OF_STRING = re.compile(rb'[^"\\\n]*+(?:\\.[^"\\\n]*+)*+(")?')
_CUT = (b"", b"\\")  # a chunk cut off within a string ends here, or after the backslash of an escape
_FEW_TOKENS, _BYTES_A_TOKEN = 1024, 4  # rename while a chunk's first n bytes have up to 1024 + n / 4 tokens
_TOKENS_A_UNIT = 2  # tokens that `ModelRename` reads in a unit of work
_MODEL = b'"model"'
_INNER = (b'"message"', b'"response"')  # events of Anthropic's and the Responses API nest the model here
# Matches the JSON member `error` and captures its numeric code. The pattern never matches text within a JSON
# string, because a string's own quotes are escaped.
_ERROR = re.compile(r'"error"\s*:\s*(?:"|\{(?:[^{}]*?"code"\s*:\s*"?(\d{3})\b)?)')


class ModelRename:
    """Replaces the model name `target` with the client's name `mine` in an answer that arrives in chunks.

    Only the member `model` of an answer, of an event, or of an event's `message` or `response` changes, and
    only if its value is `target`. All other bytes stay unchanged. If the end of a chunk may be the start of
    the member `model`, that end is held back until the next chunk. Events end with a line break, so complete
    events are never delayed. `charge` gets each chunk's units of work (grpc/connections.py). A chunk
    with too many tokens ends the renaming: brackets are a token each, while real text has a tenth of that.
    """

    def __init__(self, target: str, mine: str, charge: Callable[[int], object] = lambda work: None) -> None:
        self._charge, self._ended = charge, False
        self._spellings = (orjson.dumps(target), json.dumps(target).encode())
        self._mine = json.dumps(mine).encode()
        self._kept_back = b""
        self._depth = 0
        self._outer = self._inner = False  # whether the JSON container at depth 1, at 2, may have the model
        self._key, self._is_value = b"", False  # (the container's last key, whether its value comes next)
        self._in_string = self._line_ended = False
        self._events: bool | None = None  # whether the answer is a stream of events; None if not yet known

    def push(self, chunk: bytes, *, ended: bool) -> bytes:
        """Take a chunk. Returns the bytes to forward: if `ended`, also all bytes that were held back."""
        if self._ended:
            return chunk
        data, copied, at, tokens = self._kept_back + chunk, 0, 0, 0
        sent: list[bytes] = []
        if self._events is None and (begun := data.lstrip()):
            self._events = begun[:1] not in b"{["
        if self._line_ended and data.startswith((b"\n", b"\r\n")):
            self._bracket(b"\n")
        self._line_ended = data.endswith((b"\n", b"\n\r"))
        while tokens <= _FEW_TOKENS + at // _BYTES_A_TOKEN:
            tokens += 1
            if self._in_string:
                rest = _REST_OF_STRING.match(data, at)
                assert rest is not None, "_REST_OF_STRING matches the empty string"
                at = rest.end()
                self._in_string = rest[1] is None and data[at : at + 2] in _CUT
                if self._in_string:
                    break
            if not self._is_watched and (skipped := _NO_BRACKETS.match(data, at)) is not None:
                at = skipped.end()
            token = _TOKEN.search(data, at)
            between = data[at : len(data) if token is None else token.start()]
            if b"," in between:
                self._key, self._is_value = b"", False
            elif b":" in between:
                self._is_value = True
            if token is None:
                at = len(data)
                break
            start, at = token.span()
            text = token[0]
            if text[:1] != b'"':
                self._bracket(text)
                continue
            whole, cut = token[1] is not None, token[1] is None and data[at : at + 2] in _CUT
            if self._is_watched:
                is_value = self._is_value and self._key != b""
                looked_for: tuple[bytes, ...] = (_MODEL, *_INNER)
                if is_value:
                    looked_for = self._spellings if self._key == _MODEL else ()
                if cut and any(name.startswith(text) for name in looked_for):
                    at = start
                    break
                if is_value and whole and text in looked_for:
                    sent += (data[copied:start], self._mine)
                    copied = at
                self._key, self._is_value = (b"" if is_value else text), False
            if cut:
                self._in_string = True
                break
        else:
            self._ended = True
        self._charge(tokens // _TOKENS_A_UNIT)
        if ended or self._ended:
            at = len(data)
        sent.append(data[copied:at])
        self._kept_back = data[at:]
        return b"".join(sent)

    @property
    def _is_watched(self) -> bool:
        """Whether a member of the current JSON container may be the model, or may contain the model."""
        return (self._depth == 1 and self._outer) or (self._depth == 2 and self._inner)

    def _bracket(self, text: bytes) -> None:
        """Track the depth in the JSON text: brackets start or end containers; a blank line ends an event."""
        if text[:1] in b"{[":
            if self._depth == 0:
                self._outer = text[:1] == b"{"
            if self._depth + len(text) >= 2 and self._depth < 2:
                self._inner = self._depth == 1 and self._outer and text[:1] == b"{" and self._is_value
                self._inner = self._inner and self._key in _INNER
            self._depth += len(text)
        elif text[:1] in b"}]":
            self._depth = max(self._depth - len(text), 0)
        elif self._events:
            self._depth = 0
        else:
            return
        self._key, self._is_value = b"", False


# JSON members that contain or report token counts in the answers of OpenAI, Anthropic, Cohere, Gemini,
# Bedrock, TGI, SGLang, Ollama and llama.cpp. Prompt tokens exclude tokens _WRITTEN to a cache and tokens
# _READ from a cache, but include _CACHED tokens.
_HOLDS, _PROMPT, _COMPLETION, _TOTAL, _WRITTEN, _READ, _CACHED = range(7)
_NAMES: Final = {
    _HOLDS: (
        "usage", "message", "response", "usageMetadata", "meta_info", "details", "meta", "tokens",
        "billed_units", "prompt_tokens_details", "input_tokens_details",
    ),
    _PROMPT: (
        "prompt_tokens", "input_tokens", "inputTokens", "promptTokenCount", "prompt_eval_count",
        "tokens_evaluated", "input_length",
    ),
    _COMPLETION: (
        "completion_tokens", "output_tokens", "outputTokens", "candidatesTokenCount", "eval_count",
        "tokens_predicted", "generated_tokens",
    ),
    _TOTAL: ("total_tokens", "totalTokens", "totalTokenCount"),
    _WRITTEN: ("cache_creation_input_tokens", "cacheWriteInputTokens"),
    _READ: ("cache_read_input_tokens", "cacheReadInputTokens"),
    _CACHED: ("cached_tokens",),
}  # fmt: skip
_KINDS: Final = {name: kind for kind, names in _NAMES.items() for name in names}
_MOST_NESTED = 3  # Cohere: {"usage": {"tokens": {…}}}; Responses API: {"response": {"usage": {…}}}
# Names of JSON members that contain usage, the most frequent name first.
_MARKS: Final = tuple(b'"%s"' % name.encode() for name in (
    "usage", "usageMetadata", "meta_info", "details", "meta", "eval_count", "tokens_predicted",
))  # fmt: skip
_Members = only(_KINDS)
_members: msgspec.json.Decoder[Mapping[str, msgspec.Raw]] = msgspec.json.Decoder(_Members)
_listed = msgspec.json.Decoder(list[msgspec.Raw])
_PREFIX = json.JSONDecoder()

# The numbers of prompt tokens, completion tokens and cached prompt tokens; None if unknown.
Counts = tuple[int | None, int | None, int | None]
_UNKNOWN: Final[Counts] = (None, None, None)


class UsageReader:
    """Reads the token counts that an answer reports.

    The reader keeps the answer's end (and at most one chunk more), which usually has the usage, and the
    answer's first 4 KiB, for servers that report usage before a long text. If the answer is plain JSON, the
    reader also keeps the last usage between these two parts. The reader parses the kept text once, after the
    answer's end, so the cost does not grow with the number of chunks. If the reader has not kept the whole
    answer, it parses only a few excerpts of a few KiB.
    """

    def __init__(self) -> None:
        self.total = 0  # bytes of the answer received so far
        self._head = self._between = b""
        self._chunks: deque[bytes] = deque()
        self._size, self._most = 0, 0
        self._is_json = self._is_encoded = False
        self._inflate: Any = None
        self._inflated_bytes = 0

    def encoded(self, encoding: bytes) -> None:
        """Set the answer's content-encoding. If it is not gzip or deflate, the reader finds no usage."""
        if encoding.strip().lower() in (b"gzip", b"x-gzip", b"deflate"):
            self._is_encoded = True
            self._inflate = zlib.decompressobj(32 + zlib.MAX_WBITS)

    def add(self, chunk: bytes) -> bytes:
        """Read the next chunk of the answer, and return it decoded."""
        self.total += len(chunk)
        if self._is_encoded and not (chunk := self._inflated(chunk)):
            return b""
        if len(self._head) < _HEAD_BYTES:
            self._head += chunk[: _HEAD_BYTES - len(self._head)]
            if not self._most and (begun := self._head.lstrip()):
                self._is_json = begun[:1] in b"{["
                self._most = _WHOLE_BYTES if self._is_json else _TAIL_BYTES
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) >= self._most and len(self._chunks) > 1:
            passed = self._chunks.popleft()
            self._size -= len(passed)
            if self._is_json:
                window = passed + self._chunks[0][:_USAGE_BYTES]
                if (at := window.rfind(_MARKS[0])) >= 0:
                    self._between = window[at : at + _USAGE_BYTES]
        return chunk

    def tells_error(self) -> bool:
        """Whether an answer without usage reports an error other than a client error (4xx)."""
        tail = b"".join(self._chunks)[-_TAIL_BYTES:].decode(errors="replace")
        errors = list(_ERROR.finditer(tail))
        return bool(errors) and not (errors[-1][1] or "").startswith("4")

    def tokens(self) -> Counts:
        """The answer's prompt, completion and cached tokens; the highest counts that a stream reports."""
        kept = b"".join(self._chunks)
        if self._is_json and (found := _of_answer(kept)) != _UNKNOWN:
            return found
        found = _last_in(kept)
        if b'"message_start"' in self._head:  # Anthropic's API reports the prompt first
            found = _most(found, _last_in(self._head))
        for text in (self._between, self._head):
            if found == _UNKNOWN:
                found = _last_in(text)
        return found

    def _inflated(self, chunk: bytes) -> bytes:
        """The decoded chunk; empty once a chunk could not be decoded or yielded too many bytes."""
        if self._inflate is None:
            return b""
        try:
            inflated: bytes = self._inflate.decompress(chunk, _MOST_INFLATED_BYTES)
        except zlib.error:
            self._inflate = None
            return b""
        self._inflated_bytes += len(inflated)
        most_bytes = _MOST_INFLATED_BYTES + _MOST_INFLATION * self.total
        if self._inflate.unconsumed_tail or self._inflated_bytes > most_bytes:
            self._inflate = None
        return inflated


def _last_in(text: bytes) -> Counts:
    """Token counts in the last events or lines of `text` that have usage, even in those that are cut off."""
    found = _UNKNOWN
    for mark in _MARKS:
        if mark is not _MARKS[0]:
            text = text[-_USAGE_BYTES:]  # servers that use the less frequent names put usage at the end
        at, unreadable = len(text), -1
        for _ in range(_FEW):
            at = text.rfind(mark, 0, at)
            if at < 0:
                break
            start = text.rfind(b"\n", 0, at) + 1
            if start != unreadable:
                end = text.find(b"\n", at)
                line = text[start : end if end >= 0 else len(text)].strip().removeprefix(b"data:")
                counts = _of_members(line)
                if counts is None:
                    unreadable = start
            if start == unreadable:
                # A line feed is never part of a JSON string, so one before `data:` continues an event.
                counts = _of_place(text[at : at + _USAGE_BYTES].replace(b"\ndata:", b"\n"))
            else:
                at = start
            found = _most(found, counts or _UNKNOWN)
            if found[0] and found[1] is not None:
                return found
        if found != _UNKNOWN:
            return found
    return found


def _of_answer(text: bytes) -> Counts:
    """Token counts of a whole JSON answer: an object, or a list of objects, whose counts are summed."""
    if text.lstrip()[:1] != b"[":
        return _of_members(text) or _UNKNOWN
    try:
        listed = _listed.decode(text)
    except MALFORMED:
        return _UNKNOWN
    answers = [_of_members(each) or _UNKNOWN for each in listed] if len(listed) <= _MOST_ANSWERS else ()
    told = [[count for count in side if count is not None] for side in zip(*answers, strict=True)]
    prompt, completion, cached = (sum(side) if side else None for side in told or ((), (), ()))
    return prompt, completion, cached


def _of_members(text: bytes | msgspec.Raw, nested: int = 0) -> Counts | None:
    """Token counts in the JSON object `text`; None if `text` is no JSON object."""
    try:
        return _of_object(_members.decode(text), nested)
    except MALFORMED:
        return None


def _of_object(members: Mapping[str, msgspec.Raw], nested: int = 0) -> Counts:
    told: list[int | None] = [None] * 7
    found = _UNKNOWN
    for name, text in members.items():
        kind = _KINDS[name]
        if kind is _HOLDS:
            if nested < _MOST_NESTED:
                found = _most(found, _of_members(text, nested + 1) or _UNKNOWN)
        elif (count := _count(bytes(text))) is not None:
            told[kind] = count if (before := told[kind]) is None else before + count
    _, prompt, completion, total, written, read, cached = told
    if total is not None:
        prompt = max(total - (completion or 0), 0) if prompt is None else prompt
        completion = max(total - prompt, 0) if completion is None else completion
    elif read is not None or written is not None:  # Anthropic and Bedrock report cached tokens separately
        prompt = (prompt or 0) + (read or 0) + (written or 0)
    return _most(found, (prompt, completion, read if cached is None else cached))


def _of_place(text: bytes) -> Counts:
    """Token counts in the JSON member with which `text` begins; other text may follow the member."""
    name, _, value = text.partition(b":")
    try:
        decoded, _ = _PREFIX.raw_decode(value.decode(errors="replace").lstrip())
        return _of_members(b"{%s:%s}" % (name, orjson.dumps(decoded))) or _UNKNOWN
    except (ValueError, RecursionError, orjson.JSONEncodeError):
        return _UNKNOWN


def _most(one: Counts, other: Counts) -> Counts:
    if one == _UNKNOWN:
        return other
    if other == _UNKNOWN:
        return one
    prompt, completion, cached = (
        max((count for count in counts if count is not None), default=None)
        for counts in zip(one, other, strict=True)
    )
    return prompt, completion, cached


def _count(digits: bytes) -> int | None:
    if digits.isdigit() and len(digits) <= _MOST_DIGITS and (count := int(digits)) <= _MAX_TOKENS:
        return count
    return None


class _Named(msgspec.Struct):
    id: str = ""


class _State(msgspec.Struct):
    """Members of an answer of the Responses API, or of one of its events."""

    id: str = ""
    conversation: _Named | str | None = None
    response: "_State | None" = None

    @property
    def ids(self) -> tuple[str, ...]:
        if self.response is not None:
            return self.response.ids
        conversation = self.conversation.id if isinstance(self.conversation, _Named) else self.conversation
        return tuple(filter(None, (self.id, conversation)))


_state = msgspec.json.Decoder(_State)
_MOST_STATE_BYTES = 1024 * 1024  # maximum bytes of an answer to search for ids of stored state
_FIRST_EVENTS = 8
_DATA = b"\ndata:"


class StateIds:
    """Reads the ids of stored state: from a complete JSON answer, or from the first events of a stream."""

    def __init__(self) -> None:
        self._kept: list[bytes] | None = []  # the text to search for ids; None once the search has ended
        self._is_json: bool | None = None
        self._size = self._events = 0

    def add(self, chunk: bytes, *, ended: bool) -> tuple[str, ...]:
        """Take an answer's next chunk. Returns the ids of stored state once they are known, else ()."""
        if self._kept is None:
            return ()
        self._kept.append(chunk)
        self._size += len(chunk)
        if self._is_json is None and (begun := chunk.lstrip()):
            self._is_json = begun[:1] == b"{"
        if self._size > _MOST_STATE_BYTES:
            self._kept = None
            return ()
        if not ended and (self._is_json or b"\n" not in chunk):
            return ()
        text = b"".join((b"\n", *self._kept))
        self._kept = None if ended else [text[text.rfind(b"\n") + 1 :]]
        if self._is_json:
            return _ids_of(text)
        at = text.find(_DATA)
        while at >= 0:
            start, at = at + len(_DATA), text.find(b"\n", at + 1)
            if at < 0 and not ended:
                break
            self._events += 1
            ids = _ids_of(text[start : at if at >= 0 else len(text)])
            if ids or self._events == _FIRST_EVENTS:
                self._kept = None
                return ids
            at = text.find(_DATA, at) if at >= 0 else at
        return ()


def _ids_of(text: bytes) -> tuple[str, ...]:
    try:
        return _state.decode(text).ids
    except MALFORMED:
        return ()


class Response:
    """Forwards one model server's response and settles its request exactly once (G6).

    A request without admission, or whose placement was withdrawn, is not settled. `rename` restores the
    client's model name; None if the picker did not change the model's name. `note_ids` is called with the
    ids of stored state in the answer and the endpoint that served.
    """

    def __init__(
        self,
        context: ExchangeContext,
        decision: Decision,
        rename: ModelRename | None,
        note_ids: Callable[[Sequence[str], str], object] | None,
    ) -> None:
        self.ended = False
        self._settings = context.settings.extproc
        self._quota = decision.quota_headers()
        self._replaced = quota_headers.NAMES if context.settings.tenants is not None else ()
        self._gate, self._clock = context.gate, context.clock
        self._decision, self._placement = decision, decision.placement
        self._picked = "" if self._placement is None else self._placement.endpoints[0]
        self._rename = rename
        self._status = 0
        self._hold_s, self._content_type = 0.0, b""
        self._served: str | None = None
        self._first_byte_s: float | None = None
        self._ttft_s: float | None = None
        self._usage = UsageReader()
        self._note_ids = note_ids
        self._ids = StateIds() if note_ids is not None else None

    def pass_on(self, part: str, message: Any) -> list[bytes]:
        """Answer one message about the response; `part` names the message's kind, such as `response_body`."""
        if part == "response_body":
            return self._chunk(message.response_body)
        if part == "response_headers":
            return self._headers(message)
        rest = self._rename.push(b"", ended=True) if self._rename is not None else b""
        self._end(Outcome.COMPLETED)
        trailers = [codec.RESPONSE_TRAILERS]
        return [codec.response_body(rest, ended=False), *trailers] if rest else trailers

    def cut(self) -> None:
        """Settle a response whose stream ended early: the client left, or Envoy gave up."""
        self._end(Outcome.CLIENT_GONE)

    def _headers(self, message: Any) -> list[bytes]:
        headers = message.response_headers
        self._first_byte_s = self._clock() - self._decision.began_s
        found = codec.read_headers(headers, _WANTED)
        status = found.get(_STATUS, b"")
        self._status = int(status) if status.isdigit() and len(status) == 3 else 0
        self._content_type = found.get(_CONTENT_TYPE, b"")
        if _RETRY_AFTER in found:
            self._hold_s = hold_of(found[_RETRY_AFTER].decode(errors="replace"))
        # Envoy names, in this metadata namespace, the endpoint that served.
        namespace, placement = self._settings.metadata_namespace, self._placement
        served = codec.read_metadata(message, namespace, SERVED)
        self._served = served if isinstance(served, str) and served else None
        added = {
            SESSION_HEADER: "" if placement is None else placement.session,
            PRESSURE: self._decision.pressure,
            **self._quota,
        }
        if self._settings.conformance:
            named = namespace in message.metadata_context.filter_metadata
            missing = "destination endpoint served metadata" if named else "envoy lb metadata"
            added[codec.TEST_SERVED] = self._served or f"fail: missing {missing}"
        if _ENCODING in found and found[_ENCODING].strip().lower() not in _UNCOMPRESSED:
            self._rename = None  # the picker cannot find model names in compressed text
            self._usage.encoded(found[_ENCODING])
        if headers.end_of_stream:
            self._end(Outcome.COMPLETED)
        removed = [name for name in self._replaced if name not in added]
        return [codec.response_headers(added, removed=removed, sized=self._rename is None)]

    def _chunk(self, part: Any) -> list[bytes]:
        body, ended = part.body, part.end_of_stream
        decoded = self._usage.add(body) if body else b""  # most answers end with an empty chunk
        if body and self._status == 200 and self._decision.request is not None:
            self._gate.ledger.grow(self._decision.request.id, self._usage.total)
        if self._ttft_s is None and body:
            self._ttft_s = self._clock() - self._decision.placed_s
            if self._placement is not None and self._placement.prefillers:
                assert self._decision.request is not None, "only an admitted request has a prefill endpoint"
                self._gate.prefilled(self._decision.request.id)
        if self._ids is not None and (ids := self._ids.add(decoded, ended=ended)) and self._status < 300:
            assert self._note_ids is not None
            self._note_ids(ids, self._served or self._picked)
        if self._rename is not None:
            body = self._rename.push(body, ended=ended)
        if ended:
            self._end(Outcome.COMPLETED)
        return [codec.response_body(body, ended=ended)]

    def _end(self, outcome: Outcome) -> None:
        if self.ended:
            return
        self.ended = True
        decision, placement = self._decision, self._placement
        if placement is None or decision.request is None:
            return
        ended_s = self._clock()
        prompt_tokens, completion_tokens, cached_tokens = self._usage.tokens()
        fault, content_type = "", self._content_type.decode(errors="replace")
        has_usage = prompt_tokens is not None or completion_tokens is not None
        if outcome is Outcome.COMPLETED and not (has_usage and self._status == 200):
            error = not has_usage and self._usage.tells_error()
            size = None if has_usage else self._usage.total
            fault = fault_of(self._status, size, error, content_type)
        self._gate.settle(
            Completion(
                id=decision.request.id,
                outcome=Outcome.UPSTREAM_FAILED if fault_of(self._status) else outcome,
                status=self._status,
                served=self._served,
                prompt_tokens=prompt_tokens,
                completion_tokens=completion_tokens,
                duration_s=ended_s - decision.began_s,
                first_byte_s=self._first_byte_s,
                service_s=ended_s - decision.placed_s,
                waited_s=placement.waited_s,
                target_model=decision.target_model,
                fault=fault,
                hold_s=self._hold_s,
                passed_over=self._picked if self._served not in (None, self._picked) else "",
                ttft_s=self._ttft_s,
                cached_tokens=cached_tokens,
                path=decision.path.decode(errors="replace"),
                content_type=content_type,
                body_bytes=self._usage.total,
            )
        )
