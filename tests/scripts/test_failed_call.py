"""What a call had changed in memory when it failed is not taken for the shared state by the next one."""

import json

import pytest
import redis
from script_fleet import SETTINGS

from picker_fleet.state.arrival import pack
from picker_fleet.state.keys import Keys
from picker_fleet.state.scripts import load_library

SILENCE_MS = 60_000


def test_given_a_call_that_fails_halfway_when_another_comes_then_it_sees_what_redis_holds(
    valkey_url: str, pool: str
) -> None:
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
            pack((id, "1", "flow", "w", "m", "*"), (1, 1, 1, 60_000, 0, 3, 0, 0)) for id in ("a", "b")
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
