"""Failure detection: when Redis counts as unavailable, a connection as stuck, or this replica as paused."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from picker_fleet.state.connection import (
    CALM_S,
    TICK_S,
    FailureDetector,
    Health,
    KernelDelay,
    PauseDetector,
    RetransmissionTimeout,
)

FLOOR_S, CEILING_S = 1.0, 7.5


class ObservedConnection:
    """A connection that is observed at each tick, as by the connection monitor."""

    def __init__(self) -> None:
        self.failure_detector = FailureDetector(FLOOR_S, CEILING_S)
        self.now_s = 100.0

    def observe(self, *, awake_s: float = TICK_S, waiting: bool = True, **seen: bool) -> Health:
        """The keywords `received` and `answered`: whether data, or the answer to a probe, came in this
        tick."""
        self.now_s += TICK_S
        seen = {"received": False, "answered": False} | seen
        return self.failure_detector.observe(self.now_s, awake_s, waiting=waiting, **seen)

    def until_failure(self, *, answered: bool = False, within_s: float = 20.0) -> tuple[Health, float]:
        """The first health STUCK or UNAVAILABLE, and the seconds until then; HEALTHY if neither comes in
        time."""
        began_s = self.now_s
        while self.now_s < began_s + within_s:
            health = self.observe(answered=answered)
            if health in (Health.STUCK, Health.UNAVAILABLE):
                return health, self.now_s - began_s
        return Health.HEALTHY, within_s


def test_a_silent_redis_is_unavailable_and_a_silent_connection_stuck_if_probes_are_answered() -> None:
    health, after_s = ObservedConnection().until_failure()
    assert health is Health.UNAVAILABLE
    assert FLOOR_S <= after_s <= FLOOR_S + 4 * TICK_S
    health, after_s = ObservedConnection().until_failure(answered=True)
    assert health is Health.STUCK
    assert after_s < FLOOR_S


def test_replies_and_idle_time_and_pauses_of_this_replica_do_not_count_as_silence() -> None:
    connection = ObservedConnection()
    for _ in range(500):
        assert Health.UNAVAILABLE not in [connection.observe() for _ in range(10)]
        assert connection.observe(received=True) is Health.HEALTHY
    assert {connection.observe(waiting=False) for _ in range(500)} == {Health.HEALTHY}
    assert Health.UNAVAILABLE not in {connection.observe(awake_s=0.0) for _ in range(500)}


def test_a_reply_in_the_socket_is_read_before_redis_counts_as_unavailable() -> None:
    connection = ObservedConnection()
    while connection.observe(awake_s=0.5) is not Health.SUSPECT:
        pass
    assert connection.observe(awake_s=FLOOR_S) is Health.SUSPECT
    assert connection.observe(awake_s=0.5, received=True) is Health.HEALTHY


def test_slow_replies_lengthen_the_time_until_redis_counts_as_unavailable() -> None:
    connection = ObservedConnection()
    for seconds in (0.2, 1.4) * 20:
        connection.failure_detector.record_reply_time(seconds)
    _, after_s = connection.until_failure()
    assert after_s > 2 * FLOOR_S
    for _ in range(50):
        connection.failure_detector.record_reply_time(60.0)
    health, after_s = connection.until_failure(within_s=30.0)
    assert health is Health.UNAVAILABLE
    assert CEILING_S <= after_s <= 2 * CEILING_S + 4 * TICK_S


def test_the_time_until_redis_is_unavailable_doubles_with_each_failover_until_a_calm_period() -> None:
    connection, took_s = ObservedConnection(), []
    for _ in range(5):
        health, after_s = connection.until_failure()
        assert health is Health.UNAVAILABLE
        took_s.append(round(after_s))
        connection.failure_detector.record_failover(connection.now_s)
        connection.failure_detector.record_recovery(connection.now_s)
    assert took_s == [1, 2, 4, 8, 8]
    connection.now_s += CALM_S
    assert connection.failure_detector.unavailable_after_s(connection.now_s) == FLOOR_S
    connection.failure_detector.record_failover(connection.now_s)
    assert connection.failure_detector.heartbeats_to_recover == 2


@given(st.floats(0.0, 20.0))
def test_a_redis_of_constant_delay_causes_one_failover_at_most(delay_s: float) -> None:
    # Redis answers each message and each probe after `delay_s` seconds.
    connection, left, beats, local = ObservedConnection(), 0, 0, False
    sent_s, probes_s = connection.now_s, list[float]()
    for _ in range(3000):
        received = connection.now_s - sent_s >= delay_s
        if received:
            connection.failure_detector.record_reply_time(delay_s)
            sent_s, beats = connection.now_s, beats + 1
        answered = any(connection.now_s - probe_s >= delay_s for probe_s in probes_s)
        health = connection.observe(received=received, answered=answered)
        probes_s = [*probes_s, connection.now_s] if health is Health.SUSPECT else []
        if health in (Health.STUCK, Health.UNAVAILABLE):
            sent_s, beats = connection.now_s, 0
        if health is Health.UNAVAILABLE and not local:
            left, local = left + 1, True
            connection.failure_detector.record_failover(connection.now_s)
        elif local and beats >= connection.failure_detector.heartbeats_to_recover:
            local = False
            connection.failure_detector.record_recovery(connection.now_s)
    assert left <= 1


@given(st.lists(st.floats(0.0, 30.0), min_size=1, max_size=100))
def test_the_retransmission_timeout_follows_rfc_6298_within_its_limits(replies_s: list[float]) -> None:
    limited, free = RetransmissionTimeout(0.1, 7.5), RetransmissionTimeout(0.0, 1000.0)
    assert 0.1 <= limited.timeout_s <= 7.5
    smoothed_s, deviation_s = replies_s[0], replies_s[0] / 2
    for number, seconds in enumerate(replies_s):
        limited.record(seconds)
        free.record(seconds)
        if number:
            deviation_s = 0.75 * deviation_s + 0.25 * abs(smoothed_s - seconds)
            smoothed_s = 0.875 * smoothed_s + 0.125 * seconds
    # Mean times below a nanosecond count as 0.
    assert free.timeout_s == pytest.approx(smoothed_s + 4 * deviation_s, abs=1e-8)
    assert limited.timeout_s == pytest.approx(min(max(free.timeout_s, 0.1), 7.5))


class PausedReplica:
    """A replica with a clock and a total scheduling delay by the kernel, both set by the test."""

    def __init__(self) -> None:
        self.now_s, self.delayed_s = 100.0, 0.0
        self.pause_detector = PauseDetector(lambda: self.now_s, lambda: self.delayed_s)
        self.pause_detector.tick()

    def passes(self, seconds: float, *, closely: bool = False) -> float:
        self.now_s += seconds
        return self.pause_detector.tick(closely=closely)


def test_time_past_the_expected_tick_counts_as_a_pause() -> None:
    time = PausedReplica()
    assert time.passes(TICK_S) == pytest.approx(TICK_S)
    assert time.pause_detector.paused_s == 0.0
    assert time.passes(0.6) == pytest.approx(TICK_S)
    assert time.pause_detector.paused_s == pytest.approx(0.6 - TICK_S)
    assert not time.pause_detector.resumed_recently
    # A pause counts once if both the clock and the kernel show the pause.
    time.passes(TICK_S, closely=True)
    time.delayed_s += 0.5
    assert time.passes(0.6, closely=True) == pytest.approx(TICK_S)


def test_a_long_pause_is_known_before_the_next_tick_and_for_a_second() -> None:
    time = PausedReplica()
    time.now_s += 3.0
    assert time.pause_detector.paused_s == pytest.approx(3.0 - TICK_S)
    assert time.pause_detector.resumed_recently
    time.passes(0.0)
    assert time.pause_detector.resumed_recently
    for _ in range(11):
        time.passes(TICK_S)
    assert not time.pause_detector.resumed_recently


def test_the_kernels_scheduling_delay_counts_as_a_pause_from_the_second_close_tick_on() -> None:
    time = PausedReplica()
    time.passes(TICK_S, closely=True)
    time.delayed_s += 0.07
    assert time.passes(TICK_S, closely=True) == pytest.approx(0.03)
    # Only two successive ticks with `closely` measure the kernel's delay; a plain tick between hides it.
    time.passes(TICK_S)
    time.delayed_s += 5.0
    assert time.passes(TICK_S, closely=True) == pytest.approx(TICK_S)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3), st.booleans()), max_size=50))
def test_awake_time_and_pauses_add_up_to_the_time_that_passed(steps: list[tuple[float, float, bool]]) -> None:
    time, awake_s = PausedReplica(), 0.0
    for passed_s, delayed_s, closely in steps:
        time.delayed_s += delayed_s
        part_s = time.passes(passed_s, closely=closely)
        assert 0.0 <= part_s <= TICK_S + 1e-9
        awake_s += part_s
    assert awake_s + time.pause_detector.paused_s == pytest.approx(time.now_s - 100.0)


def test_the_kernels_scheduling_delay_is_run_queue_delay_plus_stolen_time(tmp_path: Path) -> None:
    schedstat, stat = tmp_path / "schedstat", tmp_path / "stat"
    schedstat.write_text("5000000000 1500000000 42\n")
    stat.write_text("cpu  1 2 3 4 5 6 7 0 9 10\ncpu0 1 2 3 4\n")
    assert KernelDelay(str(schedstat), str(stat)).read() == pytest.approx(1.5)
    stat.write_text("cpu  1 2 3 4 5 6 7 1000000 9 10\n")
    assert KernelDelay(str(schedstat), str(stat)).read() > 1.5


@pytest.mark.parametrize("text", [None, "", "strange"])
def test_kernel_delay_is_0_where_the_kernel_does_not_report_it(tmp_path: Path, text: str | None) -> None:
    page = tmp_path / "page"
    if text is not None:
        page.write_text(text)
    assert KernelDelay(str(page), str(page)).read() == 0.0
