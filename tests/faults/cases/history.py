"""Checks the answers of a `Load`'s clients against the decision log (G6)."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from picker_tools.audit.auditor import audit
from picker_tools.audit.log import ENDS
from picker_tools.load.generator import Answer


@dataclass(frozen=True, slots=True)
class HistoryCheck:
    """`faults`: the broken rules, as text. `ends`: number of served requests by the event that ended them.

    `resumed`: number of served requests that a stopped replica ended, too. `entries`: entries in the log.
    `highest_stock`: the highest stock after an admission. A restored request may raise the stock further.
    """

    faults: tuple[str, ...]
    ends: Counter[str]
    resumed: int
    entries: int
    highest_stock: float


_ADMITTED = frozenset(("bypassed", "granted"))
_ENDED_BY_STOPPED_REPLICA = frozenset(("abandoned", "cancelled", "withdrawn", "reclaimed"))


def check_history(
    history: Iterable[Answer],
    log: Sequence[Mapping[str, str]],
    *,
    may_end: Sequence[str] = ("completed",),
    log_lost: bool = False,
    may_resume: bool = False,
    served_without_redis: bool = False,
) -> HistoryCheck:
    """Compare the clients' answers with the decision log of a run after which every count was 0.

    Each answer with status 200 must name a different request, which ended once in the log, by an event in
    `may_end`. The decision log must keep the promises G1 to G6.

    `log_lost`: the log was deleted during the run, so it may lack requests. `may_resume`: the requests of a
    stopped replica may be abandoned or reclaimed before another gets them; the stopped replica may later
    admit and cancel requests that have ended elsewhere, and restore a reclaimed request (lua/renew.lua).
    `served_without_redis`: replicas served without Redis, so the log lacks the ends of requests.
    """
    report = audit(log)
    faults = [
        f"{finding.promise}: {violation.what}: {'; '.join(map(str, violation.evidence))}"
        for finding in report.findings
        for violation in finding.violations
    ]
    if report.open_at_end:
        faults.append(f"{report.open_at_end} requests never ended")
    ends: dict[str, list[str]] = defaultdict(list)
    for entry in log:
        request, event = entry["request"], entry["event"]
        if request and event in ENDS:
            ends[request].append(event)
        elif may_resume and event == "restored" and ends[request][-1:] == ["reclaimed"]:
            ends[request].pop()
    counted: Counter[str] = Counter()
    seen: set[str] = set()
    resumed = 0
    for record in history:
        if not record.served:
            continue
        request = record.request_id
        if not request or request in seen:
            faults.append(
                f"two answers name request {request!r}" if request else "an answer names no request"
            )
        seen.add(request)
        if served_without_redis or (log_lost and not ends[request]):
            continue
        proper = [event for event in ends[request] if event not in _ENDED_BY_STOPPED_REPLICA]
        if may_resume and len(proper) == 1 and len(ends[request]) > 1:
            resumed += 1
            ends[request] = proper
        if not ends[request]:
            faults.append(f"{request} was served and has no end in the log")
        elif len(ends[request]) > 1 or ends[request][-1] not in may_end:
            steps = [
                f"{entry['event']} at {entry['time_us']}" for entry in log if entry["request"] == request
            ]
            faults.append(f"{request} was served and ended as {ends[request]}: {', '.join(steps)}")
        counted[ends[request][-1] if ends[request] else "unknown"] += 1
    stocks = (float(entry["stock"]) for entry in log if entry["event"] in _ADMITTED)
    return HistoryCheck(tuple(faults), counted, resumed, len(log), max(stocks, default=0.0))
