"""The format of a pool: foreign formats are refused; libraries of one format serve a pool side by side."""

import contextlib
import itertools
import json
from typing import Any

import pytest
import redis
from direct_calls import OPEN, DirectPool, arrival
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from script_fleet import OpenFleet, config, until

from picker_fleet.state import schema
from picker_fleet.state.scripts import NAMES, Library, load_library

FOREIGN = {
    "format 2": ({"format": "2", "counters": b"packed otherwise"}, "FORMAT 2"),
    "format 2, before its first publish": ({"format": "2"}, "FORMAT 2"),
    "no format number": ({"counters": b"\0" * 8 * len(schema.COUNTERS), "settings": "{}"}, "FORMAT none"),
    "no format number, before its first publish": ({"signing_keys": "1 0a"}, "FORMAT none"),
}


def dump(pool: DirectPool) -> dict[bytes, bytes]:
    names = pool.keys()
    return {name: pool.client.dump(name) for name in names}


@pytest.mark.parametrize(("fields", "error"), FOREIGN.values(), ids=FOREIGN)
def test_every_function_refuses_a_pool_of_another_format_and_changes_nothing(
    direct: DirectPool, fields: dict[str, Any], error: str
) -> None:
    direct.client.hset(f"{direct.prefix}pool", mapping=fields)
    before = dump(direct)
    for name in NAMES:
        with pytest.raises(redis.ResponseError, match=f"^{error}( |$)"):
            direct.call(name, "a", "{}", 60_000, "")
    assert dump(direct) == before


def test_a_library_refuses_a_pool_whose_format_changed_since_its_last_call(direct: DirectPool) -> None:
    direct.publish("a:1")
    direct.admit("runs")
    direct.clear()
    direct.client.hset(f"{direct.prefix}pool", "format", "2")
    with pytest.raises(redis.ResponseError, match="FORMAT 2"):
        direct.settle("runs")
    # The library serves the pool again once the foreign data is gone.
    direct.clear()
    direct.publish("a:1")
    assert direct.admit("runs")[0] == "placed"


DRAINING = json.dumps({"labels": {}, "draining": True})
WRITING: dict[str, tuple[Any, ...]] = {
    "tombstone": ("a", "gone", 0),
    "note_origin": ("a", "resp_1", "b:1"),
    "renew": ("a", "runs", "", "b:1", "", 0),
    "report_client_gone": ("a", "runs"),
    "report_fault": ("a", "runs", "a:1", "", "500", 0),
    "settle": ("a", "runs", "completed", "", "", "", ""),
    "admit": ("a", arrival("new", priority=7)),
    "prefilled": ("a", "runs"),
    "place": ("a", "waits", "1", "*", ""),
    "acknowledge": ("a", "runs", "1"),
    "cancel": ("a", "waits", "1", "cancelled"),
    "mark_endpoint": ("a", "b:1", "down", "1"),
    "evict": ("a", "waits"),
    "set_tenants": ("a", "tenants", "acme", "{}"),
    "top_up_tenant": ("a", "acme", "tokens", "60000", 1, "id"),
    "count_usage": ("a", 1, 490_896, 0, 0, "acme", "llama", 1, 0, 1, 0, 1, 2.0),
    "heartbeat": ("a", "{}", 60_000, "0a"),
    "publish_changes": ("a", "e", "f", "b:1", OPEN),
    "tune": ("a", '{"paused": 1}', "{}"),
    "set_limits": ("a", '{"b:1": 4}', "{}"),
    "sweep": ("a", 0, 60_000, 600_000, 600_000),
}


@pytest.mark.parametrize("lost", ["the pool's hash", "everything"])
@pytest.mark.parametrize("name", WRITING)
def test_no_call_creates_a_pool_without_a_format_number(direct: DirectPool, name: str, lost: str) -> None:
    # A pool in use loses its hash or all its keys, and is rebuilt.
    direct.publish("a:1", upper_per=1)
    direct.client.hset(f"{direct.prefix}endpoints", "b:1", DRAINING)
    direct.call("heartbeat", "a", "{}", 60_000, "0a")
    for request in ("runs", "waits"):
        direct.admit(request)
    if lost == "everything":
        direct.clear()
    else:
        direct.client.delete(f"{direct.prefix}pool")
    with contextlib.suppress(redis.ResponseError):  # calls that need the lost settings fail
        direct.call(name, *WRITING[name])
    fields = direct.client.hgetall(f"{direct.prefix}pool")
    assert not fields or fields[b"format"] == b"1"
    direct.publish("a:1", upper_per=1)
    assert direct.client.hget(f"{direct.prefix}pool", "format") == b"1"
    assert direct.admit("again")[0] in ("placed", "queued")


def test_the_list_of_writing_functions_is_complete() -> None:
    reading = {name for name in NAMES if name.startswith(("view_", "state"))}
    assert set(WRITING) | reading | {"publish", "claim_queue_snapshot"} == set(NAMES)


