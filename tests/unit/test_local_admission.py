"""A replica's part of the bound: shared out, spent, earned and lent, it never makes more than the bound."""

import asyncio
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from local_requests import ask, rules
from metrics_page import samples
from scripted_store import until

from picker_fleet.admission import accounting_token
from picker_fleet.admission.gate import Wait
from picker_fleet.config import EffectiveConfig, parse
from picker_fleet.endpoints.snapshot import Endpoint, Snapshot, SnapshotCell
from picker_fleet.errors import ClientGone, DeadlineExceeded, ExpiredTtl, Preempted, TotalCapacity
from picker_fleet.failover.local_gate import LocalBudget, LocalGate, LocalPicker, part_of, pick
from picker_fleet.failover.local_queue import rules_of
from picker_fleet.failover.outage import LocalPlacement, OutageJournal
from picker_fleet.request import Alive, Band, Completion, Outcome
from picker_fleet.scheduling.chooser import LeastLoadedChooser
from picker_fleet.telemetry.metrics import Metrics

E1, E2, E3 = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"


def ended(request_id: str, note: str = "") -> Completion:
    return Completion(request_id, Outcome.COMPLETED, 200, E1, 1, 1, 0.1, 0.1, accounting_token=note)


def gate_of(free: float, bound: float = 100.0, **queue: Any) -> LocalGate:
    return LocalGate(Metrics(), free, bound, rules(**queue))


@given(st.integers(0, 200), st.floats(0, 0.99), st.integers(1, 20))
def test_given_free_places_when_shared_out_then_the_parts_make_up_the_whole_ones(
    places: int, fraction: float, live: int
) -> None:
    parts = [part_of(places + fraction, live=live, rank=rank, counts_requests=True) for rank in range(live)]
    assert sum(parts) == places
    assert max(parts) - min(parts) <= 1
    tokens = [part_of(places + fraction, live=live, rank=rank, counts_requests=False) for rank in range(live)]
    assert sum(tokens) == pytest.approx(places + fraction)


def test_given_no_room_when_shared_out_then_nobody_has_any() -> None:
    assert (
        part_of(-3.0, live=3, rank=0, counts_requests=True)
        == part_of(0.0, live=3, rank=0, counts_requests=False)
        == 0.0
    )


EVENTS = st.lists(st.tuples(st.sampled_from(["place", "end", "lend", "lose"]), *[st.integers(0, 99)] * 2))


@given(st.integers(1, 30), st.integers(0, 30), st.integers(1, 5), EVENTS)
def test_given_any_course_of_an_outage_when_counted_then_in_flight_and_free_never_pass_the_bound(
    bound: int, before: int, live: int, events: list[tuple[str, int, int]]
) -> None:
    # Given some in flight from before, and the rest of the bound shared out
    running = [f"before-{n}" for n in range(min(before, bound))]
    budgets = [
        LocalBudget(part_of(bound - len(running), live=live, rank=rank, counts_requests=True))
        for rank in range(live)
    ]
    journals = [OutageJournal(lambda: 0.0) for _ in range(live)]
    note = accounting_token.write(ask(), E1)
    # When replicas place, hear ends (also again), lend to each other, and lose what is lent on the way
    for n, (what, who, which) in enumerate(events):
        one, other = who % live, which % live
        if what == "place" and budgets[one].acquire(1.0):
            running.append(str(n))
            journals[one].placed(str(n), LocalPlacement(1, note, E1, 1.0, 0.0))
        elif what == "end" and running:
            name = running.pop(which % len(running))
            budgets[one].release(journals[one].ended(ended(name, note), note) or 0.0)
            budgets[one].release(journals[one].ended(ended(name, note), note) or 0.0)
        elif what in ("lend", "lose") and budgets[other].acquire(1.0) and what == "lend":
            budgets[one].release(1.0)
        # Then
        assert len(running) + sum(budget.free for budget in budgets) <= bound
        assert all(budget.free >= 0 for budget in budgets)


def test_given_an_end_when_heard_then_it_frees_what_its_request_had_taken_and_says_if_it_is_known() -> None:
    journal = OutageJournal(lambda: 0.0)
    note = accounting_token.write(ask(cost=7.0), E1)
    assert journal.ended(ended("before"), note) == 7.0
    assert journal.ended(ended("before"), note) is None
    # one that was placed here needs no accounting token
    journal.placed("here", LocalPlacement(3, note, E2, 5.0, 0.0))
    assert journal.endpoint_of("here") == E2
    assert journal.ended(ended("here"), "") == 5.0
    # one that never ran frees nothing
    assert journal.ended(ended("refused"), "") == 0.0
    # one that was taken back has freed its place already
    journal.placed("back", LocalPlacement(4, note, E2, 5.0, 0.0))
    assert journal.withdrawn("back") == 5.0
    assert journal.ended(ended("back"), note) is None


