"""Replicas of two versions on one pool: counters that a version with fewer of them has written."""

import json
import re
from pathlib import Path

import pytest
import redis

from app.admission.published import published
from app.config import Settings
from app.state.scripts import load_library

DOUBLE = 8
ADDED = 3  # counters that came after the others
FIRST = [
    "born",
    "stock",
    "queued",
    "seq",
    "dispatches",
    "guards",
    "ended",
    "log_seq",
    "queued:0",
    "queued:1",
    "queued:2",
    "ready",
    "upper",
    "lower",
    "v:0",
    "v:1",
    "v:2",
    "band:0",
    "band:1",
    "band:2",
    "bv",
    "credit",
    "overdue",
    "rate",
    "refiling",
    "pressed",
]  # in their order


@pytest.mark.parametrize("missing", [1, ADDED])
def test_given_counters_of_an_older_version_when_a_newer_one_comes_then_it_goes_on_with_them(
    valkey_url: str, pool: str, missing: int
) -> None:
    # Given a pool in use, whose counters an older version has written last
    library = load_library()
    key = f"epp:{{{pool}}}:pool"
    with redis.Redis.from_url(valkey_url, socket_timeout=10) as server:
        server.function_load(library.source, replace=True)

        def call(name: str, *args: str) -> list[bytes]:
            reply = server.fcall(library.function(name), 1, key, *args)
            assert isinstance(reply, list)
            return reply

        settings = json.dumps(published(Settings(), {}))
        endpoint = ("10.0.0.1:8000", json.dumps({"labels": {}, "draining": False}))
        born = call("publish", "r-1", "c-1", "e-1", settings, *endpoint)[0]
        counters = server.hget(key, "counters")
        assert isinstance(counters, bytes)
        server.hset(key, "counters", counters[: -missing * DOUBLE])
        # When a replica of the newer version beats and publishes
        beat = call("heartbeat", "r-2", "{}", "5000")
        call("publish", "r-2", "c-2", "e-1", settings, *endpoint)
        # Then the pool lives on as it was, with all of its counters
        assert beat[0] == born
        assert len(server.hget(key, "counters") or b"") == len(counters)


def test_the_page_of_upgrades_tells_of_the_layouts_in_use() -> None:
    # Given the packed layouts in the scripts: to change one decides which versions may share a pool
    root = Path(__file__).parents[2]
    pool, record = ((root / "lua" / "lib" / f"{name}.lua").read_text() for name in ("pool", "record"))
    listed = re.search(r"local COUNTERS = \{(.*?)\}", pool, re.DOTALL)
    layouts = re.search(r"local WAITING, RUNNING = '(\w+)', '(\w+)'", record)
    assert listed is not None
    assert layouts is not None
    counters = re.findall(r"'([\w:]+)'", listed[1])
    # When they are looked for on the page
    page = (root / "docs" / "upgrading.md").read_text(encoding="utf-8")
    # Then it names them, and what a version of 26 counters writes still begins the list
    assert f"| {len(counters)} doubles |" in page
    assert f"`{layouts[1]}`, `{layouts[2]}`" in page
    assert counters[:26] == FIRST
