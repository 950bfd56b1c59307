"""Replicas of two versions on one pool: counters that a version with fewer of them has written."""

import json
from pathlib import Path

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from script_fleet import SETTINGS

from picker_fleet.config import Settings
from picker_fleet.replica.live_config import shared_settings
from picker_fleet.state import schema
from picker_fleet.state.scripts import Library, load_library
from picker_fleet.state.store import pack_arrival

DOUBLE = 8
ADDED = 5  # counters that came after the others
FIRST = [
    "epoch",
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
def test_a_newer_version_continues_with_the_counters_of_an_older_one(
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

        settings = json.dumps(shared_settings(Settings(), {}))
        endpoint = ("10.0.0.1:8000", json.dumps({"labels": {}, "draining": False}))
        epoch = call("publish", "r-1", "c-1", "e-1", settings, *endpoint)[0]
        counters = server.hget(key, "counters")
        assert isinstance(counters, bytes)
        server.hset(key, "counters", counters[: -missing * DOUBLE])
        # When a replica of the newer version beats and publishes
        beat = call("heartbeat", "r-2", "{}", "5000")
        call("publish", "r-2", "c-2", "e-1", settings, *endpoint)
        # Then the pool lives on as it was, with all of its counters
        assert beat[0] == epoch
        assert len(server.hget(key, "counters") or b"") == len(counters)


def test_the_page_of_upgrades_names_the_layouts_in_use() -> None:
    # Given the packed layouts: to change one decides which versions may share a pool
    page = Path(__file__).parents[2] / "docs" / "upgrading.md"
    # When they are looked for on the page
    text = page.read_text(encoding="utf-8")
    # Then it names them, and what a version of 26 counters writes still begins the list
    assert f"| {len(schema.COUNTERS)} doubles |" in text
    assert f"`{schema.WAITING_LAYOUT}`, `{schema.RUNNING_LAYOUT}`" in text
    assert list(schema.COUNTERS[:26]) == FIRST


FORMER = Path(__file__).parents[1] / "data" / "library-2e1bd23.lua"
ENDPOINTS = ("a:1", "b:1", "c:1")
TOKEN = "\t".join(("flow", "1", "1", "1", "w", "3", "m", "{}", "0"))


class Mixed:
    """A pool on which a replica of each version is at work, `0` of the former and `1` of the present one."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        source = FORMER.read_text(encoding="utf-8")
        former = Library(source, source.split("\n", 1)[0].removeprefix("#!lua name=picker_"))
        self._libraries = (former, load_library())
        for library in self._libraries:
            client.function_load(library.source, replace=True)
        self._client, self._prefix = client, f"epp:{{{pool}}}:"
        self.owners: dict[str, int] = {}
        shared = json.dumps({**SETTINGS, "upper_per": 2, "lower_per": 2, "lease_ms": 600_000})
        listed = (part for each in ENDPOINTS for part in (each, '{"labels":{},"draining":false}'))
        self.call(0, "publish", "c", "e", shared, *listed)
        for version in (0, 1):
            self.beat(version)

    def call(self, version: int, name: str, *args: str | int | bytes) -> list[bytes]:
        function = self._libraries[version].function(name)
        reply = self._client.fcall(function, 1, f"{self._prefix}pool", f"r-{version}", *args)
        assert isinstance(reply, list)
        return reply

    def beat(self, version: int) -> list[bytes]:
        return self.call(version, "heartbeat", "{}", 60_000)

    def admit(self, version: int, name: str, band: int = 1) -> None:
        if self.owners.setdefault(name, version) != version:
            return
        request = pack_arrival((name, "1", f"flow-{name}", "w", "m", "*"), (band, 1, 1, 60_000, 0, 3, 0, 0))
        self.call(version, "admit", request)

    def place(self, version: int, name: str) -> None:
        self.call(version, "place", name, "1", "*")

    def move(self, version: int, name: str, endpoint: str) -> None:
        self._renew(version, name, endpoint, "")

    def restore(self, version: int, name: str, endpoint: str) -> None:
        self._renew(version, name, "", TOKEN.format(endpoint))

    def _renew(self, version: int, name: str, endpoint: str, accounting_token: str) -> None:
        self.call(version, "renew", name, "", endpoint, accounting_token, *(["0"] if version else []))

    def settle(self, version: int, name: str) -> None:
        self.call(version, "settle", name, "completed", "", "")
        self.owners.pop(name, None)

    def sweep(self, version: int) -> None:
        self.call(version, "sweep", 0, 60_000, 600_000, *([600_000] if version else []))

    def loads(self) -> list[float]:
        return [self._client.zscore(f"{self._prefix}load", each) or 0 for each in ENDPOINTS]

    def audit(self) -> None:
        """Each endpoint's load is the number of requests placed there."""
        rows = self._client.fcall(
            self._libraries[1].function("view_inflight"), 1, f"{self._prefix}pool", "", "", 51
        )
        placed = [row.decode().split("\x1f") for row in rows[2::2]]
        hosts = [row[13].split(",")[0] for row in placed if row[1] == "placed"]
        assert self.loads() == [hosts.count(each) for each in ENDPOINTS]

    def counts(self) -> tuple[float, int, int]:
        """Stock, queue length, leases."""
        function = self._libraries[1].function("state")
        state = self._client.fcall(function, 1, f"{self._prefix}pool", 60_000)
        return float(state[2]), state[3], state[7]

    def clear(self) -> None:
        for key in self._client.scan_iter(match=self._prefix + "*"):
            self._client.delete(key)


NAMES = [f"x{number}" for number in range(9)]
VERSIONS, REQUESTS, HOSTS = st.integers(0, 1), st.sampled_from(NAMES), st.sampled_from(ENDPOINTS)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["admit", "admit", "place", "settle"]), VERSIONS, REQUESTS),
    st.tuples(st.sampled_from(["move", "move", "restore"]), VERSIONS, REQUESTS, HOSTS),
    st.tuples(st.sampled_from(["beat", "sweep"]), VERSIONS),
)


