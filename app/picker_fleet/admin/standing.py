"""How the fleet stands: all lanes, and what replicas tell, not older than a second.

All lanes are read once for the whole fleet (state/survey.py), and each replica works out once what its
answers need of them. For as long as somebody asks, the next standing is read while the last one is good, so
that who asks need not wait. A few lanes are read each time.
"""

import asyncio
import bisect
import contextlib
import itertools
import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from picker_fleet.admission.placed_requests import WINDOW_S
from picker_fleet.errors import StateFault
from picker_fleet.state.reads import CHUNK, Lanes, ReplicaRow
from picker_fleet.state.rows import PARKED, Lane
from picker_fleet.state.store import Store

MOST_LANES = 2000
# Between pieces of what onlookers are told, of about a millisecond each: decisions share the event loop, and
# have their turn then. A decision takes some milliseconds; so it meets one piece, hardly a second.
PAUSE_S = 0.01
_BANDS = 3
# A thousand lanes are gone through in C: a property for each takes ten times as long.
_GROUP, _QUEUED, _OLDEST_S, _WEIGHT = (
    operator.itemgetter(Lane._fields.index(name)) for name in ("group", "queued", "oldest_s", "weight")
)


@dataclass(frozen=True, slots=True)
class Told:
    """What a replica's last heartbeat said of it, unless it is of another version's shape."""

    id: str
    heartbeat_s_ago: float
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BandLanes:
    """The lanes of one band in their order, and what they are together."""

    lanes: tuple[Lane, ...] = ()
    queued: int = 0
    weights: float = 0.0
    oldest_s: float | None = None

    @classmethod
    def of(cls, lanes: Sequence[Lane]) -> "BandLanes":
        return cls(
            tuple(lanes),
            sum(map(_QUEUED, lanes)),
            math.fsum(map(_WEIGHT, lanes)),
            max(map(_OLDEST_S, lanes), default=None),
        )


@dataclass(frozen=True, slots=True)
class Standing:
    """`lanes` are in their order, each once. `whole`: they are all there are, not the first MOST_LANES."""

    lanes: tuple[Lane, ...] = ()
    totals: tuple[int, ...] = (0,) * 2 * _BANDS
    whole: bool = True
    replicas: tuple[Told, ...] = ()
    served: Mapping[tuple[int, str], float] = field(default_factory=dict)  # cost/s by band and flow
    served_bands: tuple[float, ...] = (0.0,) * _BANDS
    served_cut: bool = False  # a replica served more flows than it told of
    bands: tuple[BandLanes, ...] = (BandLanes(),) * _BANDS

    def served_per_s(self, band: int, flow: str) -> float | None:
        """Cost a second that the flow was given; None if it is not known."""
        found = self.served.get((band, flow))
        return found if found is not None or self.served_cut else 0.0

    def page(
        self, limit: int, group: int, behind: tuple[str, str] | None, band: int | None
    ) -> list[Lane] | None:
        """What `Reads.lanes` would bring; None if not all lanes are known."""
        if not self.whole:
            return None
        place = (group, float(behind[0]), behind[1].encode()) if behind else (group, -math.inf, b"")
        lanes = self.lanes if band is None else self.bands[band].lanes
        first = bisect.bisect_right(lanes, place, key=lambda lane: lane.place)
        return list(lanes[first : first + limit])

    def weights(self, band: int, *, even: bool) -> float | None:
        """Of the band's waiting flows, summed up; `even`: each counts 1. None if not all are known."""
        if not self.whole:
            return None
        return float(len(self.bands[band].lanes)) if even else self.bands[band].weights

    def queued(self, band: int | None) -> int:
        """Requests that wait in these lanes."""
        return sum(each.queued for each in self.bands) if band is None else self.bands[band].queued

    def oldest_s(self, band: int) -> float | None:
        """Age of the band's oldest waiting request; None if there is none, or not all lanes are known."""
        return self.bands[band].oldest_s if self.whole else None


def _bands(lanes: Sequence[Lane]) -> tuple[BandLanes, ...]:
    """Each band's lanes, then its parked ones, of all lanes in their order."""
    ends = [bisect.bisect_right(lanes, group, key=_GROUP) for group in range(-1, 2 * _BANDS)]
    groups = [lanes[start:end] for start, end in itertools.pairwise(ends)]
    return tuple(BandLanes.of([*groups[band], *groups[band + PARKED]]) for band in range(_BANDS))


class Lookout:
    """The fleet's `Standing`. One event loop."""

    def __init__(self, store: Store, silence_s: float) -> None:
        self._store = store
        self._silence_s = silence_s
        self._clock = asyncio.get_running_loop().time
        self._reading = asyncio.Lock()
        self._asked = asyncio.Event()
        self._standing = Standing()
        self._fresh_until = self._good_until = -math.inf

    @property
    def last(self) -> Standing:
        """As it was last read, however old."""
        return self._standing

    async def standing(self) -> Standing:
        """Raises StateFault, as the store does."""
        self._asked.set()
        if self._clock() >= self._good_until:
            async with self._reading:
                if self._clock() >= self._good_until:
                    await self._read()
        return self._standing

    async def run(self) -> None:
        """Read ahead of those who ask, until cancelled. Of faults they learn when they ask."""
        while True:
            await self._asked.wait()
            await asyncio.sleep(self._fresh_until - self._clock())
            self._asked.clear()
            if len(self._standing.lanes) > CHUNK:
                with contextlib.suppress(StateFault):
                    async with self._reading:
                        if self._clock() >= self._fresh_until:
                            await self._read(PAUSE_S)

    async def _read(self, pause_s: float = 0.0) -> None:
        found = await self._store.survey.lanes(MOST_LANES, pause_s=pause_s / 2)  # its pieces are half as long
        as_of_s = self._clock()
        self._standing = await self._put_together(found.lanes, pause_s)
        self._fresh_until, self._good_until = as_of_s + found.fresh_s, as_of_s + found.good_s

    async def _put_together(self, found: Lanes, pause_s: float) -> Standing:
        replicas = [_told(row) for row in await self._store.reads.replicas()]
        served: Counter[tuple[int, str]] = Counter()
        service = [0.0] * _BANDS
        cut = False
        for replica in replicas:
            if replica.heartbeat_s_ago < self._silence_s:
                flows, totals, more = _service(replica.about)
                served.update(flows)
                service = [a + b for a, b in zip(service, totals, strict=True)]
                cut = cut or more
                await asyncio.sleep(pause_s)
        return Standing(
            tuple(found.lanes),
            found.totals,
            sum(found.totals) < MOST_LANES,
            tuple(replicas),
            served,
            tuple(service),
            cut,
            _bands(found.lanes),
        )


def _told(row: ReplicaRow) -> Told:
    about: dict[str, Any] = {}
    for line in row.about.split("\n"):
        try:
            part = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        about |= part if isinstance(part, dict) else {}
    return Told(row.id, row.heartbeat_s_ago, about)


def _service(about: Mapping[str, Any]) -> tuple[Mapping[tuple[int, str], float], Sequence[float], bool]:
    """Cost a second by flow and by band, as `ServiceMeter` reports them, and whether it was cut."""
    try:
        told = about["served"]
        flows = {(int(band), str(flow)): float(cost) / WINDOW_S for band, flow, cost in told["flows"]}
        bands = [float(cost) / WINDOW_S for cost in told["bands"]]
        if len(bands) == _BANDS:
            return flows, bands, bool(told["cut"])
    except (KeyError, TypeError, ValueError):
        pass
    return {}, [0.0] * _BANDS, False
