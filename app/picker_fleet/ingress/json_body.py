"""Reads JSON bodies that are too large, or too unusual, to be decoded whole. intake.py calls this module.

The class `Body` parses the members of the outermost object, and changes the model in the body's text;
`prompt_prefix` hashes the blocks of a prompt.
"""

import enum
import re
import secrets
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

import msgspec

from picker_fleet.domain.errors import MALFORMED, BadRequest
from picker_fleet.domain.units import MAX_NAME_BYTES
from picker_fleet.ingress import cost, media
from picker_fleet.ingress.bodies import OtherBody
from picker_fleet.scheduling.endpoint_history import PROMPT_MEMBERS, block_hashes, prompt_bytes

MODEL = "model"
LONGEST_NAME = 6 * MAX_NAME_BYTES + 2  # length of a quoted name in which each byte is a `\u` escape
MAX_KEYS = 256  # maximum keys in the outermost object; the OpenAI API defines about fifty
MAX_KEY_CHARS = 256
SMALL_BYTES = 4096  # decode only smaller bodies whole: objects may take thirty times as much memory

_SALT_BYTES = 1024
_BACKSLASH = ord("\\")
_FEW_MARKS = 32  # examine this many quotation marks in every body
_BYTES_A_MARK = 512  # examine more quotation marks only while their mean distance exceeds this many bytes
_PLACEHOLDER = b"x" * (LONGEST_NAME + 1)  # replaces a long string; too long to be a valid name
_ASCII_ONLY = bytes(range(128)) + b"?" * 128
_KEY = re.compile(rb'[ \t\n\r]*[{,][ \t\n\r]*"[^"\\]*(?:\\.[^"\\]*)*"[ \t\n\r]*:[ \t\n\r]*')

_USED = frozenset((
    MODEL, "stream", *cost.MAX_ANSWER, *PROMPT_MEMBERS, "cache_salt",
))  # fmt: skip

# Matches the `\u` escape of a lone surrogate, which Python's JSON reader and others accept. The text must
# have no escaped backslashes, which `without_half_pairs` replaces first.
_HALF_PAIR = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|[c-fC-F][0-9a-fA-F]{2}(?<!\\u[dD][89abAB]..\\u[dD][c-fC-F]..))",
    re.DOTALL,
)
_MOST_HALF_PAIRS = 64
_MOST_ESCAPES = 250_000  # to examine this many `\\u` escapes takes up to 20 ms

# Decodes those members of a simple body (`intake.Ask`) that make up the prompt.
_prompt_decoder: msgspec.json.Decoder[Mapping[str, msgspec.Raw]] = msgspec.json.Decoder(
    media.only((*PROMPT_MEMBERS, "cache_salt"))
)

_keys: list[str] = []  # keys of the body being decoded; one list suffices, since decoding never awaits


class _Key(enum.Enum):
    """An enum whose members stand for a body's first, second, … key, whatever names the keys have."""

    __hash__ = object.__hash__  # the hash of Enum itself would double the time of decoding

    @classmethod
    def _missing_(cls, key: str) -> Any:  # type: ignore[override]
        """The enum member for the next key. Key MAX_KEYS + 1 raises IndexError, which ends the decoding."""
        _keys.append(key)
        return _NTH[len(_keys) - 1]


_UNGUESSABLE = secrets.token_hex(16)
_functional: Any = _Key
_NTH: tuple[Any, ...] = tuple(
    _functional("_NthKey", [(f"nth_{nth}", f"{_UNGUESSABLE}.{nth}") for nth in range(MAX_KEYS)])
)
_decoder = msgspec.json.Decoder(dict[type(_NTH[0]), msgspec.Raw])  # type: ignore[misc]


def without_long_strings(text: bytes) -> bytes:
    """The JSON `text` with each long string replaced by a placeholder; `text` itself without long strings.

    Intake reads only short values of a request's body. A parser takes 250 µs for a prompt of 400 KB; finding
    the end of that string takes 4 µs. Examining a quotation mark takes as long as parsing 500 bytes, so a
    text with denser quotation marks is kept from there on.
    """
    kept: list[bytes] = []
    copied, marks, in_string = 0, 0, True
    mark, end = -1, text.find(b'"')
    while end >= 0 and (marks <= _FEW_MARKS or end > marks * _BYTES_A_MARK):
        mark, end, marks = end, text.find(b'"', end + 1), marks + 1
        if not in_string:
            in_string = True  # JSON has backslashes only in strings, so this quotation mark begins a string
            continue
        part = text[mark + 1 : end] if text[end - 1] == _BACKSLASH else b""
        in_string = (len(part) - len(part.rstrip(b"\\"))) % 2 == 1  # an escaped quote does not end a string
        if end - mark > LONGEST_NAME:
            kept += (text[copied : mark + 1], _PLACEHOLDER, b"\\" if in_string else b"")
            copied = end
    return b"".join((*kept, text[copied:])) if kept else text


