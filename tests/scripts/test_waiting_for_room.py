"""A flow that waits for room on endpoints is granted as many requests as have room, in order (G4)."""

from typing import Any

import pytest
import redis
from direct_calls import ClockedPool, arrival

SILENCE_MS = 5000
SWEEP = 0, 60_000, 600_000, 10**9


class WaitingPool(ClockedPool):
    """Endpoint e:1 has a limit, e:2 has none, so the pool always has room; each replica has a heartbeat."""

    def starts(self, limit: int, *replicas: str) -> None:
        self.publish(
            "e:1", "e:2", upper_per=1000, lower_per=1000, caps={"e:1": limit}, lease_ms=600_000,
            silence_ms=SILENCE_MS,
        )  # fmt: skip
        for name in replicas or "a":
            self.call("heartbeat", name, "{}", SILENCE_MS, "")

    def arrive(self, *names: str, by: str = "a", **fields: Any) -> None:
        self.call("admit", by, *(arrival(name, candidates="e:1", **fields) for name in names))

    def end(self, *names: str) -> list[str]:
        """End requests in one call; return the requests that the call has granted."""
        known = len(self.granted)
        parts = (part for name in names for part in (name, "completed", "", "", "", ""))
        self.call("settle", "a", *parts)
        return self.granted[known:]

    def place(self, name: str, endpoints: str = "e:1", by: str = "a") -> str:
        return bytes(self.call("place", by, name, "1", endpoints, "")[4]).decode().split()[0]

    def sweep(self) -> None:
        self.call("sweep", "a", *SWEEP)

    @property
    def granted(self) -> list[str]:
        log = (fields for _, fields in self.client.xrange(f"{self.prefix}log"))
        return [fields[b"request"].decode() for fields in log if fields[b"event"] == b"granted"]

    def waits(self, *names: str, **fields: Any) -> None:
        """Let requests arrive, of which the last is placed first, and so the first to be queued again."""
        known = len(self.granted)
        self.arrive(*names, **fields)
        for name in reversed(self.granted[known:]):
            assert self.place(name) == "queued"


@pytest.fixture
def waiting(client: redis.Redis, pool: str) -> WaitingPool:
    return WaitingPool(client, pool)


def test_a_free_slot_is_granted_to_the_oldest_request_alone(waiting: WaitingPool) -> None:
    waiting.starts(1)
    waiting.arrive("runs")
    waiting.waits("q0", "q1", "q2", "q3", "q4")
    last = "runs"
    for name in ("q0", "q1", "q2", "q3"):
        assert waiting.end(last) == [name]
        known = len(waiting.granted)
        waiting.sweep()
        assert waiting.place(name) == "placed"
        assert waiting.granted[known:] == []
        last = name
    assert waiting.end("q4", last) == []
    assert not waiting.client.exists(f"{waiting.prefix}blockers", f"{waiting.prefix}pending")


def test_each_of_the_slots_that_become_free_is_granted_at_once(waiting: WaitingPool) -> None:
    waiting.starts(3)
    waiting.arrive("r0", "r1", "r2")
    waiting.waits(*(f"q{number}" for number in range(8)))
    assert waiting.end("r0", "r1", "r2") == ["q0", "q1", "q2"]
    assert waiting.place("q2") == waiting.place("q0") == "placed"
    assert waiting.end("q0") == ["q3"]
    assert waiting.place("q1") == waiting.place("q3") == "placed"
    assert waiting.end("q1", "q2") == ["q4", "q5"]


def test_a_grant_that_ends_without_a_placement_leaves_its_slot_to_the_next_request(
    waiting: WaitingPool,
) -> None:
    waiting.starts(1)
    waiting.arrive("runs")
    waiting.waits("x0", "x1", flow="x")
    waiting.waits("y0", flow="y")
    assert waiting.end("runs") == ["x0"]
    assert waiting.end("x0") == ["y0"]
    known = len(waiting.granted)
    assert waiting.place("y0", "e:2") == "placed"  # the slot of e:1 stays free
    assert waiting.granted[known:] == ["x1"]


@pytest.mark.parametrize("at_once", [1, 3])
def test_flows_that_wait_for_one_endpoint_share_its_slots_by_weight(
    waiting: WaitingPool, at_once: int
) -> None:
    waiting.starts(at_once)
    running = [f"r{number}" for number in range(at_once)]
    waiting.arrive(*running)
    for flow, weight in (("x", 2.0), ("y", 1.0)):
        waiting.waits(*(f"{flow}{number}" for number in range(10)), flow=flow, weight=weight)
    order = ""
    for _ in range(9 // at_once):
        running = waiting.end(*running)
        assert len(running) == at_once
        assert [waiting.place(name) for name in running] == ["placed"] * at_once
        order += "".join(name[0] for name in running)
    assert order == "xyxxyxxyx"


def test_no_waiting_flow_is_passed_over_while_another_endpoint_serves_many(waiting: WaitingPool) -> None:
    waiting.starts(1)
    waiting.arrive("runs")
    for flow in ("x", "y"):
        waiting.waits(*(f"{flow}{number}" for number in range(4)), flow=flow)
    order, last = [], "runs"
    for turn in range(4):
        for number in range(9):  # raises the virtual time, so that a sweep gives both flows the same tag
            waiting.arrive(name := f"z{turn}{number}", flow="z")
            assert waiting.place(name, "e:2") == "placed"
        known = len(waiting.granted)
        waiting.sweep()
        assert [waiting.place(name) for name in waiting.granted[known:]] == ["queued"] * 2
        (last,) = waiting.end(last)
        assert waiting.place(last) == "placed"
        order.append(last)
    assert order == ["x0", "y0", "x1", "y1"]


def test_a_grant_of_a_silent_replica_holds_up_its_flow_until_the_sweep(waiting: WaitingPool) -> None:
    waiting.starts(1, "a", "b")
    waiting.arrive("runs")
    waiting.arrive("dead", by="b")
    assert waiting.place("dead", by="b") == "queued"
    waiting.waits("q0", "q1")
    assert waiting.end("runs") == ["dead"]
    waiting.sweep()
    assert waiting.granted[-1] == "dead"
    waiting.passes(SILENCE_MS)
    waiting.call("heartbeat", "a", "{}", SILENCE_MS, "")
    waiting.sweep()
    assert waiting.granted[-1] == "q0"
    assert waiting.place("q0") == "placed"
    assert waiting.end("q0") == ["q1"]


def test_requests_are_granted_one_by_one_once_they_may_use_another_endpoint(waiting: WaitingPool) -> None:
    waiting.starts(1)
    waiting.arrive("runs")
    waiting.waits("q0", "q1", "q2")
    known = len(waiting.granted)
    waiting.sweep()
    for name in ("q0", "q1", "q2"):
        assert waiting.granted[known:] == [name]
        known += 1
        assert waiting.place(name, "e:1,e:2") == "placed"


@pytest.mark.parametrize("lost", ["blockers", "pending", "blocked:1:e:1"])
def test_a_flow_that_waits_for_room_is_served_after_redis_lost_a_key(waiting: WaitingPool, lost: str) -> None:
    waiting.starts(1)
    waiting.arrive("runs")
    waiting.waits("q0", "q1")
    if lost == "pending":
        assert waiting.end("runs") == ["q0"]
    assert waiting.client.delete(waiting.prefix + lost)
    if lost != "pending":
        waiting.end("runs")
        waiting.sweep()
    assert waiting.granted[-1] in ("q0", "q1")
    assert waiting.place("q0") == "placed"
    waiting.end("q0")
    waiting.sweep()
    assert waiting.place("q1") == "placed"
