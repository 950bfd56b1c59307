"""Replicas of two versions on one pool: counters that a version with fewer of them has written."""

import itertools
import json
from pathlib import Path

import pytest
import redis
from direct_calls import OPEN, DirectPool, arrival, former_library
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from picker_fleet.bands import NAMED
from picker_fleet.config import Settings
from picker_fleet.replica.live_config import shared_settings
from picker_fleet.state import schema

DOUBLE = 8
# The first of them, in their order.
FIRST = [
    *("epoch", "stock", "queued", "seq", "dispatches", "guards", "ended", "log_seq"),
    *("queued:0", "queued:1", "queued:2", "ready", "upper", "lower", "v:0", "v:1", "v:2"),
    *("band:0", "band:1", "band:2", "bv", "credit", "overdue", "rate", "refiling", "pressed"),
]


@pytest.mark.parametrize("missing", [1, 5])  # one, or all that came after the first
def test_a_newer_version_continues_with_the_counters_of_an_older_one(
    direct: DirectPool, missing: int
) -> None:
    # A pool in use, whose counters an older version has written last.
    published = "c-1", "e-1", json.dumps(shared_settings(Settings(), {})), "10.0.0.1:8000", OPEN
    epoch = direct.call("publish", "r-1", *published)[0]
    key = f"{direct.prefix}pool"
    counters = direct.client.hget(key, "counters")
    direct.client.hset(key, "counters", counters[: -missing * DOUBLE])
    # A replica of the newer version beats and publishes.
    beat = direct.call("heartbeat", "r-2", "{}", "5000")
    direct.call("publish", "r-2", *published)
    # The pool lives on as it was, with all of its counters.
    assert beat[0] == epoch
    assert len(direct.client.hget(key, "counters")) == len(counters)


def test_the_page_of_upgrades_names_the_layouts_in_use() -> None:
    # The packed layouts: to change one decides which versions may share a pool.
    text = (Path(__file__).parents[2] / "docs" / "upgrading.md").read_text(encoding="utf-8")
    # It names them, and what a version of 26 counters writes still begins the list.
    assert f"| {len(schema.COUNTERS)} doubles |" in text
    assert f"`{schema.WAITING_LAYOUT}`, `{schema.RUNNING_LAYOUT}`" in text
    assert list(schema.COUNTERS[:26]) == FIRST


ENDPOINTS = ("a:1", "b:1", "c:1")
TOKEN = "\t".join(("flow", "1", "1", "1", "w", "3", "m", "{}", "0"))


class Mixed(DirectPool):
    """A pool on which a replica of each version is at work, `0` of the former and `1` of the present one."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        super().__init__(client, pool)
        former = self.load(former_library())
        self._libraries = (former, self.library)
        self.owners: dict[str, int] = {}
        self.publish(*ENDPOINTS, upper_per=2, lease_ms=600_000, library=former)
        for version in (0, 1):
            self.beat(version)

    def of(self, version: int, name: str, *args: str | int | bytes) -> list[bytes]:
        """A call by the replica of that version."""
        reply: list[bytes] = self.call(name, f"r-{version}", *args, library=self._libraries[version])
        return reply

    def beat(self, version: int) -> list[bytes]:
        return self.of(version, "heartbeat", "{}", 60_000)

    def inbox(self, version: int) -> dict[bytes, bytes]:
        return dict(self.client.hgetall(f"{self.prefix}inbox:r-{version}"))

    def bring(self, version: int, name: str, band: int = 1) -> None:
        if self.owners.setdefault(name, version) == version:
            # The former has the number of the band where the present one has its priority.
            priority = NAMED[band].priority if version else band
            size = 100 * NAMES.index(name) if name in NAMES else 0
            self.of(version, "admit", arrival(name, flow=f"flow-{name}", priority=priority, body_bytes=size))

    def place(self, version: int, name: str) -> None:
        self.of(version, "place", name, "1", "*")

    def move(self, version: int, name: str, endpoint: str) -> None:
        self._renew(version, name, endpoint, "")

    def restore(self, version: int, name: str, endpoint: str) -> None:
        self._renew(version, name, "", TOKEN.format(endpoint))

    def _renew(self, version: int, name: str, endpoint: str, accounting_token: str) -> None:
        self.of(version, "renew", name, "", endpoint, accounting_token, *(["0"] if version else []))

    def end(self, version: int, name: str) -> None:
        self.of(version, "settle", name, "completed", "", "")
        self.owners.pop(name, None)

    def sweep(self, version: int) -> None:
        self.of(version, "sweep", 0, 60_000, 600_000, *([600_000] if version else []))

    def audit(self) -> None:
        """Each endpoint's load is the number of requests placed there."""
        placed = [row.decode().split("\x1f") for row in self.call("view_inflight", "", "", 51)[2::2]]
        hosts = [row[13].split(",")[0] for row in placed if row[1] == "placed"]
        loads = self.loads()
        assert [loads.get(each, 0) for each in ENDPOINTS] == [hosts.count(each) for each in ENDPOINTS]

    def forget_the_former(self) -> None:
        """As if that version had gone an hour ago."""
        self.client.zrem(f"{self.prefix}replicas", "r-0")
        self.client.hdel(f"{self.prefix}pool", "counters")
        self.publish("a:1", upper_per=2)


