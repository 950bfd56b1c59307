"""What the fault tests share: Debian's Redis, with a pool for each test, and a proxy before it."""

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
    """Debian's Redis. Where it is missing, the tests fail."""
    with redis_server(tmp_path_factory.mktemp("redis7"), binary=debian("redis-server")) as server:
        yield server


@pytest.fixture
async def between(redis7: Server) -> AsyncIterator[Proxy]:
    """A proxy to Debian's Redis, which can fail."""
    async with proxy(redis7.port) as it:
        yield it


@pytest.fixture
def pool() -> str:
    return f"faults-{next(_POOLS)}"


@pytest.fixture
async def patient(redis7: Server, between: Proxy, pool: str) -> AsyncIterator[Fleet]:
    """One replica, whose Redis is behind the proxy; it waits long before it gives it up."""
    through = {"a": between.url}
    async with running(redis7.url, pool, "a", upper_per=8, through=through, silence_s=HANGS_S) as it:
        yield it
