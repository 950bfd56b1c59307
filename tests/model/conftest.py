"""The servers that the model is compared on."""

from collections.abc import Iterator

import pytest
from script_backends import fakeredis, url_of, valkey
from script_side import ScriptSide


@pytest.fixture(scope="module", params=["valkey", "fakeredis"])
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptSide]:
    """The scripts on a server of their own, a real Valkey or fakeredis."""
    server: str = request.param
    with fakeredis() if server == "fakeredis" else valkey(tmp_path_factory.mktemp(server)) as port:
        scripts = ScriptSide(url_of(port), server)
        try:
            yield scripts
        finally:
            scripts.close()
