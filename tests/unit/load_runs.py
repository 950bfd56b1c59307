"""Results of load runs for tests of `picker_tools.load`: variants of a run that keeps all promises."""

from dataclasses import replace
from functools import cache
from typing import Any

from picker_tools.audit.auditor import audit
from picker_tools.load.checks import Promise, check_promises
from picker_tools.load.fleet import Target
from picker_tools.load.generator import Answer, Request
from picker_tools.load.result import LogAudit, RunResult, Sample
from picker_tools.load.scenarios import SCENARIOS, Plan, Scenario

PER_SOURCE = 40


@cache  # cached, since tests use ten thousand answers
def answer(source: str, number: int = 0, **fields: Any) -> Answer:
    """The answer to a served streaming request; `fields` replace values of the answer."""
    good = Answer(
        Request("p", 16, streamed=True), source=source, number=number,
        due_s=0.5 * number, sent_s=0.5 * number, head_s=0.1,
        first_s=0.1, took_s=0.3, status=200, tokens=16, endpoint="127.0.0.1:9000",
    )  # fmt: skip
    return replace(good, **fields)


def refusal(source: str, number: int = 0, **fields: Any) -> Answer:
    """An immediate refusal because the queue is full."""
    refused = {"status": 503, "reason": "rejected-saturated", "retry_after": "2", "tokens": None}
    return answer(source, number, **{**refused, "first_s": 0.01, "took_s": 0.01, **fields})


def sample(at_s: float, **fields: Any) -> Sample:
    """A sample of a fleet of three replicas: an empty queue, and a stock of 8 with the upper bound 8.8."""
    good = Sample(
        at_s=at_s, stock=8, lower=7.2, upper=8.8, queued=0, in_flight={"127.0.0.1:9000": 8},
        leases=8, replicas=3, degraded=False,
    )  # fmt: skip
    return replace(good, **fields)


def rest(at_s: float) -> Sample:
    return sample(at_s, stock=0, leases=0, in_flight={"127.0.0.1:9000": 0})


def run(scenario: str | Scenario = "steady", **fields: Any) -> RunResult:
    """A run of 20 s that keeps all promises and serves all requests; `fields` replace values of the run."""
    found = SCENARIOS[scenario] if isinstance(scenario, str) else scenario
    answers = tuple(answer(source.name, number) for source in found.sources for number in range(PER_SOURCE))
    good = RunResult(
        plan=Plan(found, duration_s=20.0, seed=1, max_requests=20_000),
        target=Target("http://127.0.0.1:8080", "llama", ("",) * 3, ("",) * 4, mode="lean", own=True),
        capacity_per_s=33.0,
        wall_s=1_700_000_000.0,
        sent=len(answers),
        answers=answers,
        samples=tuple(sample(0.25 * number) for number in range(80)),
        rest=rest(20.5),
        rest_within_s=20.0,
    )
    given = replace(good, **fields)
    return given if "sent" in fields else replace(given, sent=len(given.answers))


def verdict(evidence: RunResult, name: str) -> Promise:
    """The verdict on the promise `name`."""
    return next(promise for promise in check_promises(evidence) if promise.name == name)


def audited(entries: list[dict[str, str]]) -> LogAudit:
    """The audit of a decision log."""
    return LogAudit(audit(entries))