def test_given_one_that_was_taken_back_when_another_replica_lets_it_go_then_its_life_and_end_are_told() -> (
    None
):
    journal = OutageJournal(lambda: 9.0)
    note = accounting_token.write(ask(), E1)
    journal.placed("redriven", LocalPlacement(1, note, E1, 1.0, 9.0))
    journal.withdrawn("redriven")
    assert (journal.in_flight(0.0), journal.ends()) == ([], [])
    journal.alive(Alive("redriven", E2, note))
    assert [each.id for each in journal.in_flight(0.0)] == ["redriven"]
    journal.ended(ended("redriven"), note)
    assert (journal.in_flight(0.0), [each.id for each in journal.ends()]) == ([], ["redriven"])


def test_given_what_was_seen_when_redis_returns_then_all_that_runs_and_all_that_ended_is_told() -> None:
    now_s = 6.0
    journal = OutageJournal(lambda: now_s)
    note = accounting_token.write(ask(), E1)
    for name in ("mine", "over", "old"):
        journal.placed(name, LocalPlacement(9, note, E1, 1.0, 0.0))
    journal.placed("new", LocalPlacement(10, note, E1, 1.0, 8.0))
    journal.alive(Alive("silent since", E3, note))
    now_s = 9.0
    for name in ("theirs", "over-too", "mine"):
        journal.alive(Alive(name, E3, note))
    journal.alive(Alive("no-ticket", E3, ""))
    journal.ended(ended("over"), note)
    journal.ended(ended("over-too"), note)
    journal.alive(Alive("over-too", E3, note))  # a late sign of life
    # Of one that nobody has seen alive lately another replica may have heard the end
    assert journal.in_flight(7.0) == [
        ("mine", 9, "", note, 9.0), ("new", 10, "", note, 8.0), ("theirs", None, E3, note, 9.0),
    ]  # fmt: skip
    assert [each.id for each in journal.ends()] == ["over", "over-too"]


def test_given_a_text_that_is_no_accounting_token_when_asked_then_it_costs_nothing() -> None:
    note = accounting_token.write(ask(cost=2.5), E1)
    assert (accounting_token.cost_of(note), accounting_token.model_of(note)) == (2.5, "m")
    for text in ("", "a\tb", "a\tb\tc\tinf\te\tf\tg\th\ti", "a\tb\tc\t-1\te\tf\tg\th\ti", "a\tb\tc\tx"):
        assert accounting_token.cost_of(text) == 0.0
    assert accounting_token.model_of("a\tb") == ""


def test_given_loads_when_picked_then_the_least_loaded_first_and_scores_count() -> None:
    def picked(
        candidates: str, load: dict[str, int], ready: tuple[str, ...] = (E1, E2, E3)
    ) -> tuple[str, ...]:
        return pick(candidates, ready, load, live_weight=0.5, most=2, chance=lambda: 0.0)

    assert picked("*", {E1: 2, E2: 1, E3: 0}) == (E3, E2)
    assert picked(f"{E1},{E2}", {E1: 2, E2: 1}) == (E2, E1)
    assert picked(f"{E1}=0.9,{E2}=0.1", {}) == (E1, E2)
    assert picked(f"{E1}=0.4,{E2}=0.1", {E1: 4}) == (E2, E1)
    assert picked("*", {}, (E2,)) == (E2,)
    assert picked(E1, {}, (E2,)) == ()
    assert picked("", {}) == ()


def test_given_endpoints_with_limits_when_picked_alone_then_one_below_its_limit_comes_first() -> None:
    # Given two endpoints with a place each, one of which was taken when Redis was lost
    cell = SnapshotCell()
    cell.publish(Snapshot("1", tuple(Endpoint(each, max_inflight=1) for each in (E1, E2))))
    picker = LocalPicker(LeastLoadedChooser(cell), cell, {E1: 1}, lambda: 0.0)
    # Then the other is picked, without the first as a fallback
    assert picker.pick(ask("a"), most=2) == (E2,)
    picker.began(E2)
    # And where all are at their limits as far as is known, any: the bound is kept by other means
    assert set(picker.pick(ask("b"), most=2)) == {E1, E2}


async def test_given_places_when_spent_then_the_next_waits_until_one_is_earned() -> None:
    gate = gate_of(1.0)
    assert await gate.admit(ask("a"), 1.0, Wait(asyncio.get_running_loop().time()))
    waiting = asyncio.create_task(gate.admit(ask("b"), 1.0, Wait(asyncio.get_running_loop().time())))
    await until(lambda: gate.waiting == 1)
    gate.release(1.0)
    assert await waiting
    assert (gate.free, gate.waiting) == (0.0, 0)


async def test_given_more_than_the_bound_when_earned_then_it_is_not_kept() -> None:
    gate = gate_of(50.0, bound=3.0)
    assert gate.free == 3.0
    gate.release(5.0)
    assert gate.free == 3.0
    assert gate.charge(10.0) == 3.0
    # Under `unit: tokens` one request takes its share of the bound at most
    settings = parse({"request_queue_controller": {"unit": "tokens", "watermark_per_backend": 1000}})
    gate = LocalGate(Metrics(), 50.0, 1000.0, rules_of(EffectiveConfig(settings, {}), 1))
    assert (gate.charge(1e6), gate.charge(100.0)) == (250.0, 100.0)


