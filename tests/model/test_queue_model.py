"""The model alone: what the rules promise, seen in runs short enough to reckon by hand."""

from typing import Any

import pytest
from model_state import Moment, Request, Workload, Workloads
from queue_model import Arrival, QueueModel
from shared_queue import policy_of

from picker_fleet.failover.fair_queue import Context, FlowQueue

START_US = 1_000_000_000_000
SETTINGS: dict[str, Any] = {
    "upper_per": 1, "lower_per": 1, "total_capacity": 100, "flow_capacity": 100, "lease_ms": 60_000,
    "silence_ms": 60_000, "fallbacks": 0, "log_max": 100, "window_ms": 60_000, "ema_alpha": 0.2,
    "guard_share": 0, "starvation_ms": 0, "band_policy": "strict", "band_weights": [70, 20, 10],
    "fairness": "weighted-fair", "ordering": "fcfs", "wait_signal": "request", "wait_weight": 0.4,
    "criticality_weight": 0.4, "rate_weight": 0.2, "wait_cap_ms": 60_000, "rate_cap": 100,
    "overload": "preempt", "weights": {}, "paused": 0, "default_answer": 10, "answer_alpha": 0.5,
    "live_weight": 0,
}  # fmt: skip


def model_of(endpoints: int = 1, **changed: Any) -> QueueModel:
    """A pool whose one replica `a` has brought `runs`, which takes all there is (of one endpoint)."""
    model = QueueModel()
    model.moment.now_us = START_US
    model.publish("a", ("1", "1"), SETTINGS | changed, {f"e{i}": False for i in range(endpoints)})
    model.heartbeat("a", 60_000)
    model.admit("a", [Arrival("runs", flow="runs")])
    return model


def serve(model: QueueModel, times: int, actual: float | None = None) -> list[str]:
    """Settle what runs, that many times over, and say who was granted its place."""
    order: list[str] = []
    for _ in range(times):
        (running,) = model.in_flight()
        notifications = model.settle("a", [(running.id, "completed", actual, None)]).notifications
        order += [item.split()[1] for item in notifications if item.startswith("granted")]
    return order


def flow_queue(moment: Moment, workloads: Workloads) -> FlowQueue[Request]:
    return FlowQueue(Context(policy_of(moment), lambda: moment.now_us, workloads))


def head_of(queue: FlowQueue[Request]) -> str:
    head = queue.head()
    assert head is not None
    return head.id


def test_flow_queues_are_served_by_their_weights() -> None:
    # Given three flows of weights 1, 2 and 4, each with more waiting than can be served
    model = model_of()
    for flow, weight in (("p", 1.0), ("q", 2.0), ("r", 4.0)):
        model.admit("a", [Arrival(f"{flow}{i}", flow=flow, weight=weight) for i in range(9)])
    # When 14 are served, then each has its share, in the order of start tags, ties by name
    order = serve(model, 14)
    assert [id[0] for id in order] == [*"pqrrqrr"] * 2
    assert model.queue.bands[1].v == 1.75


def test_a_flow_queue_that_was_idle_has_no_claim() -> None:
    # Given a flow that has been served for a while
    model = model_of()
    model.admit("a", [Arrival(f"p{i}", flow="p") for i in range(9)])
    serve(model, 5)
    # When another arrives, then they alternate from now on
    model.admit("a", [Arrival(f"q{i}", flow="q") for i in range(3)])
    assert [id[0] for id in serve(model, 4)] == [*"qpqp"]


# spec 001: average wait s, requests a second, criticality -> score, with the waits rounded there
EXAMPLES = {
    "batch-job-123": (2.36, 0.033, 4, 0.3355),
    "interactive-user-456": (0.8, 2.5, 5, 0.4002),
    "low-priority-789": (15.0, 0.1, 2, 0.2598),
}


