"""Promises of `picker load` broken on purpose, one at a time: each is found broken, and says by what."""

from dataclasses import replace
from typing import Any

import pytest
from faulty_queues import EndsTwice, IgnoresWeights, OverAdmits, ServesLowBandsFirst
from load_runs import answer, audited, refusal, rest, run, sample, verdict
from queue_simulator import QueueSimulator

from picker_fleet.request import Band
from picker_tools.load.checks import GENERAL_CHECKS, SCENARIO_CHECKS, Verdict, check_promises
from picker_tools.load.result import Dispatch, EndpointSample, FaultsInjected, LogAudit, RunResult
from picker_tools.load.scenarios import SCENARIOS

KEPT, BROKEN, UNKNOWN = Verdict.KEPT, Verdict.BROKEN, Verdict.UNKNOWN


def answers(scenario: str, **changed: dict[str, Any]) -> tuple[Any, ...]:
    """Those of a good run, with `changed` in those of each source that it names (`_` for `-`)."""
    given = {name.replace("_", "-"): fields for name, fields in changed.items()}
    return tuple(replace(each, **given.get(each.source, {})) for each in run(scenario).answers)


def some(scenario: str, *instead: Any) -> tuple[Any, ...]:
    """A good run's answers, the first of them replaced by `instead`."""
    return (*instead, *run(scenario).answers[len(instead) :])


LATE = {"reason": "rejected-ttl-expired", "first_s": 31.5, "last_s": 31.5}
OUTAGE = FaultsInjected(outages=[(5.0, 10.0)])
QUEUED = {"Critical": 0, "Default": 5, "Sheddable": 0}
BACK = tuple(sample(10 + 0.25 * number) for number in range(40))
AWAY = tuple(sample(5 + 0.25 * number, degraded=True) for number in range(20))
BEFORE = tuple(sample(0.25 * number) for number in range(20))


def overload(scenario: str, **waits_s: float) -> RunResult:
    """A run in which each source's requests wait so long for their turn; every one of them is served."""
    base = run(scenario)
    dispatches = tuple(
        Dispatch(
            at_s=base.wall_s + each.sent_s + waits_s.get(each.source.replace("-", "_"), 0.0),
            request=f"{each.source}-{each.number}",
            flow=source.flow,
            band=int(source.band),
            workload=source.workload,
            cost=base.cost(each),
            weight=1.0,
            wait_s=waits_s.get(each.source.replace("-", "_"), 0.0),
        )
        for each in base.answers
        for source in base.sources
        if source.name == each.source
    )
    waiting = tuple(replace(each, queued=QUEUED) for each in base.samples)
    return replace(base, log_audits=(LogAudit(None, dispatches),), samples=waiting)


def starved(evidence: RunResult, flow: str, kept: int) -> RunResult:
    """The same, but of the requests of `flow` only every `kept`th was ever dispatched."""
    dispatches = tuple(
        turn
        for number, turn in enumerate(evidence.log_audits[0].dispatches)
        if turn.flow != flow or number % kept == 0
    )
    return replace(evidence, log_audits=(LogAudit(None, dispatches),))


