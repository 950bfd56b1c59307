"""Checks of `picker load`: each promise has a run that breaks the promise; the check must name the case."""

from dataclasses import replace
from typing import Any

import pytest
from faulty_queues import OverAdmits
from load_runs import answer, audited, refusal, rest, run, sample, verdict
from queue_simulator import QueueSimulator
from tables import cases

from picker_tools.load.checks import GENERAL_CHECKS, SCENARIO_CHECKS, Verdict, check_promises
from picker_tools.load.generator import Answer
from picker_tools.load.result import Dispatch, EndpointSample, FaultsInjected, LogAudit, RunResult
from picker_tools.load.scenarios import SCENARIOS

KEPT, BROKEN, UNKNOWN = Verdict.KEPT, Verdict.BROKEN, Verdict.UNKNOWN


def first(scenario: str, instead: Answer) -> RunResult:
    """A run that keeps all promises, except that its first answer is replaced by `instead`."""
    return run(scenario, answers=(instead, *run(scenario).answers[1:]))


def outage(**fields: Any) -> RunResult:
    return run("redis-outage", faults_injected=FaultsInjected(outages=[(5.0, 10.0)]), **fields)


def refused_in_outage(but: int = -1) -> RunResult:
    """A run in which all requests in the outage are refused, except request number `but` of each source."""
    answers = tuple(
        refusal(each.source, each.number) if 5 <= each.sent_s <= 10 and each.number != but else each
        for each in run("redis-outage").answers
    )
    return outage(answers=answers)


LATE = {"reason": "rejected-ttl-expired", "first_s": 31.5, "took_s": 31.5}
BACK = tuple(sample(10 + 0.25 * number) for number in range(40))
AWAY = tuple(sample(5 + 0.25 * number, degraded=True) for number in range(20))
BEFORE = tuple(sample(0.25 * number) for number in range(20))


def overload(scenario: str, **waits_s: float) -> RunResult:
    """A run in which all requests are served; `waits_s` has the wait in seconds of each source's requests."""
    base = run(scenario)
    dispatches = []
    for each in base.answers:
        (source,) = (source for source in base.sources if source.name == each.source)
        wait_s = waits_s.get(each.source.replace("-", "_"), 0.0)
        at_s = base.wall_s + each.sent_s + wait_s
        dispatches.append(Dispatch(at_s, source.flow, source.workload, wait_s))
    waiting = tuple(replace(each, queued=5) for each in base.samples)
    return replace(base, log_audits=(LogAudit(None, tuple(dispatches)),), samples=waiting)


def starved(result: RunResult, flow: str) -> RunResult:
    """The run `result`, changed so that only every second request of the flow `flow` is dispatched."""
    dispatches = enumerate(result.log_audits[0].dispatches)
    kept = tuple(one for number, one in dispatches if one.flow != flow or number % 2 == 0)
    return replace(result, log_audits=(LogAudit(None, kept),))


# Each row has a promise, a run that breaks the promise, and words of the evidence.
FAULTS: list[tuple[str, RunResult, str]] = [
    ("one-answer", first("steady", answer("client-1", fault="no whole answer")), "client-1 #0"),
    ("one-answer", run(sent=161), "161 requests were sent and 160 ended"),
    ("one-answer", run(surplus_answers=1), "1 surplus answers came"),
    ("refusals-explained", first("steady", refusal("client-1", reason="")), "reason none"),
    ("refusals-explained", first("steady", refusal("client-1", retry_after="")), "retry-after none"),
    ("deadline", first("steady", refusal("client-1", **LATE)), "after 31.500 s"),
    ("at-rest", run(rest=None), "stock 8"),
    ("stock-in-bounds", run(samples=(sample(1.0), sample(1.25, stock=9))), "9 of 8.8"),
    ("stock-in-bounds", run(samples=(sample(1.0), sample(1.25, upper=4.0), sample(1.5, upper=4.0, stock=9))),
     "in 3 samples; 1 violations\nat 1.50 s: 9 of 4"),
    ("no-errors", first("steady", answer("client-1", status=500)), "500"),
    ("no-errors", first("steady", refusal("client-1")), "rejected-saturated"),
    ("no-errors", first("replica-crash", answer("client-1", fault="cut")), "cut"),
    ("nothing-expires", first("steady", refusal("client-1", **LATE)), "rejected-ttl-expired"),
    ("quiet-share", starved(overload("noisy-neighbour", noisy=2.0), "quiet"), "fair share was"),
    ("quiet-wait", overload("noisy-neighbour", noisy=2.0, quiet=1.0), "quiet 1.000 s, noisy 2.000 s"),
    ("quiet-not-refused", first("noisy-neighbour", refusal("quiet")), "quiet #0"),
    ("low-not-starved", first("starvation", refusal("low", **LATE)), "low #0"),
    ("low-not-starved",
     run("starvation", answers=[each for each in run("starvation").answers if each.source != "sheddable"]),
     "sheddable: nothing was served"),
    ("urgent-first", overload("workload-aware", urgent=1.0, busy_1=2.0), "urgent 1.000 s, busy-1 2.000 s"),
    ("seldom-first", overload("workload-aware", quiet=1.0, busy_1=2.0), "quiet 1.000 s, busy-1 2.000 s"),
    ("only-overload-errors", first("redis-outage", answer("client-1", status=500)), "500"),
    ("outage-serves", refused_in_outage(), "0.0 requests a second were served without"),
    ("outage-serves", refused_in_outage(but=14), "before the outage"),  # one request in 3 s is too few
    ("outage-bound", outage(endpoint_samples=(EndpointSample(6.0, 8, 4), EndpointSample(7.0, 9, 4))),
     "at 7.00 s: 9"),
    ("outage-bound", outage(samples=BEFORE, endpoint_samples=(EndpointSample(11.0, 12, 4),)),
     "at 11.00 s: 12"),
    ("shared-again", outage(samples=(*BEFORE, *AWAY)), "no sample after"),
    ("shared-again", outage(samples=(*BEFORE, *AWAY, sample(16.0))), "shared the queue 6.00 s"),
    ("shared-again", outage(samples=(*BEFORE, *(replace(each, replicas=2) for each in BACK))),
     "no sample after"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "result", "words"), FAULTS, ids=[f"{name}: {words}" for name, _, words in FAULTS]
)
def test_the_check_of_a_promise_finds_the_case_that_breaks_it(
    name: str, result: RunResult, words: str
) -> None:
    found = verdict(result, name)
    assert found.verdict is BROKEN
    assert words in "\n".join([found.evidence, *found.cases])


