"""The service that flows have had through one replica over the last seconds, for whoever adds replicas up."""

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

WINDOW_S = 10  # whole seconds, without the one that has begun
_MOST_FLOWS = 5000  # a second
_MOST_TOLD = 200
_MOST_TOLD_BYTES = 16_000  # of names, about


class ServiceMeter:
    """Costs of placed requests by band and flow. Noting one is a dictionary entry; memory is bounded.

    A flow beyond 5000 in one second counts for its band only.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._seconds: deque[tuple[int, dict[tuple[int, str], float], list[float]]] = deque()
        self._reported: tuple[int, dict[str, Any]] = (-1, {})  # in which second, and what

    def note(self, band: int, flow: str, cost: float) -> None:
        """A request of `flow` has been placed."""
        second = int(self._clock_s())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, {}, [0.0, 0.0, 0.0]))
            self._forget(second)
        _, flows, bands = self._seconds[-1]
        bands[band] += cost
        lane = (band, flow)
        if lane in flows or len(flows) < _MOST_FLOWS:
            flows[lane] = flows.get(lane, 0.0) + cost

    def report(self) -> dict[str, Any]:
        """`bands`: cost by band; `flows`: [band, flow, cost] of the busiest; `cut`: there are more.

        Added up once a second, however often it is asked for. Not to be changed.
        """
        second = int(self._clock_s())
        if self._reported[0] != second:
            self._reported = second, self._add_up(second)
        return self._reported[1]

    def _add_up(self, second: int) -> dict[str, Any]:
        self._forget(second)
        bands = [0.0, 0.0, 0.0]
        flows: Counter[tuple[int, str]] = Counter()
        for begun, costs, totals in self._seconds:
            if begun != second:
                flows.update(costs)
                bands = [a + b for a, b in zip(bands, totals, strict=True)]
        told: list[list[object]] = []
        room = _MOST_TOLD_BYTES
        for (band, flow), cost in flows.most_common(_MOST_TOLD):
            room -= len(flow) + 16
            if room < 0:
                break
            told.append([band, flow, round(cost, 3)])
        return {"bands": [round(cost, 3) for cost in bands], "flows": told, "cut": len(told) < len(flows)}

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] < second - WINDOW_S:
            self._seconds.popleft()
