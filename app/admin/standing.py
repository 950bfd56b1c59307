"""How the fleet stands: all lanes, and what replicas tell. Reading it takes a fiftieth of the time at most,
however many ask: what took 20 ms is good for a second, what took 1 ms for 50. A few lanes are read each time.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.admission.service import WINDOW_S
from app.state.reads import ReplicaRow
from app.state.rows import Lane
from app.state.store import Store

MOST_LANES = 2000
_OLDEST_S = 1.0
_REST = 50  # times as long as the reading took
_LANE_S = 0.0005  # and no longer than this for each lane: reading a few may take long, and costs nothing
_BANDS = 3


@dataclass(frozen=True, slots=True)
class Told:
    """What a replica's last heartbeat said of it, unless it is of another version's shape."""

    id: str
    heartbeat_s_ago: float
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Standing:
    """`whole`: the lanes are all there are, and not the first MOST_LANES of them."""

    lanes: tuple[Lane, ...] = ()
    totals: tuple[int, ...] = (0,) * 2 * _BANDS
    whole: bool = True
    replicas: tuple[Told, ...] = ()
    served: Mapping[tuple[int, str], float] = field(default_factory=dict)  # cost/s by band and flow
    served_bands: tuple[float, ...] = (0.0,) * _BANDS
    served_cut: bool = False  # a replica served more flows than it told of

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
        return [
            lane
            for lane in self.lanes
            if (band is None or lane.band == band) and (lane.group, lane.start, lane.name.encode()) > place
        ][:limit]

    def weights(self, band: int, *, even: bool) -> float | None:
        """Of the band's waiting flows, summed up; `even`: each counts 1. None if not all are known."""
        mine = [lane for lane in self.lanes if lane.band == band]
        return (float(len(mine)) if even else math.fsum(lane.weight for lane in mine)) if self.whole else None

    def oldest_s(self, band: int) -> float | None:
        """Age of the band's oldest waiting request; None if there is none, or not all lanes are known."""
        return (
            max((lane.oldest_s for lane in self.lanes if lane.band == band), default=None)
            if self.whole
            else None
        )


class Lookout:
    """The fleet's `Standing`, not older than a second. One event loop."""

    def __init__(self, store: Store, silence_s: float) -> None:
        self._store = store
        self._silence_s = silence_s
        self._clock = asyncio.get_running_loop().time
        self._reading = asyncio.Lock()
        self._standing = Standing()
        self._good_until = -math.inf

    @property
    def last(self) -> Standing:
        """As it was last read, however old."""
        return self._standing

    async def standing(self) -> Standing:
        """Raises StateUnavailable, as the store does."""
        async with self._reading:
            begun = self._clock()
            if begun >= self._good_until:
                self._standing = await self._read()
                took_s = self._clock() - begun
                lanes_s = _LANE_S * len(self._standing.lanes)
                self._good_until = begun + min(_OLDEST_S, _REST * took_s, lanes_s)
            return self._standing

    async def _read(self) -> Standing:
        reads = self._store.reads
        lanes = await reads.lanes(MOST_LANES)
        replicas = [_told(row) for row in await reads.replicas()]
        served: Counter[tuple[int, str]] = Counter()
        bands = [0.0] * _BANDS
        cut = False
        for replica in replicas:
            if replica.heartbeat_s_ago < self._silence_s:
                flows, totals, more = _service(replica.about)
                served.update(flows)
                bands = [a + b for a, b in zip(bands, totals, strict=True)]
                cut = cut or more
        return Standing(
            tuple(lanes.lanes),
            lanes.totals,
            sum(lanes.totals) <= len(lanes.lanes),
            tuple(replicas),
            served,
            tuple(bands),
            cut,
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
    """Cost a second by flow and by band, as app/admission/service.py reports them, and whether it was cut."""
    try:
        told = about["served"]
        flows = {(int(band), str(flow)): float(cost) / WINDOW_S for band, flow, cost in told["flows"]}
        bands = [float(cost) / WINDOW_S for cost in told["bands"]]
        if len(bands) == _BANDS:
            return flows, bands, bool(told["cut"])
    except (KeyError, TypeError, ValueError):
        pass
    return {}, [0.0] * _BANDS, False
