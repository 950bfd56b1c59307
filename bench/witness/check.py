"""What clients remember, held against the decision log (G6): offline, from what both wrote down."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.witness.asking import Asked
from picker_tools.audit.auditor import audit

_BEGINS = ("queued", "bypassed")
_OF_A_SLEEPER = frozenset(("abandoned", "cancelled", "withdrawn"))
_NO_END = frozenset(
    ("queued", "bypassed", "granted", "restored", "requeued", "held", "adopted", "placed", "tuned", "parked",
     "unparked", "corrected", "moved")
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Verdict:
    """`faults`: every broken rule, in words. `ends` of the requests that clients were served, by event.

    `returned` of them lived twice. `begun` is how many lives the log has of them;
    `entries` how long the log is.
    """

    faults: tuple[str, ...]
    ends: Counter[str]
    returned: int
    begun: int
    entries: int
    highest_stock: float


def check(
    history: Iterable[Asked],
    log: Sequence[Mapping[str, str]],
    *,
    may_end: Sequence[str] = ("completed",),
    forgotten: bool = False,
    may_return: bool = False,
    but: Sequence[str] = (),
    alone: bool = False,
) -> Verdict:
    """Judge a run at whose end nothing was left.

    Every answer that a client was served belongs to a request of the log that ended once, as one of
    `may_end`; no two clients have the same request; and the log keeps G1 to G6. `forgotten`: the log was lost
    on the way, so requests of clients may be missing from it. `may_return`: what a replica that sleeps holds
    may be abandoned before Envoy brings it elsewhere, and when it wakes it may bring again what has ended
    elsewhere, if it takes it back. `but`: promises (`G1`) that a fault breaks by its nature, not judged.
    `alone`: replicas served without Redis for a while, so what became of a request the log cannot say.
    """
    report = audit(log)
    faults = [
        f"{finding.promise}: {violation.what}: {'; '.join(map(str, violation.evidence))}"
        for finding in report.findings
        if finding.promise not in but
        for violation in finding.violations
    ]
    if report.open_at_end:
        faults.append(f"{report.open_at_end} requests never ended")
    ends: dict[str, list[str]] = defaultdict(list)
    begun: Counter[str] = Counter()
    for entry in log:
        request, event = entry["request"], entry["event"]
        if request and event not in _NO_END:
            ends[request].append(event)
        begun[request] += event in _BEGINS
    counted: Counter[str] = Counter()
    seen: set[str] = set()
    returned = 0
    for asked in history:
        if not asked.served:
            continue
        request = asked.request_id
        if not request or request in seen:
            faults.append(f"an answer names request {request!r}, as another does or none")
        seen.add(request)
        if alone:
            continue
        if not ends[request] and forgotten:
            continue
        true_ends = [event for event in ends[request] if event in may_end]
        others = set(ends[request]) - set(true_ends)
        if may_return and others and len(true_ends) == 1 and others <= _OF_A_SLEEPER:
            returned += 1
            ends[request] = true_ends
        if not ends[request]:
            faults.append(f"{request} was served and the log knows no end of it")
        elif len(ends[request]) > 1 or ends[request][-1] not in may_end:
            faults.append(f"{request} was served and ended as {ends[request]}")
        counted[ends[request][-1] if ends[request] else "unknown"] += 1
    return Verdict(
        tuple(faults),
        counted,
        returned,
        sum(begun[request] for request in seen),
        len(log),
        max((float(entry["stock"]) for entry in log), default=0.0),
    )
