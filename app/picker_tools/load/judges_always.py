"""Promises that hold whatever the load is, by what clients see and what the fleet's own log has. Pure."""

from collections.abc import Callable, Mapping

from picker_tools.load.answer import Answer, Kind
from picker_tools.load.evidence import Evidence
from picker_tools.load.figures import quantile
from picker_tools.load.ledger import violations
from picker_tools.load.promise import Finding, not_judged, unless

EXPIRED = "rejected-ttl-expired"
_LATE_S = 1.0  # after its TTL a client has its answer (G5)
RECOUNTED_S = 10.0  # after Redis came back empty: what runs has been seen again (two access-log intervals)
_LATENESS_S = 0.25  # of the load generator itself: more than that, and the load was not what it was to be
_FEW = 20  # answers that an objective needs to be judged


def one_answer(run: Evidence) -> Finding:
    cases: list[object] = [
        answer for answer in run.answers if not answer.left and (answer.fault or answer.answers != 1)
    ]
    if run.sent != len(run.answers):
        cases.append(f"{run.sent} requests were sent and {len(run.answers)} ended")
    if run.surplus_answers:
        cases.append(f"{run.surplus_answers} answers came beyond one a request")
    short = [each for each in run.answers if run.parameters.own and _is_short(each)]
    cases += [f"{answer}: {answer.tokens} tokens of {answer.asked_tokens}" for answer in short]
    left = sum(answer.left for answer in run.answers)
    return unless(
        cases, f"{run.sent} requests, {len(run.answers) - left} answers" + (f", {left} left" if left else "")
    )


def refusals_explained(run: Evidence) -> Finding:
    refused = [answer for answer in run.answers if answer.kind is Kind.REFUSED]
    if not refused:
        return not_judged("nothing was refused")
    bad = [
        f"{answer} (retry-after {answer.retry_after_s}, reason {answer.reason or 'none'})"
        for answer in refused
        # An answer given without Redis is not one of the queue: it needs no reason of the queue's.
        if answer.retry_after_s is None or (not answer.reason and not _overlaps_outage(run, answer))
    ]
    return unless(bad, f"{len(refused)} refusals")


def deadline_kept(run: Evidence) -> Finding:
    ttl_s = {source.name: source.ttl_s for source in run.sources}
    refused = [answer for answer in run.answers if answer.kind is Kind.REFUSED]
    late = [answer for answer in refused if answer.last_s > ttl_s[answer.source] + _LATE_S]
    waits = max((answer.last_s for answer in refused), default=0.0)
    if not refused:
        return not_judged("every request was served; whether past its TTL, the decision log tells (G5)")
    expired = sum(answer.reason == EXPIRED for answer in refused)
    return unless(late, f"{expired} expired; the longest time to a refusal was {waits:.2f} s")


def at_rest(run: Evidence) -> Finding:
    if not run.samples:
        return not_judged("no admin address is known")
    if run.rest is not None:
        return unless([], f"seen {run.rest.at_s:.1f} s after the load began")
    last = run.samples[-1]
    counts = f"stock {last.stock:g}, queued {last.total_queued}, leases {last.leases}, {dict(last.in_flight)}"
    return unless([counts], f"not all counts were 0 within {run.rest_within_s:g} s of the last answer")


def stock_in_bounds(run: Evidence) -> Finding:
    samples = [each for each in run.samples if not run.disturbed(each.at_s, RECOUNTED_S)]
    if not samples:
        return not_judged("the shared state was not seen")
    over = [
        f"at {each.at_s:.2f} s: {each.stock:g} of {each.upper:g}"
        for each in samples
        if each.stock > each.upper and each.upper > 0
    ]
    highest = max(samples, key=lambda each: each.stock)
    left_out = [each.stock for each in run.samples if run.disturbed(each.at_s, RECOUNTED_S)]
    also = (
        f"; {len(left_out)} while Redis was away and just after are left out, the highest {max(left_out):g}"
        if left_out
        else ""
    )
    return unless(over, f"highest {highest.stock:g} of {highest.upper:g} in {len(samples)} samples{also}")


def load_as_planned(run: Evidence) -> Finding:
    late = sorted(answer.sent_s - answer.due_s for answer in run.answers)
    if not late:
        return not_judged("nothing was sent")
    p99_s = quantile(late, 0.99)
    text = f"requests went out {1000 * p99_s:.0f} ms late (p99), {1000 * late[-1]:.0f} ms at most"
    if p99_s > _LATENESS_S:
        return not_judged(f"{text}: this machine was too busy for the load, so waits are in part its own")
    return unless([], text)


def objective_ttft(run: Evidence) -> Finding:
    ttft = [
        each.first_s for each in run.answers if each.kind is Kind.SERVED and each.streamed and each.first_s
    ]
    return _objective(ttft, run.parameters.slo_ttft_p95_s or 0.0)


def objective_latency(run: Evidence) -> Finding:
    return _objective(
        [answer.last_s for answer in run.answers if answer.kind is Kind.SERVED],
        run.parameters.slo_latency_p95_s or 0.0,
    )


def audited(promise: str) -> Callable[[Evidence], Finding]:
    """A judge that takes the word of the decision log's audit for G1 to G6, or `log`."""

    def judge(run: Evidence) -> Finding:
        if not any(ledger.report for ledger in run.ledgers):
            why = next(
                (ledger.why for ledger in run.ledgers if ledger.why),
                "the log of a fleet that was found is for `picker audit`",
            )
            return not_judged(why)
        checked, broken, cases = violations(run.ledgers, promise)
        finding = unless(cases, f"{checked} checks of the decision log, {broken} broken")
        missing = [ledger.why for ledger in run.ledgers if not ledger.report]
        if missing and not broken:
            return not_judged(f"a part of the log could not be read: {missing[0]}")
        return finding if checked or broken else not_judged("the log had nothing to check")

    return judge


ALWAYS: Mapping[str, tuple[str, Callable[[Evidence], Finding]]] = {
    "one-answer": ("each request has exactly one answer, and a whole one", one_answer),
    "refusals-explained": ("each refusal has a reason and a retry-after", refusals_explained),
    "deadline": ("who is refused, hears so within 1 s of the TTL", deadline_kept),
    "at-rest": ("after the load every count is exactly 0", at_rest),
    "stock-in-bounds": ("stock is never seen above its upper bound", stock_in_bounds),
    "G1": ("the log: stock and limits", audited("G1")),
    "G2": ("the log: service in proportion to weights", audited("G2")),
    "G3": ("the log: what is overdue has the guard's share", audited("G3")),
    "G4": ("the log: order within a flow", audited("G4")),
    "G5": ("the log: nothing past its TTL is dispatched", audited("G5")),
    "G6": ("the log: each request ends once, counts add up", audited("G6")),
    "log": ("the log has no gap", audited("log")),
    "load-as-planned": ("the load generator kept its own times", load_as_planned),
}


def _objective(seconds: list[float], limit_s: float) -> Finding:
    if len(seconds) < _FEW:
        return not_judged(f"{len(seconds)} answers are too few")
    p95_s = quantile(sorted(seconds), 0.95)
    text = f"p95 of {len(seconds)} answers is {p95_s:.3f} s"
    return unless([] if p95_s <= limit_s else [f"{p95_s:.3f} s is above {limit_s:g} s"], text)


def _is_short(answer: Answer) -> bool:
    return answer.kind is Kind.SERVED and answer.tokens != answer.asked_tokens


def _overlaps_outage(run: Evidence, answer: Answer) -> bool:
    return run.disturbed(answer.sent_s + answer.last_s, RECOUNTED_S)
