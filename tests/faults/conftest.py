"""What the fault tests share: Debian's Redis, with a pool for each test, and a proxy before it."""

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
from proxy import Proxy, proxy
from redis_servers import Server, debian, redis_server

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
