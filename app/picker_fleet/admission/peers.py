"""A replica's peers (the other live replicas) in an outage: their published states and transfers of budget.

Any replica may get Envoy's access log, so freed budget collects at the replicas that receive ends. A replica
with waiting requests asks every peer for budget, by one call at a time to each peer. A replica repeats a call
without a reply, and the peer repeats its reply, so a pause of caller or peer loses no budget. The budget of a
peer that dies stays unused until Redis is back; two replicas never use the same budget.
"""

import asyncio
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from picker_fleet.admission.local_gate import LocalGate, part_of
from picker_fleet.state.replies import HeartbeatReply

_PAUSE_S = 0.2  # seconds before the next call to a peer that had no budget to spare
_COMPARED = 30_000  # maximum running requests that `lost_budget` compares
TRANSFER_WAIT_S = 0.5  # a peer without free budget waits this many seconds for budget before it answers


@dataclass(frozen=True, slots=True)
class OutageCount:
    """A replica's figures at the start of its outage: the number of live replicas, the bound of the stock,
    its own free budget, and, by id, the costs of requests that may have been running."""

    live: int
    bound: float
    free: float
    running: Mapping[str, float]


class RedisUse(NamedTuple):
    """`uses`: whether a replica uses Redis, and Redis has answered lately. `local_s`: how many seconds the
    replica has been without Redis; 0 while it uses Redis or resyncs."""

    uses: bool
    local_s: float


@dataclass(frozen=True, slots=True)
class EndedCharge:
    """How a request ended that another replica charged to tenants' limits. `unserved`: no model server
    answered the request. `usage`: the request's tokens of prompt, cached prompt and answer, if known."""

    unserved: bool
    usage: Sequence[float] | None


class PeerClient(Protocol):
    """Calls to other replicas (admission/budget_transfer.py)."""

    async def count(self, address: str) -> OutageCount | None:
        """The `OutageCount` of the replica at `address`; None if the replica has none or does not answer."""
        ...

    async def ended_before(self, address: str, ids: Collection[str]) -> Collection[str] | None:
        """The subset of `ids` whose ends the replica received before its outage; None without an answer."""
        ...

    async def ended(self, address: str, ids: Collection[str]) -> Mapping[str, EndedCharge] | None:
        """How the requests `ids` ended that the replica saw end in its outage; None without an answer."""
        ...

    async def redis_use(self, address: str) -> RedisUse | None:
        """Whether the replica at `address` says that it uses Redis; None if it does not answer."""
        ...

    async def ask(self, address: str, least: float, most: float) -> float | None:
        """The budget that the replica at `address` gives (0: no budget); None without an answer."""
        ...


@dataclass(frozen=True, slots=True)
class PeerState:
    """The part of a replica's info (published with its heartbeats) that failover reads.

    `degraded`: whether the replica has state that Redis lacks. `grpc`: the host:port at which peers ask for
    budget; '' if the replica takes no calls. `resyncs`: how often the replica has begun to resync.
    `answered`: the resyncs of peers for which the replica has published all ends that it received before.
    """

    degraded: bool = False
    grpc: str = ""
    resyncs: int = 0
    answered: frozenset[str] = frozenset()

    @classmethod
    def read(cls, about: Mapping[str, object]) -> "PeerState":
        """Read the JSON object `about` (docs/redis-schema.md). A field of a wrong type counts as missing."""
        grpc, resyncs, answered = about.get("grpc"), about.get("resyncs"), about.get("answered")
        return cls(
            bool(about.get("degraded")),
            grpc if isinstance(grpc, str) else "",
            resyncs if isinstance(resyncs, int) else 0,
            frozenset(map(str, answered) if isinstance(answered, list | tuple) else ()),
        )


