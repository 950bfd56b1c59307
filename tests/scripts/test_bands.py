"""Bands of any priority in the scripts: how many there can be, and when scripts create and collect a band."""

from collections.abc import Iterable
from typing import Any

import pytest
from direct_calls import DirectPool

from picker_fleet.state import schema

OTHERS = 61  # maximum dynamic bands, in addition to the three named bands


def lengths_of(pool: DirectPool) -> dict[int, int]:
    """Queue length by priority, for each band in use, highest priority first."""
    bands = pool.call("state", 60_000)[10]
    return dict(zip(bands[::5], bands[3::5], strict=True))


def bytes_of(pool: DirectPool) -> dict[int, int]:
    """Bytes of the waiting requests' bodies by priority, for each band whose waiting requests have bodies."""
    bands = pool.call("state", 60_000)[10]
    return {each: int(n) for each, n in zip(bands[::5], bands[4::5], strict=True) if int(n)}


def end_all(pool: DirectPool) -> None:
    """End all requests, also requests that are granted meanwhile."""
    while requests := pool.requests():
        for request in requests:
            pool.settle(request.decode())


def queue(pool: DirectPool, priorities: Iterable[int]) -> None:
    for priority in priorities:
        assert pool.admit(f"of {priority}", priority=priority)[0] == "queued"


def sweep(pool: DirectPool) -> None:
    while pool.call("sweep", "a", 0, 60_000, 600_000, 600_000)[7] == 1:
        pass


@pytest.fixture
def full(direct: DirectPool) -> DirectPool:
    """A pool whose stock is full, so that every further request waits."""
    fill(direct)
    return direct


def fill(pool: DirectPool, **of_request: Any) -> None:
    pool.publish("a:1", upper_per=1)
    pool.call("heartbeat", "a", "{}", 60_000)
    pool.admit("runs", **of_request)


def test_once_64_bands_exist_a_new_priority_waits_in_the_nearest_band(full: DirectPool) -> None:
    priorities = range(1000, 1000 + 10 * OTHERS, 10)
    queue(full, priorities)
    assert set(priorities) < lengths_of(full).keys()
    # Requests of further priorities wait in the nearest lower band, or in the lowest band.
    queue(full, (1005, 2**31 - 1, 5, -(2**31)))
    lengths = lengths_of(full)
    assert len(lengths) == OTHERS + 3
    assert {each: count for each, count in lengths.items() if count > 1} == {1600: 2, 1000: 2}
    assert (lengths[0], lengths[-10]) == (1, 1)
    assert full.settle("runs").startswith("settled")
    end_all(full)
    sweep(full)
    assert list(lengths_of(full)) == [10, 0, -10]
    full.admit("again", priority=1005)
    assert 1005 in lengths_of(full)


def test_a_newly_loaded_library_reads_the_bands_from_redis(full: DirectPool) -> None:
    queue(full, (7, 7 - 10))
    # A newly loaded library has no cached state, as after a restart of the server.
    full.load(full.library)
    assert lengths_of(full) == {10: 0, 7: 1, 0: 0, -3: 1, -10: 0}
    full.settle("runs")
    assert lengths_of(full)[7] == 0


def counted_anew(pool: DirectPool) -> dict[int, int]:
    """Bytes of the waiting requests' bodies, read from Redis by a newly loaded library."""
    pool.load(pool.library)
    return bytes_of(pool)


def test_counts_of_waiting_body_bytes_survive_a_server_restart(full: DirectPool) -> None:
    for name, priority, size in (("a", 0, 900), ("b", 0, 50), ("c", 7, 2**40), ("d", -10, 0)):
        full.admit(name, priority=priority, body_bytes=size, candidates="a:1")
    # A record stores a body's size in four bytes, so larger sizes are capped.
    assert counted_anew(full) == {0: 950, 7: schema.MOST_BYTES}
    # The body of a granted request does not count as waiting.
    full.settle("runs")
    assert full.client.hgetall(f"{full.prefix}inbox:a") == {b"c": b"granted"}
    assert counted_anew(full) == {0: 950}
    end_all(full)
    assert counted_anew(full) == {}
    assert full.client.hget(f"{full.prefix}pool", "waiting_bytes") == b""
