"""Short runs, on the Lua scripts and on the model at once, with results that were calculated by hand."""

import itertools
from typing import Any

import pytest
from by_hand import Pool, full, holding, many
from model_state import Request
from script_side import ScriptSide
from shared_queue import named_bands

CASES = dict[str, Any]
TWO: CASES = {"endpoints": 2, "upper_per": 9}  # high bounds: no request waits because of the stock in flight
THREE: CASES = {**TWO, "endpoints": 3}
CAPPED: CASES = {**TWO, "caps": {"e1": 1}}
# With these settings the fleet finds the endpoints' limits.
FOUND: CASES = {**TWO, "adaptive": 1, "limit_initial": 2, "limit_min": 1, "limit_max": 9}
BY_WORKLOAD: CASES = {"ordering": "workload-aware"}

ONLY_CRITICAL: CASES = {"overload": "reject-noncritical"}
# Two more bands: one is guaranteed, not preemptible, with a capacity of two requests; one has a low priority.
GUARANTEED = {"priority": 7, "guaranteed": True, "capacity": 2}
BANDED: CASES = {"bands": [*named_bands(), GUARANTEED, {"priority": -50, "preemptible": True, "bytes": 1000}]}
QUEUED = "queued 10000"
FULL, SATURATED, NO_BYTES_LEFT, NO_ENDPOINT = (
    f"refused {reason} 1" for reason in ("total-capacity", "saturated", "band-bytes", "no-endpoints")
)
# Each case has settings, earlier arrivals, the next arrival and its answer, in the notation of by_hand.py.
ANSWERS: dict[str, tuple[CASES, str, str, str]] = {
    "below the bound an arrival is placed at once": ({"upper_per": 2}, "r1", "r2", "placed e1 1"),
    "at the bound an arrival is queued for the rest of its TTL": (
        {}, "runs", "r ttl_ms=30000 age_ms=2000", "queued 28000"),
    "a request as old as its TTL has expired": ({}, "", "late ttl_ms=1000 age_ms=1000", "expired"),
    "a request waits until its whole cost fits": ({"upper_per": 4}, "r1 cost=3", "r2 cost=2", QUEUED),
    "no arrival bypasses a waiting request": ({"upper_per": 4}, "r1 cost=3, r2 cost=2", "r3", QUEUED),
    "a request takes at most largest_claim of the stock": (
        {"upper_per": 1000, "largest_claim": 0.25}, "r1 cost=1000000.0", "r2 cost=750", "placed e1 1"),
    "costly requests take at most largest_claim of the stock each": (
        {"upper_per": 8, "largest_claim": 0.25}, "r1 cost=6400, r2 cost=64, r3 cost=3", "r4", "placed e1 3"),
    "a flow at flow_capacity is refused": (
        {"flow_capacity": 2}, "runs, x0, x1", "x2", "refused insufficient-flow-capacity 1"),
    "at total_capacity an arrival is refused": ({"total_capacity": 2}, "runs, x0, y0", "z0", FULL),
    "at total_capacity a flow below flow_capacity is refused too": (
        {"total_capacity": 3, "flow_capacity": 2}, "runs, x0, x1, y0", "y1", FULL),
    "under fairness none flow_capacity does not apply": (
        {"flow_capacity": 2, "fairness": "none"}, "runs, x1, x2", "x3", QUEUED),
    "max_flows refuses a new flow": ({"max_flows": 2}, "runs, x0, y0, x1", "z0", "refused too-many-flows 1"),
    "at max_flows a waiting flow may queue more": ({"max_flows": 2}, "runs, x0, y0", "x1", QUEUED),
    "max_flows does not limit critical flows": ({"max_flows": 2}, "runs, x0, y0, x1", "c band=0", QUEUED),
    "a critical request does not preempt critical requests": (
        {"total_capacity": 2}, "runs, c1 band=0, c2 band=0", "d1 band=0", FULL),
    "under reject-noncritical a default request is refused": (ONLY_CRITICAL, "runs", "d1", SATURATED),
    "under reject-noncritical a critical request is queued": (ONLY_CRITICAL, "runs", "c1 band=0", QUEUED),
    "max_flows does not limit flows of a guaranteed band": (
        {**BANDED, "max_flows": 2}, "runs, x0, y0, x1", "g priority=7", QUEUED),
    "under reject-noncritical a guaranteed band's request is queued": (
        {**ONLY_CRITICAL, **BANDED}, "runs", "g priority=7", QUEUED),
    "a dynamic band has the attributes of the nearest lower band": (
        {**ONLY_CRITICAL, **BANDED}, "runs", "g priority=9", QUEUED),
    "a band above Critical is like Critical": (ONLY_CRITICAL, "runs", "u priority=100", QUEUED),
    "a band between Default and Critical is like Default": (ONLY_CRITICAL, "runs", "g priority=7", SATURATED),
    "a band below Sheddable is like Sheddable": (ONLY_CRITICAL, "runs", "l priority=-2147483648", SATURATED),
    "a band at its capacity refuses a request": (
        BANDED, "runs, g0 priority=7, g1 priority=7", "g2 priority=7", "refused band-capacity 1"),
    "a body beyond its band's byte limit is refused": (
        BANDED, "runs, b0 priority=-50 body_bytes=600", "b1 priority=-50 body_bytes=401", NO_BYTES_LEFT),
    "a body that exactly reaches its band's byte limit is queued": (
        BANDED, "runs, b0 priority=-50 body_bytes=600", "b1 priority=-50 body_bytes=400", QUEUED),
    "a band that is not preemptible is not preempted": (
        {**BANDED, "total_capacity": 2}, "runs, g0 priority=7, g1 priority=7", "c band=0", FULL),
    "a paused pool queues every arrival": ({"paused": 1}, "", "r", QUEUED),
    "the endpoint with the fewest requests comes first": (TWO, "r1 candidates=e1", "r2", "placed e2,e1 0,1"),
    "an answer has the configured number of fallbacks": (
        {**THREE, "fallbacks": 1}, "r1 candidates=e1, r2 candidates=e2", "r3", "placed e3,e1 0,1"),
    "a request stays within its subset": (TWO, "r1 candidates=e2", "r2 candidates=e2", "placed e2 1"),
    "a subset of unknown endpoints is refused": ({}, "", "r candidates=away", NO_ENDPOINT),
    "of idle endpoints the highest score wins": (TWO, "", "r candidates=e1=0.2+e2=0.5", "placed e2,e1 0,0"),
    "live load may outweigh a higher score": (
        TWO, "r1 candidates=e2", "r2 candidates=e1=0.2+e2=0.5", "placed e1,e2 0,1"),
    "a request waits if its flow is at its limit on its only candidate": (
        TWO, "x1 candidates=e2 limit=1", "x2 candidates=e2 limit=1", QUEUED),
    "a flow at its limit on every endpoint waits": (TWO, "x1 limit=1, x2 limit=1", "x3 limit=1", QUEUED),
    "an endpoint at the flow's limit is no candidate": (
        THREE, "x1 candidates=e2 limit=1", "x2 candidates=e1=0.1+e2=0.9 limit=1", "placed e1 0,"),
    "no score outweighs an endpoint's own limit": (
        CAPPED, "r1 candidates=e1=100+e2=0", "r2 candidates=e1=100+e2=0", "placed e2 ,0"),
    "a request for an endpoint at its own limit waits": (
        CAPPED, "r1 candidates=e1", "r2 candidates=e1", QUEUED),
    "with the queue disabled no bound applies": ({"queue_enabled": 0}, "r1, r2", "r3 cost=9", "placed e1 2"),
    "with the queue disabled a request is refused if all endpoints are full": (
        {"queue_enabled": 0, "caps": {"e1": 1}}, "r1", "r2", SATURATED),
    "an endpoint at its limit is the last fallback": (
        {**FOUND, "caps": {"e1": 1}}, "r1 candidates=e1, r2 candidates=e2", "r3 candidates=e1=0.9+e2=0.1",
        "placed e2,e1 ,1"),
}  # fmt: skip


