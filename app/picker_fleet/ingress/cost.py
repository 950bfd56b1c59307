"""Estimates a request's cost from its body: in sequences if the stock counts requests, else in tokens. Pure.

A prompt's text costs base + slope · size tokens: lua/lib/usage.lua fits this line for each model to the usage
that engines report. `_text_size` gives the size: each letter, blank and non-ASCII byte of the text counts 1,
each other byte 2, since tokenizers split texts at digits and punctuation. Fields outside the prompt do not
count. The JSON around a message counts, since a chat template adds about as many tokens to each message.

An engine runs one sequence for each answer to each prompt of a request. The picker counts JSON members with
prompts, or with a number of answers, on all paths, even where an engine ignores such a member.
A client could claim a false cost. So a request takes at most a share of the stock's bound, the model's
`max_model_len` bounds the cost, and `settle` corrects the cost if the engine reports its usage.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import msgspec
import orjson

from picker_fleet.domain.request import UNLEARNED, PromptLine, finite_number
from picker_fleet.domain.units import MOST_COST
from picker_fleet.ingress import media
from picker_fleet.scheduling.endpoint_history import PROMPT_MEMBERS

_ANSWERS: Final = {"n", "best_of", "num_return_sequences", "candidateCount"}
# JSON members that limit the answer's length. Engines read different members, so the largest number counts.
MAX_ANSWER: Final = {
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "num_predict"),
    *("max_tokens_to_sample", "maxOutputTokens", "maxTokens"),
}
_SECTIONS: Final = {
    *("sampling_params", "parameters", "options", "generationConfig", "generation_config"),
    "inferenceConfig",
}
PROMPTS: Final = ("messages", "prompt", "input")  # the most common members with prompts
_MORE_PROMPTS: Final = (
    *("prompts", "inputs", "texts", "text", "text_1", "text_2", "queries", "documents"),
    *("input_ids", "prompt_ids", "prompt_token_ids", "token_ids", "tokens"),
)
_ALL_PROMPTS: Final = (*PROMPTS, *_MORE_PROMPTS)
_OBJECTS_ARE_PROMPTS: Final = ("documents", "queries")  # in other members, objects are parts of one prompt
SEVERAL: Final = frozenset((*_ANSWERS, *_SECTIONS, *_MORE_PROMPTS))  # members that may request more sequences

_MOST_SEQUENCES = 1_000_000
_MOST_ANSWER_TOKENS = 1_000_000
_MOST_PARSED_BYTES = 64 * 1024  # count a longer list's elements without parsing it; ignore a longer section
_LONGEST_NUMBER = 400  # maximum bytes of a number in JSON: no finite number needs more

_IN_PROMPT = frozenset((*PROMPT_MEMBERS, *_ALL_PROMPTS, *media.MEMBERS, "query"))
_SAMPLE_BYTES = 1024  # the size of a longer body is estimated from this many bytes of its middle
_COUNTED_ONCE = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ " + bytes(range(128, 256))
_SIZE_OF_A_FIELD_BYTE = 1.3  # mean size (`_size`) of a byte in fields such as `"temperature":0.7,`
# Escaped characters that take two bytes in UTF-8, and escaped characters that mostly take three.
_ESCAPED_2, _ESCAPED_3 = re.compile(rb"\\u0[0-7][0-9a-fA-F]{2}"), re.compile(rb"\\u[0-9a-fA-F]{4}")

_FIRST = re.compile(rb"\[[ \t\r\n]*(.)", re.DOTALL)
_NUMBERS = re.compile(rb"\[[\[ \t\r\n]*+[0-9]")

_JSON_TEXTS = (msgspec.Raw, memoryview)  # a tuple, since each use of a type union would build an object
Members = Mapping[str, Any]  # a body's members, each decoded or a JSON text (msgspec.Raw, memoryview)


def sequences(members: Members) -> int:
    """The number of sequences that an engine runs: prompts times answers per prompt, from 1 to 1 000 000."""
    prompts = 1
    for name, text in _lists(members):
        prompts = max(prompts, _prompts_in(text, objects=name in _OBJECTS_ARE_PROMPTS))
    return int(min(prompts * max(1.0, _largest(members, _ANSWERS)), _MOST_SEQUENCES))


class Estimate(NamedTuple):
    """The estimated tokens of a request: of all its prompts, and of the answers of all its sequences.

    `lacks_answer`: `answer` is 0, since no estimate is known; the scripts add the mean answer. `prompt_size`
    is the size of the prompt's text; 0 if the engine's usage will count more than this text.
    """

    prompt: float
    answer: float
    lacks_answer: bool
    prompt_size: int


def tokens(
    body: bytes,
    size_bytes: int,
    members: Members,
    *,
    count: int,
    most: float,
    default: float,
    line: PromptLine = UNLEARNED,
    found: media.Found = media.NONE,
    is_one: bool = False,
) -> Estimate:
    """Estimate a request's tokens.

    `body` is b'' if only its length `size_bytes` is known; `found` are its media.
    `is_one`: the body has one prompt, which is text or chat messages, and no sections.
    `line` is the prompt line of the request's model. `count` is the number of sequences; `most` bounds the
    tokens (prompt and answer) of a sequence; `default` is the assumed length of each of several answers.
    """
    others = {name: value for name, value in members.items() if name not in _IN_PROMPT}
    longest = (_largest_in if is_one else _largest)(others, MAX_ANSWER)
    ids = 0
    for name, text in () if is_one else _lists(members):
        if _NUMBERS.match(text):
            others[name] = members[name]
            ids += text.count(b",") + 1
    size = _text_size(body, size_bytes, _length(others), found.size_bytes)
    if ids:  # the digits, and blanks between them, are no text
        texts = {name: value for name, value in members.items() if name not in others}
        size = min(size, _length(texts) * _SIZE_OF_A_FIELD_BYTE)
    # Use comparisons here: calls of min and max would take a tenth of this function's time.
    other_tokens, bound = ids + found.tokens, count * most
    bound = bound if bound < MOST_COST else MOST_COST
    prompt = line.tokens(size) + other_tokens
    prompt = prompt if prompt > 1 else 1.0
    prompt = prompt if prompt < bound else bound
    told = round(size) if count == 1 and members and not other_tokens else 0
    if longest < 1 and count == 1:
        return Estimate(prompt, 0.0, True, told)
    answer = count * (default if longest < 1 else int(min(longest, _MOST_ANSWER_TOKENS)))
    return Estimate(prompt, answer if answer < bound - prompt else bound - prompt, False, told)


def _lists(members: Members) -> Iterator[tuple[str, bytes]]:
    """The name and JSON text of each member that is a list of prompts or of numbers."""
    for name in _ALL_PROMPTS:
        value = members.get(name, "")
        if type(value) is str:
            continue
        if type(value) is list and value and type(value[0]) is dict and name not in _OBJECTS_ARE_PROMPTS:
            continue  # a list of chat messages counts as one prompt
        if (text := _json(value)).startswith(b"["):
            yield name, text


def _length(members: Members) -> int:
    """The bytes of the members' JSON text."""
    try:
        return len(orjson.dumps(members))
    except orjson.JSONEncodeError:  # the members are JSON texts
        return sum(len(name) + len('"":,') + len(value) for name, value in members.items())


