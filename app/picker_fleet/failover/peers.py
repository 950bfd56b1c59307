"""The other replicas during an outage: which are live, what each says of itself, and budget from them.

Envoy's access log goes to any replica, so freed budget gathers where the ends are received. A replica whose
requests wait asks each of the others for some, one question at a time each. A question without a reply is
repeated, and the peer repeats its reply, so that a pause of either loses no budget; that of a peer that dies
is used by nobody until Redis is back, never by two replicas.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from picker_fleet.failover.local_gate import LocalGate, part_of
from picker_fleet.state.store import HeartbeatReply

_PAUSE_S = 0.2  # before a peer that had nothing is asked again
_IDLE_S = 10.0  # without waiting requests, connections to peers are closed after so long
_COMPARED = 30_000  # requests, at most
TRANSFER_WAIT_S = 0.5  # how long a peer without free budget waits before it answers


@dataclass(frozen=True, slots=True)
class OutageCount:
    """What a replica knows of the moment at which its outage began: how many replicas were live, the bound,
    its own free budget, and the cost by id of what may have been running."""

    live: int
    bound: float
    free: float
    running: Mapping[str, float]


class PeerClient(Protocol):
    """How another replica is asked (extproc/budget_transfer.py)."""

    async def count(self, address: str) -> OutageCount | None:
        """The count of the replica at `address`; None if it has none or does not answer."""
        ...

    async def ended_before(self, address: str, ids: Collection[str]) -> Collection[str] | None:
        """Those of `ids` whose end it had received before its outage; None as for `count`."""
        ...

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
    has published all ends.
    """

    degraded: bool = False
    grpc: str = ""
    resyncs: int = 0
    answered: frozenset[str] = frozenset()

    @classmethod
    def read(cls, about: Mapping[str, object]) -> "PeerState":
        """From the JSON object of docs/redis-schema.md, `about`. What has another type counts as missing."""
        grpc, resyncs, answered = about.get("grpc"), about.get("resyncs"), about.get("answered")
        return cls(
            bool(about.get("degraded")),
            grpc if isinstance(grpc, str) else "",
            resyncs if isinstance(resyncs, int) else 0,
            frozenset(map(str, answered) if isinstance(answered, list | tuple) else ()),
        )


class Peers:
    """The live replicas. `live` has their ids in order, as of the last time Redis was in use; this replica's
    own, `replica`, is among them."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self.live: tuple[str, ...] = ()
        self.left_s = -math.inf  # when a live replica was last found gone
        self._states: Mapping[str, PeerState] = {}
        self._addresses: dict[str, str] = {}

    def update(self, replicas: Mapping[str, PeerState], *, shared: bool, now_s: float) -> None:
        """Take over what each live replica says; `live` changes only while Redis is in use (`shared`)."""
        self._states = replicas
        if shared:
            if not replicas.keys() >= set(self.live):
                self.left_s = now_s
            self.live = tuple(sorted(replicas))
        for name, state in replicas.items():
            if name != self._replica and state.grpc:
                self._addresses[name] = state.grpc

    def addresses(self) -> list[str]:
        """Where each of the others is asked for budget (host:port)."""
        return [self._addresses[name] for name in self.live if name in self._addresses]

    def others(self) -> list[str] | None:
        """Where each of the others is asked, for the replica of the least id; None for any other replica, or
        if an address is not known."""
        others = [name for name in self.live if name != self._replica]
        if self.live[:1] != (self._replica,) or not self._addresses.keys() >= set(others):
            return None
        return [self._addresses[name] for name in others]

    def all_resynced(self) -> bool:
        """Whether every replica that was live says that its state is in Redis."""
        return all(name in self._states and not self._states[name].degraded for name in self.live)

    def live_ones(self, holds: Callable[[str, PeerState], bool]) -> bool:
        """Whether it `holds` for any replica that was live and still is."""
        return any(name in self.live and holds(name, said) for name, said in self._states.items())

    def count(self, pulse: HeartbeatReply) -> int:
        """How many replicas divide the bound."""
        return max(len(self.live), pulse.live_replicas, 1)

    def own_part(self, pulse: HeartbeatReply, *, counts_requests: bool) -> float:
        """This replica's part of what was free at `pulse`; `counts_requests` as in `part_of`."""
        live = self.count(pulse)
        rank = self.live.index(self._replica) if self._replica in self.live else live
        free = pulse.upper - pulse.stock
        return part_of(free, live=live, rank=rank, counts_requests=counts_requests)


async def lost_budget(
    own: OutageCount, ended_before: Collection[str], client: PeerClient, others: Collection[str]
) -> float | None:
    """The part of the bound that no replica has and no running request takes: it belonged to ends and grants
    that were on their way when Redis was lost. None if one of the `others` has no count, or knows of more or
    fewer replicas.

    When the outage began, the bound was the sum of the free budgets, of the costs of what ran, and of this
    part. What ran is at most what any replica had placed or seen alive within an access-log interval and
    whose end none had received. So the result is never too large (docs/redis.md).
    """
    counts = [own, *await asyncio.gather(*(client.count(address) for address in others))]
    running: dict[str, float] = {}
    for count in counts:
        if count is None or count.live != own.live:
            return None
        running.update(count.running)
    if len(running) > _COMPARED:
        return 0.0  # of so large a bound little is lost
    asked = await asyncio.gather(*(client.ended_before(address, list(running)) for address in others))
    for ended in (ended_before, *asked):
        if ended is None:
            return None
        for name in ended:
            running.pop(name, None)
    bound = min(count.bound for count in counts if count is not None)
    free = sum(count.free for count in counts if count is not None)
    return max(bound - free - sum(running.values()), 0.0)


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
            await asyncio.sleep(_PAUSE_S)  # the fleet is paused: there is budget, but nothing is admitted
            return
        began_s = self._clock()
        granted = await self._client.ask(address, minimum, maximum)
        if granted:
            self._gate.release(granted)
        elif self._clock() - began_s < _PAUSE_S:
            await asyncio.sleep(_PAUSE_S)  # the peer is away, or gave everything away already