class Peers:
    """The live replicas. The attribute `live` has their sorted ids, with this replica's own id `replica`, as
    of the last heartbeat while Redis was in use."""

    def __init__(self, replica: str) -> None:
        self._replica = replica
        self.live: tuple[str, ...] = ()
        self.left_s = -math.inf  # when this replica last noticed that a live replica had left
        self._states: Mapping[str, PeerState] = {}
        self._addresses: dict[str, str] = {}

    def update(self, replicas: Mapping[str, PeerState], *, shared: bool, now_s: float) -> None:
        """Store the state of each live replica. The attribute `live` changes only while Redis is in use
        (`shared`)."""
        self._states = replicas
        if shared:
            if not replicas.keys() >= set(self.live):
                self.left_s = now_s
            self.live = tuple(sorted(replicas))
        for name, state in replicas.items():
            if name != self._replica and state.grpc:
                self._addresses[name] = state.grpc

    def addresses(self) -> list[str]:
        """The addresses (host:port) of the peers that take calls for budget."""
        return [self._addresses[name] for name in self.live if name in self._addresses]

    def others(self) -> list[str] | None:
        """The addresses (host:port) of all peers; None if a peer has a lesser id than this replica or no
        address."""
        others = [name for name in self.live if name != self._replica]
        if self.live[:1] != (self._replica,) or not self._addresses.keys() >= set(others):
            return None
        return [self._addresses[name] for name in others]

    def all_resynced(self) -> bool:
        """Whether every replica in `live` reports that Redis has all of its state."""
        return all(name in self._states and not self._states[name].degraded for name in self.live)

    def live_ones(self, holds: Callable[[str, PeerState], bool]) -> bool:
        """Whether the predicate `holds` is true for a replica in `live` that still sends heartbeats."""
        return any(name in self.live and holds(name, said) for name, said in self._states.items())

    def count(self, pulse: HeartbeatReply) -> int:
        """The number of replicas among which the bound of the stock is divided."""
        return max(len(self.live), pulse.live_replicas, 1)

    def own_part(self, pulse: HeartbeatReply, *, counts_requests: bool) -> float:
        """This replica's share of the stock that was free in the heartbeat reply `pulse` (see `part_of`)."""
        live = self.count(pulse)
        rank = self.live.index(self._replica) if self._replica in self.live else live
        free = pulse.upper - pulse.stock
        return part_of(free, live=live, rank=rank, counts_requests=counts_requests)


async def lost_budget(
    own: OutageCount, ended_before: Collection[str], client: PeerClient, others: Collection[str]
) -> float | None:
    """The part of the bound that is in no replica's budget and that no running request uses, since reports of
    ends, or grants, were in transit when Redis was lost. None if a peer in `others` has no count, or counts
    another number of live replicas.

    When the outage began, the bound was the sum of the free budgets, the costs of the running requests, and
    this lost part. A request counts as running if some replica had placed it or had an access-log entry of it
    within an access-log interval, and no replica had received its end. So the returned part is never too
    large (docs/redis.md).
    """
    counts = [own, *await asyncio.gather(*(client.count(address) for address in others))]
    running: dict[str, float] = {}
    for count in counts:
        if count is None or count.live != own.live:
            return None
        running.update(count.running)
    if len(running) > _COMPARED:
        return 0.0  # compared with so many running requests, the lost budget is small
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
    """Gets budget for `gate` from the replicas at `addresses()` while requests wait in the gate."""

    def __init__(self, gate: LocalGate, client: PeerClient, addresses: Callable[[], list[str]]) -> None:
        self._gate, self._client, self._addresses = gate, client, addresses
        self._clock = asyncio.get_running_loop().time

    async def run(self) -> None:
        asking: dict[str, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._gate.has_waiting.wait()
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

    async def _ask(self, address: str) -> None:
        minimum, maximum = self._gate.shortage()
        if minimum <= 0:
            await asyncio.sleep(_PAUSE_S)  # no request lacks budget; the pool may be paused
            return
        began_s = self._clock()
        granted = await self._client.ask(address, minimum, maximum)
        if granted:
            self._gate.release(granted)
        elif self._clock() - began_s < _PAUSE_S:
            await asyncio.sleep(_PAUSE_S)  # the peer is unreachable, or has no budget left
