"""Faults in the INFO of a Redis server that make the server unfit for the shared state."""

import pytest

from picker_fleet.state.server_check import faults_in

FIT = {"maxmemory": "1000", "used_memory": "900", "maxmemory_policy": "noeviction", "role": "master"}


@pytest.mark.parametrize(
    ("differs", "kinds"),
    [
        ({}, set()),
        ({"maxmemory_policy": "volatile-lru"}, set()),  # volatile-lru evicts only keys with an expiry
        ({"maxmemory": "0", "used_memory": "5000"}, set()),
        ({"maxmemory_policy": "allkeys-random"}, {"evicts"}),
        ({"used_memory": "901"}, {"nearly_full"}),
        ({"role": "slave", "master_host": "h", "master_port": "1"}, {"read_only"}),
    ],
)
def test_a_redis_server_that_evicts_or_is_nearly_full_or_read_only_is_unfit(
    differs: dict[str, str], kinds: set[str]
) -> None:
    info = "# Memory\r\n" + "\r\n".join(f"{name}:{value}" for name, value in {**FIT, **differs}.items())
    assert faults_in(info).keys() == kinds
