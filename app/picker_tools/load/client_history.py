"""What each client asked and was answered, checked offline against the decision log (G6).

The fault tests and the long benchmarks run a `closed_loop` of clients, which keeps a `ClientRecord` of each
request. `check_history` then finds every answer that the log does not explain. A saved run is checked again
by `python -m picker_tools.load.client_history FOLDER`: exit status 0 if no rule is broken, 1 if one is, 2 if
there is nothing to read.
"""

import argparse
import asyncio
import gzip
import json
import random
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from picker_tools.audit.auditor import audit
from picker_tools.audit.log import ENDS
from picker_tools.load.client import Client, HttpRequest
from picker_tools.load.generator import COMPLETIONS

LONGEST_BODY_BYTES = 60_000  # what Envoy can send again to another replica
_HANGS_S = 90.0  # no answer takes longer unless it hangs
_WHOLE_ANSWER_BYTES = 64 * 1024 * 1024
_DONE = b"data: [DONE]"
_SERVED_WITHIN_S = 120.0
_REFUSED_PAUSE_S = 0.05  # a refused client waits so long before its next request
_FLOWS = 6


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """`pad_bytes` lengthen the prompt; the client hangs up after `leaves_s` (None: never)."""

    prompt: str
    tokens: int
    streamed: bool = False
    pad_bytes: int = 0
    leaves_s: float | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def http(self) -> HttpRequest:
        body = {
            "model": "llama",
            "prompt": self.prompt + "x" * self.pad_bytes,
            "max_tokens": self.tokens,
            "stream": self.streamed,
        }
        return HttpRequest(COMPLETIONS, self.headers, json.dumps(body).encode(), self.streamed, self.tokens)


@dataclass(frozen=True, slots=True)
class ClientRecord:
    """A request as its client saw it. Times are of the client's monotonic clock.

    `status` is 0 if no answer began. `whole` says that the answer had everything it should have; `left` that
    the client hung up first. `request_id`, `endpoint`, `retry_after` and `reason` (of a refusal) are from the
    answer's headers.
    """

    request: ClientRequest
    sent_s: float
    done_s: float
    status: int
    whole: bool
    left: bool
    request_id: str
    endpoint: str
    retry_after: str
    fault: str
    reason: str = ""

    @property
    def served(self) -> bool:
        return self.status == 200 and self.whole

    @property
    def took_s(self) -> float:
        return self.done_s - self.sent_s

    @property
    def failed(self) -> bool:
        """Whether the client waited and was not served."""
        return not self.left and not self.served


async def send_request(url: str, request: ClientRequest) -> ClientRecord:
    """Send `request` on its own connection and read the whole answer. Raises nothing but CancelledError."""
    sent_s = time.monotonic()
    patience_s = _HANGS_S if request.leaves_s is None else request.leaves_s
    with Client(url) as client:
        exchange = await client.send(request.http(), within_s=patience_s, kept_bytes=_WHOLE_ANSWER_BYTES)
    left = exchange.timed_out and request.leaves_s is not None

    def header(name: bytes) -> str:
        return exchange.headers.get(name, b"").decode("latin-1")

    return ClientRecord(
        request,
        sent_s,
        time.monotonic(),
        exchange.status,
        not exchange.fault and _is_whole(request, bytes(exchange.tail)),
        left,
        header(b"x-picker-request-id"),
        header(b"x-served-by"),
        header(b"retry-after"),
        "" if left else exchange.fault,
        header(b"x-llm-d-request-dropped-reason"),
    )


def _is_whole(request: ClientRequest, body: bytes) -> bool:
    if request.streamed:
        events = [part for part in body.split(b"\n\n") if part]
        texts = sum(b'"text":""' not in part and b'"choices":[{' in part for part in events[:-1])
        return bool(events) and events[-1] == _DONE and texts == request.tokens
    try:
        return bool(json.loads(body)["usage"]["completion_tokens"] == request.tokens)
    except (ValueError, KeyError, TypeError):
        return False


def flow_header(flow: str) -> tuple[tuple[str, str], ...]:
    return (("x-gateway-inference-fairness-id", flow),)


MakeRequest = Callable[[random.Random, int], ClientRequest]


def mixed_request(dice: random.Random, number: int) -> ClientRequest:
    """Short and medium answers, half of them streamed, six flows, a few bodies near the limit."""
    return ClientRequest(
        prompt=f"request {number} ",
        tokens=dice.choice((1, 3, 10, 30)),
        streamed=dice.random() < 0.5,
        pad_bytes=dice.choice((0, 0, 200, 2000, LONGEST_BODY_BYTES - 500 if dice.random() < 0.2 else 0)),
        headers=flow_header(f"flow-{dice.randrange(_FLOWS)}"),
    )


def requests_of_flows(flows: int) -> MakeRequest:
    """Requests for one token, of `flows` flows in turn."""
    return lambda _, number: ClientRequest(
        f"request {number}", 1, headers=flow_header(f"flow-{number % flows}")
    )


