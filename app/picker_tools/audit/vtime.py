"""The virtual time of each band: a turn moves it to the tag it was taken at, and at rest it is brought up to
the highest finish tag. When all tags are rebased it is less by the same amount. Nothing else moves it.
"""

from picker_tools.audit.entry import GUARD, Entry
from picker_tools.audit.finding import Finding
from picker_tools.audit.lanes import BANDS, Lanes
from picker_tools.audit.replay import same


class VirtualTimes:
    def __init__(self, finding: Finding, lanes: Lanes, first: float | None) -> None:
        """`first` is what each band begins with; None: whatever the log shows first."""
        self._finding = finding
        self._lanes = lanes
        self._v: dict[int, float | None] = dict.fromkeys(BANDS, first)
        self._knows_all = first is not None  # there is no lane but those that were seen
        self._rested = dict.fromkeys(BANDS, False)  # nothing waited or ran since the band's last entry

    def forget_lanes(self) -> None:
        """Lanes may have tags that were not seen."""
        self._knows_all = False

    def of(self, band: int) -> float | None:
        return self._v[band]

    def follow(self, entry: Entry) -> None:
        """Take the log's word for it."""
        self._v[entry.band] = entry.v
        self._note_rest(entry)

    def rebase(self, band: int, by: float) -> None:
        before = self._v[band]
        self._v[band] = None if before is None else before - by

    def judge(self, entry: Entry) -> float:
        """Check what `entry` shows. Returns the virtual time its decision began with."""
        before = self._v[entry.band]
        rested = self._rested[entry.band]
        self.follow(entry)
        if before is None:
            return entry.v
        after = before
        if entry.event == "granted" and entry.by != GUARD and entry.tag is not None:
            after = max(before, entry.tag)
        if same(after, entry.v):
            return before
        if not (rested and entry.v > before and self._is_highest(entry)):
            self._finding.blame(
                f"virtual time of band {entry.band} is {entry.v:g} where {after:g} follows", entry
            )
        return entry.v

    def _is_highest(self, entry: Entry) -> bool:
        """Whether the band may have come to rest at what `entry` shows."""
        tags = [lane.tag for lane in self._lanes.of(entry.band) if lane.tag is not None]
        return not self._knows_all or same(max(tags, default=0.0), entry.v)

    def _note_rest(self, entry: Entry) -> None:
        at_rest = entry.stock == 0 and entry.queued == 0
        for band in BANDS:
            self._rested[band] = at_rest or (self._rested[band] and band != entry.band)
