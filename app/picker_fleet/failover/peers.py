"""Places that other replicas have to spare, asked for while there is no shared state.

Ends are heard by whoever Envoy's access log goes to, so places gather there. A replica whose requests wait
asks each of the others, one question at a time; a reply that is lost is a place that nobody uses until Redis
is back, never one that two do.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from picker_fleet.failover.budget import share
from picker_fleet.failover.local_gate import LocalGate
from picker_fleet.state.store import Pulse

_PAUSE_S = 0.2  # after a peer that had nothing, and said so at once
_IDLE_S = 10.0  # the outage is over: connections to all the others are not kept for the next one
ASK_S = 0.5  # a peer that has nothing keeps the question open for so long


class Peers(Protocol):
    """How other replicas are reached (extproc/budget_transfer.py)."""

    async def ask(self, address: str, least: float, most: float) -> float | None:
        """What the replica at `address` gives, 0 if nothing; None if it does not answer."""
        ...

    async def close(self) -> None:
        """Keep no connection; `ask` makes them anew."""
        ...


class Borrower:
    """`peers` gives the others' addresses by id; `active` whether there is anything to borrow for."""

    def __init__(
        self,
        local: LocalGate,
        via: Peers,
        *,
        peers: Callable[[], Mapping[str, str]],
        active: Callable[[], bool],
        idle_s: float = _IDLE_S,
    ) -> None:
        self._local, self._via, self._peers, self._active = local, via, peers, active
        self._idle_s = idle_s
        self._clock = asyncio.get_running_loop().time

    async def run(self) -> None:
        """Borrow until cancelled."""
        asking: dict[str, asyncio.Task[None]] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    if not await self._needed():
                        await self._via.close()
                        continue
                    for address in self._peers().values() if self._active() else ():
                        if address not in asking or asking[address].done():
                            asking[address] = tasks.create_task(self._ask(address))
                    asking = {address: task for address, task in asking.items() if not task.done()}
                    if asking:
                        await asyncio.wait(
                            asking.values(), return_when=asyncio.FIRST_COMPLETED, timeout=ASK_S
                        )
                    else:
                        await asyncio.sleep(_PAUSE_S)
        finally:
            await self._via.close()

    async def _needed(self) -> bool:
        """Whether somebody waits within the idle time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._idle_s):
                await self._local.needy.wait()
        return self._local.needy.is_set()

    async def _ask(self, address: str) -> None:
        least, most = self._local.wanted()
        if least <= 0:
            await asyncio.sleep(_PAUSE_S)  # who waits could be paid for, and is not let go: a paused fleet
            return
        began_s = self._clock()
        given = await self._via.ask(address, least, most)
        if given:
            self._local.earn(given)
        elif self._clock() - began_s < _PAUSE_S:
            await asyncio.sleep(_PAUSE_S)  # it is away, or has no need to keep places itself


class Fleetmates:
    """`live` are their ids, in order, as they were while the shared state could be had; this replica's own,
    `replica`, is among them."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self.live: tuple[str, ...] = ()
        self._about: Mapping[str, Mapping[str, Any]] = {}  # what the live replicas say of themselves
        self._addresses: dict[str, str] = {}

    def heard(self, about: Mapping[str, Mapping[str, Any]], *, shared: bool) -> None:
        """Who is live, and what each says of itself; who counts changes only while the state is `shared`."""
        self._about = about
        if shared:
            self.live = tuple(sorted(about))
        for name, said in about.items():
            if name != self._replica and said.get("grpc"):
                self._addresses[name] = str(said["grpc"])

    def others(self) -> Mapping[str, str]:
        """Where each of the others is asked for places (host:port), by its id."""
        return {name: self._addresses[name] for name in self.live if name in self._addresses}

    def all_back(self) -> bool:
        """Whether everyone who was live says that its part of the state is in the shared one."""
        return all(name in self._about and not self._about[name].get("degraded") for name in self.live)

    def count(self, pulse: Pulse) -> int:
        """How many replicas the bound is shared by."""
        return max(len(self.live), pulse.live, 1)

    def part(self, pulse: Pulse, *, whole: bool) -> float:
        """This replica's part of what was free at `pulse`; `whole` as in `purse.share`."""
        live = self.count(pulse)
        rank = self.live.index(self._replica) if self._replica in self.live else live
        return share(pulse.upper - pulse.stock, live=live, rank=rank, whole=whole)
