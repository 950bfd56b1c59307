"""Checks the answers of clients offline against the decision log (G6).

The fault suite and the long tests use it: `check_history` finds every answer of a `Load`'s clients that the
log does not explain. `python tests/faults/cases/history.py FOLDER` checks a saved run again: exit status 0 if
no rule is broken, 1 if one is, 2 if the run cannot be read.
"""

import argparse
import gzip
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from picker_tools.audit.auditor import audit
from picker_tools.audit.log import ENDS
from picker_tools.load.generator import Answer, Request


@dataclass(frozen=True, slots=True)
class HistoryCheck:
    """`faults`: descriptions of broken rules. `ends`: ends of served requests in the log, by event.

    `resumed`: served requests that a stopped replica ended as well. `entries` is the log's length.
    """

    faults: tuple[str, ...]
    ends: Counter[str]
    resumed: int
    entries: int
    highest_stock: float


_ENDED_BY_STOPPED_REPLICA = frozenset(("abandoned", "cancelled", "withdrawn", "reclaimed"))


def check_history(
    history: Iterable[Answer],
    log: Sequence[Mapping[str, str]],
    *,
    may_end: Sequence[str] = ("completed",),
    log_lost: bool = False,
    may_resume: bool = False,
    except_promises: Sequence[str] = (),
    served_without_redis: bool = False,
) -> HistoryCheck:
    """Check a run; the fleet must be at rest after it.

    Every served answer belongs to a request in the log that ended once, with an event of `may_end`; no two
    answers name the same request; and the log keeps G1 to G6.

    `log_lost`: the log was deleted during the run, so it may lack requests. `may_resume`: requests of a
    stopped replica may be abandoned, or lose a grant to its lease, before Envoy sends them to another; once
    the replica continues, it may admit and cancel requests that have ended elsewhere. `except_promises`:
    promises (`G1`) that the fault inevitably breaks. `served_without_redis`: replicas served without Redis
    for a while, so the log does not say how requests ended.
    """
    report = audit(log)
    faults = [
        f"{finding.promise}: {violation.what}: {'; '.join(map(str, violation.evidence))}"
        for finding in report.findings
        if finding.promise not in except_promises
        for violation in finding.violations
    ]
    if report.open_at_end:
        faults.append(f"{report.open_at_end} requests never ended")
    ends: dict[str, list[str]] = defaultdict(list)
    for entry in log:
        request, event = entry["request"], entry["event"]
        if request and event in ENDS:
            ends[request].append(event)
    counted: Counter[str] = Counter()
    seen: set[str] = set()
    resumed = 0
    for record in history:
        if not record.served:
            continue
        request = record.request_id
        if not request or request in seen:
            faults.append(f"an answer names request {request!r}, as another does or none")
        seen.add(request)
        if served_without_redis or (log_lost and not ends[request]):
            continue
        proper = [event for event in ends[request] if event not in _ENDED_BY_STOPPED_REPLICA]
        if may_resume and len(proper) == 1 and len(ends[request]) > 1:
            resumed += 1
            ends[request] = proper
        if not ends[request]:
            faults.append(f"{request} was served and the log knows no end of it")
        elif len(ends[request]) > 1 or ends[request][-1] not in may_end:
            steps = [
                f"{entry['event']} at {entry['time_us']}" for entry in log if entry["request"] == request
            ]
            faults.append(f"{request} was served and ended as {ends[request]}: {', '.join(steps)}")
        counted[ends[request][-1] if ends[request] else "unknown"] += 1
    return HistoryCheck(
        tuple(faults),
        counted,
        resumed,
        len(log),
        max((float(entry["stock"]) for entry in log), default=0.0),
    )


_HISTORY, _LOG, _RULES = "history.jsonl.gz", "log.jsonl.gz", "rules.json"


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A saved run in `folder`: the clients' answers, the log's entries, and `check_history`'s rules."""

    folder: Path

    def check(self) -> HistoryCheck:
        """Check the saved run, without any other data.

        Raises:
            OSError: a file is missing or cannot be read.
                ValueError, KeyError, TypeError: a file's content is not as `save_run` writes it.
        """
        rules = json.loads((self.folder / _RULES).read_text(encoding="utf-8"))
        history = [_answer(row) for row in _lines(self.folder / _HISTORY)]
        return check_history(history, list(_lines(self.folder / _LOG)), **rules)


def save_run(
    folder: Path, history: Iterable[Answer], log: Iterable[Mapping[str, str]], **rules: Any
) -> SavedRun:
    """Save a run in `folder`, replacing an earlier one. `rules` are `check_history`'s options."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in ((_HISTORY, map(asdict, history)), (_LOG, map(dict, log))):
        with gzip.open(folder / name, "wt", compresslevel=3, encoding="utf-8") as lines:
            lines.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    (folder / _RULES).write_text(json.dumps(rules) + "\n", encoding="utf-8")
    return SavedRun(folder)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _answer(row: dict[str, Any]) -> Answer:
    request = row.pop("request")
    headers = tuple((name, value) for name, value in request.pop("headers"))
    return Answer(Request(**request, headers=headers), **row)


def main() -> int:
    parser = argparse.ArgumentParser(prog="history.py")
    parser.add_argument("folder", type=Path, help="such as bench/results/faults/replica_killed")
    folder = parser.parse_args().folder
    try:
        found = SavedRun(folder).check()
    except (OSError, ValueError, KeyError, TypeError) as fault:
        print(f"{folder} cannot be read: {fault!r}", file=sys.stderr)
        return 2
    ends = ", ".join(f"{count} {end}" for end, count in found.ends.most_common())
    print(f"{found.entries} entries; answers that clients were served: {ends or 'none'}")
    print(*found.faults, sep="\n", end="\n" if found.faults else "")
    print(f"{len(found.faults)} rules broken")
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
