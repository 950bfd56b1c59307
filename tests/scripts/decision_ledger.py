"""The decision log read back: what it adds up to. Whether that is right is what the audit says."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from picker_tools.audit.log import ENDS, Entry


@dataclass(slots=True)
class Ledger:
    """How often each request began, and how many ended how."""

    started: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    @classmethod
    def replay(cls, entries: Iterable[Entry]) -> "Ledger":
        ledger, known = cls(), set[str]()
        for entry in entries:
            if entry.event not in ENDS:
                ledger.started[entry.request] += entry.event in ("queued", "bypassed", "restored")
                known.add(entry.request)
            elif entry.request in known:  # else it was refused, and has never begun
                ledger.ends[entry.event] += 1
                known.remove(entry.request)
        del ledger.started[""]  # changes of the pool
        return ledger


def events_of(entries: Iterable[Entry], request: str) -> list[str]:
    """The events of `request`, in order."""
    return [entry.event for entry in entries if entry.request == request]


def order_of(entries: Iterable[Entry]) -> list[str]:
    """The requests in the order they were granted."""
    return [entry.request for entry in entries if entry.event == "granted"]