@pytest.mark.parametrize("case", ANSWERS)
def test_an_arrival_gets_the_answer_that_settings_and_state_require(side: ScriptSide, case: str) -> None:
    settings, known, arrival, answer = ANSWERS[case]
    pool = holding(side, known, **settings)
    # A refused arrival changes no state, so the same arrival is refused again.
    for _ in range(2 if answer.startswith("refused") else 1):
        assert pool.admit(arrival) == [answer]


@pytest.mark.parametrize("draining", [{}, {"e1": True}], ids=["no endpoint", "an endpoint that drains"])
def test_without_a_ready_endpoint_a_request_is_refused(side: ScriptSide, draining: dict[str, bool]) -> None:
    pool = Pool(side)
    pool.publish(draining)
    assert pool.admit("r") == ["refused no-endpoints 1"]
    assert pool.is_at_rest()


WEIGHTED: CASES = {"band_policy": "weighted", "guard_share": 0}
# Each case has settings, requests that wait behind a running one, and the beginning of the order of service.
ORDERS: dict[str, tuple[CASES, str, str]] = {
    "requests of one flow are served by arrival": ({}, "x2, x0, x1", "x2 x0 x1"),
    "flows take turns": ({}, "x0, x1, x2, y0, y1", "x0 y0 x1 y1 x2"),
    "a lower band is served once the higher bands are empty": ({}, "s band=2, d1, c band=0, d2", "c d1 d2 s"),
    "bands are served by priority": (
        {}, "m priority=-2147483648, h priority=2147483647, c band=0, n priority=-3, s priority=7, d",
        "h c s d n m"),
    "dynamic bands have the weights of the nearest configured bands": (
        WEIGHTED, many("c{n} priority=99, d{n} priority=7, s{n} priority=-3", 8),
        "c0 d0 s0 c1 c2 c3 d1 c4 c5 c6"),
    "further configured bands have their own weights": (
        {**WEIGHTED, **BANDED, "band_weights": [20, 10, 1, 9, 70]},
        many("g{n} priority=6, b{n} priority=-50, d{n} priority=10", 8),
        "d0 g0 b0 b1 b2 b3 d1 b4 b5 b6"),
    "a flow name in two bands means two flows": ({}, "low flow=f band=2, high flow=f band=0", "high low"),
    "under band policy weighted bands are served by weight": (
        WEIGHTED, many("c{n} band=0, d{n}, s{n} band=2", 8), "c0 d0 s0 c1 c2 c3 d1 c4 c5 c6"),
    "under round-robin each flow gets one request a round at any cost": (
        {"fairness": "round-robin", "upper_per": 100, "lower_per": 1},
        "x1 cost=9 weight=5, x2 cost=9, y1, y2, z1", "x1 y1 z1 x2 y2"),
    "without fairness flows share one queue": ({"fairness": "none"}, "x1, x2, x3, y1, x4", "x1 x2 x3 y1 x4"),
    "under edf the earliest deadline is first": (
        {"ordering": "edf"}, "late ttl_ms=50000 flow=f, soon ttl_ms=20000 flow=f, middle ttl_ms=30000 flow=f",
        "soon middle late"),
    "under edf the deadline less the predicted service time counts": (
        {"ordering": "edf"}, "late ttl_ms=50000 flow=f attempt=1-35000.x, soon ttl_ms=20000 flow=f, "
        "middle ttl_ms=30000 flow=f attempt=1-11000.x", "late middle soon"),
    "an overdue request is served out of turn": ({"starvation_ms": 1}, "s band=2 age_ms=5, c band=0", "s c"),
    "by default a request is overdue after half of its TTL": (
        {}, "l band=2 ttl_ms=60000, s band=2 ttl_ms=10000 age_ms=6000, c band=0", "s c l"),
    "with guard_share 0 no request is served out of turn": (
        {"starvation_ms": 1, "guard_share": 0}, "s band=2 age_ms=5, c band=0", "c s"),
    "the workload of higher criticality is first, requests of a workload by arrival": (
        {**BY_WORKLOAD, "rate_weight": 0},
        "l1 workload=low criticality=1 flow=f, l2 workload=low criticality=5 flow=f, "
        "h1 workload=high criticality=4 flow=f, h2 workload=high criticality=4 flow=f", "h1 h2 l1 l2"),
    "the workload with the lowest arrival rate is first": (
        {**BY_WORKLOAD, "window_ms": 1000, "rate_cap": 10},
        many("o{n} workload=often flow=f", 8) + ", once workload=once flow=f", "once"),
    "at the wait cap the more critical request is first": (
        {**BY_WORKLOAD, "wait_cap_ms": 50},
        "old workload=old criticality=2 age_ms=120 flow=f, young workload=new criticality=4 age_ms=60 flow=f",
        "young old"),
    "below the wait cap the longer wait is first": (
        BY_WORKLOAD,
        "old criticality=2 age_ms=60000 ttl_ms=90000 flow=f, young criticality=5 ttl_ms=90000 flow=f",
        "old young"),
    "the workload with the longer average wait is first": (
        {**BY_WORKLOAD, "wait_signal": "workload_average", "wait_cap_ms": 1000},
        "new workload=new age_ms=500 flow=f, again workload=waited flow=f", "again new"),
}  # fmt: skip


