"""State that a Lua library caches between calls, while another version of the library changes the pool."""

import json

import pytest
import redis
from direct_calls import ClockedPool


class Versions(ClockedPool):
    """A pool that two versions of the library use: the version `library` and the version `other`."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        super().__init__(client, pool)
        self.other = self.load(self.named_library("other"))
        assert self.library.version != self.other.version

    def live_through(self, *names: str) -> None:
        """Place and end requests, so that the library caches all endpoints and their loads."""
        self.publish("a:1", "b:1", version="1", upper_per=100)
        for name in names:
            assert self.admit(name)[0] == "placed"
            self.settle(name)


@pytest.fixture
def server(client: redis.Redis, pool: str) -> Versions:
    return Versions(client, pool)


def test_no_request_goes_to_an_endpoint_that_another_library_version_has_replaced(server: Versions) -> None:
    # The first version of the Lua library has placed requests, and so caches all endpoints and their loads.
    server.live_through("x", "y")
    server.publish("a:1", "c:1", version="2", library=server.other, upper_per=100)
    assert {server.admit(f"after-{number}")[1] for number in range(6)} == {"a:1,c:1", "c:1,a:1"}
    assert server.loads() == {"a:1": 3, "c:1": 3}


def test_an_endpoint_added_under_the_same_version_of_the_endpoints_is_picked(server: Versions) -> None:
    # The first admission makes the library cache all endpoints.
    server.publish("a:1", version="1", upper_per=100)
    assert server.admit("x")[1] == "a:1"
    server.publish("a:1", "b:1", version="1", upper_per=100)
    assert server.admit("y")[1] == "b:1,a:1"


def test_a_workload_counts_each_request_once_although_two_library_versions_serve_it(server: Versions) -> None:
    server.publish("a:1", "b:1", version="1", upper_per=100)
    for number in range(10):
        server.admit(f"one-{number}")
        server.admit(f"other-{number}", library=server.other)
        server.settle(f"one-{number}", server.other)
        if number % 2:
            server.settle(f"other-{number}")
    row = server.call("view_workload", "w")[1].split(b"\x1f")
    assert [float(figure) for figure in row[1:4]] == [20, 5, 20]  # total, active and dispatched requests
    assert sum(server.loads().values()) == 5


def test_either_library_version_expires_a_request_that_the_other_version_queued(server: Versions) -> None:
    # One library version has cached that no timer is pending; request `runs` fills the pool.
    server.publish("a:1", version="1", upper_per=1)
    assert server.admit("runs")[0] == "placed"
    assert server.admit("waits", library=server.other, ttl_ms=40) == ["queued", "40"]
    server.passes(41)
    assert server.admit("runs")[-1] == "adopted"
    assert server.requests() == {b"runs"}


def test_endpoints_loads_stay_exact_with_more_endpoints_than_the_library_caches(server: Versions) -> None:
    server.publish("a:1", "b:1", version="1", upper_per=100)
    for number in range(30):
        strangers = ",".join(f"10.0.{number}.{last}:1" for last in range(50))
        answer = server.admit(f"r-{number}", flow="f", workload=f"w-{number}", candidates=f"{strangers},a:1")
        assert answer[:2] == ["placed", "a:1"]
    assert server.loads() == {"a:1": 30, "b:1": 0}
    for number in range(30):
        server.settle(f"r-{number}")
    assert server.loads() == {"a:1": 0, "b:1": 0}


def test_the_next_call_applies_a_setting_that_another_library_version_changed(server: Versions) -> None:
    # One library version has cached the settings, and counts do not change, which would refresh the cache.
    server.live_through("x", "y")
    for fallbacks in (0, 1):
        server.call("tune", "r", json.dumps({"fallbacks": fallbacks}), "{}", library=server.other)
        assert len(server.admit(f"r{fallbacks}")[1].split(",")) == 1 + fallbacks


def test_an_endpoint_is_picked_again_after_its_down_mark_is_removed(server: Versions) -> None:
    names = [f"{letter}:1" for letter in "abcdefgh"]
    server.publish(*names, version="1", upper_per=1, lower_per=1)
    server.call("heartbeat", "a", "{}", 60_000)
    running = {server.admit(f"r{number}")[1].split(",")[0]: f"r{number}" for number in range(8)}
    assert server.admit("waits")[0] == "queued"
    # Requests end on endpoint a:1 and on b:1, which is down: the waiting request goes to a:1.
    server.call("mark_endpoint", "a", "b:1", "down", "1")
    for address in ("a:1", "b:1"):
        server.settle(running.pop(address))
    assert server.loads()["a:1"] == 1  # request `waits` runs on a:1
    for name in (*running.values(), "waits"):
        server.settle(name)
    server.call("mark_endpoint", "a", "b:1", "down", "")
    for number in range(8):
        assert server.admit(f"after-{number}")[0] == "placed"
    assert server.loads() == dict.fromkeys(names, 1)
