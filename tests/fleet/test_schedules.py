"""Whole replicas keep the guarantees under random faults. `make chaos` runs 500 schedules."""

import pytest
from schedules import BOUND, KINDS, Fault, Schedule, World, failure, report, smallest

_SEEDS = (0, 5, 6, 7, 10, 13, 18, 47, 69, 126)  # the fleet finds its limits under odd seeds


@pytest.mark.parametrize("seed", _SEEDS)
def test_every_guarantee_holds_under_a_schedule_of_faults(seed: int) -> None:
    assert not report(Schedule.of(seed))


def test_the_seeds_of_this_file_cover_every_kind_of_fault() -> None:
    assert set.union(*(Schedule.of(seed).kinds for seed in _SEEDS)) == set(KINDS)


def test_the_smallest_schedule_has_only_the_faults_that_cause_the_failure() -> None:
    kinds = ["cut", "kill", "slow", "stop"]
    whole = Schedule(1, "lean", tuple(Fault(float(at), kind, 0, 1.0) for at, kind in enumerate(kinds)))
    assert smallest(whole, lambda some: {"kill", "stop"} <= some.kinds).kinds == {"kill", "stop"}


def test_a_schedule_in_which_the_bound_is_exceeded_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "_most_running", lambda *_: BOUND - 1)
    assert "G1, G8: 6 run" in failure(Schedule(1, "lean", ()))
