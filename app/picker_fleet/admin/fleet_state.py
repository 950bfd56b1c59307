"""The fleet state for the views (views.py): every flow queue, and the replicas' reports about themselves.

The fleet state is at most a second old. One replica reads all flow queues for the whole fleet
(state/reads.py), and each replica sums the flow queues once. While clients keep asking, the cache reads the
next state before the last one expires, so that clients do not wait. A short queue is read for each client.
"""

import asyncio
import bisect
import contextlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from picker_fleet.admission.ledger import METER_WINDOW_S, ServiceReport
from picker_fleet.domain.errors import StateFault
from picker_fleet.state.reads import CHUNK, THROTTLED, FlowQueuePage, FlowQueueRow, ReplicaRow, group_of
from picker_fleet.state.store import Store

MAX_FLOWS = 2000
# Pause (seconds) between chunks of background work. A chunk takes about a millisecond. Decisions run during
# the pauses, in the same event loop, so a chunk, rarely two, delays a decision.
PAUSE_S = 0.01


@dataclass(frozen=True, slots=True)
class Served:
    """The cost of the requests served a second. `truncated`: a replica did not report all flows."""

    flows: Mapping[tuple[int, str], float] = field(default_factory=dict)  # (priority, flow) -> cost a second
    bands: Mapping[int, float] = field(default_factory=dict)  # by priority
    truncated: bool = False


class ReplicaReport(msgspec.Struct, frozen=True):
    """The report in a replica's last heartbeat. A field is None if its line is missing or malformed."""

    id: str
    heartbeat_s_ago: float
    host: str | None = None
    degraded: bool | None = None
    waiting: int | None = None
    admin: str | None = None
    grpc: str | None = None
    version: str | None = None
    up_s: float | None = None
    served: ServiceReport | None = None

    @classmethod
    def parse(cls, row: ReplicaRow) -> "ReplicaReport":
        report = cls(row.id, row.heartbeat_s_ago)
        for line in row.about.split("\n"):
            with contextlib.suppress(msgspec.MsgspecError):
                part = msgspec.json.decode(line, type=dict[str, Any])
                report = msgspec.convert({**msgspec.structs.asdict(report), **part, **asdict(row)}, cls)
        return report


@dataclass(frozen=True, slots=True)
class BandQueues:
    """The flow queues of one band in dispatch order, with sums over them."""

    queues: tuple[FlowQueueRow, ...] = ()
    queued: int = 0
    weights: float = 0.0
    oldest_s: float | None = None


@dataclass(frozen=True, slots=True)
class FleetState:
    """All flow queues in dispatch order, and the replicas' reports. `complete` is False if `queues` has only
    the first `max_flows` flow queues."""

    queues: tuple[FlowQueueRow, ...] = ()
    totals: tuple[tuple[int, int], ...] = ()  # pairs: a group in use, the number of its flow queues
    complete: bool = True
    replicas: tuple[ReplicaReport, ...] = ()
    served: Served = Served()  # the cost a second that the live replicas serve
    bands: Mapping[int, BandQueues] = field(default_factory=dict)  # priority -> band with waiting requests

    def band(self, priority: int) -> BandQueues:
        return self.bands.get(priority, _NONE_WAITS)

    def total(self, priority: int | None = None) -> int:
        """Number of flow queues in all bands, or in one band."""
        return total(self.totals, priority)

    def served_per_s(self, priority: int, flow: str) -> float | None:
        """Cost served a second for the flow; None if some replica truncated its report."""
        found = self.served.flows.get((priority, flow))
        return found if found is not None or self.served.truncated else 0.0

    def page(
        self, limit: int, group: int, after: tuple[str, str] | None, priority: int | None
    ) -> list[FlowQueueRow] | None:
        """The flow queues that `Reads.flow_queues` would return; None if the fleet state is incomplete."""
        if not self.complete:
            return None
        position = (group, float(after[0]), after[1].encode()) if after else (group, -math.inf, b"")
        queues = self.queues if priority is None else self.band(priority).queues
        first = bisect.bisect_right(queues, position, key=lambda queue: queue.order_key)
        return list(queues[first : first + limit])

    def weights(self, priority: int, *, even: bool) -> float | None:
        """Sum of the band's flow weights, each 1 if `even`; None if the fleet state is incomplete."""
        if not self.complete:
            return None
        band = self.band(priority)
        return float(len(band.queues)) if even else band.weights

    def queued(self, priority: int | None) -> int:
        if priority is not None:
            return self.band(priority).queued
        return sum(each.queued for each in self.bands.values())

    def oldest_s(self, priority: int) -> float | None:
        """Age of the band's oldest waiting request; None if the band is empty or the state incomplete."""
        return self.band(priority).oldest_s if self.complete else None


