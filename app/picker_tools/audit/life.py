"""Where a request is, and what each event of the log does to that."""

import enum
from dataclasses import dataclass

from picker_tools.audit.entry import ENDS, Entry


class Place(enum.StrEnum):
    NOWHERE = "nowhere"
    QUEUED = "queued"
    HELD = "held"
    GRANTED = "granted"
    PLACED = "placed"


ANYWHERE = frozenset(Place) - {Place.NOWHERE}
RUNNING = frozenset({Place.GRANTED, Place.PLACED})
_WAITING = frozenset({Place.QUEUED, Place.HELD})

# Where a request may be when an event befalls it. One that was never taken in may only begin or be refused.
FROM: dict[str, frozenset[Place]] = {
    "queued": frozenset({Place.NOWHERE}),
    "bypassed": frozenset({Place.NOWHERE}),
    "restored": frozenset({Place.NOWHERE}),
    "refused": frozenset({Place.NOWHERE, Place.GRANTED}),
    "granted": frozenset({Place.QUEUED}),
    "placed": frozenset({Place.GRANTED}),
    "requeued": frozenset({Place.GRANTED}),
    "held": frozenset({Place.QUEUED}),
    "adopted": ANYWHERE,
    "moved": frozenset({Place.PLACED}),
    "corrected": RUNNING,
    "completed": RUNNING,
    "client_gone": RUNNING,
    "upstream_failed": RUNNING,
    "reclaimed": RUNNING,
    "withdrawn": ANYWHERE,
    "cancelled": ANYWHERE,
    "expired": _WAITING | {Place.GRANTED},
    "abandoned": frozenset({Place.HELD}),
    "preempted": frozenset({Place.QUEUED}),
    "evicted": _WAITING,
}
_TO = {
    "queued": Place.QUEUED, "requeued": Place.QUEUED, "held": Place.HELD, "granted": Place.GRANTED,
    "placed": Place.PLACED, "bypassed": Place.PLACED, "restored": Place.PLACED,
}  # fmt: skip


def place_after(event: str, was: Place) -> Place:
    if event in ENDS:
        return Place.NOWHERE
    if event == "adopted" and was is Place.HELD:
        return Place.QUEUED
    return _TO.get(event, was)


@dataclass(slots=True)
class Life:
    """A request that has begun and not ended.

    `lane` is the one it stood in last, `taken` the stock it holds (None: unknown), `granted` the entry of its
    grant, whose start tag its charge began at.
    """

    begun: Entry
    place: Place
    lane: str
    taken: float | None = 0.0
    endpoint: str = ""
    granted: Entry | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One entry and what it means for its request; `life` is None where no request is known by its id."""

    entry: Entry
    life: Life | None
    was: Place
    now: Place

    @property
    def enters_queue(self) -> bool:
        return self.now is Place.QUEUED and self.was is not Place.QUEUED

    @property
    def leaves_queue(self) -> bool:
        return self.was is Place.QUEUED and self.now is not Place.QUEUED

    @property
    def takes(self) -> bool:
        return self.now in RUNNING and self.was not in RUNNING

    @property
    def gives_back(self) -> bool:
        return self.was in RUNNING and self.now not in RUNNING
