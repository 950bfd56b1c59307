"""The audit of logs that keep every promise: it finds nothing, and it did look."""

import itertools
import pickle
import random

import pytest
from queue_simulator import QueueSimulator

from picker_tools.audit.auditor import Auditor, audit
from picker_tools.audit.report import Report


def told(report: Report) -> list[str]:
    return [violation.what for finding in report.findings for violation in finding.violations]


def busy_queue(seed: int, steps: int = 300) -> QueueSimulator:
    """Bands, weights, limits, deadlines, corrections, cancels, adoptions, overdue requests, live changes."""
    chance, names = random.Random(seed), itertools.count()
    queue = QueueSimulator(total_capacity=40, starvation_ms=200)
    weights = {"one": 1.0, "two": 2.0, "four": 4.0, "tight": 1.0}
    for step in range(steps):
        queue.wait_ms(chance.choice([0, 1, 20]))
        for _ in range(chance.randrange(6)):
            flow = chance.choice(list(weights))
            ttl_ms = chance.choice([300, 60_000])
            about = {"band": chance.choice([0, 1, 1, 2]), "cost": chance.choice([0.25, 1, 2.75])}
            about |= {"weight": weights[flow], "limit": int(flow == "tight")}
            queue.admit(f"r{next(names)}", flow, ttl_ms=ttl_ms, **about)
        queue.place_granted()
        queue.sweep()
        placed = [r.id for r in queue.requests.values() if r.state == "placed"]
        for name in placed[:2]:
            queue.settle(name, chance.choice([None, 0.1, 1.0, 4.0]))
        waiting = [r.id for r in queue.requests.values() if r.state == "queued"]
        if waiting and step % 5 == 0:
            name = chance.choice(waiting)
            chance.choice([queue.cancel, queue.hold, queue.admit])(name)
            if chance.random() < 0.5 and name in queue.requests:
                queue.admit(name, owner="b")
        if step % 60 == 59:
            queue.tune(upper_per=chance.choice([2, 3]), weights={"one": chance.choice([1, 3])})
    return queue


@pytest.mark.parametrize("seed", range(5))
def test_a_right_log_shows_no_violation(seed: int) -> None:
    # Given a queue that keeps the rules, through all that may happen
    queue = busy_queue(seed)
    events = {entry["event"] for entry in queue.log}
    assert events >= {
        "tuned", "bypassed", "queued", "granted", "placed", "completed", "cancelled", "expired", "preempted",
        "refused", "held", "adopted", "corrected", "parked", "unparked",
    }  # fmt: skip
    assert any(entry["by"] == "guard" for entry in queue.log)
    # When its log is audited, then every promise was looked at and none is broken
    report = audit(queue.log)
    assert told(report) == []
    assert all(finding.checked > 100 for finding in report.findings)
    assert report.violations == 0
    assert report.open_at_end == len(queue.requests)


def test_at_rest_nothing_is_open() -> None:
    queue = QueueSimulator()
    for i in range(20):
        queue.admit(f"r{i}", f"flow{i % 3}")
    queue.run_dry()
    report = audit(queue.log)
    assert (told(report), report.open_at_end) == ([], 0)
    assert (report.first_seq, report.last_seq, report.remarks) == (1, len(queue.log), ())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kept", [0.9, 0.5, 0.1])
def test_a_log_whose_beginning_is_cut_off_is_joined_on_the_way(seed: int, kept: float) -> None:
    # Given the last part of a right log, and the settings that were in force at its beginning
    log = busy_queue(seed).log
    start = int(len(log) * (1 - kept))
    settings = [entry["note"] for entry in log[:start] if entry["event"] == "tuned"][-1]
    # When it is audited, with the settings and without
    with_settings, without = audit(log[start:], settings), audit(log[start:])
    # Then what can be known is in order, and the report says where it began
    assert told(with_settings) + told(without) == []
    assert with_settings.remarks[0].startswith(f"begins at entry {start + 1}")


def test_order_is_judged_again_when_those_from_before_the_log_have_left() -> None:
    # Given a log that begins with requests in the pool, which are all served while it goes on
    queue = QueueSimulator()
    for i in range(10):
        queue.admit(f"old{i}")
    start = len(queue.log)
    queue.run_dry()
    for i in range(20):
        queue.admit(f"new{i}", f"flow{i % 2}")
    queue.run_dry()
    # When it is audited with the settings in force, then the turns after that are checked
    report = audit(queue.log[start:], queue.log[0]["note"])
    assert told(report) == []
    assert report.of("G4").checked > 15
    assert report.of("G2").checked > 15


