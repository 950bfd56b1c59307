"""The decision log of a run: audited, and read for when each request was served and how long it waited."""

from collections.abc import Sequence
from dataclasses import dataclass

from picker_tools.audit.auditor import Auditor
from picker_tools.audit.entry import Entry, EntryError
from picker_tools.audit.report import Report
from picker_tools.audit.stream import LogStream, LogUnreadable


@dataclass(frozen=True, slots=True)
class Turn:
    """A request was dispatched. Times are seconds of Redis's clock; `cost` is in the stock's unit."""

    at_s: float
    request: str
    flow: str
    band: int
    workload: str
    cost: float
    weight: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """One stretch of the log. `why` says why there is none; '' if there is."""

    report: Report | None
    turns: tuple[Turn, ...] = ()
    events: tuple[tuple[str, int], ...] = ()
    begins_s: float = 0.0  # the first entry's time
    why: str = ""

    def count(self, event: str) -> int:
        """How many entries of `event` it has."""
        return dict(self.events).get(event, 0)


def read(url: str, pool: str = "default") -> Ledger:
    """All of the log that Redis has now. Synchronous: to be called in a thread."""
    turns: list[Turn] = []
    events: dict[str, int] = {}
    begins_s = 0.0
    try:
        with LogStream(url, pool) as log:
            auditor = Auditor(log.settings_throughout())
            for page in log.pages():
                for raw in page.entries:
                    auditor.take(raw)
                    entry = Entry.parse(raw)
                    begins_s = begins_s or entry.time_us / 1e6
                    events[entry.event] = events.get(entry.event, 0) + 1
                    if entry.event in ("granted", "bypassed"):
                        turns.append(_turn(entry))
    except (LogUnreadable, EntryError) as fault:
        return Ledger(None, why=str(fault))
    report = auditor.report()
    if not report.entries:
        return Ledger(None, why="the fleet has no decision log (decision_log.enabled)")
    return Ledger(report, tuple(turns), tuple(sorted(events.items())), begins_s)


def violations(ledgers: Sequence[Ledger], promise: str) -> tuple[int, int, list[str]]:
    """How often `promise` (G1 to G6, log) was checked and broken in `ledgers`, and the first cases."""
    checked = broken = 0
    cases: list[str] = []
    for ledger in ledgers:
        if ledger.report is None:
            continue
        finding = ledger.report.of(promise)
        checked += finding.checked
        broken += finding.broken
        for violation in finding.violations[:3]:
            cases.append("\n    ".join([violation.what, *map(str, violation.evidence)]))
    return checked, broken, cases


def _turn(entry: Entry) -> Turn:
    return Turn(
        at_s=entry.time_us / 1e6,
        request=entry.request,
        flow=entry.flow,
        band=entry.band,
        workload=entry.workload,
        cost=entry.cost,
        weight=entry.weight,
        # `arrived` is the time of arrival in µs, or the number after the last one's: never less.
        wait_s=max(0.0, (entry.time_us - entry.arrived) / 1e6),
    )
