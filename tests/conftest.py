"""What every test shares."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from redis_servers import Server, redis_server

# How fast examples come says something about the machine, not about the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

gc.disable()  # until all is imported, which the garbage collector would scan again and again


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Server]:
    """A Valkey of the test's own, which it may kill, stop and start again."""
    with redis_server(tmp_path / "valkey") as server:
        yield server