@given(steps=st.lists(STEPS, min_size=5, max_size=60))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_count_ends_at_0_when_the_previous_version_runs_beside_this_one(
    valkey_url: str, steps: list[tuple[str, int]]
) -> None:
    with redis.Redis.from_url(valkey_url, socket_timeout=10) as server:
        mixed = Mixed(server, "mixed")
        try:
            # Given whatever the two do in whatever order
            for step, *args in steps:
                getattr(mixed, step)(*args)
                # Then loads are what runs
                mixed.audit()
            # And when all has ended, nothing is left
            for _ in range(2):
                for name in NAMES:
                    for version in (0, 1):
                        mixed.place(version, name)
                        mixed.settle(version, name)
            mixed.audit()
            assert mixed.counts() == (0, 0, 0)
            # And the present version knows that the former is about, and takes unsigned tokens
            assert mixed.beat(1)[17] == 1
        finally:
            mixed.clear()


@pytest.mark.parametrize(("owner", "word"), [(0, b"evicted"), (1, b"preempted")])
def test_an_owner_of_the_previous_version_is_notified_of_a_preemption_by_a_word_it_knows(
    valkey_url: str, owner: int, word: bytes
) -> None:
    with redis.Redis.from_url(valkey_url, socket_timeout=10) as server:
        mixed = Mixed(server, "words")
        try:
            if owner == 1:  # alone: the former version has gone an hour ago
                server.zrem("epp:{words}:replicas", "r-0")
                server.hdel("epp:{words}:pool", "counters")
                shared = json.dumps({**SETTINGS, "upper_per": 2, "lower_per": 2})
                mixed.call(1, "publish", "c", "e", shared, "a:1", '{"labels":{},"draining":false}')
            # Given a queue that is full of one, which a replica of that version holds
            mixed.call(1, "tune", json.dumps({"paused": 1, "total_capacity": 1}), "{}")
            mixed.admit(owner, "waits")
            # When a replica of the present version brings one of a higher band
            mixed.admit(1, "above", band=0)
            # Then the owner is told that its request is out
            assert server.hget(f"epp:{{words}}:inbox:r-{owner}", "waits") == word
        finally:
            mixed.clear()


def test_accounting_tokens_must_be_signed_when_this_version_runs_alone(valkey_url: str) -> None:
    with redis.Redis.from_url(valkey_url, socket_timeout=10) as server:
        mixed = Mixed(server, "alone")
        # Given a former version that has gone an hour ago
        prefix = "epp:{alone}:"
        server.zrem(f"{prefix}replicas", "r-0")
        server.hdel(f"{prefix}pool", "counters")
        shared = json.dumps({**SETTINGS, "upper_per": 2, "lower_per": 2})
        mixed.call(1, "publish", "c", "e", shared, "a:1", '{"labels":{},"draining":false}')
        # When a replica beats, then nobody older is about
        assert mixed.beat(1)[17] == 0
        mixed.clear()