def test_every_promise_of_a_scenario_has_a_run_that_breaks_it() -> None:
    planted = {name for name, _, _ in FAULTS}
    # test_audit.py breaks the promises `log` and G1 to G6; the first three say whether other checks can run.
    spared = {"overloaded", "faults-happened", "load-as-planned", "log", *(f"G{n}" for n in range(1, 7))}
    assert planted | spared >= GENERAL_CHECKS.keys() | SCENARIO_CHECKS.keys()
    assert {name for scenario in SCENARIOS.values() for name in scenario.promises} == SCENARIO_CHECKS.keys()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_load_run_without_faults_breaks_no_promise(name: str) -> None:
    promises = check_promises(run(name))
    assert [promise for promise in promises if promise.verdict is BROKEN] == []
    assert {promise.name for promise in promises if promise.verdict is KEPT} >= {"one-answer", "at-rest"}


def simulated(kind: type[QueueSimulator]) -> LogAudit:
    queue = kind()
    queue.admit_many("r", 20)
    queue.run_dry()
    return audited(queue.log)


def test_a_decision_log_that_ends_with_an_outage_is_checked_too() -> None:
    good, bad = simulated(QueueSimulator), simulated(OverAdmits)
    broken = verdict(run(log_audits=(bad, good)), "G1")
    assert broken.verdict is BROKEN
    assert "#" in broken.cases[0]
    assert verdict(run(log_audits=(good,)), "G1").verdict is KEPT


STANDARD = replace(run().target, mode="standard")
NOT_PROVABLE: dict[str, tuple[str, RunResult]] = {
    "the log ended in the middle": (
        "G1", run(log_audits=(simulated(QueueSimulator), LogAudit(None, why="the log ended in the middle")))),
    "not all endpoints answered": ("outage-bound", outage(
        samples=BEFORE, endpoint_samples=(EndpointSample(1.0, 8, 4), EndpointSample(6.0, 2, 1)))),
    "no log": ("G1", run()),
    "nothing was refused": ("refusals-explained", run()),
    "nothing was refused late": ("deadline", run()),
    "no samples at rest": ("at-rest", run(samples=())),
    "no samples of the stock": ("stock-in-bounds", run(samples=())),
    "no request waited": ("overloaded", run("noisy-neighbour")),
    "no request of the quiet client waited": ("quiet-wait", run("noisy-neighbour")),
    "the quiet client was idle": ("quiet-not-refused", run("noisy-neighbour", answers=(answer("noisy"),))),
    "no replica crashed": ("faults-happened", run("replica-crash")),
    "Redis was never down": ("outage-serves", run("redis-outage")),
    "no sample of the endpoints": ("outage-bound", outage()),
    "Redis did not come back": (
        "shared-again", run("redis-outage", faults_injected=FaultsInjected(outages=[(5.0, None)]))),
    "sent late": ("load-as-planned", run(answers=[replace(each, due_s=-1.0) for each in run().answers])),
    "streams of a killed replica are cut in this mode, as promised": (
        "no-errors", replace(first("replica-crash", answer("client-1", fault="cut")), target=STANDARD)),
}  # fmt: skip


@cases("name, result", NOT_PROVABLE)
def test_a_promise_that_a_run_cannot_prove_is_neither_kept_nor_broken(name: str, result: RunResult) -> None:
    assert verdict(result, name).verdict is UNKNOWN


def test_a_client_that_hangs_up_at_an_interrupt_is_no_error() -> None:
    hung_up = answer("client-1", left=True)
    result = replace(first("steady", hung_up), interrupted=True)
    assert [promise for promise in check_promises(result) if promise.verdict is BROKEN] == []


def test_an_outage_that_the_fleet_survives_breaks_no_promise() -> None:
    result = outage(
        samples=(*BEFORE, *AWAY, *BACK), endpoint_samples=(EndpointSample(6.0, 8, 4),), rest=rest(21.0)
    )
    names = ("outage-serves", "outage-bound", "shared-again", "only-overload-errors")
    assert {verdict(result, name).verdict for name in names} == {KEPT}
