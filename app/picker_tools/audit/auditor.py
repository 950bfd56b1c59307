"""The audit replays the decision log and checks the promises G1–G6 (docs/guarantees.md) and tenants' quotas.

The command `picker audit`, the load generator, the fault suite and the tests call it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from picker_tools.audit.checks import Capacity, Check, Conservation, Deadline, Finding, Order
from picker_tools.audit.fairness import Fairness
from picker_tools.audit.log import Entry, LogStream, LogUnreadable
from picker_tools.audit.quotas import Quotas
from picker_tools.audit.replay import Replay, Rules
from picker_tools.audit.starvation import Starvation

_CHECKS: tuple[type[Check], ...] = (Capacity, Fairness, Starvation, Order, Deadline, Conservation, Quotas)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an audit of `entries` entries, numbered `first_seq` to `last_seq` (None: no entries),
    with one finding per promise. `open_at_end` counts requests that had not ended, which are no violations.
    """

    entries: int
    first_seq: int | None
    last_seq: int | None
    open_at_end: int
    remarks: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def violations(self) -> int:
        return sum(finding.broken for finding in self.findings)

    def of(self, promise: str) -> Finding:
        """The finding on `promise`, one of G1 to G6, `log`, and, with tenants, `quotas`.

        Raises:
            KeyError: no promise has this name.
        """
        for finding in self.findings:
            if finding.promise == promise:
                return finding
        raise KeyError(promise)


class Auditor:
    """Checks the decision log entry by entry. The auditor's memory grows with the open requests, not with the
    log.

    `settings` (JSON, as in a `tuned` entry) are the settings in force at the beginning of the log; None if
    the log itself shows these settings.
    """

    def __init__(self, settings: str | None = None) -> None:
        self._log = Finding("log", "the numbers of the entries have no gap")
        self._findings = {check: Finding(check.PROMISE, check.TITLE) for check in _CHECKS}
        self._first: Entry | None = None
        self._from_start = False
        self._newest: Entry | None = None
        self._last: Entry | None = None  # the last entry; the next entry must follow without a gap
        self._remarks: list[str] = []
        self._replay = Replay(Rules.parse(settings) if settings else None)
        self._checks: list[Check] = []  # created once the first entry shows whether the log is complete

    def take(self, raw: Mapping[str, str]) -> Entry:
        """Check the next log entry, given as the fields in the Redis stream. Returns the parsed entry.

        Raises:
            EntryError: the entry cannot be parsed.
        """
        entry = Entry.parse(raw)
        self._log.checked += 1
        if self._last is not None and entry.seq != self._last.seq + 1:
            self._log.add(f"entry {entry.seq} follows {self._last.seq}", self._last, entry)
            self.skip(f"entries between {self._last.seq} and {entry.seq} are missing")
        self._last = self._newest = entry
        step = self._replay.step(entry)
        if self._first is None:
            self._first, self._from_start = entry, self._replay.complete
        if not self._checks:
            self._checks = [make(finding, self._replay) for make, finding in self._findings.items()]
        for check in self._checks:
            check.check(step)
        self._replay.advance(step)
        if self._replay.rules is not None and not self._replay.rules.log_max:
            self.skip(f"the log was off after entry {entry.seq}")
        return entry

    def skip(self, why: str) -> None:
        """Restart the checks at the next log entry, since entries before it are missing (no violation)."""
        self._remarks.append(why)
        self._close()
        self._last, self._replay, self._checks = None, Replay(), []

    @property
    def last_seq(self) -> int | None:
        return self._last.seq if self._last else None

    def report(self) -> Report:
        """The findings on all entries so far. Do not call `take` after this call."""
        self._close()
        remarks = list(self._remarks)
        # A log without tenants has no finding on quotas.
        found = self._findings.values()
        shown = [each for each in found if each.checked or each.broken or each.promise != Quotas.PROMISE]
        if self._first is not None and not self._from_start:
            remarks.insert(0, f"begins at entry {self._first.seq}: requests that began before are ignored")
        if self._first is not None and not self._replay.settled:
            remarks.append(
                "flow queues and order are unknown at the end: G2, G3 and G4 are only partly checked"
            )
        return Report(
            entries=self._log.checked,
            first_seq=self._first.seq if self._first else None,
            last_seq=self._newest.seq if self._newest else None,
            open_at_end=len(self._replay.requests),
            remarks=tuple(remarks),
            findings=(*shown, self._log),
        )

    def _close(self) -> None:
        for check in self._checks:
            check.close()


def audit(entries: Iterable[Mapping[str, str]], settings: str | None = None) -> Report:
    """Replay `entries`, the decision log with the oldest entry first, and check G1 to G6.

    `settings` are as for `Auditor`.

    Raises:
        EntryError: an entry cannot be parsed.
    """
    auditor = Auditor(settings)
    for raw in entries:
        auditor.take(raw)
    return auditor.report()


def audited(url: str, pool: str, seen: Callable[[Entry], object] = lambda _: None) -> Report:
    """Check the whole decision log of `pool` in the Redis at `url`, and pass each entry to `seen`.

    Raises:
        LogUnreadable: the pool has no decision log, or Redis does not answer.
        EntryError: an entry cannot be parsed.
    """
    with LogStream(url, pool) as log:
        auditor = Auditor(log.settings_throughout())
        for page in log.pages():
            first = page.entries[0].get("seq", "")
            if page.trimmed and auditor.last_seq is not None and first != str(auditor.last_seq + 1):
                auditor.skip(f"entries up to {first} were trimmed while the log was read")
            for raw in page.entries:
                seen(auditor.take(raw))
        report = auditor.report()
    if not report.entries:
        raise LogUnreadable(f"pool {pool!r} has no decision log (decision_log.enabled)")
    return report
