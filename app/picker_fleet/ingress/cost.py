"""Estimates a request's cost from the body: in sequences if the stock counts requests, else in tokens. Pure.

An engine runs one sequence for each answer to each prompt of a request. Members with prompts or numbers of
answers count on all paths: an engine ignores an unknown member, but the picker charges for it.
The cost is a client's claim: a request takes at most a share of the stock's bound, the model's
`max_model_len` bounds the cost, and `settle` corrects the cost where the engine reports its usage.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypedDict

import msgspec
import orjson

from picker_fleet.domain.request import finite_number
from picker_fleet.domain.units import MOST_COST

MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # errors for invalid JSON

_ANSWERS: Final = ("n", "best_of", "num_return_sequences", "candidateCount")
# Members that limit the answer's length. Engines differ in the members that they read: the largest counts.
MAX_ANSWER: Final = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_predict"),
    *("max_tokens_to_sample", "maxOutputTokens", "maxTokens"),
)
_SECTIONS: Final = (
    *("sampling_params", "parameters", "options", "generationConfig", "generation_config"),
    "inferenceConfig",
)
PROMPTS: Final = ("messages", "prompt", "input")  # the most common members with prompts
_MORE_PROMPTS: Final = (
    *("prompts", "inputs", "texts", "text", "text_1", "text_2", "queries", "documents"),
    *("input_ids", "prompt_ids", "prompt_token_ids", "token_ids", "tokens"),
)
_ALL_PROMPTS: Final = (*PROMPTS, *_MORE_PROMPTS)
_OBJECTS_ARE_PROMPTS: Final = ("documents", "queries")  # elsewhere objects are parts of one prompt
SEVERAL: Final = frozenset((*_ANSWERS, *_SECTIONS, *_MORE_PROMPTS))  # members that may request more sequences

_MOST_SEQUENCES = 1_000_000
_MOST_ANSWER_TOKENS = 1_000_000
_MOST_PARSED_BYTES = 64 * 1024  # bytes; elements of longer lists are counted without parsing
_LONGEST_NUMBER = 400  # bytes of JSON: the longest finite number written out
_LONGEST_SECTION_BYTES = 64 * 1024

# A token is about four bytes of a JSON body, its field names included.
_BYTES_A_TOKEN = 4
# An image costs an engine a token per patch, whatever its size in bytes; audio and video cost tokens in
# proportion to their length.
_MEDIA_TOKENS = 1500
_MEDIA_BYTES_A_TOKEN = 1000
_MOST_OBJECTS = 10_000  # most objects of a body that is searched for media
_MEDIA_MARKS = (b"image", b"audio", b"video", b"base64", b"inline_data", b"inlineData")
_SHORT_BYTES = 4096
_WITH_MEDIA = ("messages", "input", "contents", "images", "image_data")
_PICTURES = frozenset(("image", "image_url", "image_embeds", "images", "image_data"))
_ENDS_BYTES = 256  # bytes at each end of a file's JSON text to search for its media type

_FIRST = re.compile(rb"\[[ \t\r\n]*(.)", re.DOTALL)
_NUMBERS = re.compile(rb"\[[\[ \t\r\n]*+[0-9]")

Members = Mapping[str, Any]  # a body's members, each decoded or a JSON text (msgspec.Raw, memoryview)


def sequences(members: Members) -> int:
    """The number of sequences that an engine runs: prompts times answers per prompt, from 1 to 1 000 000."""
    prompts = 1
    for name in _ALL_PROMPTS:
        if name in members and (text := _list(name, members[name])):
            prompts = max(prompts, _prompts_in(text, objects=name in _OBJECTS_ARE_PROMPTS))
    return int(min(prompts * max(1.0, _largest(members, _ANSWERS)), _MOST_SEQUENCES))


def tokens(body: bytes, size_bytes: int, members: Members, most: float, default: float) -> tuple[float, bool]:
    """The cost of a request in tokens, and whether the cost lacks the answer's tokens; then the scripts add
    the flow's mean answer. `body` is b'' if only the body's length `size_bytes` is known.

    `most` bounds the tokens of prompt plus answer in each sequence; `default` is the assumed length of each
    of several answers of unknown length.
    """
    count = sequences(members)
    answer = min(_largest(members, MAX_ANSWER), _MOST_ANSWER_TOKENS)
    prompt = _prompt_tokens(body, size_bytes, members)
    if answer < 1 and count == 1:
        return min(prompt, most), True
    return min(prompt + count * (int(answer) if answer >= 1 else default), count * most, MOST_COST), False


def _list(name: str, value: object) -> bytes:
    """The JSON text of the member `name` if it is a list of prompts or of numbers, else b''."""
    if type(value) is str:
        return b""
    if type(value) is list and value and type(value[0]) is dict and name not in _OBJECTS_ARE_PROMPTS:
        return b""  # a list of chat messages is one prompt
    text = _json(value)
    return text if text[:1] == b"[" else b""


def _prompt_tokens(body: bytes, size_bytes: int, members: Members) -> float:
    found = 0.0
    for name in _ALL_PROMPTS:
        if name in members and _NUMBERS.match(text := _list(name, members[name])):
            size_bytes -= len(text)
            found += text.count(b",") + 1
    if _may_have_media(body, members):
        media_bytes, media_tokens = _media(body)
        size_bytes -= media_bytes
        found += media_tokens
    return max(1.0, found + max(size_bytes, 0) / _BYTES_A_TOKEN)


def _may_have_media(body: bytes, members: Members) -> bool:
    """Whether the body may contain media. Of a long body only `members` are searched."""
    for name in _WITH_MEDIA:
        if name in members:
            text = body if len(body) <= _SHORT_BYTES else _json(members[name])
            if any(mark in text for mark in _MEDIA_MARKS):
                return body.count(b"{") <= _MOST_OBJECTS
    return False


def _largest(members: Members, names: tuple[str, ...]) -> float:
    """The largest number under any of `names`, in `members` or in sections of these; 0 if there is none."""
    found = _largest_in(members, names)
    for section in _SECTIONS:
        if section in members:
            value = members[section]
            if not isinstance(value, dict | list):
                text = _json(value)
                if len(text) > _LONGEST_SECTION_BYTES:
                    continue
                value = orjson.loads(text)
            for each in value if isinstance(value, list) else (value,):  # SGLang: a section for each prompt
                if isinstance(each, dict):
                    found = max(found, _largest_in(each, names))
    return found


def _largest_in(members: Members, names: tuple[str, ...]) -> float:
    found = 0.0
    for name in names:
        if name in members:
            value = members[name]
            found = max(found, value if type(value) is int else _number(value))
    return found


def _number(value: object) -> float:
    """The number `value`, which may be a quoted number, as engines accept; 0 for anything else."""
    if isinstance(value, msgspec.Raw | memoryview):
        if len(text := bytes(value)) > _LONGEST_NUMBER:
            return 0.0
        value = orjson.loads(text)
    if isinstance(value, str) and len(value) <= _LONGEST_NUMBER:
        try:
            value = float(value)
        except ValueError:
            return 0.0
    return finite_number(value) or 0.0


def _json(value: object) -> bytes:
    """The JSON text of a body's member."""
    return bytes(value) if isinstance(value, msgspec.Raw | memoryview) else orjson.dumps(value)