def test_the_specifications_worked_examples() -> None:
    # Given workloads with the history of the examples
    moment = Moment(START_US, SETTINGS | {"ordering": "workload-aware", "wait_signal": "workload_average"})
    workloads = Workloads(moment)
    queue = flow_queue(moment, workloads)
    for name, (wait_s, rate, criticality, _) in EXAMPLES.items():
        slot = moment.now_ms // 10_000
        counts: list[float] = [rate * 60, 0, 0, 0, 0, 0, 0]
        workloads.known[name] = Workload(1, 1, wait_s * 1000, moment.now_ms, slot, counts)
        # When each has a request waiting
        queue.insert(Request(name, "a", "1", "f", 1, 1.0, 1.0, name, criticality, "m", 0, START_US))
    # Then its score is the example's, and so is the order
    for name, (_, _, _, expected) in EXAMPLES.items():
        assert -queue.static.scores()[name] == pytest.approx(expected, abs=2e-4)
    order = []
    while (head := queue.head()) is not None:
        order.append(head.id)
        queue.remove(head)
    assert order == ["interactive-user-456", "batch-job-123", "low-priority-789"]


def test_own_waits_grow_until_the_cap() -> None:
    # Given a request that has waited to the cap, and a more critical one that arrives
    moment = Moment(START_US, SETTINGS | {"ordering": "workload-aware"})
    queue = flow_queue(moment, Workloads(moment))
    queue.insert(Request("old", "a", "1", "f", 1, 1.0, 1.0, "", 2, "m", 0, START_US - 60_000_000))
    queue.insert(Request("new", "a", "1", "f", 1, 1.0, 1.0, "", 5, "m", 0, START_US))
    # Then the older leads, at 0.4 + 0.16 against 0.4, until the other has waited 24 s
    assert head_of(queue) == "old"
    moment.now_us += 23_900_000
    assert head_of(queue) == "old"
    moment.now_us += 200_000
    assert head_of(queue) == "new"


def test_edf_serves_the_nearest_deadline() -> None:
    # Given requests of one flow that arrive in the order of their patience
    model = model_of(ordering="edf")
    model.admit(
        "a", [Arrival("late", ttl_ms=9000), Arrival("soon", ttl_ms=1000), Arrival("mid", ttl_ms=5000)]
    )
    # Then they are served by deadline
    assert serve(model, 3) == ["soon", "mid", "late"]


def test_the_guard_spends_its_credit_on_the_most_overdue() -> None:
    # Given an overdue request of the lowest band behind many of the highest, and a quarter for the guard
    model = model_of(guard_share=0.25)
    model.admit("a", [Arrival("low1", band=2, ttl_ms=100_000), Arrival("low2", band=2, ttl_ms=100_000)])
    model.moment.now_us += 50_000_000
    model.heartbeat("a", 60_000)
    model.admit("a", [Arrival(f"high{i}", band=0, ttl_ms=90_000) for i in range(9)])
    # Then the first goes at once, on the credit that was there, and the next when it has grown again
    assert serve(model, 6) == ["low1", "high0", "high1", "high2", "low2", "high3"]
    assert model.guards == 2
    assert model.queue.bands[2].v == 0.0  # served out of turn


def test_weighted_bands_share_by_their_weights() -> None:
    # Given bands of weights 2, 1 and 1, none of them empty
    model = model_of(band_policy="weighted", band_weights=[2, 1, 1])
    for band in (0, 1, 2):
        model.admit("a", [Arrival(f"{band}-{i}", band=band) for i in range(9)])
    # Then the first is served twice as often, ties to the higher band
    assert [id[0] for id in serve(model, 8)] == [*"01200120"]


def test_preemption_takes_the_newest_of_each_lower_flow_queue_in_turn() -> None:
    # Given a full queue of two sheddable flows, and one of the default band
    model = model_of(total_capacity=5)
    arrivals = [("p1", "p", 2), ("p2", "p", 2), ("q1", "q", 2), ("q2", "q", 2), ("d1", "d", 1)]
    model.admit("a", [Arrival(id, flow=flow, band=band) for id, flow, band in arrivals])
    # When critical ones arrive, then the lowest band gives way, its flows in turn, and then the next band
    reply = model.admit("a", [Arrival(f"c{i}", band=0) for i in range(6)])
    assert reply.notifications == [f"preempted {id}" for id in ("p2", "q2", "p1", "q1", "d1")]
    # And nobody for one of their own band
    assert reply.answers[:5] == ["queued 10000"] * 5
    assert reply.answers[5] == "refused total-capacity 1"


