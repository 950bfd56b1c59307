"""Heartbeats report the live replicas and the publishing replica, with few reads of Redis."""

import pytest
import redis
from direct_calls import START_MS, ClockedPool

SILENCE_MS = 5000
NAMES = [f"r{number:02d}" for number in range(50)]


class Beating(ClockedPool):
    """A pool whose replicas send heartbeats."""

    def beat(self, name: str, info: str = "") -> tuple[int, int]:
        """Send a heartbeat; return whether replica `name` has to publish, and how many replicas are live."""
        reply = self.call("heartbeat", name, info, SILENCE_MS, "")
        return reply[5], reply[6]


@pytest.fixture
def beating(client: redis.Redis, pool: str) -> Beating:
    beating = Beating(client, pool)
    beating.publish("e:1", silence_ms=SILENCE_MS)
    return beating


def test_heartbeats_of_an_unchanged_fleet_read_the_other_replicas_once_a_second(beating: Beating) -> None:
    for name in NAMES:
        beating.beat(name)
    beating.passes(1000)
    beating.client.config_resetstat()
    for name in NAMES:
        beating.passes(10)
        assert beating.beat(name) == (name == NAMES[0], len(NAMES))
    assert beating.client.info("commandstats")["cmdstat_zrangebyscore"]["calls"] == 1


def test_the_live_replica_with_the_lowest_name_publishes(beating: Beating) -> None:
    for name in ("b", "c", "d"):
        beating.beat(name)
    assert [beating.beat(name) for name in "bcd"] == [(1, 3), (0, 3), (0, 3)]
    # A replica leaves, as if it had called Store.leave.
    beating.client.zadd(f"{beating.prefix}replicas", {"b": 0}, xx=True)
    assert [beating.beat(name) for name in "cd"] == [(1, 2), (0, 2)]
    # A replica joins while another replica falls silent, so the number of replicas stays the same.
    beating.passes(SILENCE_MS - 1)
    beating.beat("d")
    beating.passes(1)
    assert beating.beat("a") == (1, 2)
    assert beating.beat("d") == (0, 2)


def test_a_replica_registered_by_another_library_is_counted_within_a_second(beating: Beating) -> None:
    beating.beat("b")
    beating.beat("c")
    # Another library version replaces replica `c` by `a`: the number of replicas stays the same.
    beating.client.zrem(f"{beating.prefix}replicas", "c")
    beating.client.zadd(f"{beating.prefix}replicas", {"a": START_MS})
    beating.passes(1000)
    assert beating.beat("b") == (0, 2)


def test_a_heartbeat_without_replica_info_keeps_the_stored_info(beating: Beating) -> None:
    beating.beat("a", '{"host":"h"}')
    beating.beat("a")
    assert beating.call("view_replicas", 10)[3] == b'{"host":"h"}'
    assert beating.call("state", SILENCE_MS)[11] == [b"a", b'{"host":"h"}']
