"""Whose turn it is: the lanes of each band by start tag."""

import heapq

from picker_tools.audit.lanes import BANDS, Lane, Lanes
from picker_tools.audit.replay import same


class Turns:
    """A heap a band; what has changed since it was pushed is dropped when it comes up."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._heaps: dict[int, list[tuple[float, str]]] = {band: [] for band in BANDS}

    def file(self, lane: Lane) -> None:
        """`lane` has a new tag, or can be served again."""
        if lane.tag is None:
            return
        heap = self._heaps[lane.band]
        heapq.heappush(heap, (lane.tag, lane.name))
        if len(heap) > 4 * len(self._lanes) + 64:
            self.refile(lane.band)

    def refile(self, band: int) -> None:
        """All lanes of `band`, by the tags they have now."""
        heap = self._heaps[band]
        heap[:] = [(each.tag, each.name) for each in self._lanes.of(band) if each.tag is not None]
        heapq.heapify(heap)

    def ahead_of(self, lane: Lane, tag: float) -> Lane | None:
        """The lane of the band whose turn it was, if it was not that of `lane` at `tag`."""
        heap = self._heaps[lane.band]
        while heap:
            least, name = heap[0]
            first = self._lanes.find(lane.band, name)
            if first is None or not first.is_servable or first.tag != least:
                heapq.heappop(heap)
                continue
            if first is lane or (least, name) >= (tag, lane.name) or (least != tag and same(least, tag)):
                return None
            return first
        return None
