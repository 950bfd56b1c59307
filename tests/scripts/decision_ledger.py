"""Counts starts and ends of requests in the decision log. The audit checks whether the log is right."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from picker_tools.audit.log import ENDS, Entry


@dataclass(slots=True)
class Ledger:
    """The number of starts of each request, and the number of ends by outcome."""

    started: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)

    @classmethod
    def replay(cls, entries: Iterable[Entry]) -> "Ledger":
        ledger, known = cls(), set[str]()
        for entry in entries:
            if entry.event not in ENDS:
                ledger.started[entry.request] += entry.event in ("queued", "bypassed", "restored")
                known.add(entry.request)
            elif entry.request in known:  # an unknown request was refused and never started
                ledger.ends[entry.event] += 1
                known.remove(entry.request)
        del ledger.started[""]  # log entries about the pool name no request
        return ledger


def events_of(entries: Iterable[Entry], request: str) -> list[str]:
    """The logged events of `request`, in order."""
    return [entry.event for entry in entries if entry.request == request]


def order_of(entries: Iterable[Entry]) -> list[str]:
    """The requests in the order of their grants."""
    return [entry.request for entry in entries if entry.event == "granted"]