@pytest.mark.parametrize("case", ORDERS)
def test_waiting_requests_are_served_in_the_order_of_the_policy(side: ScriptSide, case: str) -> None:
    settings, waiting, order = ORDERS[case]
    pool = Pool(side, **settings)
    pool.admit(f"runs flow=other workload=waited age_ms=900 cost={settings.get('upper_per', 1)}")
    pool.admit(waiting)
    assert pool.serve()[: len(order.split())] == order.split()
    assert pool.is_at_rest()


@pytest.mark.parametrize(
    ("weights", "costs"),
    [
        ({"x": 1, "y": 2, "z": 4}, {"x": 1, "y": 1, "z": 1}),
        ({"x": 1, "y": 2, "z": 4}, {"x": 2, "y": 0.5, "z": 1}),
        ({"x": 1, "y": 1, "z": 1}, {"x": 1, "y": 1, "z": 1}),
    ],
    ids=["weights 1:2:4", "weights and costs", "equals"],
)
def test_two_flows_services_by_weight_differ_by_at_most_one_request_of_each_flow(
    side: ScriptSide, weights: dict[str, float], costs: dict[str, float]
) -> None:
    pool = holding(side, "runs cost=2", upper_per=2, lower_per=0.25)
    for number, flow in itertools.product(range(10), weights):
        by = "ab"[number % 2]
        pool.admit(f"{flow}{number} weight={weights[flow]} cost={costs[flow]}", by=by)
    order = pool.serve()
    assert len(order) == 30
    # While all flows wait, two flows' services by weight differ by at most one request of each flow.
    last = min(max(at for at, name in enumerate(order) if name[0] == flow) for flow in weights)
    share = {flow: costs[flow] / weights[flow] for flow in weights}
    for one, other in itertools.combinations(weights, 2):
        for begin, end in itertools.combinations(range(last + 1), 2):
            served = [name[0] for name in order[begin:end]]
            difference = share[one] * served.count(one) - share[other] * served.count(other)
            assert abs(difference) <= share[one] + share[other] + 1e-9


