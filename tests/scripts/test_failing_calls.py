"""A script that fails at any of its calls to Redis, and is repeated, does what it would have done at once."""

import json
from collections.abc import Iterator

import pytest
import redis
from failing_calls import FailingLibrary
from script_fleet import SETTINGS

from picker_fleet.state.keys import Keys
from picker_fleet.state.scripts import load_library
from picker_fleet.state.store import pack_arrival

START_MS = 1_800_000_000_000
OPEN = json.dumps({"labels": {}, "draining": False})
ENDPOINTS = tuple(part for number in (1, 2, 3) for part in (f"e{number}:1", OPEN))
TOKEN = "\t".join(("lost", "1", "1", "1", "w", "3", "m", "e2:1", "1"))


def arrival(
    name: str, *, flow: str = "flow", band: int = 1, cost: float = 1, ttl_ms: int = 60_000, limit: int = 0
) -> bytes:
    return pack_arrival((name, "1", flow, "w-" + flow, "m", "*"), (band, 1, cost, ttl_ms, 0, 3, limit, 0))


def settings(**changed: object) -> str:
    return json.dumps({**SETTINGS, "upper_per": 2, "lower_per": 2, "total_capacity": 9, **changed})


CALLS: dict[str, tuple[str | int | float | bytes, ...]] = {
    "admit": ("a", arrival("new"), arrival("other", flow="fresh"), arrival("urgent", band=0), arrival("q1")),
    "place": ("a", "q1", "1", "*", "g2", "1", "e1:1=0.5,e2:1=0.4"),
    "settle": ("a", "p1", "completed", "3", "7", "p2", "client_gone", "", "", "q2", "completed", "", ""),
    "cancel": ("a", "p3", "1", "withdrawn", "q3", "1", "cancelled"),
    "renew": ("a", "p1", "", "e3:1", "", 0, "gone", "", "", TOKEN, 0, "p2", "1", "", "", 0),
    "tombstone": ("a", "x", 0, "y", 0),
    "mark_endpoint": ("a", "e1:1", "drained", "1"),
    "evict": ("a", "q2"),
    "heartbeat": ("a", "{}", 5000, "fresh old"),
    "publish": ("a", "c2", "e2", settings(fairness="none"), "e1:1", OPEN, "e4:1", OPEN),
    "tune": ("a", '{"upper_per": 3, "lower_per": 3}', '{"x": 1}'),
    "sweep": ("a", 0, 3000, 60_000, 2000),
    "next sweep": ("a", 0, 3000, 60_000, 2000),
}


@pytest.fixture(scope="module")
def server(valkey_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_url, socket_timeout=10) as client:
        yield client


def prepare(library: FailingLibrary, ordering: str) -> None:
    """A pool with what a call may come upon: placed, granted, waiting, overdue requests, a silent replica."""
    library.set_clock(START_MS)
    library.call("publish", "a", "c1", "e1", settings(ordering=ordering, silence_ms=5000), *ENDPOINTS)
    for replica in ("a", "silent"):
        library.call("heartbeat", replica, "{}", 5000, f"key-{replica}")
    placed = [arrival(f"p{number}", flow=f"f{number % 2}", limit=number % 2) for number in range(1, 7)]
    library.call("admit", "a", *placed)
    waiting = [arrival(f"g{number}", flow="f1", limit=1) for number in (1, 2)]
    waiting += [
        arrival(f"q{number}", flow=f"f{number % 3}", ttl_ms=4000, cost=1 + number % 2)
        for number in range(1, 6)
    ]
    library.call("admit", "a", *waiting, arrival("g3", flow="f7"), arrival("sheddable", band=2, flow="f8"))
    library.call("admit", "silent", arrival("orphan", flow="f5"), arrival("late", flow="f6", ttl_ms=1000))
    library.set_clock(START_MS + 3000)
    library.call("heartbeat", "a", "{}", 5000, "key-a")
    library.call("tombstone", "a", "old", 0)
    library.call("settle", "a", "p5", "completed", "5", "", "p6", "completed", "2", "9")
    library.set_clock(START_MS + 3500)


@pytest.mark.parametrize("ordering", ["fcfs", "workload-aware"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_fails_anywhere_and_is_repeated_leaves_the_same_state_as_one_that_succeeds(
    server: redis.Redis, pool: str, name: str, ordering: str
) -> None:
    # Given what an undisturbed call makes of a pool
    library = FailingLibrary(server, f"epp:{{{pool}}}:pool")
    prepare(library, ordering)
    if name == "next sweep":
        library.set_clock(START_MS + 90_000)
    script, args = name.split()[-1], CALLS[name]
    saved, at_first = library.save(), library.everything()
    library.restore(saved)
    library.fail_at(0)
    library.call(script, *args)
    calls, due = library.calls_made(), library.everything()
    failures = 0
    for number in range(1, calls + 1):
        # When one of its calls to Redis fails
        library.restore(saved)
        library.fail_at(number)
        try:
            library.call(script, *args)
        except redis.ResponseError:
            # Then it has left no trace
            assert library.everything() == at_first, number
            failures += 1
            library.call(script, *args)
        # And once it has been repeated, by itself where it failed at its last writes, all is as it should be
        assert library.everything() == due, number
    assert failures > 0


SILENCE_MS = 60_000


def test_the_call_after_one_that_failed_halfway_sees_what_redis_has(valkey_url: str, pool: str) -> None:
    # Given two requests in flight
    settings = json.dumps({**SETTINGS, "upper_per": 2, "lower_per": 2})
    library, keys = load_library(), Keys.of(pool)
    with redis.Redis.from_url(valkey_url, socket_timeout=10) as server:
        server.function_load(library.source, replace=True)

        def call(name: str, *args: str | int | bytes) -> list[bytes]:
            reply = server.fcall(library.function(name), 1, keys.pool, *args)
            assert isinstance(reply, list)
            return reply

        call("publish", "r", "1", "1", settings, "e", '{"labels":{},"draining":false}')
        arrivals = [
            pack_arrival((id, "1", "flow", "w", "m", "*"), (1, 1, 1, 60_000, 0, 3, 0, 0)) for id in ("a", "b")
        ]
        assert [reply.split()[0] for reply in call("admit", "r", *arrivals)[4:]] == [b"placed", b"placed"]
        workload = server.hget(f"{keys.prefix}workloads", "w")
        # When a call ends the first of them, and fails at the second before it has written anything
        with pytest.raises(redis.ResponseError):
            call("settle", "r", "a", "completed", "", "", "b", "completed", "", "no number")
        # Then both are still in flight for the next call, and ending them takes all away
        assert float(call("state", SILENCE_MS)[2]) == 2
        assert call("settle", "r", "a", "completed", "", "", "b", "completed", "", "")[4:] == [
            b"settled m",
            b"settled m",
        ]
        assert float(call("state", SILENCE_MS)[2]) == 0
        assert server.hget(f"{keys.prefix}workloads", "w") != workload
        assert server.zcard(f"{keys.prefix}inflight") == 0
