"""Fixtures of the fault tests, namely Debian's Redis, a pool for each test, and a proxy in front of Redis."""

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
from fault_load import HANGS_S
from proxy import Proxy, proxy
from redis_servers import Server, debian, redis_server
from script_fleet import Fleet, running

_POOLS = itertools.count(1)


@pytest.fixture(scope="session")
def redis7(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Debian's Redis. Tests that use Debian's Redis fail if it is not installed."""
    with redis_server(tmp_path_factory.mktemp("redis7"), binary=debian("redis-server")) as server:
        yield server


@pytest.fixture
async def between(redis7: Server) -> AsyncIterator[Proxy]:
    """A proxy that injects faults in front of Debian's Redis."""
    async with proxy(redis7.port) as it:
        yield it


@pytest.fixture
def pool() -> str:
    return f"faults-{next(_POOLS)}"


@pytest.fixture
async def patient(redis7: Server, between: Proxy, pool: str) -> AsyncIterator[Fleet]:
    """One replica that reaches Redis through the proxy and tolerates a silence of HANGS_S."""
    through = {"a": between.url}
    async with running(redis7.url, pool, "a", upper_per=8, through=through, silence_s=HANGS_S) as it:
        yield it
