"""Fixtures: the servers whose scripts the tests compare with the model."""

from collections.abc import Iterator

import pytest
import redis
from fakeredis import FakeRedis
from script_backends import real_server
from script_side import TEXT, ScriptSide

TIMEOUT_S = 10


@pytest.fixture(scope="module", params=["valkey", "fakeredis"])
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptSide]:
    """The scripts on a fresh server, a real Valkey or fakeredis."""
    server: str = request.param
    if server == "fakeredis":  # run fakeredis in this process, as TCP would double its time
        with FakeRedis(server_type="valkey", **TEXT) as client:
            yield ScriptSide(client, server)
        return
    with (
        real_server(tmp_path_factory.mktemp(server)) as valkey,
        redis.Redis.from_url(valkey.url, socket_timeout=TIMEOUT_S, **TEXT) as client,
    ):
        yield ScriptSide(client, server)
