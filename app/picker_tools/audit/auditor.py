"""The whole audit: entries in, verdict on each promise out (G1–G6, docs/guarantees.md)."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from picker_tools.audit.capacity import Capacity
from picker_tools.audit.conservation import Conservation
from picker_tools.audit.deadline import Deadline
from picker_tools.audit.entry import Entry
from picker_tools.audit.fairness import Fairness
from picker_tools.audit.finding import Finding
from picker_tools.audit.life import Step
from picker_tools.audit.order import Order
from picker_tools.audit.replay import Replay
from picker_tools.audit.report import Report
from picker_tools.audit.rules import Rules
from picker_tools.audit.starvation import Starvation


class _Check(Protocol):
    """A promise. `see` comes before the step is taken into the replay, `close` when no more will come."""

    def see(self, step: Step) -> None: ...

    def close(self) -> None: ...


_CHECKS: tuple[tuple[str, str, Callable[[Finding, Replay], _Check]], ...] = (
    ("G1", Capacity.TITLE, Capacity),
    ("G2", Fairness.TITLE, Fairness),
    ("G3", Starvation.TITLE, Starvation),
    ("G4", Order.TITLE, Order),
    ("G5", Deadline.TITLE, Deadline),
    ("G6", Conservation.TITLE, Conservation),
)


class Auditor:
    """Takes the log entry by entry. What it keeps grows with the requests that are open, not with the log.

    `settings` (JSON, as a `tuned` entry notes them) are those in force at the log's beginning, where it does
    not tell them itself.
    """

    def __init__(self, settings: str | None = None) -> None:
        self._log = Finding("log", "every entry is there, numbered without a gap")
        self._findings = [Finding(promise, title) for promise, title, _ in _CHECKS]
        self._first: Entry | None = None
        self._from_start = False
        self._newest: Entry | None = None
        self._last: Entry | None = None  # that the next one must follow
        self._remarks: list[str] = []
        self._begin(Rules.parse(settings) if settings else None)

    def take(self, raw: Mapping[str, str]) -> None:
        """The next entry, as the stream has it.

        Raises:
            EntryError: it cannot be read.
        """
        entry = Entry.parse(raw)
        self._log.checked += 1
        if self._last is not None and entry.seq != self._last.seq + 1:
            self._log.blame(f"entry {entry.seq} follows {self._last.seq}", self._last, entry)
            self.skip(f"entries between {self._last.seq} and {entry.seq} are missing")
        self._last = self._newest = entry
        step = self._replay.step(entry)
        if self._first is None:
            self._first, self._from_start = entry, self._replay.complete
        for check in self._checks:
            check.see(step)
        self._replay.advance(step)
        if self._replay.rules is not None and not self._replay.rules.logged:
            self.skip(f"the log was off after entry {entry.seq}")

    def skip(self, why: str) -> None:
        """Entries are missing here, and nothing is held against that: what comes is joined on the way."""
        self._remarks.append(why)
        self._close()
        self._last = None
        self._begin(None)

    @property
    def last_seq(self) -> int | None:
        return self._last.seq if self._last else None

    def report(self) -> Report:
        """The verdict on what was taken. Nothing may be taken after it."""
        self._close()
        remarks = list(self._remarks)
        if self._first is not None and not self._from_start:
            remarks.insert(0, f"begins at entry {self._first.seq}: requests that began before are ignored")
        if self._first is not None and not self._replay.settled:
            remarks.append("lanes and order were not known at the end: G2, G3 and G4 are judged only in part")
        return Report(
            entries=self._log.checked,
            first_seq=self._first.seq if self._first else None,
            last_seq=self._newest.seq if self._newest else None,
            open_at_end=len(self._replay.lives),
            remarks=tuple(remarks),
            findings=(*self._findings, self._log),
        )

    def _begin(self, rules: Rules | None) -> None:
        self._replay = Replay(rules)
        self._checks = [
            check(finding, self._replay) for (*_, check), finding in zip(_CHECKS, self._findings, strict=True)
        ]

    def _close(self) -> None:
        for check in self._checks:
            check.close()


def audit(entries: Iterable[Mapping[str, str]], settings: str | None = None) -> Report:
    """Replay `entries`, the decision log oldest first, and judge G1 to G6.

    `settings` as `Auditor` takes them.

    Raises:
        EntryError: an entry cannot be read.
    """
    auditor = Auditor(settings)
    for raw in entries:
        auditor.take(raw)
    return auditor.report()
