"""Checks reports of failed connections to endpoints. `Admission` and `Reports` call this module.

One report that Envoy could not connect takes an endpoint from the whole fleet, and whoever reaches the gRPC
port can send one: Envoy's log entry of a failed attempt has no accounting token, and a caller gets tokens for
requests of its own. So the replica first tries to connect to the endpoint itself.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from picker_fleet.domain.units import split_host_port
from picker_fleet.endpoints.snapshot import SnapshotCell

_CONNECT_S: Final = 0.5  # an endpoint that accepts no connection within this time (s) cannot be reached
_PAUSE_S: Final = 0.2  # after a connection the endpoint counts as reachable for this long
_MOST_WAITING: Final = 256  # maximum reports about one endpoint that wait for the result of a check


class ConnectionCheck:
    """Checks reports about the endpoints in `endpoints`; one connection at a time tests each endpoint."""

    def __init__(self, endpoints: SnapshotCell) -> None:
        self._endpoints = endpoints
        self._waiting: dict[str, list[Callable[[], object]]] = {}
        self._checks: set[asyncio.Task[None]] = set()

    def report(self, address: str, confirmed: Callable[[], object]) -> None:
        """Call `confirmed` if the endpoint at `address` accepts no connection now. Returns at once; drops
        reports about unknown endpoints."""
        waiting = self._waiting.get(address)
        if waiting is not None:
            if len(waiting) < _MOST_WAITING:
                waiting.append(confirmed)
        elif any(each.address == address for each in self._endpoints.current.endpoints):
            self._waiting[address] = [confirmed]
            check = asyncio.create_task(self._check(address), name="connection-check")
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)

    async def _check(self, address: str) -> None:
        try:
            if await _accepts(address):
                await asyncio.sleep(_PAUSE_S)
                return
            for confirmed in self._waiting[address]:
                confirmed()
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