async def test_a_replica_leaves_a_pool_whose_format_changes_and_joins_again_once_it_is_deleted(
    fleet: OpenFleet, pool: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet("a", joined=config(2, pool=pool), checked=False) as (it, a):
        keys = await it.redis.keys(it.keys.prefix + "*")
        pipe = it.redis.pipeline(transaction=True)
        pipe.delete(*keys)
        pipe.hset(it.keys.pool, "format", "2")
        await pipe.execute()
        await until(lambda: a.membership.refusal)
        for part in ("has format 2", "reads and writes format 1", f"epp:{{{it.pool}}}:*", "another pool"):
            assert part in a.membership.refusal
        assert (a.membership.pulse, a.cell.current.endpoints) == (None, ())
        # Three more heartbeats log no further refusal, and do not change the pool.
        await it.redis.hset(it.keys.pool, "another", "field")
        for _ in range(3):
            a.membership.heartbeat_now()
            with pytest.raises(Exception, match="format 2"):
                await a.beat()
        assert await it.redis.keys(it.keys.prefix + "*") == [it.keys.pool]
        assert await it.redis.hgetall(it.keys.pool) == {"format": "2", "another": "field"}
        assert sum("not joining" in record.message for record in caplog.records) == 1
        await it.redis.delete(it.keys.pool)
        await until(lambda: a.membership.pulse is not None and a.cell.current.endpoints)
        assert a.membership.refusal == ""


def newer_library() -> Library:
    """A library of the same format with one more counter, for the requests that the library admits, and one
    more field in the pool's hash."""
    library = load_library()
    source, version = library.source, f"{library.version}x"
    last = f"'{schema.COUNTERS[-1]}'\n}}"
    seen = "record.prefetch(ids, count)\n  workloads.prefetch"
    assert source.count(last) == source.count(seen) == 1
    source = source.replace(last, f"'{schema.COUNTERS[-1]}', 'added'\n}}")
    counts = "pool.added = pool.added + count\n  defer_write('HSET', key.pool, 'added_field', pool.added)\n  "
    return Library(source.replace(seen, counts + seen).replace(library.version, version), version)


ENDPOINTS = ("a:1", "b:1", "c:1")
TOKEN = "\t".join(("flow", "1", "1", "1", "w", "3", "m", "{}", "0"))


class Beside(DirectPool):
    """A pool with one replica on each of two libraries: replica `0` uses the newer library, replica `1` the
    current one."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        super().__init__(client, pool)
        self._libraries = (self.load(newer_library()), self.library)
        self.owners: dict[str, int] = {}
        self.publish(*ENDPOINTS, upper_per=2, lease_ms=600_000, library=self._libraries[0])
        for version in (0, 1):
            self.beat(version)

    def of(self, version: int, name: str, *args: str | int | bytes) -> list[bytes]:
        """Make a call as the replica with library `version`."""
        reply: list[bytes] = self.call(name, f"r-{version}", *args, library=self._libraries[version])
        return reply

    def beat(self, version: int) -> list[bytes]:
        return self.of(version, "heartbeat", "{}", 60_000, "")

    def bring(self, version: int, name: str, priority: int = 0) -> None:
        if self.owners.setdefault(name, version) == version:
            size = 100 * REQUESTS.index(name) if name in REQUESTS else 0
            self.of(version, "admit", arrival(name, flow=f"flow-{name}", priority=priority, body_bytes=size))

    def place(self, version: int, name: str) -> None:
        self.of(version, "place", name, "1", "*", "")

    def move(self, version: int, name: str, endpoint: str) -> None:
        self.of(version, "renew", name, "", endpoint, "", 0)

    def restore(self, version: int, name: str, endpoint: str) -> None:
        self.of(version, "renew", name, "", "", TOKEN.format(endpoint), 0)

    def end(self, version: int, name: str) -> None:
        self.of(version, "settle", name, "completed", "", "", "")
        self.owners.pop(name, None)

    def sweep(self, version: int) -> None:
        self.of(version, "sweep", 0, 60_000, 600_000, 600_000)

    def audit(self) -> None:
        """Assert that each endpoint's load is the number of requests placed there."""
        placed = [row.decode().split("\x1f") for row in self.call("view_inflight", "", "", 51)[2::2]]
        hosts = [row[13].split(",")[0] for row in placed if row[1] == "placed"]
        loads = self.loads()
        assert [loads.get(each, 0) for each in ENDPOINTS] == [hosts.count(each) for each in ENDPOINTS]


EXAMPLES = itertools.count()
REQUESTS = [f"x{number}" for number in range(9)]
WHICH, NAMED, HOSTS = st.integers(0, 1), st.sampled_from(REQUESTS), st.sampled_from(ENDPOINTS)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["bring", "place", "end"]), WHICH, NAMED),
    st.tuples(st.just("bring"), WHICH, NAMED, st.sampled_from([10, 7, -3])),
    st.tuples(st.sampled_from(["move", "move", "restore"]), WHICH, NAMED, HOSTS),
    st.tuples(st.sampled_from(["beat", "sweep"]), WHICH),
)


@given(steps=st.lists(STEPS, min_size=5, max_size=60))
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_count_ends_at_0_when_two_libraries_of_one_format_serve_a_pool(
    client: redis.Redis, pool: str, steps: list[tuple[str, int]]
) -> None:
    beside = Beside(client, f"{pool}-{next(EXAMPLES)}")
    for step, *args in steps:
        getattr(beside, step)(*args)
        beside.audit()
    for _, name, version in itertools.product(range(2), REQUESTS, (0, 1)):
        beside.place(version, name)
        beside.end(version, name)
    beside.audit()
    state = beside.call("state", 60_000)
    assert (float(state[2]), state[3], state[7]) == (0, 0, 0)  # stock, queue length, number of leases
    assert set(state[10][4::5]) == {b"0"}  # waiting body bytes of each band


def test_a_library_keeps_counters_and_fields_added_by_a_newer_library(client: redis.Redis, pool: str) -> None:
    beside = Beside(client, pool)
    for number in range(6):
        beside.bring(number % 2, f"one {number}")
        beside.beat(1)
        beside.sweep(1)
    beside.bring(0, "the last")
    # The added field and counter count only the admissions by the newer library.
    assert client.hget(f"{beside.prefix}pool", "added_field") == b"4"
    counters = client.hget(f"{beside.prefix}pool", "counters")
    assert len(counters) == 8 * (len(schema.COUNTERS) + 1)
    assert [beside.beat(version)[6] for version in (0, 1)] == [2, 2]
