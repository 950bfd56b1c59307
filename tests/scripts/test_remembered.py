"""What a library remembers from call to call, while another version of it changes the same pool."""

import json
from collections.abc import Iterator

import pytest
import redis
from script_fleet import SETTINGS
from set_clock import clock_of

from picker_fleet.state.scripts import Library, load_library
from picker_fleet.state.store import pack_arrival

START_MS = 1_800_000_000_000
OPEN = json.dumps({"labels": {}, "draining": False})


class Server:
    """A server with two versions of the library, `one` and `other`, and one pool."""

    def __init__(self, client: "redis.Redis", pool: str) -> None:
        self._client = client
        self._prefix = f"epp:{{{pool}}}:"
        self._clock = f"clock:{pool}"
        self.one, self.other = (load_library(clock_of(self._clock, name)) for name in ("one", "other"))
        assert self.one.version != self.other.version
        for library in (self.one, self.other):
            client.function_load(library.source, replace=True)
        self.at_ms(0)

    def at_ms(self, since_start_ms: int) -> None:
        self._client.set(self._clock, (START_MS + since_start_ms) * 1000)

    def call(self, library: Library, name: str, *args: str | int | bytes) -> list[bytes]:
        reply = self._client.fcall(library.function(name), 1, f"{self._prefix}pool", *args)
        assert isinstance(reply, list)
        return reply

    def publish(self, library: Library, version: str, *addresses: str, upper: float = 100) -> None:
        settings = json.dumps({**SETTINGS, "log_max": 0, "upper_per": upper, "lower_per": upper})
        endpoints = (part for address in addresses for part in (address, OPEN))
        self.call(library, "publish", "r", "c", version, settings, *endpoints)

    def admit(self, library: Library, request_id: str, *, ttl_ms: int = 60_000) -> list[str]:
        request = pack_arrival((request_id, "1", "flow", "w", "m", "*"), (1, 1, 1, ttl_ms, 0, 3, 0, 0))
        return self.call(library, "admit", "r", request)[4].decode().split()

    def settle(self, library: Library, request_id: str) -> None:
        assert self.call(library, "settle", "r", request_id, "completed", "", "")[4] == b"settled m"

    def loads(self) -> dict[bytes, float]:
        return dict(self._client.zrange(f"{self._prefix}load", 0, -1, withscores=True))

    def requests(self) -> set[bytes]:
        return set(self._client.hkeys(f"{self._prefix}requests"))


@pytest.fixture
def server(valkey_url: str, pool: str) -> Iterator[Server]:
    with redis.Redis.from_url(valkey_url, socket_timeout=10) as client:
        yield Server(client, pool)


def test_nothing_goes_to_an_endpoint_that_another_version_has_replaced(
    server: Server,
) -> None:
    # Given a version that has placed requests, and so knows all endpoints and their loads
    server.publish(server.one, "1", "a:1", "b:1")
    for name in ("x", "y"):
        assert server.admit(server.one, name)[0] == "placed"
        server.settle(server.one, name)
    # When another one puts an endpoint in the place of one
    server.publish(server.other, "2", "a:1", "c:1")
    # Then the first sends requests to the new one, and none to the one that has left
    went = {server.admit(server.one, f"after-{number}")[1] for number in range(6)}
    assert went == {"a:1,c:1", "c:1,a:1"}
    assert server.loads() == {b"a:1": 3, b"c:1": 3}


def test_an_endpoint_added_under_the_same_version_is_picked(server: Server) -> None:
    # Given a version that knows all endpoints
    server.publish(server.one, "1", "a:1")
    assert server.admit(server.one, "x")[1] == "a:1"
    # When another endpoint is published
    server.publish(server.one, "1", "a:1", "b:1")
    # Then the next request goes there
    assert server.admit(server.one, "y")[1] == "b:1,a:1"


def test_requests_of_one_workload_by_two_versions_are_counted_once_each(server: Server) -> None:
    server.publish(server.one, "1", "a:1", "b:1")
    # When both let in and end requests, in turns and twice in a row
    for number in range(10):
        server.admit(server.one, f"one-{number}")
        server.admit(server.other, f"other-{number}")
        server.settle(server.other, f"one-{number}")
        if number % 2:
            server.settle(server.one, f"other-{number}")
    # Then the workload's counts are those of all, and so are the loads
    row = server.call(server.one, "view_workload", "w")[1].split(b"\x1f")
    assert [float(figure) for figure in row[1:4]] == [20, 5, 20]  # in all, active, let in
    assert sum(server.loads().values()) == 5


def test_either_version_expires_a_request_that_the_other_queued(
    server: Server,
) -> None:
    # Given a version that has found nothing that time will bring, and one in flight that leaves no room
    server.publish(server.one, "1", "a:1", upper=1)
    assert server.admit(server.one, "runs")[0] == "placed"
    # When another one queues a request, whose time passes
    assert server.admit(server.other, "waits", ttl_ms=40) == ["queued", "40"]
    server.at_ms(41)
    # Then the first ends it with the next thing that it is asked
    assert server.admit(server.one, "runs")[-1] == "adopted"
    assert server.requests() == {b"runs"}


def test_a_timer_before_the_remembered_one_is_not_missed(server: Server) -> None:
    # Given a request that waits, whose timer is the earliest that is known of
    server.publish(server.one, "1", "a:1", upper=1)
    server.admit(server.one, "runs")
    assert server.admit(server.one, "patient", ttl_ms=60_000)[0] == "queued"
    # When one with less time comes, and that time passes
    assert server.admit(server.one, "hasty", ttl_ms=40)[0] == "queued"
    server.at_ms(41)
    server.admit(server.one, "runs")
    # Then it is gone, and the other one waits
    assert server.requests() == {b"runs", b"patient"}


def test_loads_and_counts_stay_exact_with_more_names_than_are_kept(server: Server) -> None:
    server.publish(server.one, "1", "a:1", "b:1")
    # When requests may go to endpoints that nobody has heard of, each to others
    for number in range(30):
        strangers = ",".join(f"10.0.{number}.{last}:1" for last in range(50))
        request = pack_arrival(
            (f"r-{number}", "1", "f", f"w-{number}", "m", f"{strangers},a:1"), (1, 1, 1, 60_000, 0, 3, 0, 0)
        )
        assert server.call(server.one, "admit", "r", request)[4].startswith(b"placed a:1 ")
    # Then those that are known have what they have
    assert server.loads() == {b"a:1": 30, b"b:1": 0}
    for number in range(30):
        server.settle(server.one, f"r-{number}")
    assert server.loads() == {b"a:1": 0, b"b:1": 0}


def test_the_next_call_follows_a_setting_that_another_version_changed(server: Server) -> None:
    # Given a version that knows the settings, with nothing that counts about to change
    server.publish(server.one, "1", "a:1", "b:1")
    for name in ("x", "y"):
        server.admit(server.one, name)
        server.settle(server.one, name)
    for fallbacks in (0, 1):
        # When another one changes how many endpoints a request is given
        server.call(server.other, "tune", "r", json.dumps({"fallbacks": fallbacks}), "{}")
        # Then the first one goes by it with its next request
        assert len(server.admit(server.one, f"r{fallbacks}")[1].split(",")) == 1 + fallbacks
