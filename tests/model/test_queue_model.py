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