def _prompts_in(text: bytes, *, objects: bool) -> int:
    """The number of prompts in the JSON list `text`."""
    begun = _FIRST.match(text)
    first = begun[1] if begun is not None else b"]"
    if first.isdigit() or (first == b"{" and not objects):
        return 1
    if len(text) <= _MOST_PARSED_BYTES:
        return len(msgspec.json.decode(text, type=list[msgspec.Raw]))
    if first == b'"':  # each string has two unescaped quotes
        text = text.replace(b"\\\\", b"")
        return (text.count(b'"') - text.count(b'\\"')) // 2
    return text.count(first) - (first == b"[")


class _Part(TypedDict, total=False):
    """A part of a message's content in the APIs of OpenAI, Anthropic and Gemini."""

    type: str
    content: "str | list[_Part] | None"  # a part within a tool's result
    image: msgspec.Raw
    image_url: msgspec.Raw
    image_embeds: msgspec.Raw
    source: msgspec.Raw
    input_audio: msgspec.Raw
    audio: msgspec.Raw
    audio_url: msgspec.Raw
    video: msgspec.Raw
    video_url: msgspec.Raw
    file: msgspec.Raw
    file_data: msgspec.Raw
    inline_data: msgspec.Raw
    inlineData: msgspec.Raw


class _Message(_Part, total=False):
    parts: list[_Part]  # Gemini
    images: list[msgspec.Raw]  # Ollama


class _Prompted(TypedDict, total=False):
    messages: list[_Message]
    input: str | list[_Message]
    contents: list[_Message]
    images: list[msgspec.Raw]
    image_data: msgspec.Raw  # SGLang


_prompted = msgspec.json.Decoder(_Prompted)


def _media(body: bytes) -> tuple[int, float]:
    """The bytes of images, audio and video in a body, and their cost in tokens; or 0, 0 in another form."""
    try:
        prompted: Any = _prompted.decode(body)
    except MALFORMED:
        return 0, 0.0
    found: list[tuple[bool, int]] = []
    said = prompted.pop("input", ())
    _collect((prompted, *prompted.pop("messages", ()), *prompted.pop("contents", ())), found)
    if not isinstance(said, str):
        _collect(said, found)
    other_bytes = sum(size_bytes for is_picture, size_bytes in found if not is_picture)
    return sum(size for _, size in found), len(found) * _MEDIA_TOKENS + other_bytes / _MEDIA_BYTES_A_TOKEN


def _collect(parts: Iterable[Mapping[str, Any]], found: list[tuple[bool, int]]) -> None:
    """Add the media in `parts` to `found`: for each whether it is an image, and its length in bytes."""
    for part in parts:
        for name, value in part.items():
            if name in ("content", "parts") and isinstance(value, list):
                _collect(value, found)
            elif isinstance(value, list):
                found += ((True, len(bytes(each))) for each in value)
            elif isinstance(value, msgspec.Raw):
                text = bytes(value)
                ends = text[:_ENDS_BYTES] + text[-_ENDS_BYTES:]
                if b'"text"' not in ends:  # a document may be plain text
                    found.append((name in _PICTURES or b"image/" in ends, len(text)))
