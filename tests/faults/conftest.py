"""Servers of the fault tests, each started once, and pools of their own for the tests."""

import itertools
from collections.abc import Iterator

import pytest
from redis_servers import Server, debian, running

_POOLS = itertools.count(1)


@pytest.fixture(scope="session")
def redis7(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Debian's Redis. Where it is missing, the tests fail."""
    with running(debian("redis-server"), tmp_path_factory.mktemp("redis7")) as server:
        yield server


@pytest.fixture
def pool() -> str:
    return f"faults-{next(_POOLS)}"