def test_an_idle_flow_gets_no_credit_for_its_idle_time(side: ScriptSide) -> None:
    pool = full(side, many("x{n}", 12))
    assert pool.serve(8)[-1] == "x7"
    pool.admit("y0, y1, y2, y3")
    assert pool.serve() == ["y0", "x8", "y1", "x9", "y2", "x10", "y3", "x11"]


@pytest.mark.parametrize(
    ("share", "turns"), [(0.1, [0, 10, 20, 30, 40]), (0.3, [0, 4, 7, 10, 14, 17, 20, 24])]
)
def test_the_starvation_guard_gives_its_share_of_dispatches_to_the_longest_overdue_request(
    side: ScriptSide, share: float, turns: list[int]
) -> None:
    pool = full(side, many("s{n} band=2", len(turns)), starvation_ms=30, guard_share=share)
    pool.passes(40)
    pool.admit(many("c{n} band=0", 60))
    order = pool.serve(41)
    assert pool.those("granted", by="guard") == [order[turn] for turn in turns]
    assert [order.index(f"s{n}") for n in range(len(turns))] == turns


def test_the_queue_is_served_only_while_the_stock_is_below_its_lower_bound(side: ScriptSide) -> None:
    pool = holding(side, "r1, r2, r3, r4", "waits", upper_per=4, lower_per=2)
    assert pool.end("r1", "r2") == []
    assert pool.end("r3") == ["waits"]


def test_fractional_costs_leave_no_residue_in_the_stock(side: ScriptSide) -> None:
    pool = holding(side, ", ".join(f"r{n} cost={0.1 + n / 3}" for n in range(10)), upper_per=1000)
    for n in (3, 7, 1, 9, 0, 5, 2, 8, 6, 4):
        pool.end(f"r{n}")
    assert pool.counts() == (0, 0, [0])


def test_queued_requests_are_served_when_an_endpoint_returns(side: ScriptSide) -> None:
    pool = full(side, "waits")
    pool.publish({})
    assert pool.end("runs") == []
    pool.publish({"e2": False})
    assert pool.granted == ["waits"]
    assert pool.place("waits") == "placed e2"


def test_waiting_requests_go_to_the_endpoints_where_requests_have_ended(side: ScriptSide) -> None:
    pool = holding(side, many("r{n}", 30), "waits1, waits2", endpoints=30)
    freed = {endpoint_of(pool, "r15"), endpoint_of(pool, "r29")}
    assert pool.end("r29", "r15") == ["waits1", "waits2"]
    assert {endpoint_of(pool, "waits1"), endpoint_of(pool, "waits2")} == freed


def test_a_draining_endpoint_raises_no_bound_and_keeps_its_requests(side: ScriptSide) -> None:
    pool = holding(side, "r1 candidates=e1, r2 candidates=e2", endpoints=2, upper_per=2)
    pool.publish({"e1": True, "e2": False})
    assert pool.admit("waits") == ["queued 10000"]
    assert pool.end("r1") == ["waits"]
    assert pool.place("waits") == "placed e2"
    pool.publish({"e1": False, "e2": False})
    assert pool.admit("r3") == ["placed e1,e2 0,2"]


def test_the_newest_request_of_the_flow_preempted_longest_ago_is_preempted(side: ScriptSide) -> None:
    pool = full(side, total_capacity=7)
    pool.admit("x1 band=2, x2 band=2, x3 band=2, y1 band=2, y2 band=2, y3 band=2", by="b")
    pool.admit("d1")
    assert pool.admit("c1 band=0, c2 band=0, c3 band=0, d2") == ["queued 10000"] * 4
    assert pool.those("preempted") == ["x3", "y3", "x2", "y2"]
    pool.beat("b")
    assert sorted(pool.told["b"]) == [f"preempted {name}" for name in ("x2", "x3", "y2", "y3")]


