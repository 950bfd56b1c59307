"""Outlier ejection in the scripts: which failures eject an endpoint, for how long, and how it returns."""

import json
from typing import Any

import pytest
import redis
from direct_calls import ClockedPool

E1, E2, E3, E4 = (f"10.0.0.{n}:1" for n in range(1, 5))
ROOMY = {
    "upper_per": 9,
    "live_weight": 0,  # the score alone decides among candidates
}  # fmt: skip


class FailingPool(ClockedPool):
    """A pool of four endpoints, and calls that report the outcome of requests at these endpoints."""

    def __init__(self, client: redis.Redis, pool: str, **settings: Any) -> None:
        super().__init__(client, pool)
        self.publish(E1, E2, E3, E4, **ROOMY | settings)
        self.ids = 0

    def place(self, *where: str, flow: str = "x") -> str:
        """Place a new request with the candidates `where`, best first; return the request's id."""
        self.ids += 1
        scored = ",".join(f"{address}={1 - at / 10}" for at, address in enumerate(where))
        reply = self.admit(f"r{self.ids}", flow=flow, candidates=scored)
        assert reply[:2] == ["placed", ",".join(where)], reply
        return f"r{self.ids}"

    def fault(self, request_id: str, address: str, why: str = "500", hold_ms: int = 0, flow: str = "") -> str:
        reply = self.call("report_fault", "a", request_id, address, flow, why, hold_ms)
        return bytes(reply[4]).decode()

    def fails(self, address: str, flow: str, why: str = "500") -> str:
        """Place a request of `flow` at `address`, report the request's failure, and end the request."""
        request_id = self.place(address, flow=flow)
        said = self.fault(request_id, address, why)
        self.call("settle", "a", request_id, "upstream_failed", "", "", "", "")
        return said

    def answers(self, address: str, flow: str = "well") -> None:
        self.call("settle", "a", self.place(address, flow=flow), "answered", "", "", "", "")

    def probed(self, address: str, well: bool) -> None:
        self.call("mark_endpoint", "a", address, "ejected", int(not well))

    @property
    def ejected(self) -> set[str]:
        marks = self.client.hkeys(f"{self.prefix}marks")
        return {mark.decode().split("\x1f")[1] for mark in marks if mark.startswith(b"ejected")}

    def takes(self, address: str) -> bool:
        """Whether a new request may go to the endpoint `address`. The new request ends at once."""
        self.ids += 1
        reply = self.admit(f"t{self.ids}", flow="t", candidates=f"{address},{E4}")
        self.call("settle", "a", f"t{self.ids}", "client_gone", "", "", "", "")
        return address in reply[1].split(",")


@pytest.fixture
def it(client: redis.Redis, pool: str) -> FailingPool:
    return FailingPool(client, pool)


def test_failures_of_two_flows_eject_an_endpoint_at_once(it: FailingPool) -> None:
    assert it.fails(E1, "x") == "noted"
    assert it.fails(E1, "y") == "ejected"
    assert it.ejected == {E1}
    assert not it.takes(E1)
    # A request that only the ejected endpoint can serve is still placed on this endpoint.
    assert it.admit("only", candidates=E1)[:2] == ["placed", E1]


def test_503_limits_an_endpoint_that_works_on_other_requests_and_ejects_an_idle_one(it: FailingPool) -> None:
    runs, _, *refused = [it.place(E1, E2, flow=f"{number}") for number in range(8)]
    assert {it.fault(each, E1, "503") for each in refused} == {"noted"}
    assert it.ejected == set()
    assert not it.takes(E1)
    it.call("settle", "a", runs, "answered", "", "", "", "")
    assert it.takes(E1)
    # An endpoint that fails on every request soon has none of them in flight.
    failing = [it.place(E3, E2, flow=flow) for flow in "xyz"]
    assert [it.fault(each, E3, "503") for each in failing] == ["noted", "noted", "ejected"]


def test_failures_of_one_flow_eject_no_endpoint_while_other_flows_run(it: FailingPool) -> None:
    it.place(E4, flow="other")
    assert {it.fails(E1, "x") for _ in range(50)} == {"noted"}
    assert it.ejected == set()


def test_five_failures_of_the_only_flow_eject_an_endpoint_if_others_answer_the_flow(it: FailingPool) -> None:
    assert {it.fails(E1, "x") for _ in range(9)} == {"noted"}
    it.answers(E1)
    assert it.fails(E1, "x") == "noted"
    it.answers(E2, flow="x")
    assert [it.fails(E1, "x") for _ in range(4)] == [*["noted"] * 3, "ejected"]


def test_a_request_that_fails_on_two_endpoints_ejects_neither_endpoint(it: FailingPool) -> None:
    # After each failure Envoy tries another endpoint; the request counts at the endpoint of this attempt.
    for flow in "xyz":
        request_id = it.place(E1, E2, E3, flow=flow)
        it.fault(request_id, E1)
        assert it.loads()[E2] % 1e9 == 1
        it.fault(request_id, E2)
        it.fault(request_id, E3)
        it.fault(request_id, E1, flow=flow)  # a repeated report
        it.call("settle", "a", request_id, "upstream_failed", "", "", "", "")
        assert it.ejected == set()
    # An ejection by the first failure is undone when the second failure is reported.
    it.fails(E1, "x")
    last = it.place(E1, E2, flow="y")
    assert it.fault(last, E1) == "ejected"
    it.fault(last, E2)
    assert it.ejected == set()


