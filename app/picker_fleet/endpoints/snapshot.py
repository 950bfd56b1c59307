"""The pool's endpoints as every replica reads them, who waits for the next change, and what Envoys have."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from picker_fleet.request import Endpoint


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet's endpoints at one moment; `version` changes whenever they do."""

    version: str
    endpoints: tuple[Endpoint, ...]


class SnapshotCell:
    """Holds the newest snapshot; many may wait for the next one. One event loop.

    `on_acknowledged` is called when `acknowledged` has changed.
    """

    def __init__(self) -> None:
        self.current = Snapshot(version="", endpoints=())  # set by `publish` alone
        self._changed = asyncio.Event()
        self._acknowledged: dict[object, str] = {}  # by the Envoys that follow this replica
        self.on_acknowledged: Callable[[], object] = lambda: None

    def acknowledge(self, envoy: object, version: str | None) -> None:
        """`envoy` follows this replica and has the endpoints of `version`, '' if none yet; None: it has
        left."""
        before = self.acknowledged
        if version is None:
            self._acknowledged.pop(envoy, None)
        else:
            self._acknowledged[envoy] = unmarked(version)
        if self.acknowledged != before:
            self.on_acknowledged()

    @property
    def acknowledged(self) -> str | None:
        """The version, without marks, that all Envoys of this replica have; '' if some have another, None if
        no Envoy follows it."""
        versions = set(self._acknowledged.values())
        return "" if len(versions) > 1 else next(iter(versions), None)

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


def unmarked(version: str) -> str:
    """A version of endpoints without the marks made since."""
    return version.partition("+")[0]
