"""Whole replicas keep the guarantees under random faults. `make chaos` runs 500 schedules."""

import signal

import pytest
from schedule_faults import EXTRAS, KINDS, Fault, Steps
from schedules import BOUND, Schedule, World, failure, report

_SEEDS = (126, 252, 333, 409, 666, 715, 789)  # the fleet finds its limits under odd seeds


@pytest.mark.parametrize("seed", _SEEDS)
def test_every_guarantee_holds_under_a_schedule_of_faults(seed: int) -> None:
    assert not report(Schedule.of(seed))


def test_the_seeds_of_this_file_cover_every_fault_and_configuration() -> None:
    schedules = [Schedule.of(seed) for seed in _SEEDS]
    assert set.union(*({*each.kinds, *each.extras} for each in schedules)) == {*KINDS, *EXTRAS}
    assert {each.mode for each in schedules} == {"lean", "standard", "http"}


def test_a_schedule_reports_more_requests_in_flight_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "_most_running", lambda *_: BOUND - 1)
    assert "G1, G8: stock 6 at" in failure(Schedule(1, "lean", ()))


def test_an_interrupt_ends_a_run_of_schedules_and_drains_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    async def interrupt(world: World, *_: object) -> Steps:
        world.loop.call_soon(signal.raise_signal, signal.SIGINT)
        yield

    monkeypatch.setitem(KINDS, "interrupt", interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt):
            failure(Schedule(1, "http", (Fault(9.0, "interrupt", 0, 1.0),)))
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_replica_that_starts_without_redis_gets_requests_once_redis_answers() -> None:
    assert not failure(Schedule(1, "http", (Fault(9.0, "kill", 0, 1.0), Fault(9.5, "restart", 1, 3.0))))
