"""Fixtures of the script tests: a pool for each test, on a real Valkey and, where possible, on fakeredis."""

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import redis
from direct_calls import DirectPool
from fake_struct import with_struct
from script_backends import fakeredis, real_server
from script_fleet import OpenFleet, running

from picker_fleet.state import batching
from picker_fleet.state.scripts import load_library

_POOLS = itertools.count(1)


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the server on which the guarantees are tested. The tests fail if Valkey is not installed."""
    with real_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server.url


@pytest.fixture(scope="session")
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_url, socket_timeout=10) as client:
        yield client


@pytest.fixture
def direct(client: redis.Redis, pool: str) -> DirectPool:
    return DirectPool(client, pool)


@pytest.fixture(scope="session")
def fakeredis_url() -> Iterator[str]:
    with fakeredis() as url:
        yield url


@pytest.fixture(params=["valkey", "fakeredis"])
def redis_url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "fakeredis":  # a replica loads this library again if it has changed
        library = with_struct(load_library())
        monkeypatch.setattr(batching, "load_library", lambda: library)
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


@pytest.fixture
def pool() -> str:
    return f"pool-{next(_POOLS)}"


@pytest.fixture
def fleet(redis_url: str, pool: str) -> OpenFleet:
    """Opens a fleet on Valkey or fakeredis; takes the arguments of `script_fleet.running`."""
    return partial(running, redis_url, pool)


@pytest.fixture
def valkey_fleet(valkey_url: str, pool: str) -> OpenFleet:
    """Like the fixture `fleet`, but on the real server only, for features that fakeredis lacks."""
    return partial(running, valkey_url, pool)
