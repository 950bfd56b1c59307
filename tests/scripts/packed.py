"""Reads packed values that the scripts store: doubles as `struct` or fakeredis packs them."""

import re
import struct

from picker_fleet.state.schema import COUNTERS


def doubles(packed: str) -> list[float]:
    """The numbers of a packed string that a client decoded with `surrogateescape`."""
    if re.fullmatch("[-+.0-9e\x1f]*", packed):
        return [float(text) for text in packed.split("\x1f")[:-1]]
    raw = packed.encode("utf-8", "surrogateescape")
    return list(struct.unpack(f"<{len(raw) // 8}d", raw))


def counters(packed: str) -> dict[str, float]:
    """The pool's counters by name."""
    return dict(zip(COUNTERS, doubles(packed), strict=True))