# scenario's promise, a run that breaks it, words that name how
FAULTS: list[tuple[str, RunResult, str]] = [
    ("one-answer", run(answers=some("steady", answer("client-1", answers=2))), "client-1 #0"),
    (
        "one-answer",
        run(answers=some("steady", answer("client-1", answers=0, fault="no whole answer"))),
        "no whole",
    ),
    ("one-answer", run(sent=161), "161 requests were sent and 160 ended"),
    ("one-answer", run(surplus_answers=1), "1 answers came beyond"),
    ("one-answer", run(answers=some("steady", answer("client-1", tokens=15))), "15 tokens of 16"),
    ("refusals-explained", run(answers=some("steady", refusal("client-1", reason=""))), "reason none"),
    (
        "refusals-explained",
        run(answers=some("steady", refusal("client-1", retry_after_s=None))),
        "retry-after None",
    ),
    ("deadline", run(answers=some("steady", refusal("client-1", **LATE))), "after 31.500 s"),
    ("at-rest", run(rest=None), "stock 8"),
    ("stock-in-bounds", run(samples=(sample(1.0), sample(1.25, stock=9))), "9 of 8.8"),
    ("slo-ttft", run(parameters=replace(run().parameters, slo_ttft_p95_s=0.05)), "0.100 s is above 0.05 s"),
    (
        "slo-latency",
        run(parameters=replace(run().parameters, slo_latency_p95_s=0.2)),
        "0.300 s is above 0.2 s",
    ),
    ("no-errors", run(answers=some("steady", answer("client-1", status=500))), "500"),
    ("no-errors", run(answers=some("steady", refusal("client-1"))), "rejected-saturated"),
    (
        "no-errors",
        run("replica-crash", answers=some("replica-crash", answer("client-1", fault="cut"))),
        "cut",
    ),
    ("nothing-expires", run(answers=some("steady", refusal("client-1", **LATE))), "rejected-ttl-expired"),
    ("queue-drains", run("burst", samples=tuple(sample(n / 4, queued=QUEUED) for n in range(80))), "burst 1"),
    ("quiet-share", starved(overload("noisy-neighbour", noisy=2.0), "quiet", 2), "fair share was"),
    ("quiet-wait", overload("noisy-neighbour", noisy=2.0, quiet=1.0), "quiet 1.000 s, noisy 2.000 s"),
    (
        "quiet-not-refused",
        run("noisy-neighbour", answers=some("noisy-neighbour", refusal("quiet"))),
        "quiet #0",
    ),
    (
        "critical-not-refused",
        run("priority-overload", answers=some("priority-overload", refusal("critical"))),
        "critical #0",
    ),
    (
        "waits-by-band",
        overload("priority-overload", critical=1, default=0.5, sheddable_1=2),
        "1.000 s before 0.500",
    ),
    (
        "low-not-starved",
        run("starvation", answers=some("starvation", refusal("low", **LATE))),
        "low #0",
    ),
    (
        "low-not-starved",
        run(
            "starvation",
            answers=tuple(each for each in run("starvation").answers if each.source != "sheddable"),
        ),
        "sheddable: nothing was served",
    ),
    ("urgent-first", overload("workload-aware", urgent=1.0, busy_1=2.0), "urgent 1.000 s, busy-1 2.000 s"),
    ("seldom-first", overload("workload-aware", quiet=1.0, busy_1=2.0), "quiet 1.000 s, busy-1 2.000 s"),
    ("short-share", starved(overload("long-prompts", long=2.0), "short", 3), "fair share was"),
    ("short-wait", overload("long-prompts", short=2.0, long=2.0), "short 2.000 s"),
    (
        "no-errors-but-overload",
        run("long-prompts", answers=some("long-prompts", answer("long", status=502))),
        "502",
    ),
    (
        "only-overload-errors",
        run("redis-outage", answers=some("redis-outage", answer("client-1", status=500))),
        "500",
    ),
    (
        "outage-serves",
        run(
            "redis-outage",
            faults_injected=OUTAGE,
            answers=tuple(
                refusal(each.source, each.number) if 5 <= each.sent_s <= 10 else each
                for each in run("redis-outage").answers
            ),
        ),
        "0.0 requests a second were served without",
    ),
    (
        "outage-serves",  # one in three seconds is not going on
        run(
            "redis-outage",
            faults_injected=OUTAGE,
            answers=tuple(
                refusal(each.source, each.number) if 5 <= each.sent_s <= 10 and each.number != 14 else each
                for each in run("redis-outage").answers
            ),
        ),
        "before it went",
    ),
    (
        "outage-bound",
        run(
            "redis-outage",
            faults_injected=OUTAGE,
            endpoint_samples=(EndpointSample(6.0, 8, 4), EndpointSample(7.0, 9, 4)),
        ),
        "at 7.00 s: 9",
    ),
    (
        "outage-bound",
        run(
            "redis-outage",
            faults_injected=OUTAGE,
            samples=BEFORE,
            endpoint_samples=(EndpointSample(11.0, 12, 4),),
        ),
        "at 11.00 s: 12",
    ),
    (
        "shared-again",
        run("redis-outage", faults_injected=OUTAGE, samples=(*BEFORE, *AWAY)),
        "no sample after",
    ),
    (
        "shared-again",
        run("redis-outage", faults_injected=OUTAGE, samples=(*BEFORE, *AWAY, sample(16.0))),
        "shared again 6.00 s",
    ),
    (
        "shared-again",
        run(
            "redis-outage",
            faults_injected=OUTAGE,
            samples=(*BEFORE, *(replace(each, replicas=2) for each in BACK)),
        ),
        "no sample after",
    ),
    (
        "turns-stay",
        run(
            "multi-turn",
            answers=tuple(
                answer("talk", conversation, turn=turn, served_by=f"127.0.0.1:{9000 + turn}")
                for conversation in range(10)
                for turn in range(4)
            ),
        ),
        "0 of 30 later turns",
    ),
]


@pytest.mark.parametrize(
    ("name", "evidence", "words"), FAULTS, ids=[f"{name}: {words}" for name, _, words in FAULTS]
)
def test_a_planted_fault_is_found_and_named(name: str, evidence: RunResult, words: str) -> None:
    found = verdict(evidence, name)
    assert found.verdict is BROKEN
    assert words in "\n".join([found.evidence, *found.cases])


def test_every_promise_of_a_scenario_has_a_planted_fault() -> None:
    planted = {name for name, _, _ in FAULTS}
    # The audit's own are planted below; these two tell whether the others can be judged at all.
    spared = {"overloaded", "faults-happened", "load-as-planned", "log", *(f"G{n}" for n in range(1, 7))}
    assert planted | spared >= GENERAL_CHECKS.keys() | SCENARIO_CHECKS.keys()
    assert {name for scenario in SCENARIOS.values() for name in scenario.promises} == SCENARIO_CHECKS.keys()


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_good_run_breaks_nothing(name: str) -> None:
    promises = check_promises(run(name))
    assert [promise for promise in promises if promise.verdict is BROKEN] == []
    assert {promise.name for promise in promises if promise.verdict is KEPT} >= {"one-answer", "at-rest"}


