"""The last 100 completions of an endpoint: mean and standard deviation as they would be counted anew."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.scheduling.latency import LatencyBook, LatencyRing

times = st.lists(st.floats(min_value=0, max_value=3600), min_size=1, max_size=400)


@given(times, st.integers(min_value=1, max_value=120))
def test_statistics_are_those_of_the_window(seconds: list[float], window: int) -> None:
    ring = LatencyRing(window)

    for one in seconds:
        ring.add(one)

    last = seconds[-window:]
    stats = ring.stats
    assert stats is not None
    assert stats.count == len(last)
    assert stats.mean_s == pytest.approx(statistics.fmean(last), abs=1e-6)
    assert stats.std_s == pytest.approx(statistics.pstdev(last), abs=1e-3)


def test_a_small_spread_on_long_times_is_not_lost() -> None:
    """Given times near an hour that differ by a millisecond, when the window has moved on a
    hundred thousand times, then the spread is still theirs."""
    ring = LatencyRing()

    for n in range(100_050):
        ring.add(3600.0 + (n % 2) * 0.001)

    stats = ring.stats
    assert stats is not None
    assert stats.std_s == pytest.approx(0.0005, rel=0.01)


def test_what_is_no_time_is_left_out() -> None:
    ring = LatencyRing()

    for wrong in (float("nan"), float("inf"), -1.0):
        ring.add(wrong)

    assert ring.stats is None


def test_the_book_forgets_who_has_been_silent_longest() -> None:
    """Given room for two, when a third comes, then the one without news longest is gone."""
    book = LatencyBook(most=2)

    for address in ("a", "b", "a", "c"):
        book.add(address, 1.0)

    assert [book.stats(address) is not None for address in "abc"] == [True, False, True]


def test_the_book_keeps_only_the_pools_endpoints() -> None:
    book = LatencyBook()
    book.add("a", 1.0)
    book.add("b", 2.0)

    book.keep({"b"})

    assert book.stats("a") is None
    assert book.stats("b") is not None
