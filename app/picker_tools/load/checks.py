"""Checks whether a run kept the fleet's general promises and the promises of its scenario. Pure.

The command `picker load` calls `check_promises`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from statistics import fmean

from picker_fleet.domain.bands import Band
from picker_tools.load.generator import Kind, quantile
from picker_tools.load.result import (
    SHARED_AGAIN_S,
    RunResult,
    fair,
    latest_before,
    violations,
)
from picker_tools.load.scenarios import Source

MAX_CASES = 5  # maximum cases that the report lists for a broken promise


class Verdict(StrEnum):
    KEPT = "held"
    BROKEN = "broken"
    UNKNOWN = "not judged"


@dataclass(frozen=True, slots=True)
class Promise:
    """A checked promise. `evidence` explains the verdict; `cases` has the first violations; `says` is the
    promise's text. `check_promises` sets name and text."""

    verdict: Verdict
    evidence: str
    cases: tuple[str, ...] = ()
    name: str = ""
    says: str = ""


def kept_unless(cases: Sequence[object], evidence: str) -> Promise:
    """The verdict that a promise is kept, unless `cases` has violations."""
    if not cases:
        return Promise(Verdict.KEPT, evidence)
    return Promise(Verdict.BROKEN, f"{evidence}; {len(cases)} violations", tuple(map(str, cases[:MAX_CASES])))


def kept_if(kept: bool, evidence: str) -> Promise:
    return Promise(Verdict.KEPT if kept else Verdict.BROKEN, evidence)


def unknown(why: str) -> Promise:
    return Promise(Verdict.UNKNOWN, why)


EXPIRED = "rejected-ttl-expired"
_LATE_S = 1.0  # a client gets an answer within this many seconds after its request's TTL (G5)
RECOUNTED_S = 10.0  # two access-log intervals: an empty Redis has then counted all running requests again
_LATENESS_S = 0.25  # if requests are sent more than this many seconds late, the load differs from the plan


def one_answer(run: RunResult) -> Promise:
    cases: list[object] = [answer for answer in run.answers if answer.fault]
    if run.sent != len(run.answers):
        cases.append(f"{run.sent} requests were sent and {len(run.answers)} ended")
    if run.surplus_answers:
        cases.append(f"{run.surplus_answers} surplus answers came, beyond one a request")
    left = sum(answer.left for answer in run.answers)
    return kept_unless(
        cases, f"{run.sent} requests, {len(run.answers) - left} answers" + (f", {left} left" if left else "")
    )


def refusals_explained(run: RunResult) -> Promise:
    refused = [answer for answer in run.answers if answer.kind is Kind.REFUSED]
    if not refused:
        return unknown("nothing was refused")
    bad = [
        f"{answer} (retry-after {answer.retry_after or 'none'}, reason {answer.reason or 'none'})"
        for answer in refused
        # While Redis is unavailable, a refusal need not have a reason of the shared queue.
        if not answer.retry_after.isdecimal()
        or not (answer.reason or run.disturbed(answer.done_s, RECOUNTED_S))
    ]
    return kept_unless(bad, f"{len(refused)} refusals")


def deadline_kept(run: RunResult) -> Promise:
    ttl_s = {source.name: source.ttl_s for source in run.sources}
    refused = [answer for answer in run.answers if answer.kind is Kind.REFUSED]
    late = [answer for answer in refused if answer.took_s > ttl_s[answer.source] + _LATE_S]
    waits = max((answer.took_s for answer in refused), default=0.0)
    if not refused:
        return unknown("every request was served, so none could be late; the audit checks TTLs, too (G5)")
    expired = sum(answer.reason == EXPIRED for answer in refused)
    return kept_unless(late, f"{expired} expired; the longest time to a refusal was {waits:.2f} s")


def at_rest(run: RunResult) -> Promise:
    if not run.samples:
        return unknown("no admin address is known")
    if run.rest is not None:
        return kept_unless([], f"all counts were 0 at {run.rest.at_s:.1f} s")
    last = run.samples[-1]
    counts = f"stock {last.stock:g}, queued {last.queued}, leases {last.leases}, {dict(last.in_flight)}"
    return kept_unless([counts], f"not all counts were 0 within {run.rest_within_s:g} s of the last answer")


