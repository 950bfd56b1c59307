"""The members of a request's JSON body, without building what is in them.

The decoder reports each key of the outermost object in order and returns each value as its raw bytes; nested
values are validated and skipped. So a body costs about its own size, however deep it nests. A body that has a
used key twice is refused: a server that takes the other one would run another model.

msgspec calls `Enum._missing_` for each key that it cannot look up. Here that is every key, since the enum's
own names are random. That takes 1 µs a key, which is most of what a small body costs; so small bodies are
decoded whole where no key can be duplicated (`simple_members`; docs/decisions.md, 21). Called by intake.
"""

import enum
import re
import secrets
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any

import msgspec
import orjson

from picker_fleet.errors import BadRequest

MODEL = "model"
MAX_KEYS = 256  # of the outermost object; the OpenAI API knows about fifty
MAX_KEY_CHARS = 256

# A larger body is read through a copy that is ASCII only: a key of its size with one other letter would take
# four bytes a letter.
_LARGE_BYTES = 1024 * 1024
_SMALL_BYTES = 4096  # a decoded body may take thirty times its size
_PLAIN = bytes(range(128)) + b"?" * 128
_KEY = re.compile(rb'[ \t\n\r]*[{,][ \t\n\r]*"[^"\\]*(?:\\.[^"\\]*)*"[ \t\n\r]*:[ \t\n\r]*')

_USED = frozenset(
    (
        MODEL,
        "stream",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
        "messages",
        "prompt",
        "input",
        "tools",
        "functions",
        "instructions",
        "cache_salt",
    )
)
_keys: list[str] = []  # of the body that is being read: decoding is one step of the event loop


class _Key(enum.Enum):
    """Its members stand for the first, the second, … key of a body, whatever their names."""

    __hash__ = object.__hash__  # an Enum's own takes as long as all the rest

    @classmethod
    def _missing_(cls, key: str) -> Any:  # type: ignore[override]
        """The member for the next key of the body; one past the last ends the decoding."""
        _keys.append(key)
        return _NTH[len(_keys) - 1]


_UNGUESSABLE = secrets.token_hex(16)
_functional: Any = _Key
_NTH: tuple[Any, ...] = tuple(
    _functional("_NthKey", [(f"nth_{nth}", f"{_UNGUESSABLE}.{nth}") for nth in range(MAX_KEYS)])
)
_decoder = msgspec.json.Decoder(dict[type(_NTH[0]), msgspec.Raw])  # type: ignore[misc]


def simple_members(text: bytes) -> dict[str, Any] | None:
    """The members of a small body that has a model and no key twice at any depth; None if in doubt.

    Encoded again, such a body has as many quotes as before: a duplicated member is dropped with the quotes of
    its key. Only a `\\u` escape can spell a quote or a key otherwise.
    """
    if len(text) > _SMALL_BYTES or (b"\\" in text and b"\\u" in text):
        return None
    try:
        members = orjson.loads(text)
        again = orjson.dumps(members)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None
    if type(members) is not dict or len(members) > MAX_KEYS or MODEL not in members:
        return None
    return members if again.count(b'"') == text.count(b'"') else None


class Body:
    """A body's members, read when they are first asked for."""

    __slots__ = ("_keys", "_text", "_texts", "_values")

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._values: Mapping[str, msgspec.Raw | memoryview] | None = None

    @property
    def values(self) -> Mapping[str, msgspec.Raw | memoryview]:
        """The JSON text of each key's value. Strings in it may be invalid UTF-8; the reader checks.

        Raises:
            BadRequest: it is no JSON object, or one that is not to be read.
        """
        if self._values is None:
            self._values = self._read(self._text)
        return self._values

    def _read(self, text: bytes) -> Mapping[str, msgspec.Raw | memoryview]:
        if not text:
            raise BadRequest("the body is empty; a JSON object with a model is needed")
        plain = len(text) < _LARGE_BYTES or text.isascii()
        _keys.clear()
        try:
            texts = _decoder.decode(text if plain else text.translate(_PLAIN)).values()
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
        return len(self._text)

    def with_model(self, name: bytes) -> bytes:
        """The body with the JSON text `name` as its model, all else byte for byte as it was.

        Raises:
            BadRequest: it has a key that is too long to be passed over.
        """
        size_bytes = len(self.values[MODEL])
        start = self._starts(self._keys.index(MODEL) + 1)[-1]
        text = memoryview(self._text)
        return b"".join((text[:start], name, text[start + size_bytes :]))

    def _starts(self, count: int) -> list[int]:
        """Where each of the first `count` values begins."""
        if max(map(len, self._keys), default=0) > MAX_KEY_CHARS:
            raise BadRequest(f"the body has a key of more than {MAX_KEY_CHARS} characters")
        starts = []
        end = 0
        for value in islice(self._texts, count):
            key = _KEY.match(self._text, end)
            assert key is not None, "the decoder has read a key here"
            starts.append(key.end())
            end = key.end() + len(value)
        return starts