@pytest.mark.parametrize(
    ("queue", "promise"),
    [(OverAdmits, "G1"), (IgnoresWeights, "G2"), (ServesLowBandsFirst, "G4"), (EndsTwice, "G6")],
)
def test_what_the_audit_finds_breaks_the_run(queue: type[QueueSimulator], promise: str) -> None:
    faulty = queue()
    for number in range(40):
        faulty.admit(f"r{number}", "ab"[number % 2], weight=1 + number % 2, band=number % 3)
    faulty.run_dry()
    found = verdict(run(log_audits=(audited(faulty.log),)), promise)
    assert found.verdict is BROKEN
    assert "#" in found.cases[0]


def test_a_log_from_before_an_outage_counts_too() -> None:
    good, bad = QueueSimulator(), OverAdmits()
    for queue in (good, bad):
        for number in range(20):
            queue.admit(f"r{number}")
        queue.run_dry()
    assert verdict(run(log_audits=(audited(bad.log), audited(good.log))), "G1").verdict is BROKEN
    assert verdict(run(log_audits=(audited(good.log),)), "G1").verdict is KEPT


def unserved(evidence: RunResult, band: Band) -> RunResult:
    """The same, but nobody of `band` was ever dispatched."""
    dispatches = tuple(turn for turn in evidence.log_audits[0].dispatches if turn.band != band)
    return replace(evidence, log_audits=(LogAudit(None, dispatches),))


def good_log() -> LogAudit:
    queue = QueueSimulator()
    for number in range(20):
        queue.admit(f"r{number}")
    queue.run_dry()
    return audited(queue.log)


NOT_PROVABLE: list[tuple[str, RunResult]] = [
    ("G1", run(log_audits=(good_log(), LogAudit(None, why="the log ended in the middle")))),
    (
        "outage-bound",  # not all endpoints answered when they were asked
        run(
            "redis-outage",
            faults_injected=OUTAGE,
            samples=BEFORE,
            endpoint_samples=(EndpointSample(1.0, 8, 4), EndpointSample(6.0, 2, 1)),
        ),
    ),
    (
        "waits-by-band",  # of the highest band nobody was served
        unserved(overload("priority-overload", default=1, sheddable_1=2, sheddable_2=2), Band.CRITICAL),
    ),
    ("G1", run()),  # no log
    ("refusals-explained", run()),  # nothing was refused
    ("deadline", run()),
    ("at-rest", run(samples=())),
    ("stock-in-bounds", run(samples=())),
    ("overloaded", run("noisy-neighbour")),  # nobody waited
    ("quiet-wait", run("noisy-neighbour")),
    ("waits-by-band", run("priority-overload")),
    ("quiet-not-refused", run("noisy-neighbour", answers=(answer("noisy"),))),
    ("faults-happened", run("replica-crash")),
    ("outage-serves", run("redis-outage")),
    ("outage-bound", run("redis-outage", faults_injected=OUTAGE)),  # endpoints were not seen
    ("shared-again", run("redis-outage", faults_injected=FaultsInjected(outages=[(5.0, None)]))),
    ("turns-stay", run("multi-turn")),  # no second turns
    ("load-as-planned", run(answers=answers("steady", client_1={"due_s": -1.0}))),  # a late generator
    (
        "no-errors",  # streams of a dead replica are cut in this mode, as promised
        run(
            "replica-crash",
            parameters=replace(run().parameters, mode="standard"),
            answers=some("replica-crash", answer("client-1", fault="cut")),
        ),
    ),
]


@pytest.mark.parametrize(("name", "evidence"), NOT_PROVABLE, ids=[name for name, _ in NOT_PROVABLE])
def test_what_cannot_be_judged_is_not_called_held(name: str, evidence: RunResult) -> None:
    assert verdict(evidence, name).verdict is UNKNOWN


def test_who_hung_up_at_an_interrupt_is_no_error() -> None:
    evidence = run(
        answers=some("steady", answer("client-1", fault="the client hung up", left=True)), interrupted=True
    )
    assert [promise for promise in check_promises(evidence) if promise.verdict is BROKEN] == []


def test_an_outage_held_by_the_fleet() -> None:
    evidence = run(
        "redis-outage",
        faults_injected=OUTAGE,
        samples=(*BEFORE, *AWAY, *BACK),
        endpoint_samples=(EndpointSample(6.0, 8, 4),),
        rest=rest(21.0),
    )
    names = ("outage-serves", "outage-bound", "shared-again", "only-overload-errors")
    assert {verdict(evidence, name).verdict for name in names} == {KEPT}
