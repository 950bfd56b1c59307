"""The pool's endpoints as every replica reads them, and who waits for the next change."""

import asyncio
from dataclasses import dataclass

from picker_fleet.request import Endpoint


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet's endpoints at one moment; `version` changes whenever they do."""

    version: str
    endpoints: tuple[Endpoint, ...]


class SnapshotCell:
    """Holds the newest snapshot; many may wait for the next one. One event loop."""

    def __init__(self) -> None:
        self.current = Snapshot(version="", endpoints=())  # set by `publish` alone
        self._changed = asyncio.Event()

    def publish(self, snapshot: Snapshot) -> None:
        """Make `snapshot` current; wakes the waiters if its version is new."""
        if snapshot.version == self.current.version:
            return
        self.current = snapshot
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, version: str) -> Snapshot:
        """The first snapshot whose version is not `version`; waits without end for it."""
        while self.current.version == version:
            await self._changed.wait()
        return self.current
