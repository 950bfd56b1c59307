"""Holds the pool's endpoints, wakes waiters on a change, and tracks the version that each Envoy has."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from picker_fleet.request import Endpoint


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet's endpoints at one moment; `version` changes whenever the endpoints change."""

    version: str
    endpoints: tuple[Endpoint, ...]


class SnapshotCell:
    """Holds the newest snapshot; many tasks may wait for the next snapshot. One event loop.

    `on_acknowledged` is called after each change of `acknowledged`.
    """

    def __init__(self) -> None:
        self.current = Snapshot(version="", endpoints=())  # set by `publish` alone
        self._changed = asyncio.Event()
        self._acknowledged: dict[object, str] = {}  # Envoy that follows this replica -> its version
        self.on_acknowledged: Callable[[], object] = lambda: None

    def acknowledge(self, envoy: object, version: str | None) -> None:
        """Note that `envoy`, which follows this replica, has the endpoints of `version` ('': none yet); with
        None, that it has left."""
        before = self.acknowledged
        if version is None:
            self._acknowledged.pop(envoy, None)
        else:
            self._acknowledged[envoy] = unmarked(version)
        if self.acknowledged != before:
            self.on_acknowledged()

    @property
    def acknowledged(self) -> str | None:
        """The version, without marks, that all Envoys of this replica have; '' if their versions differ; None
        if no Envoy follows this replica."""
        versions = set(self._acknowledged.values())
        return "" if len(versions) > 1 else next(iter(versions), None)

    def publish(self, snapshot: Snapshot) -> None:
        """Make `snapshot` current and wake the waiters, if its version is new."""
        if snapshot.version == self.current.version:
            return
        self.current = snapshot
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, version: str) -> Snapshot:
        """Wait, without a timeout, for a snapshot with another version than `version`."""
        while self.current.version == version:
            await self._changed.wait()
        return self.current


def unmarked(version: str) -> str:
    """A version of the endpoints without its suffix `+MARKS`."""
    return version.partition("+")[0]
