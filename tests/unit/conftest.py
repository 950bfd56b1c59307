"""Fixtures of the unit tests."""

import logging
from collections.abc import Iterator

import pytest
from extproc_client import choose_transport
from source_reports import Lines


@pytest.fixture(params=["grpcio", "native"])
def transport(request: pytest.FixtureRequest) -> str:
    """Runs the test once on each gRPC transport."""
    name = str(request.param)
    choose_transport(name)
    return name


@pytest.fixture
def log() -> Iterator[Lines]:
    """The log lines of discovery, the endpoints and Kubernetes."""
    lines = Lines()
    logger = logging.getLogger()
    logger.addHandler(lines)
    yield lines
    logger.removeHandler(lines)
