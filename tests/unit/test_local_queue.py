"""The local queue of a replica: order of service, limits, preemption."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from local_requests import ask, rules
from tables import cases

from picker_fleet.admission.local_queue import LocalQueue, Waiting
from picker_fleet.domain import errors
from picker_fleet.domain.bands import LEAST_PRIORITY, MOST_PRIORITY, Band, Bands
from picker_fleet.domain.config import parse
from picker_fleet.domain.request import Workload

NO_GUARD: dict[str, Any] = {"guard_share": 0}


def served(queue: LocalQueue, now_s: float = 0.0) -> Iterator[Waiting]:
    """Serve requests until `queue` is empty, and yield each served request."""
    while (turn := queue.turn(now_s)) is not None:
        queue.serve(*turn)
        yield turn[0]


def drain(queue: LocalQueue, now_s: float = 0.0) -> list[str]:
    return [waiting.request.id for waiting in served(queue, now_s)]


def preempted_by(queue: LocalQueue, name: str, **changes: Any) -> str:
    """Offer a request to a full queue; return the id of the request that is preempted."""
    _, preempted = queue.offer(ask(name, **changes), 1.0, 4.0)
    assert preempted is not None
    return preempted.request.id


def test_a_flow_is_served_by_arrival_time_whatever_the_order_of_queueing() -> None:
    # The requests waited in the shared queue before, and keep their arrival times.
    queue = LocalQueue(rules())
    for name, arrived_s in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        queue.offer(ask(name), 1.0, arrived_s)
    assert [each.request.id for each in queue.all()] == ["a", "b", "c"]
    assert drain(queue) == ["a", "b", "c"]
    assert len(queue) == 0


PRIORITIES = (-3, 0, LEAST_PRIORITY, 100, 7, MOST_PRIORITY)
# tests/model covers the order of service; these cases show each setting. Each case has settings, arrivals as
# (id, changes, time in seconds), and the expected order.
ORDERS: dict[str, tuple[dict[str, Any], list[tuple[str, dict[str, Any], float]], str]] = {
    "bands of any priority from high to low": (
        {}, [(str(each), {"band": Bands().of(each)}, 0.0) for each in PRIORITIES],
        f"{MOST_PRIORITY} 100 7 0 -3 {LEAST_PRIORITY}"),
    "bands by the weights of the nearest of the three": (
        {"band_policy": "weighted"},
        [(f"{name}{n}", {"band": Bands().of(priority)}, float(n))
         for n in range(8) for name, priority in (("c", 100), ("d", 7), ("s", -3))],
        "c0 d0 s0 c1 c2 c3 d1 c4 c5 c6"),
    "the earliest deadline": (
        {"ordering": "edf"}, [("late", {"ttl_s": 30.0}, 0.0), ("soon", {"ttl_s": 5.0}, 0.0)], "soon late"),
    "wait and criticality": (  # `old` scores 0.4 * 59/60 + 0.08, `high` 0.4 * 9/60 + 0.4
        {"ordering": "workload-aware"},
        [(name, {"workload": Workload(name, criticality), "ttl_s": 300.0}, arrived_s)
         for name, criticality, arrived_s in (("old", 1, 0.0), ("low", 1, 50.0), ("high", 5, 50.0))],
        "old high low"),
}  # fmt: skip


@cases("settings, arrivals, order", ORDERS)
def test_the_configured_policy_decides_which_request_is_next(
    settings: dict[str, Any], arrivals: list[tuple[str, dict[str, Any], float]], order: str
) -> None:
    queue = LocalQueue(rules(**settings, **NO_GUARD))
    for name, asked, arrived_s in arrivals:
        queue.offer(ask(name, **asked), 1.0, arrived_s)
    assert sum(queue.lengths().values()) == len(arrivals)
    found = drain(queue, 59.0)
    assert (" ".join(found[: len(order.split())]), len(found)) == (order, len(arrivals))


def with_bands(bands: list[dict[str, Any]], **more: Any) -> tuple[LocalQueue, Bands]:
    """The local queue of one of two replicas, and the bands configured by `bands`."""
    configured = parse({"fair_request_queue": {"priority_bands": bands}}).fair_request_queue.bands
    return LocalQueue(rules(live=2, priority_bands=bands, **more, **NO_GUARD)), configured


def test_a_full_band_refuses_requests_and_an_unpreemptible_band_keeps_its_requests() -> None:
    batch = {"priority": -50, "name": "batch", "weight": 1}
    bands = [{"priority": 7, "capacity": 4, "preemptible": False}, batch]
    queue, configured = with_bands(bands, total_capacity=6, flow_capacity=6)
    # This replica's share of band 7 is two of four requests.
    for n in range(2):
        queue.offer(ask(f"seven {n}", band=configured.of(7)), 1.0, float(n))
    with pytest.raises(errors.BandCapacity):
        queue.offer(ask("no more", band=configured.of(7)), 1.0, 2.0)
    # This replica's share is three of six requests; only the request of the lowest band can be preempted.
    queue.offer(ask("batch", band=configured.of(-50)), 1.0, 3.0)
    assert preempted_by(queue, "critical", band=Band.CRITICAL) == "batch"
    with pytest.raises(errors.TotalCapacity):
        queue.offer(ask("critical too", band=Band.CRITICAL), 1.0, 5.0)
    assert queue.lengths() == {"Critical": 1, "7": 2, "Default": 0, "Sheddable": 0, "batch": 0}


def test_the_byte_limit_of_a_band_is_divided_among_replicas() -> None:
    queue, configured = with_bands([{"priority": 0, "name": "Default", "bytes": 1000}])
    band = configured.of(0)
    # This replica's share is 500 of 1000 bytes.
    entry, _ = queue.offer(ask("first", band=band, body_bytes=300), 1.0, 0.0)
    with pytest.raises(errors.BandBytes):
        queue.offer(ask("second", band=band, body_bytes=201), 1.0, 1.0)
    queue.offer(ask("second", band=band, body_bytes=200), 1.0, 1.0)
    # A request that leaves the queue releases its bytes, whether it was served or not.
    queue.remove(entry)
    queue.offer(ask("third", band=band, body_bytes=300), 1.0, 2.0)
    assert next(served(queue), None) is not None
    queue.offer(ask("fourth", band=band, body_bytes=200), 1.0, 3.0)


def test_the_starvation_guard_serves_overdue_requests_up_to_its_share() -> None:
    # 30 sheddable requests have waited for more than half of the TTL, beside 100 critical requests.
    queue = LocalQueue(rules(guard_share=0.1, flow_capacity=1000))
    for n in range(30):
        queue.offer(ask(f"s{n}", band=Band.SHEDDABLE), 1.0, 0.0)
    for n in range(100):
        queue.offer(ask(f"c{n}", band=Band.CRITICAL), 1.0, 15.0)
    found = [waiting.request.id for waiting in itertools.islice(served(queue, 16.0), 100)]
    assert found[0] == "s0"
    assert sum(name.startswith("s") for name in found) in (10, 11)


def test_the_order_of_preemption_starts_again_once_the_queue_is_no_longer_full() -> None:
    queue = LocalQueue(rules(total_capacity=2, flow_capacity=2))
    for _ in range(2):
        for flow in ("a", "b"):
            queue.offer(ask(flow, flow=flow, band=Band.SHEDDABLE), 1.0, 0.0)
        assert preempted_by(queue, "high", band=Band.CRITICAL) == "a"
        assert drain(queue) == ["high", "b"]


def test_a_full_local_queue_refuses_requests_with_the_shared_queues_errors() -> None:
    full = LocalQueue(rules(total_capacity=1, flow_capacity=1))
    tight = LocalQueue(rules(total_capacity=9, flow_capacity=1, max_flows=1))
    picky = LocalQueue(rules(overload="reject-noncritical"))
    _, first = (queue.offer(ask("a", flow="a"), 1.0, 0.0)[0] for queue in (full, tight))
    for queue, flow, error in (
        (full, "c", errors.TotalCapacity), (tight, "a", errors.InsufficientFlowCapacity),
        (tight, "b", errors.TooManyFlows), (picky, "d", errors.Saturated),
    ):  # fmt: skip
        with pytest.raises(error) as caught:
            queue.offer(ask(f"{flow} too", flow=flow), 1.0, 0.0)
        assert caught.value.retry_after_s == 1
    urgent, _ = tight.offer(ask("c", flow="c", band=Band.CRITICAL), 1.0, 0.0)
    for waiting in (first, urgent):
        tight.remove(waiting)
    tight.offer(ask("b", flow="b"), 1.0, 0.0)
    picky.offer(ask("e", band=Band.CRITICAL), 1.0, 0.0)


def test_queue_capacities_are_divided_among_replicas() -> None:
    for live, parts in ((1, (100, 2)), (3, (33, 1))):
        policy = rules(live, total_capacity=100, flow_capacity=2).policy
        assert (policy.total_capacity, policy.flow_capacity) == parts