def test_an_old_notification_does_not_end_a_request_that_its_replica_adopts_again(side: ScriptSide) -> None:
    pool = full(side, "q")
    pool.call("evict", [("q",)])
    # The client sends the request again to another replica, and then to the first replica.
    pool.admit("q", by="b")
    pool.admit("q")
    pool.beat()
    assert pool.told == {"a": ["evicted q"], "b": []}


def test_a_full_queue_accepts_flow_capacity_requests_of_a_critical_flow(side: ScriptSide) -> None:
    pool = full(side, many("c{n} band=0, d{n}", 3), total_capacity=6, flow_capacity=3)
    assert pool.admit(many("e{n} band=0", 4)) == [QUEUED] * 3 + ["refused insufficient-flow-capacity 1"]
    assert pool.those("preempted") == ["d2", "d1", "d0"]


def test_the_retry_after_header_is_the_time_that_the_queue_takes_to_drain(side: ScriptSide) -> None:
    pool = Pool(side, total_capacity=8)
    pool.sweep()
    pool.admit("runs")
    pool.admit("q0, q1, q2, q3")
    pool.passes(1250)
    pool.serve(2)
    pool.sweep()
    assert pool.model.rate == 1.6
    pool.admit(many("p{n}", 6))
    assert pool.admit("late") == ["refused total-capacity 6"]


def test_the_drain_rate_of_an_empty_queue_falls_to_zero(side: ScriptSide) -> None:
    pool = holding(side, "p1", "p2")
    pool.sweep()
    pool.passes(1000)
    pool.end("p1")
    pool.sweep()
    assert pool.model.rate == 1.0
    for _ in range(40):
        pool.passes(1000)
        pool.sweep()
    assert pool.model.rate == 0.0
    pool.tune(total_capacity=0)
    assert pool.admit("late") == [FULL]


def test_a_queue_that_does_not_drain_gives_the_longest_retry_after(side: ScriptSide) -> None:
    pool = holding(side, "p1", "p2, p3")
    pool.sweep()
    pool.passes(1)
    pool.end("p1")
    for _ in range(40):
        pool.sweep()
        pool.passes(100)
    pool.tune(total_capacity=1)
    assert pool.admit("late") == ["refused total-capacity 60"]


def test_a_flow_at_its_limit_is_throttled_until_one_of_its_requests_ends(side: ScriptSide) -> None:
    pool = holding(side, "p1 limit=1, p2 limit=1", "p3 limit=1, q1", endpoints=2, upper_per=4)
    assert pool.events[-3:] == ["throttled p ", "granted q1 turn", "placed q1 "]
    assert pool.end("p1") == ["p3"]
    assert "unthrottled p " in pool.events


def test_a_granted_request_at_its_flows_endpoint_limit_is_requeued_uncharged(side: ScriptSide) -> None:
    pool = holding(side, "p1 limit=1 candidates=e1", endpoints=2, upper_per=4)
    pool.tune(paused=1)
    pool.admit("p2 limit=1 workload=w candidates=e1")
    pool.tune(paused=None)
    # Request p2 is granted, but its only candidate is the endpoint on which request p1 runs.
    assert pool.place("p2", "e1") == "queued 10000"
    assert pool.events[-2:] == ["requeued p2 ", "throttled p "]
    assert pool.model.queue.bands[0].tag_of("p") == 0.0
    assert workload_of(pool) == (1, 1, 0)
    pool.passes(40)
    assert pool.end("p1") == ["p2"]
    assert pool.place("p2", "e1") == "placed e1 0"
    assert workload_of(pool) == (1, 1, 1)
    assert pool.model.workloads.known["w"].ema_ms == pytest.approx(40, abs=0.01)
    pool.end("p2")
    assert pool.is_at_rest()


def test_a_request_for_a_full_endpoint_waits_and_blocks_no_other_request(side: ScriptSide) -> None:
    pool = Pool(side, endpoints=2, upper_per=99, caps={"e1": 1})
    pool.admit("first candidates=e1")
    for names, candidates, answer in (("x2 y1", "e1", QUEUED), ("z1 z2", "*", "placed e2")):
        for name in names.split():
            pool.admit(f"{name} candidates={candidates}")
            assert pool.place(name, candidates) == answer
    # When request `first` ends, dispatch grants only the request that has waited longest for endpoint e1.
    assert pool.end("first") == ["x2"]
    assert pool.place("x2", "e1") == "placed e1 0"
    assert pool.end("x2") == ["y1"]
    assert pool.place("y1", "e1") == "placed e1 0"
    pool.end("y1", "z1", "z2")
    assert pool.is_at_rest()


