"""Fixtures of the unit tests."""

import pytest
from extproc_client import choose_transport


@pytest.fixture(params=["grpcio", "native"])
def transport(request: pytest.FixtureRequest) -> str:
    """Runs a test once on each transport."""
    name = str(request.param)
    choose_transport(name)
    return name
