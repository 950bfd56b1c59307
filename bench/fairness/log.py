"""The decision log as the scripts write it, and what the queue held at each of its entries."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

# What takes a request out of the queue; any of them may also befall one that is not in it.
_LEAVES = frozenset(
    ("granted", "held", "expired", "abandoned", "cancelled", "refused", "preempted", "evicted")
)  # fmt: skip
_ENTERS = frozenset(("queued", "requeued"))

Lane = tuple[int, str]  # band, flow


@dataclass(frozen=True, slots=True)
class Entry:
    """One decision. `by` is turn, guard or '' where nothing was granted; times are the server's."""

    time_us: int
    event: str
    request: str
    flow: str
    band: int
    cost: float
    weight: float
    arrived_us: int
    by: str

    @classmethod
    def of(cls, raw: Mapping[str, str]) -> "Entry":
        return cls(
            int(raw["time_us"]), raw["event"], raw["request"], raw["flow"], int(raw["band"]),
            float(raw["cost"]), float(raw["weight"]), int(raw["arrived"]), raw["by"],
        )  # fmt: skip

    @property
    def lane(self) -> Lane:
        return self.band, self.flow

    @property
    def wait_ms(self) -> float:
        """How long the request had been there when this was decided."""
        return (self.time_us - self.arrived_us) / 1000


class Waiting:
    """Which requests wait, as a log tells it entry by entry."""

    def __init__(self) -> None:
        self._lanes: dict[str, Lane] = {}
        self._held: set[str] = set()
        self.of_lane: Counter[Lane] = Counter()
        self.of_band: Counter[int] = Counter()

    def take(self, entry: Entry) -> int:
        """By how much `entry` changes the length of its lane: -1, 0 or 1."""
        returns = entry.event == "adopted" and entry.request in self._held
        self._held.discard(entry.request)
        if entry.event == "held":
            self._held.add(entry.request)
        if entry.event in _ENTERS or returns:
            self._lanes[entry.request] = entry.lane
            return self._count(entry.lane, 1)
        if entry.event in _LEAVES and self._lanes.pop(entry.request, None) is not None:
            return self._count(entry.lane, -1)
        return 0

    def _count(self, lane: Lane, change: int) -> int:
        self.of_lane[lane] += change
        self.of_band[lane[0]] += change
        return change
