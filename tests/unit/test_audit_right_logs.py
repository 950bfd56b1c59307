"""The auditor finds no violation in correct logs, and has checked them."""

import itertools
import pickle
import random

import pytest
from queue_simulator import QueueSimulator

from picker_tools.audit.auditor import Auditor, audit
from picker_tools.audit.report import Report


def violations_of(report: Report) -> list[str]:
    return [violation.what for finding in report.findings for violation in finding.violations]


def busy_queue(seed: int, steps: int = 300) -> QueueSimulator:
    """Bands, weights, limits, deadlines, corrections, cancels, adoptions, overdue requests, live changes."""
    chance, names = random.Random(seed), itertools.count()
    queue = QueueSimulator(total_capacity=40, starvation_ms=200)
    weights = {"one": 1.0, "two": 2.0, "four": 4.0, "tight": 1.0}
    for step in range(steps):
        queue.advance_ms(chance.choice([0, 1, 20]))
        for _ in range(chance.randrange(6)):
            flow = chance.choice(list(weights))
            ttl_ms = chance.choice([300, 60_000])
            fields = {"band": chance.choice([0, 1, 1, 2]), "cost": chance.choice([0.25, 1, 2.75])}
            fields |= {"weight": weights[flow], "limit": int(flow == "tight")}
            queue.admit(f"r{next(names)}", flow, ttl_ms=ttl_ms, **fields)
        queue.place_granted()
        queue.sweep()
        placed = [r.id for r in queue.requests.values() if r.state == "placed"]
        for name in placed[:2]:
            queue.settle(name, chance.choice([None, 0.1, 1.0, 4.0]))
        waiting = [r.id for r in queue.requests.values() if r.state == "queued"]
        if waiting and step % 5 == 0:
            name = chance.choice(waiting)
            chance.choice([queue.cancel, queue.orphan, queue.admit])(name)
            if chance.random() < 0.5 and name in queue.requests:
                queue.admit(name, owner="b")
        if step % 60 == 59:
            queue.change_settings(upper_per=chance.choice([2, 3]), weights={"one": chance.choice([1, 3])})
    return queue


@pytest.mark.parametrize("seed", range(5))
def test_a_correct_log_shows_no_violation_and_every_promise_is_checked(seed: int) -> None:
    queue = busy_queue(seed)
    events = {entry["event"] for entry in queue.log}
    assert events >= {
        "tuned", "bypassed", "queued", "granted", "placed", "completed", "cancelled", "expired", "preempted",
        "refused", "held", "adopted", "corrected", "parked", "unparked",
    }  # fmt: skip
    assert any(entry["by"] == "guard" for entry in queue.log)
    report = audit(queue.log)
    assert violations_of(report) == []
    assert all(finding.checked > 100 for finding in report.findings)
    assert report.violations == 0
    assert report.open_at_end == len(queue.requests)


def test_after_all_requests_ended_none_is_open() -> None:
    queue = QueueSimulator()
    for i in range(20):
        queue.admit(f"r{i}", f"flow{i % 3}")
    queue.run_dry()
    report = audit(queue.log)
    assert (violations_of(report), report.open_at_end) == ([], 0)
    assert (report.first_seq, report.last_seq, report.remarks) == (1, len(queue.log), ())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kept", [0.9, 0.5, 0.1])
def test_a_log_without_its_beginning_is_checked_as_far_as_possible(seed: int, kept: float) -> None:
    log = busy_queue(seed).log
    start = int(len(log) * (1 - kept))
    settings = [entry["note"] for entry in log[:start] if entry["event"] == "tuned"][-1]
    with_settings, without = audit(log[start:], settings), audit(log[start:])
    assert violations_of(with_settings) + violations_of(without) == []
    assert with_settings.remarks[0].startswith(f"begins at entry {start + 1}")


