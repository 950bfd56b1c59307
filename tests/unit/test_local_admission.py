"""Local admission in an outage: budget of each replica, ledger, choice of endpoints, local queue."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import hypothesis.strategies as st
import pytest
from background import running, until
from choosers import chooser_of
from hypothesis import given
from local_requests import ask, rules, start, waiting
from metrics_page import samples

from picker_fleet.admission.ledger import Ledger, Phase, released_by_end
from picker_fleet.admission.local_gate import LocalGate, LocalPicker, part_of, pick
from picker_fleet.admission.local_queue import rules_of
from picker_fleet.domain.bands import Band
from picker_fleet.domain.config import EffectiveConfig, parse
from picker_fleet.domain.errors import ClientGone, DeadlineExceeded, ExpiredTtl, Preempted, TotalCapacity
from picker_fleet.domain.request import Alive, Completion, Endpoint, Outcome
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.state import accounting_token
from picker_fleet.telemetry.metrics import Metrics

E1, E2, E3 = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
METRICS = Metrics()


def ended(request_id: str, token: str = "") -> Completion:
    return Completion(request_id, Outcome.COMPLETED, 200, E1, 1, 1, 0.1, 0.1, accounting_token=token)


def ids(requests: Iterable[Any]) -> list[str]:
    return [each.id for each in requests]


def gate_of(free: float, bound: float = 100.0, **queue: Any) -> LocalGate:
    return LocalGate(Metrics(), free, bound, rules(**queue))


@given(st.integers(0, 200), st.floats(0, 0.99), st.integers(1, 20))
def test_all_replicas_shares_add_up_to_the_free_budget(places: int, fraction: float, live: int) -> None:
    parts = [part_of(places + fraction, live=live, rank=rank, counts_requests=True) for rank in range(live)]
    assert sum(parts) == places
    assert max(parts) - min(parts) <= 1
    tokens = [part_of(places + fraction, live=live, rank=rank, counts_requests=False) for rank in range(live)]
    assert sum(tokens) == pytest.approx(places + fraction)


def test_no_replica_gets_local_budget_if_the_stock_is_full() -> None:
    for requests in (True, False):
        assert part_of(-3.0, live=3, rank=0, counts_requests=requests) == 0.0


EVENTS = st.lists(st.tuples(st.sampled_from(["place", "end", "transfer", "lose"]), *[st.integers(0, 99)] * 2))


@given(st.integers(1, 30), st.integers(0, 30), st.integers(1, 5), EVENTS)
async def test_requests_in_flight_plus_free_budget_never_exceed_the_bound_in_any_outage(
    bound: int, before: int, live: int, events: list[tuple[str, int, int]]
) -> None:
    # Some requests are in flight before the outage; the replicas divide the rest of the bound.
    running = [f"before-{n}" for n in range(min(before, bound))]
    shares = [
        part_of(bound - len(running), live=live, rank=rank, counts_requests=True) for rank in range(live)
    ]
    gates = [LocalGate(METRICS, share, bound, rules()) for share in shares]
    ledgers = [in_outage() for _ in range(live)]
    token = accounting_token.write(ask(), E1)
    # Replicas place requests, receive each end twice, transfer budget, and lose transfers.
    for n, (what, who, which) in enumerate(events):
        one, other = who % live, which % live
        if what == "place" and gates[one].acquire(1.0):
            running.append(str(n))
            place(ledgers[one], str(n), token, cost=1.0)
        elif what == "end" and running:
            name = running.pop(which % len(running))
            for _ in range(2):
                gates[one].release(end(ledgers[one], name, token) or 0.0)
        elif what in ("transfer", "lose") and gates[other].acquire(1.0) and what == "transfer":
            gates[one].release(1.0)
        assert len(running) + sum(gate.free for gate in gates) <= bound
        assert all(gate.free >= 0 for gate in gates)


def in_outage(clock: Callable[[], float] = lambda: 0.0) -> Ledger:
    ledger = Ledger(clock)
    ledger.begin_outage()
    return ledger


def place(ledger: Ledger, name: str, token: str, endpoint: str = E1, *, cost: float = 1.0) -> None:
    """Enter a request into `ledger` that was placed without Redis."""
    ledger.place(name, "9", token, endpoint, owned=False)
    ledger.place_locally(name, cost)


def end(ledger: Ledger, name: str, token: str) -> float | None:
    """End a request. Returns the cost that the end of the request releases."""
    released = released_by_end(ledger.get(name), token)
    ledger.finish(ended(name, token), token)
    return released


def withdraw(ledger: Ledger, name: str) -> None:
    entry = ledger.get(name)
    assert entry is not None
    ledger.withdraw(entry)


def ended_in(ledger: Ledger) -> list[str]:
    return [entry.id for entry in ledger.journal() if entry.phase is Phase.ENDED]


def test_the_end_of_a_request_releases_its_cost_only_once() -> None:
    ledger, token = in_outage(), accounting_token.write(ask(cost=7.0), E1)
    assert [end(ledger, "before", token) for _ in range(2)] == [7.0, None]
    # The end of a request that this replica placed needs no accounting token.
    place(ledger, "here", token, E2, cost=5.0)
    assert end(ledger, "here", "") == 5.0
    # The end of a request that never ran releases nothing.
    assert end(ledger, "refused", "") == 0.0
    # A withdrawn request has released its cost.
    place(ledger, "back", token, E2, cost=5.0)
    withdraw(ledger, "back")
    assert end(ledger, "back", token) is None
    assert ledger.in_flight(0.0) == []
    # Another replica places a request that this replica has withdrawn.
    place(ledger, "redriven", token)
    withdraw(ledger, "redriven")
    before = ended_in(ledger)
    assert (ledger.in_flight(0.0), "redriven" in before) == ([], False)
    ledger.see(Alive("redriven", E2, token))
    assert ids(ledger.in_flight(0.0)) == ["redriven"]
    assert end(ledger, "redriven", token) is None
    assert (ledger.in_flight(0.0), ended_in(ledger)) == ([], [*before, "redriven"])


def test_the_outage_journal_has_all_running_and_all_ended_requests() -> None:
    now_s = 0.0
    ledger = in_outage(lambda: now_s)
    token = accounting_token.write(ask(), E1)
    for name in ("mine", "over", "old"):
        place(ledger, name, token)
    now_s = 6.0
    ledger.see(Alive("silent since", E3, token))
    now_s = 8.0
    place(ledger, "new", token)
    now_s = 9.0
    for name in ("theirs", "over-too", "mine"):
        ledger.see(Alive(name, E3, token))
    ledger.see(Alive("no-token", E3, ""))
    end(ledger, "over", token)
    end(ledger, "over-too", token)
    ledger.see(Alive("over-too", E3, token))  # a late report that the ended request runs
    # If this replica has not seen a request running lately, another replica may have received its end.
    assert [(it.id, it.attempt, it.served, it.token, it.seen_s) for it in ledger.in_flight(7.0)] == [
        ("new", "9", "", token, 8.0),
        ("theirs", None, E3, token, 9.0),
        ("mine", "9", "", token, 9.0),
    ]
    assert ended_in(ledger) == ["over", "over-too"]


def test_the_ledger_keeps_an_old_request_with_a_stream_or_an_unconfirmed_end_or_placed_in_an_outage() -> None:
    now_s = 0.0
    ledger = Ledger(lambda: now_s, keep_s=10.0)
    token = accounting_token.write(ask(), E1)
    ledger.place("stream", "1", token, E1, owned=True)
    ledger.place("logged", "1", token, E1, owned=False)
    ledger.finish(ended("unconfirmed"), token)
    ledger.finish(ended("over"), token).confirmed = True
    now_s = 11.0
    ledger.place("new", "1", token, E1, owned=False)
    assert {entry.id for entry in ledger} == {"stream", "unconfirmed", "new"}
    ledger.begin_outage()
    ledger.see(Alive("seen", E1, token))
    now_s = 100.0
    ledger.see(Alive("new", E1, token))
    assert {entry.id for entry in ledger} == {"stream", "unconfirmed", "new", "seen"}
    ledger.end_outage()
    now_s = 120.0
    ledger.place("newest", "1", token, E1, owned=False)
    assert {entry.id for entry in ledger} == {"stream", "unconfirmed", "newest"}


@pytest.mark.parametrize("outage", [False, True])
def test_a_flood_of_requests_leaves_the_ledger_bounded(outage: bool) -> None:
    ledger = in_outage() if outage else Ledger(lambda: 0.0)
    ledger.place("stream", "1", "", E1, owned=True)
    for number in range(60_000):
        ledger.finish(ended(str(number)), "token")
    assert len(ledger) <= 55_001
    assert {entry.id for entry in ledger.owned()} == {"stream"}


def test_the_ledger_keeps_any_number_of_open_streams_at_a_bounded_cost() -> None:
    ledger = Ledger(lambda: 0.0)
    for number in range(60_000):  # a search at each insertion would last minutes
        ledger.place(str(number), "1", "", E1, owned=True)
    assert len(ledger.owned()) == 60_000


def test_a_malformed_accounting_token_has_cost_0() -> None:
    token = accounting_token.write(ask(cost=2.5), E1)
    assert (accounting_token.cost_of(token), accounting_token.model_of(token)) == (2.5, "m")
    for text in ("", "a\tb", "a\tb\tc\tinf\te\tf\tg\th\ti", "a\tb\tc\t-1\te\tf\tg\th\ti", "a\tb\tc\tx"):
        assert accounting_token.cost_of(text) == 0.0
    assert accounting_token.model_of("a\tb") == ""


def test_the_local_pick_prefers_endpoints_with_low_load_and_high_scores() -> None:
    def picked(candidates: str, load: dict[str, int], *ready: str) -> tuple[str, ...]:
        return pick(candidates, ready or (E1, E2, E3), load, live_weight=0.5, most=2, chance=lambda: 0.0)

    assert picked("*", {E1: 2, E2: 1, E3: 0}) == (E3, E2)
    assert picked(f"{E1},{E2}", {E1: 2, E2: 1}) == (E2, E1)
    assert picked(f"{E1}=0.9,{E2}=0.1", {}) == (E1, E2)
    assert picked(f"{E1}=0.4,{E2}=0.1", {E1: 4}) == (E2, E1)
    assert picked("*", {}, E2) == (E2,)
    assert picked(E1, {}, E2) == ()
    assert picked("", {}) == ()


def test_an_endpoint_below_its_request_limit_is_picked_first() -> None:
    # Each endpoint has a limit of one request; endpoint E1 is at its limit.
    cell = SnapshotCell()
    cell.publish(Snapshot("1", tuple(Endpoint(each, max_inflight=1) for each in (E1, E2))))
    picker = LocalPicker(chooser_of(cell), cell, {E1: 1}, lambda: 0.0)
    assert picker.pick(ask("a"), most=2) == (E2,)
    picker.began(E2)
    # If all endpoints are at their limits, any endpoint is picked; the budget still keeps the total bound.
    assert set(picker.pick(ask("b"), most=2)) == {E1, E2}


async def test_the_local_budget_is_capped_at_the_bound() -> None:
    gate = gate_of(50.0, bound=3.0)
    assert (gate.free, gate.charge(10.0)) == (3.0, 1.0)
    gate.release(5.0)
    assert gate.free == 3.0
    # With `unit: tokens`, one request is charged at most the share `claim_share` (0.25) of the bound.
    settings = parse({"request_queue_controller": {"unit": "tokens", "watermark_per_backend": 1000}})
    gate = LocalGate(Metrics(), 50.0, 1000.0, rules_of(EffectiveConfig(settings, {}), 1))
    assert (gate.charge(1e6), gate.charge(100.0)) == (250.0, 100.0)


async def test_a_waiting_request_whose_client_disconnects_releases_its_budget() -> None:
    gate = gate_of(0.0)
    (task,) = await waiting(gate, "a")
    # Budget and cancellation arrive in the same iteration of the event loop.
    gate.release(1.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (gate.free, gate.waiting) == (1.0, 0)


async def test_a_request_past_its_ttl_or_deadline_is_refused() -> None:
    metrics = Metrics()
    gate = LocalGate(metrics, 0.0, 100.0, rules())
    for ttl_s, since_s in ((30.0, 31.0), (0.01, 0.0)):
        with pytest.raises(ExpiredTtl) as caught:
            await start(gate, "any", since_s, ttl_s=ttl_s)
        # If the client set the deadline, its request gets DeadlineExceeded instead of ExpiredTtl.
        with pytest.raises(DeadlineExceeded):
            await start(gate, "own", since_s, ttl_s=ttl_s, by_client=True)
    assert caught.value.retry_after_s == 1
    assert gate.waiting == 0
    assert samples(metrics)["epp_requests_expired_total", "model=m", "target_model=m"] == 2


async def test_a_request_preempted_by_a_higher_band_is_answered() -> None:
    gate = gate_of(0.0, total_capacity=1, flow_capacity=1)
    (low,) = await waiting(gate, "low", band=Band.SHEDDABLE)
    high = start(gate, "high", band=Band.CRITICAL)
    with pytest.raises(Preempted):
        await low
    with pytest.raises(TotalCapacity):
        await start(gate, "more", flow="other")
    gate.release(1.0)
    assert await high


async def test_a_newer_stream_of_a_request_ends_the_older_stream() -> None:
    gate = gate_of(0.0)
    (old,) = await waiting(gate, "a")
    new = start(gate, "a")
    with pytest.raises(ClientGone):
        await old
    gate.release(1.0)
    assert await new
    assert gate.waiting == 0


async def test_waiting_requests_are_handed_over_to_the_shared_queue() -> None:
    gate = gate_of(0.0)
    tasks = await waiting(gate, "a", "b", "c")
    gate.hand_over_waiting()
    assert await asyncio.gather(*tasks) == [False, False, False]
    assert gate.waiting == 0


async def test_released_budget_alternates_between_peers_and_the_local_queue() -> None:
    gate = gate_of(3.0)
    for least, most, given_, left in ((1.0, 2.0, 2.0, 1.0), (2.0, 5.0, 0.0, 1.0), (1.0, 1.0, 1.0, 0.0)):
        assert (await gate.transfer_budget(least, most, 0.0), gate.free) == (given_, left)
    # Two peers ask for more budget than is free, while requests wait in the local queue.
    own = await waiting(gate, "a", "b", "c")
    transfers = [asyncio.create_task(gate.transfer_budget(1.0, 9.0, 30.0)) for _ in range(2)]
    await asyncio.sleep(0)
    for _ in range(3):
        gate.release(1.0)
    # Of three released units of budget, each peer and the local queue get one.
    assert await asyncio.gather(*transfers) == [1.0, 1.0]
    await until(lambda: gate.waiting == 2)
    gate.release(1.0)
    gate.release(1.0)
    await asyncio.gather(*own)
    assert gate.free == 0.0


async def test_a_cancelled_transfer_loses_no_budget() -> None:
    gate = gate_of(0.0)
    async with running(gate.transfer_budget(1.0, 1.0, 30.0)):
        await asyncio.sleep(0)
    gate.release(1.0)
    assert gate.free == 1.0
