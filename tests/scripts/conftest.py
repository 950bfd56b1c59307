"""Fixtures of the script tests: a real Valkey, and a pool for each test."""

import itertools
from collections.abc import Iterator
from functools import partial

import pytest
import redis
from direct_calls import DirectPool
from redis_servers import Server, redis_server
from script_fleet import OpenFleet, running

from picker_fleet.scheduling.chooser import EndpointChooser

_POOLS = itertools.count(1)


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the server on which the guarantees are tested. The tests fail if Valkey is not installed."""
    with redis_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server.url


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A separate server, for tests that change the server's settings."""
    with redis_server(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture(scope="session")
def client(valkey_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(valkey_url, socket_timeout=10) as client:
        yield client


@pytest.fixture
def direct(client: redis.Redis, pool: str) -> DirectPool:
    return DirectPool(client, pool)


@pytest.fixture
def splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes every request ask for a prefill endpoint, and accept any."""
    choose = EndpointChooser.choose
    monkeypatch.setattr(
        EndpointChooser, "choose", lambda chooser, request: choose(chooser, request)._replace(prefill="*")
    )


@pytest.fixture
def pool() -> str:
    return f"pool-{next(_POOLS)}"


@pytest.fixture
def fleet(valkey_url: str, pool: str) -> OpenFleet:
    """Opens a fleet on Valkey; takes the arguments of `script_fleet.running`."""
    return partial(running, valkey_url, pool)
