"""`check_history` finds each kind of disagreement between clients' answers and the decision log."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from history import check_history
from queue_simulator import Request as Simulated
from queue_simulator import raw_entry

from picker_tools.load.generator import Answer, Request


def entry(seq: int, event: str, request: str = "r1", *, stock: float = 0) -> dict[str, str]:
    """One entry of a decision log."""
    r = Simulated(request, "f", arrived=1_000_000, deadline_ms=9_000, endpoint="10.0.0.1:8000")
    numbers = {"v": 0, "queued": 0, "upper": 4, "lower": 4}
    numbers |= {"seq": seq, "time_us": 1_000_000 + seq, "stock": stock}
    return raw_entry(event, r, numbers, {"tag": "", "by": "", "note": "4" if event == "restored" else ""})


def lifecycle_log(*ends: str) -> list[Mapping[str, str]]:
    """A decision log in which request r1 is admitted, and ends once by each event in `ends`."""
    events = [event for end in ends for event in ("bypassed", end)]
    return [entry(seq, event, stock=seq % 2) for seq, event in enumerate(events, start=1)]


def served(request: str = "r1") -> Answer:
    return Answer(
        Request("p", 2), source="", number=1, due_s=0.0, sent_s=0.0, head_s=0.5, first_s=0.5, took_s=1.0,
        status=200, tokens=2, endpoint="10.0.0.1:8000", request_id=request,
    )  # fmt: skip


def faults(answers: Sequence[Answer], log: Sequence[Mapping[str, str]], **options: Any) -> list[str]:
    """The faults that `check_history` itself finds, without the faults that `audit` finds."""
    found = check_history(answers, log, **options).faults
    return [fault for fault in found if not fault.startswith(("G", "log"))]


FAULTY = [
    ([served()], [], "has no end"),
    ([served()], lifecycle_log("completed", "completed"), "ended as"),
    ([served()], lifecycle_log("cancelled"), "ended as"),
    ([served(), served()], lifecycle_log("completed"), "two answers name"),
    ([served("")], lifecycle_log("completed"), "names no request"),
    ([], lifecycle_log("completed")[:1], "never ended"),
]


@pytest.mark.parametrize(("answers", "log", "what"), FAULTY)
def test_check_history_finds_each_kind_of_disagreement(
    answers: list[Answer], log: list[Mapping[str, str]], what: str
) -> None:
    found = faults(answers, log)
    assert any(what in fault for fault in found), found


def test_a_second_end_by_a_stopped_replica_is_allowed_only_with_the_option_may_resume() -> None:
    assert faults([served()], lifecycle_log("completed")) == []
    log = lifecycle_log("completed", "cancelled")
    assert faults([served()], log) != []
    assert faults([served()], log, may_resume=True) == []
    assert check_history([served()], log, may_resume=True).resumed == 1
    # A late renewal restores a reclaimed request. If its end is lost too, it is reclaimed again.
    log = [*lifecycle_log("reclaimed"), entry(3, "restored", stock=2), entry(4, "reclaimed")]
    assert check_history([], log).highest_stock == 1
    assert faults([served()], log, may_end=("reclaimed",)) != []
    assert faults([served()], log, may_end=("reclaimed",), may_resume=True) == []
    # Two valid ends of one request are always a fault. A log that was deleted meanwhile may lack a request.
    assert faults([served()], lifecycle_log("completed", "completed"), may_resume=True) != []
    assert faults([served()], [], log_lost=True) == []


def test_check_history_finds_a_broken_promise() -> None:
    log = [entry(number, "bypassed", f"r{number}", stock=number) for number in range(1, 6)]
    log += [entry(5 + number, "completed", f"r{number}", stock=5 - number) for number in range(1, 6)]
    assert {fault[:2] for fault in check_history([], log).faults} == {"G1"}
