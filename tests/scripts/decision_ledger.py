"""The decision log read back, and replayed against the rules it must obey (G1, G4, G6)."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from picker_tools.audit.log import ENDS, THROTTLING, Entry

TAKES = ("bypassed", "granted", "restored")
# Events that change the state of no request.
ASIDE = THROTTLING | {"tuned", "corrected", "moved"}


@dataclass(slots=True)
class Ledger:
    """The state that a log adds up to. A broken rule is an AssertionError that shows the entry."""

    running: dict[str, float] = field(default_factory=dict)  # request -> cost
    placed: set[str] = field(default_factory=set)  # those of the running that have an endpoint
    queued: dict[str, Entry] = field(default_factory=dict)
    orphaned: dict[str, Entry] = field(default_factory=dict)
    started: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)  # by event
    ordering: str = "fcfs"

    @classmethod
    def replay(cls, entries: Iterable[Entry]) -> "Ledger":
        ledger = cls()
        for seq, entry in enumerate(entries, start=1):
            assert entry.seq == seq, f"a gap before {entry}"
            ledger._take(entry)
            assert abs(entry.stock - sum(ledger.running.values())) < 1e-9, f"stock is off: {entry}"
            assert entry.queued == len(ledger.queued), f"queue length is off: {entry}"
        return ledger

    def _take(self, entry: Entry) -> None:
        if entry.event in ASIDE:
            if entry.event == "tuned":
                self.ordering = json.loads(entry.note)["ordering"]
            return
        if entry.event in TAKES:
            self._takes_stock(entry)
        elif entry.event == "requeued":
            del self.running[entry.request]
            self.queued[entry.request] = entry
        elif entry.event == "queued":
            self._begins(entry)
            self.queued[entry.request] = entry
        elif entry.event == "held":
            self.orphaned[entry.request] = self.queued.pop(entry.request)
        elif entry.event == "adopted":
            if entry.request in self.orphaned:
                self.queued[entry.request] = self.orphaned.pop(entry.request)
            assert self._is_known(entry.request), f"nothing to adopt: {entry}"
        elif entry.event == "placed":
            assert entry.request in self.running, f"placed without a grant: {entry}"
            self.placed.add(entry.request)
        else:
            self._ends(entry)

    def _takes_stock(self, entry: Entry) -> None:
        if entry.event == "granted":
            self._served(entry)
        else:
            assert entry.event == "restored" or not self.queued, f"bypassed a queue: {entry}"
            self._begins(entry)
        # Stock rises nowhere else, so the bound holds between entries too. What is restored ran already.
        assert entry.event == "restored" or entry.stock <= entry.upper, f"past the bound: {entry}"
        self.running[entry.request] = entry.cost
        if entry.endpoint:
            self.placed.add(entry.request)

    def _served(self, entry: Entry) -> None:
        mine = self.queued.pop(entry.request)
        if self.ordering != "fcfs":
            return
        earlier = [
            other.request
            for other in self.queued.values()
            if (other.band, other.flow) == (mine.band, mine.flow) and other.arrived < mine.arrived
        ]
        assert not earlier, f"{earlier} came before: {entry}"

    def _begins(self, entry: Entry) -> None:
        assert not self._is_known(entry.request), f"begins twice: {entry}"
        self.started[entry.request] += 1

    def _ends(self, entry: Entry) -> None:
        assert entry.event in ENDS, f"an unknown event: {entry}"
        if entry.event == "refused" and not self._is_known(entry.request):
            return
        assert self._is_known(entry.request), f"ends without having begun, or twice: {entry}"
        self.ends[entry.event] += 1
        for group in (self.running, self.queued, self.orphaned):
            group.pop(entry.request, None)
        self.placed.discard(entry.request)

    def _is_known(self, request: str) -> bool:
        return request in self.running or request in self.queued or request in self.orphaned


def events_of(entries: Iterable[Entry], request: str) -> list[str]:
    """The events of `request`, in order."""
    return [entry.event for entry in entries if entry.request == request]


def order_of(entries: Iterable[Entry]) -> list[str]:
    """The requests in the order they were granted."""
    return [entry.request for entry in entries if entry.event == "granted"]
