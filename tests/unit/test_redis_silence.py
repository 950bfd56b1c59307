"""When a silent Redis counts as away: never while it answers, and later each time in a row."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from picker_fleet.state.failure_detector import CALM_S, FailureDetector, Health, RetransmissionTimeout

TICK_S = 0.1
FLOOR_S, CEILING_S = 1.0, 7.5


class Watch:
    """Looks at a connection each tick, as the detector does."""

    def __init__(self) -> None:
        self.failure_detector = FailureDetector(FLOOR_S, CEILING_S)
        self.now_s = 100.0

    def look(
        self, *, awake_s: float = TICK_S, waiting: bool = True, received: bool = False, answered: bool = False
    ) -> Health:
        self.now_s += TICK_S
        return self.failure_detector.observe(
            self.now_s, awake_s, waiting=waiting, received=received, answered=answered
        )

    def until_verdict(self, *, answered: bool = False, within_s: float = 20.0) -> tuple[Health, float]:
        """The first verdict that is neither well nor suspicion, and when it came."""
        began_s = self.now_s
        while self.now_s < began_s + within_s:
            verdict = self.look(answered=answered)
            if verdict in (Health.STUCK, Health.UNAVAILABLE):
                return verdict, self.now_s - began_s
        return Health.HEALTHY, within_s


def test_given_probes_without_an_answer_when_a_second_has_passed_then_redis_is_away() -> None:
    verdict, after_s = Watch().until_verdict()
    assert verdict is Health.UNAVAILABLE
    assert FLOOR_S <= after_s <= FLOOR_S + 4 * TICK_S


def test_given_any_answer_when_it_comes_then_silence_is_over() -> None:
    watch = Watch()
    for _ in range(500):
        verdicts = [watch.look() for _ in range(10)]
        assert Health.UNAVAILABLE not in verdicts
        assert watch.look(received=True) is Health.HEALTHY


def test_given_nothing_that_waits_when_nothing_comes_then_all_is_well() -> None:
    watch = Watch()
    assert {watch.look(waiting=False) for _ in range(500)} == {Health.HEALTHY}


def test_given_a_replica_that_stood_still_when_nothing_came_then_redis_is_not_blamed() -> None:
    watch = Watch()
    assert Health.UNAVAILABLE not in {watch.look(awake_s=0.0) for _ in range(500)}


def test_given_time_that_is_up_when_a_reply_waited_in_the_socket_then_it_is_read_first() -> None:
    # Given a look at which the time is up
    watch = Watch()
    while watch.look(awake_s=0.5) is not Health.SUSPECT:
        pass
    assert watch.look(awake_s=FLOOR_S) is Health.SUSPECT
    # When what waited is read before the next one, then Redis is not away
    assert watch.look(awake_s=0.5, received=True) is Health.HEALTHY


def test_given_probes_that_are_answered_when_the_connection_stays_silent_then_it_is_stuck() -> None:
    verdict, after_s = Watch().until_verdict(answered=True)
    assert verdict is Health.STUCK
    assert after_s < FLOOR_S


def test_given_replies_that_take_long_when_silent_then_they_are_waited_for_accordingly() -> None:
    watch = Watch()
    for seconds in (0.2, 1.4) * 20:
        watch.failure_detector.record_reply_time(seconds)
    _, after_s = watch.until_verdict()
    assert after_s > 2 * FLOOR_S
    # And up to the ceiling
    for _ in range(50):
        watch.failure_detector.record_reply_time(60.0)
    verdict, after_s = watch.until_verdict(within_s=30.0)
    assert verdict is Health.UNAVAILABLE
    assert CEILING_S <= after_s <= 2 * CEILING_S + 4 * TICK_S


def test_given_a_replica_that_leaves_again_and_again_when_redis_is_silent_then_it_takes_longer() -> None:
    watch, took_s = Watch(), []
    for _ in range(5):
        verdict, after_s = watch.until_verdict()
        assert verdict is Health.UNAVAILABLE
        took_s.append(round(after_s))
        watch.failure_detector.record_failover(watch.now_s)
        watch.failure_detector.record_recovery(watch.now_s)
    assert took_s == [1, 2, 4, 8, 8]
    # And calm makes it forget
    watch.now_s += CALM_S
    assert watch.failure_detector.unavailable_after_s(watch.now_s) == FLOOR_S
    watch.failure_detector.record_failover(watch.now_s)
    assert watch.failure_detector.heartbeats_to_recover == 2


@given(st.floats(0.0, 20.0))
def test_given_a_redis_of_any_constant_delay_when_time_passes_then_it_leaves_once_at_most(
    delay_s: float,
) -> None:
    # Given that each message, and each probe, is answered after the same time
    watch, left, beats, local = Watch(), 0, 0, False
    sent_s, probes_s = watch.now_s, list[float]()
    for _ in range(3000):
        received = watch.now_s - sent_s >= delay_s
        if received:
            watch.failure_detector.record_reply_time(delay_s)
            sent_s, beats = watch.now_s, beats + 1
        answered = any(watch.now_s - probe_s >= delay_s for probe_s in probes_s)
        verdict = watch.look(received=received, answered=answered)
        probes_s = [*probes_s, watch.now_s] if verdict is Health.SUSPECT else []
        if verdict in (Health.STUCK, Health.UNAVAILABLE):
            sent_s, beats = watch.now_s, 0
        # When a replica leaves and returns accordingly
        if verdict is Health.UNAVAILABLE and not local:
            left, local = left + 1, True
            watch.failure_detector.record_failover(watch.now_s)
        elif local and beats >= watch.failure_detector.heartbeats_to_recover:
            local = False
            watch.failure_detector.record_recovery(watch.now_s)
    # Then it is on one side or the other
    assert left <= 1


@given(st.lists(st.floats(0.0, 30.0), max_size=100))
def test_given_any_replies_when_a_timeout_is_worked_out_then_it_is_within_its_limits(
    replies: list[float],
) -> None:
    times = RetransmissionTimeout(0.1, 7.5)
    for seconds in replies:
        times.record(seconds)
    assert 0.1 <= times.timeout_s <= 7.5


def test_given_replies_when_a_timeout_is_worked_out_then_it_is_that_of_rfc_6298() -> None:
    times = RetransmissionTimeout(0.0, 100.0)
    times.record(1.0)
    assert times.timeout_s == pytest.approx(1.0 + 4 * 0.5)
    times.record(2.0)
    deviation_s = 0.75 * 0.5 + 0.25 * 1.0
    assert times.timeout_s == pytest.approx(1.125 + 4 * deviation_s)