def test_a_flow_at_its_limit_is_passed_over_until_one_of_it_ends() -> None:
    # Given a flow of which one may be on each of two endpoints, and both are
    model = model_of(endpoints=2, upper_per=4, lower_per=4)
    model.settle("a", [("runs", "completed", None, None)])
    placed = model.admit("a", [Arrival(id, flow="p", limit=1) for id in ("p1", "p2")])
    assert [answer.split()[0] for answer in placed.answers] == ["placed", "placed"]
    # When more of it comes, and one of another flow
    model.admit("a", [Arrival("p3", flow="p", limit=1), Arrival("q1", flow="q")])
    # Then its flow queue is throttled, and the other is served
    assert model.events[-2:] == ["parked p ", "granted q1 turn"]
    # And it comes back when one of it ends
    assert model.settle("a", [("p1", "completed", None, None)]).notifications == ["granted p3"]
    assert "unparked p " in model.events


def test_a_grant_without_a_place_below_the_limit_is_put_back_uncharged() -> None:
    # Given a flow of limit 1 on two endpoints, with one running on the first
    model = model_of(endpoints=2, upper_per=4, lower_per=4)
    model.admit("a", [Arrival("p1", flow="p", limit=1, candidates="e0")])
    model.tune("a", {"paused": 1})
    model.admit("a", [Arrival("p2", flow="p", limit=1)])
    model.tune("a", {"paused": None})
    # When the next is granted, and may only go where that runs
    reply = model.place("a", [("p2", "1", "e0")])
    # Then it waits again, its flow queue throttled with the tag it had
    assert reply.answers == ["queued 10000"]
    assert model.events == ["requeued p2 ", "parked p "]
    assert model.queue.bands[1].queues["p"].tag == 0.0
    # And it goes there once that has ended
    model.settle("a", [("p1", "completed", None, None)])
    assert model.place("a", [("p2", "1", "e0")]).answers == ["placed e0 1"]  # beside the one that runs


def test_real_costs_correct_what_a_flow_queue_was_charged() -> None:
    # Given two flows whose estimates are equal, though one's requests really cost four times as much
    model = model_of()
    for flow in ("dear", "cheap"):
        model.admit("a", [Arrival(f"{flow}{i}", flow=flow) for i in range(12)])
    # When each is settled with its real cost
    order = serve(model, 1)
    for _ in range(10):
        order += serve(model, 1, actual=4.0 if order[-1].startswith("dear") else 1.0)
    # Then the cheap one is served four times as often
    assert [id[0] for id in order] == [*"cdccccdcccc"]


def test_the_cost_of_an_answer_is_learned() -> None:
    # Given a flow with one answer of 40 tokens known, and then one of 20
    model = model_of()
    assert model.mean_answer("f") == 10
    model.admit("a", [Arrival("one"), Arrival("two"), Arrival("three", learn=True)])
    for name, tokens in (("runs", None), ("one", 40), ("two", 20)):
        model.settle("a", [(name, "completed", None, tokens)])
    # Then the next is taken to cost as much as the mean, over the prompt
    model.admit("a", [Arrival("four", cost=2.0, learn=True)])
    assert model.requests["four"].cost == 32.0
    assert model.requests["three"].cost == 11.0


def test_a_request_of_a_silent_replica_is_granted_to_the_one_that_brings_it() -> None:
    # Given a replica that queued a request and fell silent
    model = model_of()
    model.heartbeat("b", 60_000)
    model.admit("b", [Arrival("orphan", ttl_ms=900_000)])
    model.moment.now_us += 60_000_000
    model.heartbeat("a", 60_000)
    # When its turn comes, then it is orphaned
    model.settle("a", [("runs", "completed", None, None)])
    assert model.events[-1] == "held orphan "
    # And granted to the one that brings it
    reply = model.admit("a", [Arrival("orphan", attempt="2")])
    assert reply.answers == ["queued 840000 adopted"]
    assert reply.notifications == ["granted orphan"]