async def test_given_one_that_waits_when_its_client_leaves_then_its_place_is_given_back() -> None:
    gate = gate_of(0.0)
    now_s = asyncio.get_running_loop().time()
    task = asyncio.create_task(gate.admit(ask("a"), 1.0, Wait(now_s)))
    await until(lambda: gate.waiting == 1)
    # When the place and the departure come in the same turn of the loop
    gate.release(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (gate.free, gate.waiting) == (1.0, 0)


async def test_given_one_past_its_time_when_admitted_or_waiting_then_it_is_refused() -> None:
    metrics = Metrics()
    gate = LocalGate(metrics, 0.0, 100.0, rules())
    now_s = asyncio.get_running_loop().time()
    with pytest.raises(ExpiredTtl):
        await gate.admit(ask("old"), 1.0, Wait(now_s - 31))
    with pytest.raises(ExpiredTtl) as caught:
        await gate.admit(ask("short", ttl_s=0.01), 1.0, Wait(now_s))
    assert caught.value.retry_after_s == 1
    # a client's own deadline is told apart
    for ask_s, arrived_s in ((30.0, now_s - 31), (0.01, now_s)):
        with pytest.raises(DeadlineExceeded):
            await gate.admit(ask("own", ttl_s=ask_s, by_client=True), 1.0, Wait(arrived_s))
    assert gate.waiting == 0
    assert samples(metrics)["epp_requests_expired_total", "model=m", "target_model=m"] == 2


async def test_given_a_full_queue_when_a_higher_band_comes_then_who_makes_room_is_told() -> None:
    gate = gate_of(0.0, total_capacity=1, flow_capacity=1)
    now_s = asyncio.get_running_loop().time()
    low = asyncio.create_task(gate.admit(ask("low", band=Band.SHEDDABLE), 1.0, Wait(now_s)))
    await until(lambda: gate.waiting == 1)
    high = asyncio.create_task(gate.admit(ask("high", band=Band.CRITICAL), 1.0, Wait(now_s)))
    with pytest.raises(Preempted):
        await low
    with pytest.raises(TotalCapacity):
        await gate.admit(ask("more", flow="other"), 1.0, Wait(now_s))
    gate.release(1.0)
    assert await high


async def test_given_a_newer_stream_when_it_takes_over_then_the_older_one_ends() -> None:
    gate = gate_of(0.0)
    now_s = asyncio.get_running_loop().time()
    old = asyncio.create_task(gate.admit(ask("a"), 1.0, Wait(now_s)))
    await until(lambda: gate.waiting == 1)
    new = asyncio.create_task(gate.admit(ask("a"), 1.0, Wait(now_s)))
    with pytest.raises(ClientGone):
        await old
    gate.release(1.0)
    assert await new
    assert gate.waiting == 0


async def test_given_all_released_when_they_waited_then_each_asks_the_shared_state() -> None:
    gate = gate_of(0.0)
    now_s = asyncio.get_running_loop().time()
    tasks = [asyncio.create_task(gate.admit(ask(str(n)), 1.0, Wait(now_s))) for n in range(3)]
    await until(lambda: gate.waiting == 3)
    gate.hand_over_waiting()
    assert await asyncio.gather(*tasks) == [False, False, False]
    assert gate.waiting == 0


async def test_given_spare_places_when_asked_then_lent_and_a_hungry_one_shares_by_turns() -> None:
    # Given a replica with places that nobody needs
    gate = gate_of(3.0)
    assert await gate.transfer_budget(1.0, 2.0, 0.5) == 2.0
    assert gate.free == 1.0
    assert await gate.transfer_budget(2.0, 5.0, 0.0) == 0.0
    assert gate.free == 1.0
    # When two others ask for more than it has, while its own requests wait
    assert await gate.transfer_budget(1.0, 1.0, 0.5) == 1.0
    now_s = asyncio.get_running_loop().time()
    own = [asyncio.create_task(gate.admit(ask(str(n)), 1.0, Wait(now_s))) for n in range(3)]
    await until(lambda: gate.waiting == 3)
    lent = [asyncio.create_task(gate.transfer_budget(1.0, 9.0, 30.0)) for _ in range(2)]
    await asyncio.sleep(0)
    for _ in range(3):
        gate.release(1.0)
    # Then of three places each of them and its own queue has one
    assert await asyncio.gather(*lent) == [1.0, 1.0]
    await until(lambda: gate.waiting == 2)
    gate.release(1.0)
    gate.release(1.0)
    await asyncio.gather(*own)
    assert gate.free == 0.0


async def test_given_a_question_that_is_given_up_when_a_place_comes_then_it_is_not_lost() -> None:
    gate = gate_of(0.0)
    asked = asyncio.create_task(gate.transfer_budget(1.0, 1.0, 30.0))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    gate.release(1.0)
    assert gate.free == 1.0
