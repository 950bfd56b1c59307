"""The decision log read back: what it adds up to. Whether that is right is what the audit says."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from picker_tools.audit.log import ENDS, Entry


@dataclass(slots=True)
class Ledger:
    """How often each request began, how many ended how, and which of them wait or are orphaned."""

    started: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    queued: set[str] = field(default_factory=set)
    orphaned: set[str] = field(default_factory=set)

    @classmethod
    def replay(cls, entries: Iterable[Entry]) -> "Ledger":
        ledger = cls()
        last: dict[str, str] = {}
        for entry in entries:
            if entry.event in ENDS:
                if last.pop(entry.request, None):  # else it was refused, and has never begun
                    ledger.ends[entry.event] += 1
            elif entry.request:
                ledger.started[entry.request] += entry.event in ("queued", "bypassed", "restored")
                last[entry.request] = entry.event
        ledger.queued = {request for request, event in last.items() if event in ("queued", "requeued")}
        ledger.orphaned = {request for request, event in last.items() if event == "held"}
        return ledger


def events_of(entries: Iterable[Entry], request: str) -> list[str]:
    """The events of `request`, in order."""
    return [entry.event for entry in entries if entry.request == request]


def order_of(entries: Iterable[Entry]) -> list[str]:
    """The requests in the order they were granted."""
    return [entry.request for entry in entries if entry.event == "granted"]