def stock_in_bounds(run: RunResult) -> Promise:
    samples = [each for each in run.samples if not run.disturbed(each.at_s, RECOUNTED_S)]
    if not samples:
        return unknown("no sample shows the shared state")
    # When a limit that the fleet has found falls, running requests go on: until they end, the stock may
    # exceed the bound.
    allowed = (0.0, *(max(before.upper, before.stock) for before in samples))
    over = [
        f"at {each.at_s:.2f} s: {each.stock:g} of {each.upper:g}"
        for each, most in zip(samples, allowed, strict=False)
        if each.stock > max(each.upper, most) and each.upper > 0
    ]
    highest = max(samples, key=lambda each: each.stock)
    left_out = [each.stock for each in run.samples if run.disturbed(each.at_s, RECOUNTED_S)]
    also = ""
    if left_out:
        also = f"; left out {len(left_out)} during and just after the outage, the highest {max(left_out):g}"
    return kept_unless(
        over, f"highest {highest.stock:g} of {highest.upper:g} in {len(samples)} samples{also}"
    )


def load_as_planned(run: RunResult) -> Promise:
    late = sorted(answer.sent_s - answer.due_s for answer in run.answers)
    if not late:
        return unknown("nothing was sent")
    p99_s = quantile(late, 0.99)
    text = f"requests went out {1000 * p99_s:.0f} ms late (p99), {1000 * late[-1]:.0f} ms at most"
    if p99_s > _LATENESS_S:
        return unknown(f"{text}: the load generator was too slow, which adds to the waits")
    return kept_unless([], text)


def audited(promise: str, run: RunResult) -> Promise:
    """The result of the audit of the decision log for `promise`, which is one of G1 to G6 or `log`."""
    if not any(log_audit.report for log_audit in run.log_audits):
        why = next(
            (log_audit.why for log_audit in run.log_audits if log_audit.why),
            "this run did not start the fleet; audit its log by `picker audit`",
        )
        return unknown(why)
    checked, broken, cases = violations(run.log_audits, promise)
    finding = kept_unless(cases, f"{checked} checks, {broken} broken")
    missing = [log_audit.why for log_audit in run.log_audits if not log_audit.report]
    if missing and not broken:
        return unknown(f"a part of the log could not be read: {missing[0]}")
    return finding if checked or broken else unknown("the log had nothing to check")


AUDITED: Mapping[str, str] = {
    "G1": "the decision log: stock and limits",
    "G2": "the decision log: service in proportion to weights",
    "G3": "the decision log: overdue requests get the guard's share",
    "G4": "the decision log: order within a flow",
    "G5": "the decision log: no request past its TTL is dispatched",
    "G6": "the decision log: each request ends once, counts add up",
    "log": "the decision log has no gap",
}

GENERAL_CHECKS: Mapping[str, tuple[str, Callable[[RunResult], Promise]]] = {
    "one-answer": ("each request has exactly one answer, and a complete one", one_answer),
    "refusals-explained": ("each refusal has a reason and a retry-after", refusals_explained),
    "deadline": ("a refused client hears within 1 s of its TTL", deadline_kept),
    "at-rest": ("after the load every count is exactly 0", at_rest),
    "stock-in-bounds": ("stock is never seen to grow above its upper bound", stock_in_bounds),
    **{name: (says, partial(audited, name)) for name, says in AUDITED.items()},
    "load-as-planned": ("the load generator sends each request on time", load_as_planned),
}


_NEAR = 0.9  # a flow must get at least this part of its fair share, less _EDGE requests
_EDGE = 3  # a count may lack this many requests, which wait when counting begins or ends
_SHORTER = 0.25  # a client within its share waits at most this part of the other client's mean wait
_AT_ONCE_S = 1.0  # a request refused later than this was first admitted and then preempted
_GOES_ON = 0.5  # without Redis, the fleet must keep this part of its throughput (G8)
_OVER_S = 1.0  # after so many seconds of an outage, all calls to Redis in flight have failed


def no_errors(run: RunResult) -> Promise:
    if run.scenario.fault.kills_replicas and run.target.mode == "standard":
        return unknown("in standard mode a killed replica cuts the answers that pass through it (G7)")
    answers = [answer for answer in run.answers if not answer.left]
    bad = [answer for answer in answers if not answer.served]
    return kept_unless(bad, f"{len(answers) - len(bad)} of {len(answers)} requests were served")


def only_overload(run: RunResult) -> Promise:
    failed = [answer for answer in run.answers if answer.kind is Kind.FAILED]
    refused = sum(answer.kind is Kind.REFUSED for answer in run.answers)
    return kept_unless(failed, f"{len(run.answers)} requests, {refused} refused, {len(failed)} failed")


