"""What a check has to say: how much it looked at, and what broke its promise."""

from dataclasses import dataclass, field

from picker_tools.audit.entry import Entry

KEPT = 50  # violations of one promise that are told in full; all are counted


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise: what is wrong, and the entries that show it."""

    promise: str
    what: str
    evidence: tuple[Entry, ...]


@dataclass(slots=True)
class Finding:
    """One promise: its number, what it says, how often it was checked and broken."""

    promise: str
    title: str
    checked: int = 0
    broken: int = 0
    violations: list[Violation] = field(default_factory=list)

    def blame(self, what: str, *evidence: Entry) -> None:
        self.broken += 1
        if len(self.violations) < KEPT:
            self.violations.append(Violation(self.promise, what, evidence))
