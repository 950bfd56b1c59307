"""The client's own model name, put back into an answer whose request was sent under another."""

import json
import re

import orjson


class ModelRename:
    """Replaces `"model":"target"` by the client's name in an answer that comes in chunks.

    Only that exact field changes, with at most one space after its colon as servers write it, in plain JSON
    and in server-sent events alike. A chunk's end that may be the beginning of the field is kept back for
    the next one; an event ends with a line break, so whole events are never delayed.
    """

    __slots__ = ("_held", "_mine", "_pattern", "_spellings")

    def __init__(self, target: str, mine: str) -> None:
        names = {orjson.dumps(target), json.dumps(target).encode()}
        self._spellings = sorted(b'"model":' + space + name for name in names for space in (b"", b" "))
        self._pattern = re.compile(b"|".join(re.escape(spelling) for spelling in self._spellings))
        self._mine = b'"model":' + json.dumps(mine).encode()
        self._held = b""

    def feed(self, chunk: bytes, *, ended: bool) -> bytes:
        """What may go out once `chunk` has come; with `ended`, all of it."""
        data = self._pattern.sub(lambda _: self._mine, self._held + chunk)
        keep = 0 if ended else self._partial(data)
        self._held = data[len(data) - keep :]
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
