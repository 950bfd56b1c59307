"""How many bytes of requests' bodies a replica holds, and the bound of them all.

A body is held from its first byte until Envoy is told where its request goes, so one that waits in the queue
is. It is kept as it goes on, spliced where the model is renamed, and once. To compress what waits would take
the event loop 20 ms a MiB.
"""

from picker_fleet.errors import BufferFull

SMALL_BYTES = 64 * 1024  # of a body that may use all of the room
_KEPT = 32  # one part in so many is kept for those: a few large ones that come slowly must not keep all out


class Bodies:
    """The bytes that all exchanges of a replica hold, `limit_bytes` at most."""

    __slots__ = ("_for_large_bytes", "_limit_bytes", "held_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._for_large_bytes = limit_bytes - limit_bytes // _KEPT
        self.held_bytes = 0

    def take(self, size_bytes: int, body_bytes: int) -> None:
        """Hold so many more, to be given back, of a body that has `body_bytes` with them.

        Raises:
            BufferFull: that would be too many; nothing is held for it.
        """
        limit_bytes = self._limit_bytes if body_bytes <= SMALL_BYTES else self._for_large_bytes
        if self.held_bytes + size_bytes > limit_bytes:
            raise BufferFull(f"this replica holds as many bytes of bodies as it may ({self._limit_bytes})")
        self.held_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Hold so many fewer."""
        self.held_bytes -= size_bytes