_NONE_WAITS = BandQueues()


def total(totals: Iterable[tuple[int, int]], priority: int | None = None) -> int:
    """Number of flow queues in all groups, or in the two groups (ready and throttled) of one band."""
    group = None if priority is None else group_of(priority)
    return sum(count for each, count in totals if group is None or each % THROTTLED == group)


def _by_band(queues: Sequence[FlowQueueRow]) -> dict[int, BandQueues]:
    """Priority -> flow queues of that band, throttled ones last; `queues` must be in dispatch order."""
    bands: dict[int, list[FlowQueueRow]] = {}
    for _, group in itertools.groupby(queues, lambda queue: queue.group):
        found = list(group)
        bands.setdefault(found[0].priority, []).extend(found)
    return {
        priority: BandQueues(
            tuple(found),
            sum(each.queued for each in found),
            math.fsum(each.weight for each in found),
            max(each.oldest_s for each in found),
        )
        for priority, found in bands.items()
    }


class FleetStateCache:
    """Reads and caches the `FleetState` for all clients of a replica. One event loop."""

    def __init__(self, store: Store, silence_s: float, max_flows: int = MAX_FLOWS) -> None:
        self._store = store
        self._silence_s = silence_s
        self._max_flows = max_flows
        self._clock = asyncio.get_running_loop().time
        self._reading = asyncio.Lock()
        self._used = asyncio.Event()
        self.last = FleetState()  # the fleet state read last
        self._fresh_until = self._good_until = -math.inf

    async def get(self) -> FleetState:
        """The fleet state, at most a second old. Raises StateFault if Redis cannot be read."""
        self._used.set()
        if self._clock() >= self._good_until:
            async with self._reading:
                if self._clock() >= self._good_until:
                    await self._read()
        return self.last

    async def run(self) -> None:
        """Until cancelled, refresh the state of a long queue before clients ask. Faults of Redis are ignored
        here; the method `get` raises them."""
        while True:
            await self._used.wait()
            await asyncio.sleep(self._fresh_until - self._clock())
            self._used.clear()
            if len(self.last.queues) > CHUNK:
                with contextlib.suppress(StateFault):
                    async with self._reading:
                        if self._clock() >= self._fresh_until:
                            await self._read(PAUSE_S)

    async def _read(self, pause_s: float = 0.0) -> None:
        survey = await self._store.queue_snapshots.read(
            self._max_flows, pause_s=pause_s / 2
        )  # a script call takes half as long as a chunk, so pause half as long
        as_of_s = self._clock()
        self.last = await self._combine(survey.page, pause_s)
        self._fresh_until, self._good_until = as_of_s + survey.fresh_s, as_of_s + survey.good_s

    async def _combine(self, found: FlowQueuePage, pause_s: float) -> FleetState:
        replicas = []
        flows, bands = defaultdict[tuple[int, str], float](float), defaultdict[int, float](float)
        truncated = False
        for row in await self._store.reads.replicas():
            replica = ReplicaReport.parse(row)
            replicas.append(replica)
            if replica.served is not None and replica.heartbeat_s_ago < self._silence_s:
                for priority, flow, cost in replica.served["flows"]:
                    flows[priority, flow] += cost / METER_WINDOW_S
                for priority, cost in replica.served["priorities"]:
                    bands[priority] += cost / METER_WINDOW_S
                truncated = truncated or replica.served["cut"]
                await asyncio.sleep(pause_s)
        return FleetState(
            tuple(found.queues),
            found.totals,
            total(found.totals) < self._max_flows,
            tuple(replicas),
            Served(flows, bands, truncated),
            _by_band(found.queues),
        )
