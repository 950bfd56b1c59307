"""The breaker: when it opens, when it closes, and that it does not go to and fro."""

import hypothesis.strategies as st
from hypothesis import given

from app.admission.breaker import CALM_S, MISSES, QUICK, Breaker, State

BUDGET_S = 0.05
TICK_S = BUDGET_S / 2


class Clock:
    """Drives a breaker as its gate does: a look each half budget."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self.breaker = Breaker(budget_s)
        self.now_s = 100.0
        self.heard_s = self.asked_s = 100.0

    def run(
        self, for_s: float, *, asking: bool = True, every_s: float | None = None, down: bool = False
    ) -> None:
        """Time passes; Redis is heard `every_s` (None: never)."""
        self.asked_s, end_s = self.now_s, self.now_s + for_s
        while self.now_s < end_s:
            self.now_s += TICK_S
            if every_s is not None and self.now_s - self.heard_s >= every_s:
                self.heard_s = self.now_s
            asked_s = max(self.heard_s, self.asked_s) if asking else None
            self.breaker.look(self.now_s, asked_s=asked_s, heard_s=self.heard_s, down=down)

    def probe(self, took_s: float | None) -> State:
        self.now_s += 0.2
        self.breaker.probed(self.now_s, took_s)
        return self.breaker.state

    def open(self) -> None:
        self.run((MISSES + 2) * BUDGET_S)
        assert self.breaker.state is State.OPEN


def test_given_decisions_that_wait_when_nothing_comes_then_it_opens() -> None:
    clock = Clock()
    clock.run((MISSES - 0.5) * BUDGET_S)
    assert clock.breaker.closed
    clock.run(BUDGET_S)
    assert clock.breaker.state is State.OPEN


def test_given_no_decision_that_waits_when_nothing_comes_then_it_stays_closed() -> None:
    clock = Clock()
    clock.run(60, asking=False)
    assert clock.breaker.closed


def test_given_a_lost_connection_when_it_is_not_back_within_a_budget_then_it_opens() -> None:
    clock = Clock()
    clock.run(2 * TICK_S, asking=False, down=True)
    clock.run(TICK_S, asking=False)
    assert clock.breaker.closed
    clock.run(3 * TICK_S, asking=False, down=True)
    assert clock.breaker.state is State.OPEN


def test_given_a_process_that_stood_still_when_it_looks_again_then_redis_is_not_blamed() -> None:
    clock = Clock()
    clock.run(BUDGET_S, every_s=0.0)
    clock.now_s += 30
    clock.breaker.look(clock.now_s, asked_s=clock.heard_s, heard_s=clock.heard_s, down=False)
    assert clock.breaker.closed


@given(st.floats(0.0, MISSES * BUDGET_S - TICK_S))
def test_given_a_slow_redis_that_answers_when_time_passes_then_it_never_opens(every_s: float) -> None:
    clock = Clock()
    clock.run(20, every_s=every_s)
    assert clock.breaker.closed


def test_given_an_open_one_when_probes_come_back_quickly_then_it_closes_after_two() -> None:
    clock = Clock()
    clock.open()
    assert clock.probe(0.01) is State.HALF_OPEN
    assert clock.probe(0.01) is State.CLOSED


def test_given_a_half_open_one_when_a_probe_is_slow_or_fails_then_it_starts_again() -> None:
    for bad in (None, QUICK * BUDGET_S + 0.01):
        clock = Clock()
        clock.open()
        clock.probe(0.01)
        assert clock.probe(bad) is State.OPEN
        assert clock.probe(0.01) is State.HALF_OPEN


def test_given_one_that_opens_soon_after_closing_when_it_repeats_then_more_is_asked_up_to_a_limit() -> None:
    clock = Clock()
    wanted = []
    for _ in range(6):
        clock.open()
        wanted.append(clock.breaker.wanted)
        while clock.probe(0.01) is not State.CLOSED:
            pass
    assert wanted == [2, 4, 8, 16, 16, 16]
    # And calm makes it forget
    clock.run(CALM_S + 1, every_s=0.0)
    clock.open()
    assert clock.breaker.wanted == 2


@given(st.floats(0.001, 2.0))
def test_given_a_redis_of_any_constant_delay_when_time_passes_then_it_changes_sides_once_at_most(
    delay_s: float,
) -> None:
    # Given every decision and every probe takes the same time
    clock = Clock()
    changes, state = 0, clock.breaker.state
    for _ in range(200):
        if clock.breaker.closed:
            clock.run(0.2, every_s=delay_s)
        else:
            clock.probe(delay_s)
        changes += clock.breaker.state is not state
        state = clock.breaker.state
    # Then it is on one side or the other
    assert changes <= 1


@given(st.lists(st.sampled_from(["quick", "slow", "lost", "failed", "calm"]), max_size=60))
def test_given_anything_when_it_closes_then_the_probes_it_wanted_came_in_a_row(steps: list[str]) -> None:
    clock = Clock()
    streak = 0
    for step in steps:
        was_closed = clock.breaker.closed
        if step == "quick":
            streak += 1
            clock.probe(0.01)
        elif step in ("slow", "lost"):
            streak = 0
            clock.probe(1.0 if step == "slow" else None)
        elif step == "failed":
            streak = 0
            clock.breaker.fail(clock.now_s)
        else:
            clock.run(1.0, asking=False, every_s=0.0)
        if was_closed:
            streak = 0
            continue
        assert clock.breaker.closed == (streak >= clock.breaker.wanted)
