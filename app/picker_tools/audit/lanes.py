"""The lanes of the queue, as the entries show them: who waits in each, which are parked, and their tags."""

from dataclasses import dataclass

BANDS = (0, 1, 2)


@dataclass(slots=True)
class Lane:
    """A lane of one band. `tag` is its start tag while it is backlogged, else its finish tag; None: unknown.

    `largest` is the largest share any of its requests would cost or has cost.
    """

    band: int
    name: str
    waiting: int = 0
    parked: bool = False
    tag: float | None = None
    largest: float = 0.0

    @property
    def is_servable(self) -> bool:
        return self.waiting > 0 and not self.parked


class Lanes:
    """All lanes that somebody waits in or that have a tag to remember."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, str], Lane] = {}
        self._servable = dict.fromkeys(BANDS, 0)

    def find(self, band: int, name: str) -> Lane | None:
        return self._lanes.get((band, name))

    def at(self, band: int, name: str) -> Lane:
        """The lane, a new one without a known tag if there was none."""
        lane = self._lanes.get((band, name))
        if lane is None:
            lane = self._lanes[band, name] = Lane(band, name)
        return lane

    def of(self, band: int) -> list[Lane]:
        return [lane for lane in self._lanes.values() if lane.band == band]

    def servable(self, band: int) -> int:
        """How many lanes of the band have somebody to serve."""
        return self._servable[band]

    def wait(self, lane: Lane, change: int) -> None:
        """`change` more wait in `lane`."""
        self._count(lane, -1)
        lane.waiting += change
        self._count(lane, 1)

    def park(self, lane: Lane, parked: bool) -> None:
        self._count(lane, -1)
        lane.parked = parked
        self._count(lane, 1)

    def unpark_empty(self) -> None:
        for lane in self._lanes.values():
            if not lane.waiting:
                lane.parked = False

    def clear(self) -> None:
        self._lanes.clear()
        self._servable = dict.fromkeys(BANDS, 0)

    def drop(self, lane: Lane) -> None:
        """Forget an empty lane."""
        del self._lanes[lane.band, lane.name]

    def __len__(self) -> int:
        return len(self._lanes)

    def _count(self, lane: Lane, change: int) -> None:
        if lane.is_servable:
            self._servable[lane.band] += change
