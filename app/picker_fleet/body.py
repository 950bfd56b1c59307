"""The members of a request's JSON body, without building what is in them.

The decoder tells each key of the outermost object in its turn and gives every value as the bytes it was
written in; whatever is inside is checked to be JSON and passed over. So a body costs about its own size,
whatever it nests, and one whose used keys come twice is refused: whoever reads it after the picker, and takes
the other one, would run another model.

The keys come by `Enum._missing_`, which msgspec calls for each key that it cannot look up. Here that is every
key: what could be looked up are names made at random when the process starts. That takes 1 µs a key, which is
most of what a small body costs; so small bodies are built whole where nothing in them is in doubt
(`simple_members`; docs/decisions.md, 21).
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

# From here on a body is read through a copy without letters beyond ASCII: a key of its size with one such
# letter would take four bytes a letter.
_LARGE_BYTES = 1024 * 1024
_SMALL_BYTES = 4096  # what is in one may cost thirty times its size
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
    """Its members stand for the first, the second, … key of a body, whatever they are called."""

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
    """The members of a small body that has a model and no key twice, anywhere; None where that is in doubt.

    Written again it has as many quotes as it came with: a member that comes twice has been dropped, and its
    key's with it. A quote or a key may be spelt otherwise by `\\u` alone.
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
        """The JSON text of each key's value. Strings in it may be no UTF-8: whoever reads them finds that.

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