def _text_size(body: bytes, size_bytes: int, apart_bytes: int, media_bytes: int) -> float:
    """The size of the prompt's text in `body`, without the `apart_bytes` of other fields and the
    `media_bytes` of media."""
    if not body:
        return max(size_bytes - media_bytes, 0)
    if len(body) <= _SAMPLE_BYTES:
        size = _size(body) - apart_bytes * _SIZE_OF_A_FIELD_BYTE - media_bytes
        return size if size > 0 else 0
    start = (len(body) - _SAMPLE_BYTES) // 2
    sample_size = _size(body[start : start + _SAMPLE_BYTES])
    return max(size_bytes - apart_bytes - media_bytes, 0) * sample_size / _SAMPLE_BYTES


def _size(text: bytes) -> int:
    """The size of JSON text: each byte counts 1, each digit or punctuation mark 2, each backslash 0."""
    counted_twice = text.translate(None, _COUNTED_ONCE)
    backslashes = counted_twice.count(b"\\")
    if backslashes and b"\\u" in text:
        text = _ESCAPED_3.sub(b"\xff" * 3, _ESCAPED_2.sub(b"\xff" * 2, text))
        counted_twice = text.translate(None, _COUNTED_ONCE)
        backslashes = counted_twice.count(b"\\")
    return len(text) + len(counted_twice) - 2 * backslashes


def _largest(members: Members, names: set[str]) -> float:
    """The largest number under any of `names` in `members` or in a section of `members`; 0 without any."""
    found = _largest_in(members, names)
    for section in _SECTIONS.intersection(members):
        value = members[section]
        if not isinstance(value, dict | list):
            text = _json(value)
            if len(text) > _MOST_PARSED_BYTES:
                continue
            value = _decoded(text)
        for each in value if isinstance(value, list) else (value,):  # SGLang: a section for each prompt
            if isinstance(each, dict):
                found = max(found, _largest_in(each, names))
    return found


def _largest_in(members: Members, names: set[str]) -> float:
    found = 0.0
    for name, value in members.items():
        if name in names:
            number = value if type(value) is int else _number(value)
            found = number if number > found else found
    return found


def _number(value: object) -> float:
    """`value` as a number; it may be quoted, as engines accept. 0 if it is no number."""
    if isinstance(value, _JSON_TEXTS):
        if len(text := bytes(value)) > _LONGEST_NUMBER:
            return 0.0
        value = _decoded(text)
    if isinstance(value, str) and len(value) <= _LONGEST_NUMBER:
        try:
            value = float(value)
        except ValueError:
            return 0.0
    return finite_number(value) or 0.0


def _decoded(text: bytes) -> Any:
    """The value of the JSON `text`; None if no reader takes it. Unlike intake's reader of bodies and Python's
    JSON reader, orjson refuses numbers beyond the largest float, and invalid UTF-8."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            return json.loads(text.decode(errors="replace"))
        except (ValueError, RecursionError):
            return None


def _json(value: object) -> bytes:
    """The JSON text of a body's member."""
    return bytes(value) if isinstance(value, _JSON_TEXTS) else orjson.dumps(value)


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