def test_order_is_checked_once_the_requests_from_before_the_log_have_left() -> None:
    queue = QueueSimulator()
    for i in range(10):
        queue.admit(f"old{i}")
    start = len(queue.log)
    queue.run_dry()
    for i in range(20):
        queue.admit(f"new{i}", f"flow{i % 2}")
    queue.run_dry()
    report = audit(queue.log[start:], queue.log[0]["note"])
    assert violations_of(report) == []
    assert report.of("G4").checked > 15
    assert report.of("G2").checked > 15


def test_requests_from_before_the_log_was_switched_on_are_ignored() -> None:
    queue = QueueSimulator()
    for i in range(10):
        queue.admit(f"old{i}")
    start = len(queue.log)
    queue.change_settings(log_max=500)
    queue.run_dry()
    late = [{**entry, "seq": str(i)} for i, entry in enumerate(queue.log[start:], start=1)]
    report = audit(late)
    assert violations_of(report) == []
    assert report.remarks[0].startswith("begins at entry 1")


def test_decisions_while_the_log_was_off_are_no_violation() -> None:
    queue = QueueSimulator()
    queue.admit("before")
    queue.change_settings(log_max=0)
    off = len(queue.log)
    for i in range(10):
        queue.admit(f"meanwhile{i}")
    on = len(queue.log)
    queue.change_settings(log_max=100)
    queue.run_dry()
    log = [{**e, "seq": str(i)} for i, e in enumerate(queue.log[:off] + queue.log[on:], start=1)]
    report = audit(log)
    assert violations_of(report) == []
    assert report.remarks == (f"the log was off after entry {off}",)


def test_memory_grows_with_open_requests_and_not_with_the_log() -> None:
    # The queue stays short; each request has a new flow.
    queue = QueueSimulator(endpoints=1)
    for i in range(8_000):
        queue.admit(f"r{i}", f"flow{i}", band=i % 3)
        if len(queue.requests) > 6:
            queue.place_granted()
            queue.settle(next(r.id for r in queue.requests.values() if r.state == "placed"))
        if i % 100 == 0:
            queue.run_dry()
            queue.sweep()
    auditor = Auditor()
    sizes = []
    for i, raw in enumerate(queue.log):
        auditor.take(raw)
        if i % (len(queue.log) // 8) == 0:
            sizes.append(len(pickle.dumps(auditor)))
    assert max(sizes[4:]) < 1.3 * max(sizes[:4])
    assert violations_of(auditor.report()) == []


def test_order_is_not_checked_until_requests_queued_before_its_change_have_left() -> None:
    queue = QueueSimulator()
    for i in range(8):
        queue.admit(f"old{i}", ttl_ms=60_000 - i)
    queue.change_settings(ordering="edf")
    for i in range(8):
        queue.admit(f"new{i}")
    # The sweep has not reordered them yet, so they are still served by arrival.
    queue.run_dry()
    queue.sweep()
    queue.admit("afterwards")
    assert violations_of(audit(queue.log)) == []


def test_a_reused_request_id_is_checked_at_its_new_position() -> None:
    queue = QueueSimulator(endpoints=1)
    for i in range(3):
        queue.admit(f"runs{i}")
    for name in ("again", "first", "second"):
        queue.admit(name, "a")
    queue.cancel("again")
    queue.admit("again", "b")
    queue.run_dry()
    assert violations_of(audit(queue.log)) == []


@pytest.mark.parametrize("seed", range(20))
def test_changing_the_guard_share_breaks_no_bound(seed: int) -> None:
    queue, dice = QueueSimulator(endpoints=1), random.Random(seed)
    for i in range(60):
        queue.admit(f"r{i}", f"flow{i % 3}", band=i % 3)
        queue.advance_ms(dice.choice((0, 0, 40)))
        if dice.random() < 0.3:
            queue.change_settings(guard_share=dice.choice((0.05, 0.1, 0.5)))
    for _ in range(60):
        queue.advance_ms(dice.choice((0, 20, 200)))
        if dice.random() < 0.3:
            queue.change_settings(guard_share=dice.choice((0.05, 0.1, 0.5)))
        queue.place_granted()
        queue.settle(next(r.id for r in queue.requests.values() if r.state == "placed"))
    assert violations_of(audit(queue.log)) == []
