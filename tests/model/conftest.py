"""Fixture: the scripts that the tests compare with the model."""

from collections.abc import Iterator

import pytest
import redis
from redis_servers import redis_server
from script_side import TEXT, ScriptSide

TIMEOUT_S = 10


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptSide]:
    """The scripts on a Redis server of their own, which the tests may flush."""
    with (
        redis_server(tmp_path_factory.mktemp("valkey")) as server,
        redis.Redis.from_url(server.url, socket_timeout=TIMEOUT_S, **TEXT) as client,
    ):
        yield ScriptSide(client)