class ClosedLoop:
    """Clients that send the next request when the last is answered, with a record of each."""

    def __init__(
        self,
        url: str,
        seed: int,
        make_request: MakeRequest,
        pause_s: float = _REFUSED_PAUSE_S,
        think_s: float = 0.0,
    ) -> None:
        self.history: list[ClientRecord] = []
        self._url = url
        self._dice = random.Random(seed)
        self._make_request = make_request
        self._pause_s = pause_s
        self._think_s = think_s
        self._count = 0
        self._changed = asyncio.Condition()

    @property
    def served(self) -> int:
        return sum(record.served for record in self.history)

    @property
    def failed(self) -> list[ClientRecord]:
        """Those whose client waited and was not served."""
        return [record for record in self.history if record.failed]

    async def run_client(self, stopping: asyncio.Event) -> None:
        """Send requests until `stopping`; the last one is finished."""
        while not stopping.is_set():
            self._count += 1
            record = await send_request(self._url, self._make_request(self._dice, self._count))
            self.history.append(record)
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(self._pause_s if record.failed else self._think_s)

    async def wait_for_served(self, count: int) -> None:
        """Wait until `count` more requests are served than now. Raises TimeoutError."""
        goal = self.served + count
        async with asyncio.timeout(_SERVED_WITHIN_S):
            await self.wait_until(lambda: self.served >= goal)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds, which is asked whenever a request has ended."""
        async with self._changed:
            await self._changed.wait_for(condition)


@asynccontextmanager
async def closed_loop(
    url: str,
    *,
    clients: int,
    seed: int = 1,
    make_request: MakeRequest = mixed_request,
    pause_s: float = _REFUSED_PAUSE_S,
    think_s: float = 0.0,
) -> AsyncIterator[ClosedLoop]:
    """Run `clients` until the block ends and each has finished its last request. A refused client waits for
    `pause_s` before its next request, a served one for `think_s`.
    """
    loop, stopping = ClosedLoop(url, seed, make_request, pause_s, think_s), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(loop.run_client(stopping))
        try:
            yield loop
        finally:
            stopping.set()


@dataclass(frozen=True, slots=True)
class HistoryCheck:
    """`faults`: every broken rule, in words. `ends`: how served requests ended in the log, by event.

    `resumed` of them have another end by a replica that was stopped. `admitted` is how often the log admits
    them, `entries` its length.
    """

    faults: tuple[str, ...]
    ends: Counter[str]
    resumed: int
    admitted: int
    entries: int
    highest_stock: float


_ADMITTED = ("queued", "bypassed")
_ENDED_BY_STOPPED_REPLICA = frozenset(("abandoned", "cancelled", "withdrawn", "reclaimed"))


def check_history(
    history: Iterable[ClientRecord],
    log: Sequence[Mapping[str, str]],
    *,
    may_end: Sequence[str] = ("completed",),
    log_lost: bool = False,
    may_resume: bool = False,
    except_promises: Sequence[str] = (),
    served_without_redis: bool = False,
) -> HistoryCheck:
    """Check a run after which the fleet is at rest.

    Every served answer belongs to a request of the log that ended once, as one of `may_end`; no two answers
    name the same request; and the log keeps G1 to G6.

    `log_lost`: the log was deleted during the run, so it may lack requests. `may_resume`: requests of a
    stopped replica may be abandoned, or lose a grant to its lease, before Envoy sends them to another; once
    it continues it may admit and cancel again what has ended elsewhere. `except_promises`: promises (`G1`)
    that the fault breaks by its nature. `served_without_redis`: replicas served without Redis for a while, so
    the log does not say how requests ended.
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
    admitted: Counter[str] = Counter()
    for entry in log:
        request, event = entry["request"], entry["event"]
        if request and event in ENDS:
            ends[request].append(event)
        admitted[request] += event in _ADMITTED
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
        sum(admitted[request] for request in seen),
        len(log),
        max((float(entry["stock"]) for entry in log), default=0.0),
    )


_HISTORY, _LOG, _RULES = "history.jsonl.gz", "log.jsonl.gz", "rules.json"


@dataclass(frozen=True, slots=True)
class SavedRun:
    """A run in `folder`: the records of clients, the entries of the log, and `check_history`'s rules."""

    folder: Path

    def check(self) -> HistoryCheck:
        """Check what is saved here, and nothing else.

        Raises:
            OSError: a file is missing or cannot be read.
            ValueError, KeyError, TypeError: it is not what `save_run` writes.
        """
        rules = json.loads((self.folder / _RULES).read_text(encoding="utf-8"))
        history = [_record(row) for row in _lines(self.folder / _HISTORY)]
        return check_history(history, list(_lines(self.folder / _LOG)), **rules)


def save_run(
    folder: Path, history: Iterable[ClientRecord], log: Iterable[Mapping[str, str]], **rules: Any
) -> SavedRun:
    """Save a run in `folder`, in place of an earlier one. `rules` are `check_history`'s."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in ((_HISTORY, map(asdict, history)), (_LOG, map(dict, log))):
        with gzip.open(folder / name, "wt", compresslevel=3, encoding="utf-8") as lines:
            lines.writelines(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    (folder / _RULES).write_text(json.dumps(rules) + "\n", encoding="utf-8")
    return SavedRun(folder)


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _record(row: dict[str, Any]) -> ClientRecord:
    request = row.pop("request")
    headers = tuple((name, value) for name, value in request.pop("headers"))
    return ClientRecord(ClientRequest(**request, headers=headers), **row)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m picker_tools.load.client_history")
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
