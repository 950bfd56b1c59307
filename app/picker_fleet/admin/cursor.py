"""Where a list goes on: opaque to its reader, checked when it comes back."""

import base64
import binascii
import math

import orjson

from picker_fleet.errors import BadRequest

_MOST_CHARS = 4096


class BadCursor(BadRequest):
    """A cursor that no answer of this list has given."""

    code = "bad_cursor"

    def __init__(self) -> None:
        super().__init__(
            "cursor: not one that this list gave; take `cursor` of the page before, or leave it out"
        )


def encode(name: str, *parts: str | int | float) -> str:
    """The cursor of the list called `name`, whose place is `parts`."""
    return base64.urlsafe_b64encode(orjson.dumps([name, *parts])).rstrip(b"=").decode()


def decode(text: str, name: str, *kinds: type) -> list[str | int | float]:
    """The parts that `encode` was given, of exactly these kinds; an int is not negative, a float finite.

    Raises:
        BadCursor: `text` is not of this list.
    """
    if len(text) > _MOST_CHARS:
        raise BadCursor
    try:
        packed = base64.b64decode(text.encode() + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
        told = orjson.loads(packed)
    except (binascii.Error, ValueError):  # UnicodeError and orjson's own are ValueErrors
        raise BadCursor from None
    if not isinstance(told, list) or len(told) != len(kinds) + 1 or told[0] != name:
        raise BadCursor
    for part, kind in zip(told[1:], kinds, strict=True):
        if type(part) is not kind:
            raise BadCursor
        if isinstance(part, int) and not 0 <= part < 2**63:
            raise BadCursor
    return told[1:]


def finite(text: object) -> str:
    """`text` if it spells a finite number, as a score of Redis does. Raises BadCursor if not."""
    try:
        if isinstance(text, str) and text.isascii() and math.isfinite(float(text)) and "_" not in text:
            return text.strip()
    except ValueError:
        pass
    raise BadCursor
