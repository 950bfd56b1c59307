"""Holds the pool's endpoints, wakes waiters on a change, and tracks which version each Envoy has."""

import asyncio
import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from picker_fleet.domain.request import Endpoint

# How long Envoys list a removed endpoint. A request that was placed there just before the removal reaches
# Envoy's load balancing within a few milliseconds, on a busy machine within a second.
REMOVED_S: Final = 2.0
MAX_REMOVED: Final = 4096  # maximum removed endpoints listed at once; the oldest beyond these are dropped


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet's endpoints at one moment; `version` changes whenever the endpoints change.

    `decoders` are the endpoints that generate answers; `prefillers` compute prompts for decoders, and
    `encoders` encode images, audio and video for decoders.
    """

    version: str
    endpoints: tuple[Endpoint, ...]
    decoders: tuple[Endpoint, ...] = field(init=False)
    prefillers: tuple[Endpoint, ...] = field(init=False)
    encoders: tuple[Endpoint, ...] = field(init=False)

    def __post_init__(self) -> None:
        decoders = tuple(each for each in self.endpoints if each.decodes)
        if len(decoders) == len(self.endpoints):
            decoders = self.endpoints
        object.__setattr__(self, "decoders", decoders)  # assignments to a frozen dataclass fail
        object.__setattr__(self, "prefillers", tuple(each for each in self.endpoints if each.prefills))
        object.__setattr__(self, "encoders", tuple(each for each in self.endpoints if each.encodes))


class SnapshotCell:
    """Holds the newest snapshot; many tasks may wait for the next snapshot. One event loop.

    `on_acknowledged` is called once for each version of the endpoints, when all Envoys have acknowledged it.
    `clock` is in seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        on_acknowledged: Callable[[], object] = lambda: None,
    ) -> None:
        self._clock, self._on_acknowledged = clock, on_acknowledged
        self.current = Snapshot(version="", endpoints=())  # the current snapshot, which only `publish` sets
        self._changed = asyncio.Event()
        self._removed: dict[str, float] = {}  # address of a removed endpoint -> listed until; oldest first
        self._acknowledged: dict[object, str] = {}  # Envoy with a stream -> its version of the endpoints
        self._announced = ""  # the last version for which `on_acknowledged` was called

    def acknowledge(self, envoy: object, version: str | None) -> None:
        """Record that `envoy`, which has a stream to this replica, has the endpoints of `version` ('': none
        yet; None: its stream has ended)."""
        if version is None:
            self._acknowledged.pop(envoy, None)
        else:
            self._acknowledged[envoy] = unmarked(version)
        newest = unmarked(self.current.version)
        if newest != self._announced and self.acknowledged == newest:
            self._announced = newest
            self._on_acknowledged()

    @property
    def acknowledged(self) -> str | None:
        """The version of the endpoints, without marks, that all Envoys of this replica have; '' if the
        Envoys' versions differ; None if no Envoy has a stream."""
        versions = set(self._acknowledged.values())
        return "" if len(versions) > 1 else next(iter(versions), None)

    def publish(self, snapshot: Snapshot) -> None:
        """If the version of `snapshot` is new, make `snapshot` current and wake the waiters."""
        if snapshot.version == self.current.version:
            return
        self._remember_removed(snapshot)
        self.current = snapshot
        self._changed.set()
        self._changed = asyncio.Event()

    async def after(self, version: str) -> Snapshot:
        """Wait, without a timeout, for a snapshot with another version than `version`."""
        while self.current.version == version:
            await self._changed.wait()
        return self.current

    def listed(self) -> Snapshot:
        """The snapshot for Envoys: the current endpoints, and as draining each endpoint removed less than
        `REMOVED_S` ago. The version's mark changes when an endpoint is removed, returns or expires.

        If removed endpoints were left out, Envoy could answer 503 to a request placed just before a removal.
        """
        self._forget_expired()
        if not self._removed or not self.current.version:
            return self.current
        mark = hashlib.blake2b(" ".join(self._removed).encode(), digest_size=6).hexdigest()
        removed = (Endpoint(address, draining=True) for address in self._removed)
        return Snapshot(f"{self.current.version}+{mark}", (*self.current.endpoints, *removed))

    async def listed_after(self, version: str) -> Snapshot:
        """Wait, without a timeout, until `listed` has another version than `version`."""
        while (listed := self.listed()).version == version:
            until_s = next(iter(self._removed.values()), None)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if until_s is None else until_s - self._clock()):
                    await self._changed.wait()
        return listed

    def _remember_removed(self, snapshot: Snapshot) -> None:
        """Remember the endpoints that leave with `snapshot`, and forget those that return."""
        until_s = self._clock() + REMOVED_S
        self._removed |= {each.address: until_s for each in self.current.decoders}
        for each in snapshot.decoders:
            self._removed.pop(each.address, None)
        self._forget_expired()
        self._removed = dict(list(self._removed.items())[-MAX_REMOVED:])

    def _forget_expired(self) -> None:
        now_s = self._clock()
        self._removed = {address: until_s for address, until_s in self._removed.items() if until_s > now_s}


def unmarked(version: str) -> str:
    """A version of the endpoints without its suffix `+MARKS`."""
    return version.partition("+")[0]