def nothing_expires(run: RunResult) -> Promise:
    return kept_unless(
        [each for each in run.answers if each.reason == EXPIRED], f"{len(run.answers)} requests"
    )


def overloaded(run: RunResult) -> Promise:
    half_s = run.plan.duration_s / 2
    seen = [each for each in run.samples if half_s <= each.at_s <= run.plan.duration_s]
    if not seen:
        return unknown("no sample shows the queue")
    waiting = sum(each.queued > 0 for each in seen) / len(seen)
    text = f"requests waited in {waiting:.0%} of the samples of the second half"
    return kept_unless([], text) if waiting >= 0.5 else unknown(f"{text}, too few to compare waits")


def keeps_share(name: str, run: RunResult) -> Promise:
    """Check that the source `name` gets about its fair share of the service."""
    service, total = run.service(), sum(run.service().values())
    flow = _source(run, name).flow
    due = fair(run.sources, run.demand(), total).get(flow, 0.0)
    if due <= 0:
        return unknown(f"{name} sent no request")
    text = f"{name} had {service[flow] / total:.1%} of the service; its fair share was {due / total:.1%}"
    return kept_if(service[flow] >= _NEAR * due - _EDGE, text)


def waits_less(name: str, than: str, run: RunResult) -> Promise:
    """Check that the source `name`, which asks for less than its fair share, waits far less than `than`."""
    mine, others = (_lengths(run, _source(run, each)) for each in (name, than))
    if not mine or not any(others):
        return unknown(f"{name} or {than} was not served")
    mine_s, others_s = fmean(mine), fmean(others)
    text = f"mean waits: {name} {mine_s:.3f} s, {than} {others_s:.3f} s"
    queue = overloaded(run)
    if queue.verdict is not Verdict.KEPT:
        return unknown(queue.evidence)
    return kept_if(mine_s <= _SHORTER * others_s, text)


def not_refused(name: str, run: RunResult) -> Promise:
    """Check that every request of the source `name` is served, while other sources' requests are refused."""
    mine = [answer for answer in run.answers_of(_source(run, name)) if not answer.left]
    bad = [answer for answer in mine if not answer.served]
    others = sum(each.kind is Kind.REFUSED and each.source != name for each in run.answers)
    text = f"{len(mine)} {name} requests, {len(bad)} not served; {others} requests of others refused"
    return kept_unless(bad, text) if mine else unknown(f"no {name} requests")


def low_not_starved(run: RunResult) -> Promise:
    """Check G3: every admitted request of low priority is served within its TTL."""
    low = [each for each in run.sources if each.band is Band.SHEDDABLE or each.criticality == 1]
    cases: list[object] = []
    text: list[str] = []
    for source in low:
        answers = run.answers_of(source)
        served = sum(answer.served for answer in answers)
        cases += [each for each in answers if each.kind is Kind.FAILED or each.reason == EXPIRED]
        longest = max(_lengths(run, source), default=0.0)
        refused = [each for each in answers if each.kind is Kind.REFUSED and each.reason != EXPIRED]
        evicted = sum((each.head_s or 0) > _AT_ONCE_S for each in refused)
        text.append(
            f"{source.name}: {served} served, {len(refused) - evicted} refused at once, {evicted} evicted "
            f"after a wait, longest wait {longest:.2f} s of {source.ttl_s:g} s"
        )
        if not served and not run.interrupted:
            cases.append(f"{source.name}: nothing was served")
    return kept_unless(cases, "; ".join(text))


def faults_were_injected(run: RunResult) -> Promise:
    kills, outages = run.faults_injected.kills, run.faults_injected.outages
    happened = [f"{name} killed at {at_s:.1f} s" for at_s, name in kills]
    happened += [
        f"Redis down from {a:.1f} s to {'the end' if b is None else f'{b:.1f} s'}" for a, b in outages
    ]
    return kept_unless([], "; ".join(happened)) if happened else unknown("no fault was injected")


def outage_serves(run: RunResult) -> Promise:
    if run.outage is None:
        return unknown("there was no outage")
    began_s, end_s = run.outage
    before = _served_per_s(run, 0.0, began_s)
    if not before:
        return unknown("nothing was served before the outage")
    away = _served_per_s(run, began_s + _OVER_S, end_s)
    if away is None:
        return unknown("nothing was sent during the outage")
    return kept_if(
        away >= _GOES_ON * before,
        f"{away:.1f} requests a second were served without Redis, {before:.1f} before the outage",
    )