def test_a_pool_is_joined_whose_log_was_switched_on_late() -> None:
    # Given a log whose first entry is the switching on, with requests in the pool
    queue = QueueSimulator()
    for i in range(10):
        queue.admit(f"old{i}")
    start = len(queue.log)
    queue.tune(log_max=500)
    queue.run_dry()
    late = [{**entry, "seq": str(i)} for i, entry in enumerate(queue.log[start:], start=1)]
    # When it is audited, then what began before is ignored
    report = audit(late)
    assert told(report) == []
    assert report.remarks[0].startswith("begins at entry 1")


def test_what_was_decided_while_the_log_was_off_is_not_missed() -> None:
    # Given a log that was switched off and on again
    queue = QueueSimulator()
    queue.admit("before")
    queue.tune(log_max=0)
    off = len(queue.log)
    for i in range(10):
        queue.admit(f"meanwhile{i}")
    on = len(queue.log)
    queue.tune(log_max=100)
    queue.run_dry()
    log = [{**e, "seq": str(i)} for i, e in enumerate(queue.log[:off] + queue.log[on:], start=1)]
    # When it is audited, then nothing is held against that
    report = audit(log)
    assert told(report) == []
    assert report.remarks == (f"the log was off after entry {off}",)


def test_memory_follows_what_is_open_not_the_log() -> None:
    # Given a long log of a queue that is never long, with a new flow for each request
    queue = QueueSimulator(endpoints=1)
    for i in range(8_000):
        queue.admit(f"r{i}", f"flow{i}", band=i % 3)
        if len(queue.requests) > 6:
            queue.place_granted()
            queue.settle(next(r.id for r in queue.requests.values() if r.state == "placed"))
        if i % 100 == 0:
            queue.run_dry()
            queue.sweep()
    # When it is audited entry by entry, then what is kept grows no more after the first quarter
    auditor = Auditor()
    sizes = []
    for i, raw in enumerate(queue.log):
        auditor.take(raw)
        if i % (len(queue.log) // 8) == 0:
            sizes.append(len(pickle.dumps(auditor)))
    assert max(sizes[4:]) < 1.3 * max(sizes[:4])
    assert told(auditor.report()) == []


def test_changing_the_order_suspends_its_judgement_until_the_former_queue_is_gone() -> None:
    # Given requests that wait by arrival when the order becomes that of deadlines
    queue = QueueSimulator()
    for i in range(8):
        queue.admit(f"old{i}", ttl_ms=60_000 - i)
    queue.tune(ordering="edf")
    for i in range(8):
        queue.admit(f"new{i}")
    # When they are still served by arrival, as a walk that is under way may do, then that is no violation
    queue.run_dry()
    queue.sweep()
    queue.admit("afterwards")
    assert told(audit(queue.log)) == []


def test_an_id_that_lives_again_stands_in_its_new_place() -> None:
    # Given a request that was cancelled, and whose id comes again in another flow while its first flow waits
    queue = QueueSimulator(endpoints=1)
    for i in range(3):
        queue.admit(f"runs{i}")
    for name in ("again", "first", "second"):
        queue.admit(name, "a")
    queue.cancel("again")
    queue.admit("again", "b")
    # When everything is served, then neither flow's order is thought broken
    queue.run_dry()
    assert told(audit(queue.log)) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_changing_share_of_the_guard_breaks_no_bound(seed: int) -> None:
    # Given arrivals of two bands that become overdue at different times
    queue, dice = QueueSimulator(endpoints=1), random.Random(seed)
    for i in range(60):
        queue.admit(f"r{i}", f"flow{i % 3}", band=i % 3)
        queue.wait_ms(dice.choice((0, 0, 40)))
        # When the guard's share is changed while they are served
        if dice.random() < 0.3:
            queue.tune(guard_share=dice.choice((0.05, 0.1, 0.5)))
    for _ in range(60):
        queue.wait_ms(dice.choice((0, 20, 200)))
        if dice.random() < 0.3:
            queue.tune(guard_share=dice.choice((0.05, 0.1, 0.5)))
        queue.place_granted()
        queue.settle(next(r.id for r in queue.requests.values() if r.state == "placed"))
    # Then no request is said to have waited for more dispatches than it takes
    assert told(audit(queue.log)) == []
