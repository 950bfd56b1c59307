"""How many bytes of requests' bodies a replica holds, and the bound of them all.

A body is held from its first byte until Envoy is told where its request goes, so one that waits in the queue
is. It is kept as it goes on, spliced where the model is renamed, and once. To compress what waits would take
the event loop 20 ms a MiB.
"""

from app.errors import BufferFull


class Bodies:
    """The bytes that all exchanges of a replica hold, `limit_bytes` at most."""

    __slots__ = ("_limit_bytes", "held_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def take(self, size_bytes: int) -> None:
        """Hold so many more, to be given back.

        Raises:
            BufferFull: that would be too many; nothing is held for it.
        """
        if self.held_bytes + size_bytes > self._limit_bytes:
            raise BufferFull(f"this replica holds as many bytes of bodies as it may ({self._limit_bytes})")
        self.held_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        """Hold so many fewer."""
        self.held_bytes -= size_bytes