def test_the_actual_cost_corrects_the_charge_of_a_flow(side: ScriptSide) -> None:
    pool = full(side, many("dear{n}, cheap{n}", 12))
    order = pool.serve(1)
    for _ in range(10):
        # Both flows' estimates are equal, but requests of flow `dear` really cost four times as much.
        order += pool.end(order[-1], actual=4.0 if order[-1].startswith("dear") else 1.0)
    assert "".join(name[0] for name in order) == "cdccccdcccc"


def test_a_negative_tag_is_corrected_like_any_other_tag(side: ScriptSide) -> None:
    pool = holding(side, "runs cost=10", upper_per=10, lower_per=1, fairness="round-robin", guard_share=0)
    pool.admit("x1 cost=10, x2 cost=10, x3 cost=10")
    pool.serve(1)
    pool.tune(fairness="weighted-fair")
    pool.sweep()
    pool.end("x1", actual=1.0)
    assert pool.model.requests["x2"].tag == -8
    pool.end("x2", actual=5.0)
    assert pool.those("corrected") == ["x1", "x2"]


def test_a_request_past_its_time_to_live_is_not_dispatched(side: ScriptSide) -> None:
    pool = full(side)
    # More requests expire than the number of timers that one call runs.
    pool.admit(many("short{n} ttl_ms=50", 30), by="b")
    pool.admit("late flow=short")
    pool.passes(60)
    assert pool.end("runs") == ["late"]
    assert pool.of("short29") == ["queued", "expired"]
    pool.sweep()
    for _ in range(2):
        pool.beat("b")
    assert sorted(pool.told["b"]) == sorted(f"expired short{n}" for n in range(30))


def test_a_request_without_renewals_is_reclaimed_and_a_renewed_one_is_not(side: ScriptSide) -> None:
    pool = holding(side, "silent, alive workload=w", "waits candidates=e1", upper_per=2, lease_ms=50)
    pool.passes(40)
    pool.call("renew", [("alive", "", "", None)])
    pool.passes(20)
    assert pool.sweep()[:4] == [1, 0, 1, 0]
    assert pool.of("silent") == ["bypassed", "reclaimed"]
    # The waiting request gets a grant. A grant that is never placed is reclaimed too, and `place` then fails.
    assert pool.granted == ["waits"]
    pool.passes(60)
    pool.sweep()
    assert pool.place("waits") == "gone"
    assert pool.counts() == (0, 0, [0])


def test_a_request_of_a_silent_replica_is_granted_to_the_replica_that_adopts_it(side: ScriptSide) -> None:
    pool = full(side, lease_ms=900_000)
    pool.admit("orphan flow=f ttl_ms=900000", by="b")
    pool.admit("alive flow=f ttl_ms=900000")
    pool.passes(SILENT_MS)
    pool.beat()
    # Requests of a silent replica are not granted. A replica that adopts a request gets its position, too.
    pool.sweep()
    assert pool.admit("orphan flow=f") == ["queued 840000 adopted"]
    assert pool.of("orphan") == ["queued", "orphaned", "adopted"]
    assert pool.serve() == ["orphan", "alive"]


def test_dispatch_orphans_requests_of_a_silent_replica_without_a_sweep(side: ScriptSide) -> None:
    pool = full(side, lease_ms=900_000)
    pool.admit("orphan flow=f ttl_ms=900000", by="b")
    pool.admit("alive flow=f ttl_ms=900000")
    pool.passes(SILENT_MS)
    pool.beat()
    assert pool.serve() == ["alive"]
    assert pool.of("orphan") == ["queued", "orphaned"]


def test_a_superseded_stream_cannot_cancel_the_request_at_the_same_replica(side: ScriptSide) -> None:
    pool = full(side, "q attempt=1.x")
    pool.admit("q attempt=2.x")
    assert pool.call("cancel", [("q", "1.x", "cancelled")]).answers == ["foreign"]
    assert pool.serve() == ["q"]


def endpoint_of(pool: Pool, name: str) -> str:
    return pool.model.requests[name].endpoints.split(",")[0]


def acknowledged(pool: Pool, name: str, attempt: str = "1", by: str = "a") -> bool:
    return str(pool.call("acknowledge", [(name, attempt)], by=by).answers[0]) == "taken"


def test_a_request_for_any_endpoint_is_placed_by_its_grant(side: ScriptSide) -> None:
    pool = full(side)
    pool.admit("q1", by="b")
    pool.admit("q2")
    pool.end("runs")
    # Each heartbeat notifies the owner of the grant until the owner acknowledges it with the right attempt.
    assert pool.of("q1") == ["queued", "granted", "placed"]
    pool.beat("b")
    assert not acknowledged(pool, "q1", by="a")
    assert not acknowledged(pool, "q1", attempt="2", by="b")
    pool.beat("b")
    assert pool.told["b"] == ["granted q1"] * 2
    assert acknowledged(pool, "q1", by="b")
    assert not acknowledged(pool, "q1", by="b")
    pool.beat("b")
    assert pool.told["b"] == ["granted q1"] * 2
    assert pool.cancel("q1", "unclaimed", by="b") == "foreign"
    # If a replica's own call grants the replica's request, the reply contains the placement.
    pool.end("q1")
    assert pool.told["a"] == ["placed 1 e1 0 q2"]
    assert pool.cancel("q2", "unclaimed") == "ended"
    assert pool.is_at_rest()


