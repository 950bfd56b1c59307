"""Reads doubles that the scripts store with Lua's `struct`."""

import struct

from picker_fleet.state.schema import COUNTERS


def doubles(packed: str) -> list[float]:
    """The numbers of a packed string that a client decoded with `surrogateescape`."""
    raw = packed.encode("utf-8", "surrogateescape")
    return list(struct.unpack(f"<{len(raw) // 8}d", raw))


def counters(packed: str) -> dict[str, float]:
    """The pool's counters by name."""
    return dict(zip(COUNTERS, doubles(packed), strict=True))