def test_ejections_double_in_length_and_end_after_a_probe_and_a_trial_request(it: FailingPool) -> None:
    it.fails(E1, "x")
    it.fails(E1, "y")
    for seconds in (1, 2, 4, 8, 8):
        # A probe before the end of the ejection has no effect; a failed probe prolongs the ejection.
        it.passes(seconds * 1000 - 1)
        it.probed(E1, well=True)
        assert it.ejected == {E1}
        it.passes(1)
        it.probed(E1, well=False)
        assert it.ejected == {E1}
        it.probed(E1, well=True)
        assert it.ejected == set()
        # One trial request goes to the endpoint, and no second request at the same time.
        trial = it.place(E1, E2, flow="z")
        assert not it.takes(E1)
        assert it.fault(trial, E1) == "ejected"
        it.call("settle", "a", trial, "answered", "", "", "", "")
    it.passes(8000)
    it.probed(E1, well=True)
    it.answers(E1)
    assert all(it.place(E1) for _ in range(3))
    # Long after the endpoint's return, ejections start at one second again.
    it.passes(9000)
    it.fails(E1, "x")
    assert it.fails(E1, "y") == "ejected"
    entry = json.loads(it.client.hget(f"{it.prefix}outliers", E1))
    assert entry["times"] == 1


@pytest.mark.parametrize(
    ("percent", "endpoints", "most"), [(50, 4, 2), (50, 3, 1), (50, 2, 1), (50, 1, 0), (100, 4, 3), (0, 4, 0)]
)
def test_at_most_the_configured_share_of_the_pool_is_ejected(
    it: FailingPool, percent: int, endpoints: int, most: int
) -> None:
    listed = (E1, E2, E3, E4)[:endpoints]
    it.publish(*listed, **ROOMY | {"eject_percent": percent})
    for address in listed:
        for flow in "xy":
            request_id = f"{flow}{address}"
            it.admit(request_id, flow=flow, candidates=address)
            it.fault(request_id, address)
    assert len(it.ejected) == most
    # Requests are placed despite all failures.
    assert it.admit("goes on")[0] == "placed"


def test_a_full_endpoint_gets_a_request_for_each_that_ends_until_its_hold_is_over(it: FailingPool) -> None:
    running = [it.place(E1) for _ in range(2)]
    refused = it.place(E1, E2)
    it.fault(refused, E1, "full", 3000)
    assert not it.takes(E1)
    assert it.ejected == set()
    it.call("settle", "a", running[0], "answered", "", "", "", "")
    running.append(it.place(E1, E2))
    assert not it.takes(E1)
    it.passes(3000)
    assert it.takes(E1)
    # A full endpoint that is full again before any answer is held twice as long, up to 8 s.
    it.call("settle", "a", running.pop(), "client_gone", "", "", "", "")
    for hold_ms in (1000, 2000, 4000, 8000, 8000):
        it.fault(it.place(E2, E1, flow="y"), E2, "full")
        it.passes(hold_ms - 1)
        assert not it.takes(E2)
        it.passes(1)
        one = it.place(E2)
        assert not it.takes(E2)
        it.call("settle", "a", one, "client_gone", "", "", "", "")
    # A successful retry at another endpoint is no evidence against the full endpoint.
    for flow in "yz":
        passed_on = it.place(E3, E4, flow=flow)
        it.fault(passed_on, E3, "full")
        it.fault(passed_on, E3, "retried", flow=flow)
        it.passes(8000)
        late = it.place(E3, E4, flow=flow)  # the retry is reported before the refusal
        it.fault(late, E3, "retried", flow=flow)
    assert it.ejected == set()
    # If all endpoints are full, requests wait in the queue.
    for address in (E1, E2, E3, E4):
        it.fault(it.place(address, flow=address), address, "full")
    assert it.admit("waits", flow="w")[0] == "queued"


def test_a_fault_report_without_a_flow_counts_only_for_the_requests_endpoint(it: FailingPool) -> None:
    runs = it.place(E1, E2)
    for why in ("full", "500", "connect"):
        assert it.fault(runs, E2, why, 60_000) == "unknown"
        assert it.fault("no-request", E1, why, 60_000) == "unknown"
    assert it.takes(E2)
    assert it.fault(runs, E1, "full", 60_000) == "noted"
    assert it.fault(runs, E2, "full", 60_000) == "noted"
    assert not it.takes(E1)


def test_an_endpoint_that_stands_still_while_others_answer_is_ejected(it: FailingPool) -> None:
    def stuck(seconds: int, *, others_answer: bool) -> str:
        it.call("mark_endpoint", "a", E1, "stuck", 1)
        it.passes(seconds * 1000)
        if others_answer:
            it.answers(E2)
        return bytes(it.call("mark_endpoint", "a", E1, "stuck", 1)[4]).decode()

    assert stuck(60, others_answer=False) == "marked"
    assert stuck(0, others_answer=True) == "ejected"


def test_the_sweep_ends_ejections_whose_outlier_records_are_lost(it: FailingPool) -> None:
    for flow in "xy":
        it.fails(E1, flow)
    it.client.delete(f"{it.prefix}outliers")
    for _ in range(2):
        it.passes(1000)
        it.call("sweep", "a", 0, 3000, 60_000, 6000)
    assert it.ejected == set()
    assert it.takes(E1)
