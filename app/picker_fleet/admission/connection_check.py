"""Checks reports of failed connections to endpoints. `Admission` calls this module.

Envoy's log entry of a failed attempt has no accounting token, so whoever reaches the gRPC port can forge one.
One report that Envoy could not connect takes an endpoint from the whole fleet: the replica first tries to
connect itself.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from picker_fleet.domain.request import Fault
from picker_fleet.domain.units import split_host_port
from picker_fleet.endpoints.snapshot import SnapshotCell

_CONNECT_S: Final = 0.5  # an endpoint that accepts no connection within this time (s) cannot be reached
_PAUSE_S: Final = 0.2  # after a connection the endpoint counts as reachable for this long
_MOST_WAITING: Final = 256  # maximum reports about one endpoint that wait for the result of a check


class ConnectionCheck:
    """Calls `confirmed` with each report that an endpoint of `endpoints` accepts no connection, if that is
    true: one connection at a time tests each endpoint."""

    def __init__(self, endpoints: SnapshotCell, confirmed: Callable[[Fault], object]) -> None:
        self._endpoints, self._confirmed = endpoints, confirmed
        self._waiting: dict[str, list[Fault]] = {}
        self._checks: set[asyncio.Task[None]] = set()

    def report(self, fault: Fault) -> None:
        """Check a report. Returns at once; drops reports about unknown endpoints."""
        waiting = self._waiting.get(fault.endpoint)
        if waiting is not None:
            if len(waiting) < _MOST_WAITING:
                waiting.append(fault)
        elif any(each.address == fault.endpoint for each in self._endpoints.current.endpoints):
            self._waiting[fault.endpoint] = [fault]
            check = asyncio.create_task(self._check(fault.endpoint), name="connection-check")
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)

    async def _check(self, address: str) -> None:
        try:
            if await _accepts(address):
                await asyncio.sleep(_PAUSE_S)
                return
            for fault in self._waiting[address]:
                self._confirmed(fault)
        finally:
            del self._waiting[address]


async def _accepts(address: str) -> bool:
    """Whether a server accepts a connection at `address`."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(*split_host_port(address))
    except OSError:  # includes TimeoutError
        return False
    writer.transport.abort()
    return True