def without_half_pairs(text: bytes) -> bytes:
    """JSON `text`, of the same length, with its first `_MOST_HALF_PAIRS` lone surrogates made U+FFFD; `text`
    itself if it has too many escapes."""
    if b"\0" in text or not 0 < text.count(b"\\u") <= _MOST_ESCAPES:
        return text
    plain = text.replace(rb"\\", b"\0\0")
    return _HALF_PAIR.sub(rb"\\ufffd", plain, _MOST_HALF_PAIRS).replace(b"\0\0", rb"\\")


def check_json(text: bytes) -> None:
    """Raises:
    BadRequest: the body `text` is not valid JSON.
    """
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as malformed:
        raise BadRequest(f"the body is not valid JSON: {malformed}") from None
    except RecursionError:
        raise BadRequest("the body is not valid JSON: it is nested too deeply") from None


class Body:
    """The members of a JSON body, parsed on first access; nested values stay JSON text.

    The decoder reports each key of the outermost object in order and returns each value as its raw bytes; it
    validates and skips nested values, so parsing takes about the body's size in memory at any depth. A body
    that repeats a key which the picker reads is refused: the server might use the other value and run another
    model. A body of `large_bytes` or more is parsed from an ASCII-only copy: a single non-ASCII character can
    make Python store a huge key with four bytes a character.
    """

    __slots__ = ("_keys", "_large_bytes", "_texts", "_values", "text")

    def __init__(self, text: bytes, large_bytes: int = 1024 * 1024) -> None:
        self.text, self._large_bytes = text, large_bytes
        self._values: Mapping[str, msgspec.Raw | memoryview] | None = None

    @property
    def values(self) -> Mapping[str, msgspec.Raw | memoryview]:
        """The JSON text of each key's value. The text may contain invalid UTF-8, which the caller must check.

        Raises:
            BadRequest: the body is no JSON object, has too many keys, or repeats a key that the picker reads.
        """
        if self._values is None:
            self._values = self._read(self.text)
        return self._values

    def _read(self, text: bytes) -> Mapping[str, msgspec.Raw | memoryview]:
        if not text:
            raise BadRequest("the body is empty; a JSON object with a model is needed")
        plain = len(text) < self._large_bytes or text.isascii()
        _keys.clear()
        try:
            texts = _decoder.decode(text if plain else text.translate(_ASCII_ONLY)).values()
        except msgspec.ValidationError:
            fault = f"has more than {MAX_KEYS} keys" if len(_keys) > MAX_KEYS else "must be a JSON object"
            raise BadRequest(f"the body {fault}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as malformed:
            raise BadRequest(f"the body is not valid JSON: {malformed}") from None
        except RecursionError:
            raise BadRequest("the body is not valid JSON: it is nested too deeply") from None
        self._keys = _keys.copy()
        self._texts: Collection[msgspec.Raw | memoryview] = texts
        if not plain:
            starts = self._starts(len(texts))
            whole = memoryview(text)
            texts = [whole[at : at + len(value)] for at, value in zip(starts, texts, strict=True)]
        values = dict(zip(self._keys, texts, strict=True))
        if len(values) < len(self._keys):
            for key in _USED & values.keys():
                if self._keys.count(key) > 1:
                    raise BadRequest(f"the body has {key} twice")
        return values

    def __len__(self) -> int:
        return len(self.text)

    def with_model(self, name: bytes) -> bytes:
        """The body with its model replaced by the JSON text `name` and all other bytes unchanged.

        Raises:
            BadRequest: the body has a key longer than MAX_KEY_CHARS.
        """
        if MODEL not in self.values:
            start = self.text.index(b"{") + 1
            more = b"," if self._keys else b""
            return b"".join((self.text[:start], b'"model":', name, more, memoryview(self.text)[start:]))
        size_bytes = len(self.values[MODEL])
        start = self._starts(self._keys.index(MODEL) + 1)[-1]
        text = memoryview(self.text)
        return b"".join((text[:start], name, text[start + size_bytes :]))

    def _starts(self, count: int) -> list[int]:
        """The byte offsets of the first `count` values."""
        if max(map(len, self._keys), default=0) > MAX_KEY_CHARS:
            raise BadRequest(f"the body has a key of more than {MAX_KEY_CHARS} characters")
        starts = []
        end = 0
        for value in islice(self._texts, count):
            key = _KEY.match(self.text, end)
            assert key is not None, "the decoder has read a key at this offset"
            starts.append(key.end())
            end = key.end() + len(value)
        return starts


def prompt_prefix(target_model: str, read: "Body | OtherBody | bytes") -> tuple[bytes, ...]:
    """The hashes of the prompt's blocks; no hashes for invalid JSON, which the model server refuses."""
    try:
        members = _prompt_decoder.decode(read) if isinstance(read, bytes) else read.values
    except MALFORMED:
        try:
            members = _prompt_decoder.decode(
                without_half_pairs(read if isinstance(read, bytes) else read.text)
            )
        except MALFORMED:
            return ()
    salt = bytes(memoryview(members["cache_salt"])[:_SALT_BYTES]) if "cache_salt" in members else b""
    return block_hashes(target_model, prompt_bytes(members), salt=salt)
