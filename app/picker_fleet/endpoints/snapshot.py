"""The pool's endpoints as every replica reads them, and who waits for the next change."""

import asyncio
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One model server. `address` is `ip:port`, IPv6 in brackets.

    `max_inflight` is how many requests of the whole fleet it may have at once, None for any number. It takes
    nothing new while it is `draining` (so discovery says), `drained` (by an operator) or `down`
    (connections fail).
    """

    address: str
    labels: dict[str, str] = field(default_factory=dict)
    draining: bool = False
    drained: bool = False
    down: bool = False
    max_inflight: int | None = None

    @property
    def ready(self) -> bool:
        return not (self.draining or self.drained or self.down)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet's endpoints at one moment; `version` changes whenever they do."""

    version: str
    endpoints: tuple[Endpoint, ...]


class SnapshotCell:
    """Holds the newest snapshot; many may wait for the next one. One event loop."""

    def __init__(self) -> None:
        self._snapshot = Snapshot(version="", endpoints=())
        self._changed = asyncio.Event()

    @property
    def current(self) -> Snapshot:
        return self._snapshot

    def publish(self, snapshot: Snapshot) -> None:
        """Make `snapshot` current; wakes the waiters if its version is new."""
        if snapshot.version == self._snapshot.version:
            return
        self._snapshot = snapshot
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, version: str) -> Snapshot:
        """The first snapshot whose version is not `version`; waits without end for it."""
        while self._snapshot.version == version:
            await self._changed.wait()
        return self._snapshot