@pytest.fixture
def mixed(client: redis.Redis, pool: str) -> Mixed:
    return Mixed(client, pool)


def test_a_grant_places_only_what_a_replica_of_this_version_has_brought(mixed: Mixed) -> None:
    for number in range(6):
        mixed.bring(1, f"runs{number}")
    for version in (0, 1):
        mixed.bring(version, f"first{version}")
        mixed.bring(version, f"then{version}")
    # The former version takes one of the present's over.
    mixed.bring(1, "adopted")
    mixed.of(0, "admit", arrival("adopted", flow="flow-adopted", priority=1))
    # Where the present one grants
    for number in range(3):
        mixed.end(1, f"runs{number}")
    granted = {b"adopted": b"granted", b"first0": b"granted"}
    assert (mixed.inbox(0), mixed.inbox(1)) == (granted, {b"first1": b"placed 1"})
    # And where the former does.
    for number in range(3, 5):
        mixed.end(0, f"runs{number}")
    assert (mixed.inbox(0)[b"then0"], mixed.inbox(1)[b"then1"]) == (b"granted", b"granted")
    mixed.audit()


EXAMPLES = itertools.count()
NAMES = [f"x{number}" for number in range(9)]
VERSIONS, REQUESTS, HOSTS = st.integers(0, 1), st.sampled_from(NAMES), st.sampled_from(ENDPOINTS)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["bring", "bring", "place", "end"]), VERSIONS, REQUESTS),
    st.tuples(st.sampled_from(["move", "move", "restore"]), VERSIONS, REQUESTS, HOSTS),
    st.tuples(st.sampled_from(["beat", "sweep"]), VERSIONS),
)


@given(steps=st.lists(STEPS, min_size=5, max_size=60))
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_count_ends_at_0_when_the_previous_version_runs_beside_this_one(
    client: redis.Redis, pool: str, steps: list[tuple[str, int]]
) -> None:
    mixed = Mixed(client, f"{pool}-{next(EXAMPLES)}")
    # Whatever the two do in whatever order.
    for step, *args in steps:
        getattr(mixed, step)(*args)
        # Loads are what runs.
        mixed.audit()
    # And when all has ended, nothing is left
    for _, name, version in itertools.product(range(2), NAMES, (0, 1)):
        mixed.place(version, name)
        mixed.end(version, name)
    mixed.audit()
    state = mixed.call("state", 60_000)
    assert (float(state[2]), state[3], state[7]) == (0, 0, 0)  # stock, queue length, leases
    assert state[10][4::5] == [b"0"] * 3  # bytes of waiting bodies
    # And the present version knows that the former is about, and takes unsigned tokens
    assert mixed.beat(1)[17] == 1


@pytest.mark.parametrize(("owner", "word"), [(0, b"evicted"), (1, b"preempted")])
def test_an_owner_of_the_previous_version_is_notified_of_a_preemption_by_a_word_it_knows(
    mixed: Mixed, owner: int, word: bytes
) -> None:
    if owner == 1:
        mixed.forget_the_former()
    # A queue that is full of one, which a replica of that version holds.
    mixed.of(1, "tune", json.dumps({"paused": 1, "total_capacity": 1}), "{}")
    mixed.bring(owner, "waits")
    # A replica of the present version brings one of a higher band.
    mixed.bring(1, "above", band=0)
    # The owner is told that its request is out.
    assert mixed.inbox(owner)[b"waits"] == word


def test_accounting_tokens_must_be_signed_when_this_version_runs_alone(mixed: Mixed) -> None:
    mixed.forget_the_former()
    assert mixed.beat(1)[17] == 0
