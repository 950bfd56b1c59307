"""The report of an audit, promise by promise, and its output on a terminal."""

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from picker_tools.audit.log import Entry

KEPT = 50  # a finding keeps this many violations, and counts all


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise: a description, and the entries that prove it."""

    promise: str
    what: str
    evidence: tuple[Entry, ...]


@dataclass(slots=True)
class Finding:
    """The result for one promise: number, title, how often it was checked and broken."""

    promise: str
    title: str
    checked: int = 0
    broken: int = 0
    violations: list[Violation] = field(default_factory=list)

    def add(self, what: str, *evidence: Entry) -> None:
        self.broken += 1
        if len(self.violations) < KEPT:
            self.violations.append(Violation(self.promise, what, evidence))


@dataclass(frozen=True, slots=True)
class Report:
    """The result of an audit of `entries` entries, numbered `first_seq` to `last_seq` (None: no entries),
    with one finding per promise. `open_at_end` requests had not ended: no violation, as the log goes on.
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
        """The finding of `promise`: G1 to G6, or log.

        Raises:
            KeyError: there is no such promise.
        """
        for finding in self.findings:
            if finding.promise == promise:
                return finding
        raise KeyError(promise)


def show(report: Report, console: Console) -> None:
    """Print the table of promises, then each violation with the entries that prove it."""
    table = Table(title=f"{report.entries} entries, {report.first_seq} to {report.last_seq}")
    table.add_column("promise")
    table.add_column("checked", justify="right")
    table.add_column("broken", justify="right")
    table.add_column("what it says")
    for finding in report.findings:
        broken = str(finding.broken) if finding.checked or finding.broken else "-"
        style = "bold red" if finding.broken else ""
        table.add_row(finding.promise, str(finding.checked), broken, finding.title, style=style)
    console.print(table)
    for finding in report.findings:
        for violation in finding.violations:
            _line(console, f"{violation.promise}: {violation.what}", "red")
            for entry in violation.evidence:
                _line(console, f"    {entry}")
        left = finding.broken - len(finding.violations)
        if left:
            _line(console, f"{finding.promise}: and {left} more")
    for remark in report.remarks:
        _line(console, f"note: {remark}")
    if report.open_at_end:
        _line(console, f"note: {report.open_at_end} requests have not ended yet")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
