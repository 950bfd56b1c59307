"""The last 100 completions of an endpoint: mean and standard deviation as they would be computed from
scratch."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.scheduling.endpoint_history import LatencyTracker, LatencyWindow

times = st.lists(st.floats(min_value=0, max_value=3600), min_size=1, max_size=400)


@given(times, st.integers(min_value=1, max_value=120))
def test_statistics_are_those_of_the_window(seconds: list[float], window: int) -> None:
    times_window = LatencyWindow(window)

    for one in seconds:
        times_window.add(one)

    last = seconds[-window:]
    stats = times_window.stats
    assert stats is not None
    assert stats.count == len(last)
    assert stats.mean_s == pytest.approx(statistics.fmean(last), abs=1e-6)
    assert stats.std_s == pytest.approx(statistics.pstdev(last), abs=1e-3)


def test_a_small_spread_on_long_times_is_not_lost() -> None:
    """Times near an hour that differ by a millisecond: when the window has moved on a
    hundred thousand times, the spread is still theirs."""
    times_window = LatencyWindow()

    for n in range(100_050):
        times_window.add(3600.0 + (n % 2) * 0.001)

    stats = times_window.stats
    assert stats is not None
    assert stats.std_s == pytest.approx(0.0005, rel=0.01)


def test_what_is_no_time_is_left_out() -> None:
    times_window = LatencyWindow()

    for wrong in (float("nan"), float("inf"), -1.0):
        times_window.add(wrong)

    assert times_window.stats is None


def test_the_book_forgets_who_has_been_silent_longest() -> None:
    """Room for two: when a third comes, the one silent longest is gone."""
    tracker = LatencyTracker(max_endpoints=2)

    for address in ("a", "b", "a", "c"):
        tracker.add(address, 1.0)

    assert [tracker.stats(address) is not None for address in "abc"] == [True, False, True]


def test_the_book_keeps_only_the_pools_endpoints() -> None:
    tracker = LatencyTracker()
    tracker.add("a", 1.0)
    tracker.add("b", 2.0)

    tracker.retain({"b"})

    assert tracker.stats("a") is None
    assert tracker.stats("b") is not None