def test_an_adopted_request_keeps_its_position_and_belongs_to_its_adopter(side: ScriptSide) -> None:
    pool = full(side, "q0, q1, q2")
    assert pool.admit("q1, q0 candidates=e1", by="b") == ["queued 10000 adopted"] * 2
    assert [pool.cancel("q0"), pool.cancel("q0", "expired")] == ["foreign"] * 2
    assert pool.end("runs") == ["q0"]
    # A granted request is placed for its adopter, and the former owner cannot place the request.
    assert pool.admit("q0") == ["placed e1 0 adopted"]
    assert pool.place("q0", by="b") == "gone"
    # Neither replica can cancel a placed request, since Envoy may listen to either replica's stream.
    assert pool.admit("q0", by="b") == ["placed e1 adopted"]
    assert [pool.cancel("q0", by=by) for by in "ab"] == ["foreign"] * 2
    assert pool.serve() == ["q1", "q2"]


@pytest.mark.parametrize("state", ["queued", "orphaned", "granted", "placed"])
def test_a_request_is_not_adopted_by_its_id_alone(side: ScriptSide, state: str) -> None:
    pool = full(side, "q attempt=1.x candidates=e1 ttl_ms=900000", silence_ms=SILENT_MS)
    if state == "orphaned":
        pool.passes(SILENT_MS)
        pool.beat("b")
        pool.both.call("sweep", "b", 0, 600_000, 300_000, 10**9)
    elif state != "queued":
        pool.end("runs")
    if state == "placed":
        pool.call("place", [("q", "1.x", "e1")])
    assert pool.model.requests["q"].state == state
    strangers = "q attempt=9.y, q attempt=9.x flow=other, q attempt=9.x model=other"
    assert pool.admit(strangers, by="b") == ["foreign"] * 3
    assert (pool.model.requests["q"].owner, pool.model.requests["q"].attempt) == ("a", "1.x")
    # A retry of the same request adopts it in every state, any number of times.
    assert [pool.admit("q attempt=2.x", by=by)[0].split()[-1] for by in "bab"] == ["adopted"] * 3


def test_a_granted_request_is_placed_on_an_endpoint_of_its_subset_or_refused(side: ScriptSide) -> None:
    pool = holding(side, "runs candidates=e2", endpoints=2, upper_per=0.5)
    pool.admit("q1 candidates=e2, q2 candidates=e2, q3 candidates=e2")
    pool.end("runs")
    assert pool.place("q1", "e2") == "placed e2 0"
    pool.end("q1")
    assert pool.place("q2", "away") == "refused no-endpoints 1"
    assert pool.admit("q3 candidates=away", by="b") == ["refused no-endpoints 1"]
    assert pool.is_at_rest()


SILENT_MS = 60_000


def workload_of(pool: Pool, name: str = "w") -> tuple[int, int, int]:
    """The workload's total, active and dispatched requests."""
    it = pool.model.workloads.known[name]
    return it.total, it.active, it.dispatched


def test_the_counts_of_a_workload_follow_each_of_its_requests(side: ScriptSide) -> None:
    pool = holding(side, "r1 workload=w", flow_capacity=2)
    pool.admit("r2 workload=w", by="b")
    pool.admit("r3 workload=w")
    assert workload_of(pool) == (3, 3, 1)
    pool.admit("r2 workload=w")  # the request is adopted, not counted again
    assert workload_of(pool) == (3, 3, 1)
    # Request r1 ends and r2 is granted; r3 is cancelled; r6 of a full flow is refused, but is counted.
    pool.end("r1")
    pool.cancel("r3")
    assert pool.admit("r4 workload=w flow=r limit=0, r5 workload=w, r6 workload=w")[-1].startswith("refused")
    assert workload_of(pool) == (6, 3, 2)
    pool.serve()
    assert workload_of(pool) == (6, 0, 4)


@pytest.mark.parametrize("reason", ["full", "too old", "no endpoints"])
def test_a_rejected_request_counts_as_an_arrival_and_not_as_active(side: ScriptSide, reason: str) -> None:
    pool = holding(side, "runs workload=w", total_capacity=0)
    if reason == "no endpoints":
        pool.publish({})
    late = " ttl_ms=1 age_ms=2" if reason == "too old" else ""
    for number in range(1, 4):
        (answer,) = pool.admit(f"more workload=w{late}")  # a refused request is only an arrival
        assert answer.split()[0] == ("expired" if late else "refused")
        assert workload_of(pool) == (1 + number, 1, 1)
        assert sum(pool.model.workloads.arrivals("w")) == 1 + number


