"""The order in which waiting requests will be served, as far as it can be told without looking at each.

Start-time fair queueing serves the least start tag, and a lane's tag grows by what its request costs it. If
the requests of a lane cost what its oldest does, the n-th of them will be served at start + n·share; this
number stays the same while the queue is served, so a page can go on at any depth, and a position is a count
over lanes. What may change the order: arrivals, the guard's dispatches, unlike costs in one lane, and, under
`band_policy: weighted`, the turns between bands. Pure.
"""

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

from picker_fleet.state.rows import Lane

_SLACK = 1e-6  # of a share: sums of fractions differ in their last digits
_LEAST_SHARE = 1e-12


class Point(NamedTuple):
    """A request's place: its lane's group, the start tag it will be served at, and its lane."""

    group: int
    tag: float
    lane: str


class Turn(NamedTuple):
    """The `rank`-th request of `lane` (0: the first) is foretold to be served at `tag`, as the `position`-th
    of all (1: the first).
    """

    lane: Lane
    rank: int
    tag: float
    position: int

    @property
    def point(self) -> Point:
        return Point(self.lane.group, self.tag, self.lane.name)


def tag_of(lane: Lane, rank: int) -> float:
    """The start tag at which the lane's `rank`-th request will be served."""
    return lane.start + rank * max(lane.share, _LEAST_SHARE)


def turns(lanes: Sequence[Lane], behind: Point | None, limit: int) -> list[Turn]:
    """The next `limit` turns behind a point; O(lanes + limit · log lanes)."""
    ahead = 0
    if behind is None:
        heads = [(lane.group, lane.start, lane.name, 0, lane) for lane in lanes if lane.queued]
    else:
        heads = []
        for lane in lanes:
            rank = _passed(lane, behind, itself=True)
            ahead += rank
            if rank < lane.queued:
                heads.append((lane.group, tag_of(lane, rank), lane.name, rank, lane))
    heapq.heapify(heads)
    found: list[Turn] = []
    while heads and len(found) < limit:
        group, tag, name, rank, lane = heads[0]
        found.append(Turn(lane, rank, tag, ahead + len(found) + 1))
        if rank + 1 < lane.queued:
            heapq.heapreplace(heads, (group, tag_of(lane, rank + 1), name, rank + 1, lane))
        else:
            heapq.heappop(heads)
    return found


def before(lanes: Sequence[Lane], point: Point) -> int:
    """How many requests are foretold to be served before the one at `point`."""
    return sum(_passed(lane, point, itself=False) for lane in lanes)


def _passed(lane: Lane, point: Point, *, itself: bool) -> int:
    """How many requests of `lane` come before `point`; with `itself` also the one at it."""
    if lane.group != point.group:
        return lane.queued if lane.group < point.group else 0
    shares = (point.tag - lane.start) / max(lane.share, _LEAST_SHARE)
    if not math.isfinite(shares):
        return lane.queued if shares > 0 else 0
    with_equal = lane.name < point.lane or (itself and lane.name == point.lane)
    passed = math.floor(shares + _SLACK) + 1 if with_equal else math.ceil(shares - _SLACK)
    return min(max(passed, 0), lane.queued)
