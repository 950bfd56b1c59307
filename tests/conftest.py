"""Settings and fixtures of all tests."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from redis_servers import Server, redis_server

# Hypothesis's deadlines and its checks of speed would measure the machine, not the code.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")

gc.disable()  # until collection ends: each run during imports would scan all modules again


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Server]:
    """A Valkey server of this test alone: the test may kill, stop and restart it."""
    with redis_server(tmp_path / "valkey") as server:
        yield server