def _served_per_s(run: RunResult, from_s: float, to_s: float) -> float | None:
    """How many requests that were sent in an interval were served, a second; None if none was sent."""
    if not any(from_s <= each.sent_s < to_s for each in run.answers):
        return None
    served = [each for each in run.answers if each.served]
    return sum(from_s <= each.sent_s + (each.head_s or 0) < to_s for each in served) / (to_s - from_s)


def outage_bound(run: RunResult) -> Promise:
    if run.outage is None:
        return unknown("there was no outage")
    began_s, end_s = run.outage
    before = latest_before(run.samples, began_s)
    # Include the time of the resync, in which the shared queue could admit requests before it has counted the
    # running requests.
    every = max((each.answered for each in run.endpoint_samples), default=0)
    seen = [
        each
        for each in run.endpoint_samples
        if began_s <= each.at_s <= end_s + RECOUNTED_S and each.answered == every > 0
    ]
    if before is None or not seen:
        return unknown("no sample shows the bound or the endpoints")
    over = [f"at {each.at_s:.2f} s: {each.requests}" for each in seen if each.requests > int(before.upper)]
    highest = max(each.requests for each in seen)
    return kept_unless(
        over, f"the endpoints had at most {highest} requests; the last upper bound was {before.upper:g}"
    )


def shared_again(run: RunResult) -> Promise:
    if not run.faults_injected.outages or run.faults_injected.outages[0][1] is None:
        return unknown("Redis did not come back while the load ran")
    back_s = run.faults_injected.outages[0][1]
    before = latest_before(run.samples, run.faults_injected.outages[0][0])
    wanted = before.replicas if before else 1
    seen = [
        each for each in run.samples if each.at_s > back_s and not each.degraded and each.replicas >= wanted
    ]
    if not seen:
        return kept_if(False, f"no sample after {back_s:.1f} s shows {wanted} replicas that share the queue")
    return kept_if(
        seen[0].at_s - back_s <= SHARED_AGAIN_S,
        f"{wanted} replicas shared the queue {seen[0].at_s - back_s:.2f} s after Redis was back",
    )


SCENARIO_CHECKS: Mapping[str, tuple[str, Callable[[RunResult], Promise]]] = {
    "no-errors": ("every request is served", no_errors),
    "only-overload-errors": ("no request fails; a request beyond the capacity is refused", only_overload),
    "nothing-expires": ("no request waits past its TTL", nothing_expires),
    "overloaded": ("the load was more than the fleet could serve", overloaded),
    "quiet-share": (
        "the quiet client gets its demand, up to its fair share",
        partial(keeps_share, "quiet"),
    ),
    "quiet-wait": (
        "the quiet client does not wait for the noisy client",
        partial(waits_less, "quiet", "noisy"),
    ),
    "quiet-not-refused": ("the quiet client is never refused", partial(not_refused, "quiet")),
    "low-not-starved": ("admitted requests of the lowest rank are served within their TTL", low_not_starved),
    "urgent-first": (
        "within a flow, the workload of the highest criticality waits far less",
        partial(waits_less, "urgent", "busy-1"),
    ),
    "seldom-first": (
        "of workloads of equal criticality, one with few requests waits far less",
        partial(waits_less, "quiet", "busy-1"),
    ),
    "faults-happened": ("the planned faults were injected", faults_were_injected),
    "outage-serves": ("without Redis the fleet goes on serving (G8)", outage_serves),
    "outage-bound": (
        "during and just after an outage, requests in flight stay within the last bound (G8)",
        outage_bound,
    ),
    "shared-again": ("within 5 s of Redis's return the replicas share the queue again (G8)", shared_again),
}


def _source(run: RunResult, name: str) -> Source:
    return next(source for source in run.sources if source.name == name)


def _lengths(run: RunResult, source: Source) -> list[float]:
    return [length for _, length in run.waits(source)]


def check_promises(run: RunResult) -> tuple[Promise, ...]:
    """Check the promises of the run's scenario, then the promises of every run."""
    wanted = {**{name: SCENARIO_CHECKS[name] for name in run.scenario.promises}, **GENERAL_CHECKS}
    return tuple(replace(check(run), name=name, says=says) for name, (says, check) in wanted.items())
