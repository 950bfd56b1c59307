"""The other replicas during an outage: which are live, what each says of itself, and budget from them.

Envoy's access log goes to any replica, so freed budget gathers where the ends are received. A replica whose
requests wait asks each of the others for some, one question at a time each. Budget whose reply is lost is
used by nobody until Redis is back, never by two replicas.
"""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from picker_fleet.failover.local_gate import LocalGate, part_of
from picker_fleet.state.store import HeartbeatReply

_PAUSE_S = 0.2  # after a peer that had nothing and said so at once
_IDLE_S = 10.0  # without waiting requests, connections to peers are closed after so long
TRANSFER_WAIT_S = 0.5  # for so long a peer that has nothing keeps the question open


class PeerClient(Protocol):
    """How budget is requested from another replica (extproc/budget_transfer.py)."""

    async def ask(self, address: str, least: float, most: float) -> float | None:
        """What the replica at `address` gives, 0 if nothing; None if it does not answer."""
        ...

    async def close(self) -> None:
        """Close all connections; `ask` opens them again."""
        ...


@dataclass(frozen=True, slots=True)
class PeerState:
    """What a replica says of itself with each heartbeat, as far as failover needs it.

    `degraded`: it has state that is not in Redis yet. `grpc`: where it is asked for budget, host:port, '' for
    nowhere. `resyncs`: how often it has begun to resync. `answered`: resyncs of others before whose begin it
    has published all ends; None from a version that does not say.
    """

    degraded: bool = False
    grpc: str = ""
    resyncs: int = 0
    answered: frozenset[str] | None = None

    @classmethod
    def read(cls, about: Mapping[str, object]) -> "PeerState":
        """From the JSON object of docs/redis-schema.md, `about`. What has another type counts as missing."""
        grpc, resyncs, told = about.get("grpc"), about.get("returns"), about.get("told")
        return cls(
            bool(about.get("degraded")),
            grpc if isinstance(grpc, str) else "",
            resyncs if isinstance(resyncs, int) else 0,
            frozenset(map(str, told)) if isinstance(told, list | tuple) else None,
        )


class Peers:
    """The live replicas. `live` has their ids in order, as of the last time Redis was in use; this replica's
    own, `replica`, is among them."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self.live: tuple[str, ...] = ()
        self._states: Mapping[str, PeerState] = {}
        self._addresses: dict[str, str] = {}

    def update(self, replicas: Mapping[str, PeerState], *, shared: bool) -> None:
        """Take over what each live replica says; `live` changes only while Redis is in use (`shared`)."""
        self._states = replicas
        if shared:
            self.live = tuple(sorted(replicas))
        for name, state in replicas.items():
            if name != self._replica and state.grpc:
                self._addresses[name] = state.grpc

    def addresses(self) -> list[str]:
        """Where each of the others is asked for budget (host:port)."""
        return [self._addresses[name] for name in self.live if name in self._addresses]

    def all_resynced(self) -> bool:
        """Whether every replica that was live says that its state is in Redis."""
        return all(name in self._states and not self._states[name].degraded for name in self.live)

    def count(self, pulse: HeartbeatReply) -> int:
        """How many replicas divide the bound."""
        return max(len(self.live), pulse.live_replicas, 1)

    def own_part(self, pulse: HeartbeatReply, *, counts_requests: bool) -> float:
        """This replica's part of what was free at `pulse`; `counts_requests` as in `part_of`."""
        live = self.count(pulse)
        rank = self.live.index(self._replica) if self._replica in self.live else live
        free = pulse.upper - pulse.stock
        return part_of(free, live=live, rank=rank, counts_requests=counts_requests)


class BudgetTransfer:
    """Gets budget for `gate` from the replicas at `addresses()` while its requests wait."""

    def __init__(
        self,
        gate: LocalGate,
        client: PeerClient,
        addresses: Callable[[], list[str]],
        *,
        idle_s: float = _IDLE_S,
    ) -> None:
        self._gate, self._client, self._addresses = gate, client, addresses
        self._idle_s = idle_s
        self._clock = asyncio.get_running_loop().time

    async def run(self) -> None:
        asking: dict[str, asyncio.Task[None]] = {}
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    if not await self._needed():
                        await self._client.close()
                        continue
                    for address in self._addresses():
                        if address not in asking or asking[address].done():
                            asking[address] = tasks.create_task(self._ask(address))
                    asking = {address: task for address, task in asking.items() if not task.done()}
                    if asking:
                        await asyncio.wait(
                            asking.values(), return_when=asyncio.FIRST_COMPLETED, timeout=TRANSFER_WAIT_S
                        )
                    else:
                        await asyncio.sleep(_PAUSE_S)
        finally:
            await self._client.close()

    async def _needed(self) -> bool:
        """Whether a request waits within the idle time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._idle_s):
                await self._gate.has_waiting.wait()
        return self._gate.has_waiting.is_set()

    async def _ask(self, address: str) -> None:
        minimum, maximum = self._gate.shortage()
        if minimum <= 0:
            await asyncio.sleep(_PAUSE_S)  # a paused fleet: the budget is there, and nothing is admitted
            return
        began_s = self._clock()
        granted = await self._client.ask(address, minimum, maximum)
        if granted:
            self._gate.release(granted)
        elif self._clock() - began_s < _PAUSE_S:
            await asyncio.sleep(_PAUSE_S)  # the peer is away, or gave everything away already
