"""What an audit has found."""

from dataclasses import dataclass
from typing import Any

from picker_tools.audit.finding import Finding


@dataclass(frozen=True, slots=True)
class Report:
    """`entries` replayed, numbered `first_seq` to `last_seq` (None: there were none). `findings` are one a
    promise; `open_at_end` requests had begun and not ended, which is no fault of a log that goes on.
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

    def as_json(self) -> dict[str, Any]:
        """The report for machines: evidence as the entries print, one string each."""
        return {
            "entries": self.entries,
            "first_seq": self.first_seq,
            "last_seq": self.last_seq,
            "open_at_end": self.open_at_end,
            "remarks": list(self.remarks),
            "violations": self.violations,
            "promises": [
                {
                    "promise": finding.promise,
                    "title": finding.title,
                    "checked": finding.checked,
                    "broken": finding.broken,
                    "violations": [
                        {"what": violation.what, "evidence": [str(entry) for entry in violation.evidence]}
                        for violation in finding.violations
                    ],
                }
                for finding in self.findings
            ],
        }
