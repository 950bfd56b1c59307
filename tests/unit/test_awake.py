"""How long this replica was awake: its loop's gaps, and what the kernel tells."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from picker_fleet.state.failure_detector import TICK_S, KernelDelay, PauseDetector


class Time:
    """A clock, and the kernel's account of delays, that are moved by hand."""

    def __init__(self) -> None:
        self.now_s, self.delayed_s = 100.0, 0.0
        self.pause_detector = PauseDetector(lambda: self.now_s, lambda: self.delayed_s)
        self.pause_detector.tick()

    def passes(self, seconds: float, *, closely: bool = False) -> float:
        self.now_s += seconds
        return self.pause_detector.tick(closely=closely)


def test_given_a_tick_in_time_when_time_passes_then_all_of_it_was_awake() -> None:
    time = Time()
    assert time.passes(TICK_S) == pytest.approx(TICK_S)
    assert time.pause_detector.paused_s == 0.0


def test_given_a_late_tick_when_time_passes_then_what_is_past_the_expected_one_was_not_awake() -> None:
    time = Time()
    assert time.passes(0.6) == pytest.approx(TICK_S)
    assert time.pause_detector.paused_s == pytest.approx(0.6 - TICK_S)
    assert not time.pause_detector.resumed_recently


def test_given_no_tick_yet_when_asked_on_waking_then_the_gap_is_known_already() -> None:
    time = Time()
    time.now_s += 3.0
    assert time.pause_detector.paused_s == pytest.approx(3.0 - TICK_S)
    assert time.pause_detector.resumed_recently
    time.passes(0.0)
    assert time.pause_detector.resumed_recently
    for _ in range(11):
        time.passes(TICK_S)
    assert not time.pause_detector.resumed_recently


def test_given_a_busy_core_when_looked_at_closely_then_the_kernels_delay_is_not_awake() -> None:
    time = Time()
    time.passes(TICK_S, closely=True)
    time.delayed_s += 0.07
    assert time.passes(TICK_S, closely=True) == pytest.approx(0.03)
    # And it is not counted where nobody asked before
    time.passes(TICK_S)
    time.delayed_s += 5.0
    assert time.passes(TICK_S, closely=True) == pytest.approx(TICK_S)


def test_given_a_gap_that_the_kernel_tells_of_as_well_when_counted_then_once() -> None:
    time = Time()
    time.passes(TICK_S, closely=True)
    time.delayed_s += 0.5
    assert time.passes(0.6, closely=True) == pytest.approx(TICK_S)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3), st.booleans()), max_size=50))
def test_given_anything_when_counted_then_awake_and_still_make_up_what_passed(
    steps: list[tuple[float, float, bool]],
) -> None:
    time, awake_s = Time(), 0.0
    for passed_s, delayed_s, closely in steps:
        time.delayed_s += delayed_s
        part_s = time.passes(passed_s, closely=closely)
        assert 0.0 <= part_s <= TICK_S + 1e-9
        awake_s += part_s
    assert awake_s + time.pause_detector.paused_s == pytest.approx(time.now_s - 100.0)


def test_given_the_kernels_pages_when_read_then_run_queue_and_steal_add_up(tmp_path: Path) -> None:
    schedstat, stat = tmp_path / "schedstat", tmp_path / "stat"
    schedstat.write_text("5000000000 1500000000 42\n")
    stat.write_text("cpu  1 2 3 4 5 6 7 0 9 10\ncpu0 1 2 3 4\n")
    assert KernelDelay(str(schedstat), str(stat)).read() == pytest.approx(1.5)
    stat.write_text("cpu  1 2 3 4 5 6 7 1000000 9 10\n")
    assert KernelDelay(str(schedstat), str(stat)).read() > 1.5


@pytest.mark.parametrize("text", [None, "", "strange"])
def test_given_a_kernel_that_does_not_tell_when_read_then_nothing_was_delayed(
    tmp_path: Path, text: str | None
) -> None:
    page = tmp_path / "page"
    if text is not None:
        page.write_text(text)
    assert KernelDelay(str(page), str(page)).read() == 0.0
