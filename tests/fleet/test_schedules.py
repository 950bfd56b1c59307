"""Whole replicas keep the guarantees under random faults. `make chaos` runs 500 schedules."""

import pytest
from schedules import BOUND, KINDS, Schedule, World, failure, report

_SEEDS = (6, 126, 252, 333, 371, 409)  # the fleet finds its limits under odd seeds


@pytest.mark.parametrize("seed", _SEEDS)
def test_every_guarantee_holds_under_a_schedule_of_faults(seed: int) -> None:
    assert not report(Schedule.of(seed))


def test_the_seeds_of_this_file_cover_every_kind_of_fault() -> None:
    assert set.union(*(Schedule.of(seed).kinds for seed in _SEEDS)) == set(KINDS)


def test_a_schedule_in_which_the_bound_is_exceeded_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "_most_running", lambda *_: BOUND - 1)
    assert "G1, G8: 6 run" in failure(Schedule(1, "lean", ()))