def test_refused_requests_lower_the_score_of_their_workload(side: ScriptSide) -> None:
    rates = {"rate_weight": 0.9, "rate_cap": 0.1, "guard_share": 0}
    waiting = "greedy flow=f workload=greedy, modest flow=f workload=modest"
    pool = full(side, waiting, total_capacity=2, **BY_WORKLOAD, **rates)
    pool.admit(many("again{n} flow=f workload=greedy", 5))
    pool.sweep()
    assert pool.end("runs") == ["modest"]


@pytest.mark.parametrize(
    ("signal", "waiting"),
    [
        ({"rate_weight": 0.9, "rate_cap": 0.1}, "f1 workload=shared, f2 workload=own"),
        ({"wait_signal": "workload_average"}, "f1 workload=own, f2 workload=shared"),
    ],
    ids=["rate", "average wait"],
)
def test_a_workload_id_used_by_another_flow_does_not_change_a_flows_order(
    side: ScriptSide, signal: dict[str, Any], waiting: str
) -> None:
    pool = Pool(side, **BY_WORKLOAD, guard_share=0, **signal)
    # Another flow uses the same workload id with a high rate and long waits.
    pool.admit(many("g{n} workload=shared age_ms=9000", 5))
    pool.serve()
    pool.admit("runs")
    pool.admit(waiting)
    assert pool.end("runs") == ["f1"]
    # The workload registry counts the requests of both flows together.
    assert workload_of(pool, "shared")[0] == 6


def test_the_average_wait_moves_by_a_fifth_towards_each_new_wait(side: ScriptSide) -> None:
    pool = Pool(side, upper_per=2)
    average = pool.model.workloads.wait_ms
    pool.admit("r1 workload=w age_ms=2500")
    assert average("w") == 2500
    pool.admit("r2 workload=w age_ms=1800")
    assert average("w") == pytest.approx(2360)
    # The wait is measured from the request's arrival.
    pool.admit("r3 workload=v age_ms=5000")
    pool.passes(40)
    pool.end("r1")
    assert average("v") == 5040


def test_arrivals_are_counted_by_sixths_of_a_sliding_window(side: ScriptSide) -> None:
    pool = Pool(side, window_ms=240, upper_per=100)
    counted: dict[int, int] = {}
    for number in range(36):
        pool.admit(f"r{number} workload=w")
        slot = pool.both.now_us // 40_000
        counted[slot] = counted.get(slot, 0) + 1
        assert pool.model.workloads.arrivals("w") == [counted.get(slot - ago, 0) for ago in range(7)]
        pool.passes(10)
    assert len(counted) > 8
    pool.passes(1000)
    pool.beat()
    assert pool.model.workloads.rate("w") == 0


# Examples of specification 001: average wait in ms (rounded), requests within 60 s, criticality, score.
SPECIFIED = {
    "batch-job-123": (2360, 2, 4, 0.3355),
    "interactive-user-456": (800, 150, 5, 0.4002),
    "low-priority-789": (15_000, 6, 2, 0.2598),
}


def test_the_examples_of_specification_001_hold(side: ScriptSide) -> None:
    pool = Pool(side, upper_per=1000, ordering="workload-aware", wait_signal="workload_average")
    for name, (wait_ms, count, _, _) in SPECIFIED.items():
        for _ in range(count - 1):
            pool.admit(f"earlier flow=f workload={name} age_ms={wait_ms} ttl_ms=60000")
            pool.end("earlier")
    pool.admit("runs cost=1000 flow=other")
    for name, (_, _, criticality, score) in SPECIFIED.items():
        pool.admit(f"{name} workload={name} criticality={criticality} flow=f")
        assert -pool.model.queue.bands[0].queues["f"].static.scores()[name] == pytest.approx(score, abs=2e-4)
    assert pool.serve() == ["interactive-user-456", "batch-job-123", "low-priority-789"]


def test_a_draining_prefill_endpoint_does_not_raise_a_restored_requests_claim(side: ScriptSide) -> None:
    pool = Pool(side, endpoints=2, upper_per=2)
    pool.call("publish", ("2", "2"), pool.model.moment.settings, {"e1": False, "p1": True}, {"p1": "prefill"})
    token = Request("lost", "a", "1", "f", 0, 1.0, 100.0, "", 3, "m", 0, endpoints="e1")
    pool.call("renew", [("lost", "1", "", token)])
    assert pool.model.requests["lost"].taken == pool.model.upper == 2
