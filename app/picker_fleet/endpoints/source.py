"""What every source of endpoints is, and the simplest one.

A source only says what the list is; who is healthy, draining or loaded is known elsewhere.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from picker_fleet.config import StaticEndpoint
from picker_fleet.endpoints.snapshot import Endpoint

Report = Callable[[tuple[Endpoint, ...]], None]


class Source(Protocol):
    """One way to learn the pool's endpoints."""

    async def watch(self, report: Report) -> None:
        """Call `report` with the whole list as soon as it is known and after each change.

        Runs until cancelled. A source that fails later on keeps its last good list and logs why.

        Raises:
            StartupError: there is no list to begin with, and waiting would not bring one.
        """
        ...


class Static:
    """The list of the configuration; it never changes."""

    def __init__(self, listed: tuple[StaticEndpoint, ...]) -> None:
        self._endpoints = endpoints_of(listed)

    async def watch(self, report: Report) -> None:
        report(self._endpoints)
        await asyncio.Event().wait()


def endpoints_of(listed: tuple[StaticEndpoint, ...]) -> tuple[Endpoint, ...]:
    return tuple(
        Endpoint(address=entry.address, labels=dict(entry.labels), max_inflight=entry.max_inflight)
        for entry in listed
    )
