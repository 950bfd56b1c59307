"""Split requests: a decode endpoint and a prefill endpoint, chosen and reserved in one call."""

import json
from typing import Any

import pytest
import redis
from direct_calls import START_MS, DirectPool, clock_of
from script_fleet import settings_with

from picker_fleet.domain.request import Endpoint
from picker_fleet.state.pool_state import describe
from picker_fleet.state.schema import UNPICKABLE
from picker_fleet.state.scripts import load_library
from picker_tools.audit.auditor import audit

DECODE = json.dumps({"labels": {}, "draining": False})
PREFILL = json.dumps({"labels": {}, "draining": False, "stages": "prefill"})
CLOSED = UNPICKABLE
BOTH = json.dumps({"labels": {}, "draining": False, "stages": "decode prefill"})


class StagedPool(DirectPool):
    """Two decode endpoints, d:1 and d:2, and two prefill endpoints, p:1 and p:2, by default."""

    def stages(self, listed: dict[str, str] | None = None, version: str = "e", **settings: Any) -> None:
        listed = listed or {"d:1": DECODE, "d:2": DECODE, "p:1": PREFILL, "p:2": PREFILL}
        pairs = [text for pair in listed.items() for text in pair]
        self.call("publish", "a", "c", version, json.dumps(settings_with(settings)), *pairs)
        self.call("heartbeat", "a", "{}", 60_000, "")

    def prefill_counts(self) -> dict[str, float]:
        found = self.client.zrange(f"{self.prefix}prefill_load", 0, -1, withscores=True)
        return {address.decode(): count for address, count in found}

    def counts(self) -> dict[str, float]:
        """Endpoint -> requests in flight, without idle endpoints that take no new requests."""
        found = self.client.zrange(f"{self.prefix}load", 0, -1, withscores=True)
        return {address.decode(): count for address, count in found if count != CLOSED}

    def log(self) -> list[dict[str, str]]:
        found = self.client.xrange(f"{self.prefix}log")
        return [{name.decode(): value.decode() for name, value in fields.items()} for _, fields in found]

    def place(self, request_id: str, candidates: str = "*", prefill: str = "*") -> list[str]:
        return bytes(self.call("place", "a", request_id, "1", candidates, prefill)[4]).decode().split()

    def prefilled(self, request_id: str) -> str:
        return bytes(self.call("prefilled", "a", request_id)[4]).decode()

    def sweep(self) -> list[Any]:
        reply: list[Any] = self.call("sweep", "a", 0, 60_000, 600_000, 10**9)
        return reply

    def split(self, request_id: str, prefill: str = "*", **fields: Any) -> tuple[str, str]:
        """Admit a request; return its endpoint and its prefill endpoints."""
        words = self.admit(request_id, prefill=prefill, **fields)
        assert words[0] == "placed", words
        decode, _, prefillers = words[1].partition(">")
        return decode.split(",")[0], prefillers


@pytest.fixture
def staged(client: redis.Redis, pool: str) -> StagedPool:
    return StagedPool(client, pool)


def test_a_request_waits_while_the_prefill_endpoints_are_at_their_limits(staged: StagedPool) -> None:
    staged.stages({"d:1": DECODE, "p:1": PREFILL}, upper_per=10, lower_per=10, prefill_caps={"p:1": 1})
    staged.split("r1")
    assert staged.admit("waits", prefill="*")[0] == "queued"
    assert staged.place("waits")[0] == "queued"
    assert staged.place("waits") == ["gone"]  # no further grant while p:1 is full
    assert staged.admit("whole", flow="other")[:2] == ["queued", "60000"]  # its grant will place it
    assert staged.counts() == {"d:1": 2}
    assert staged.prefilled("r1") == "released"
    assert staged.place("waits")[:2] == ["placed", "d:1>p:1"]
    assert staged.prefill_counts() == {"p:1": 1}


def test_a_tenants_request_is_granted_again_only_once_a_prefill_endpoint_has_room(staged: StagedPool) -> None:
    limits = {"prefill_caps": {"p:1": 1}, "tenants": {"separator": "/"}}
    staged.stages({"d:1": DECODE, "p:1": PREFILL}, upper_per=4, lower_per=4, **limits)
    staged.call("set_tenants", "a", "tenants", "flow", '{"max_parallel": 2}')
    staged.split("r1")
    for name in ("waits", "is throttled"):  # `waits` is granted, which brings the flow to its limit
        assert staged.admit(name, prefill="*")[0] == "queued"
    for name in "abcdef":  # another flow fills the pool; its queued requests advance the virtual time
        staged.admit(name, flow="other")
    for name in "abcd":
        staged.settle(name)
    assert staged.place("waits")[0] == "queued"  # the request is requeued, its charge refunded
    assert staged.place("waits") == ["gone"]
    assert audit(staged.log()).violations == 0
    staged.prefilled("r1")
    assert staged.place("waits")[:2] == ["placed", "d:1>p:1"]


def test_a_free_prefill_slot_is_granted_to_the_oldest_waiting_request_alone(staged: StagedPool) -> None:
    staged.stages({"d:1": DECODE, "p:1": PREFILL}, upper_per=9, lower_per=9, prefill_caps={"p:1": 1})
    staged.split("r1")
    waiting, last = ["q1", "q2", "q3", "q4"], "r1"
    for name in waiting:
        assert staged.admit(name, prefill="*")[0] == "queued"
    assert [staged.place(name)[0] for name in reversed(waiting)] == ["queued"] * 4
    while waiting:
        assert staged.prefilled(last) == "released"
        assert [staged.place(name)[0] for name in waiting] == ["placed"] + ["gone"] * (len(waiting) - 1)
        last = waiting.pop(0)


def test_the_candidates_for_a_prefill_may_depend_on_the_decode_endpoint(staged: StagedPool) -> None:
    staged.stages(upper_per=10, live_weight=0.1)
    by_decoder = "d:1>p:1=0.9,p:2=0.1;d:2,d:3>p:1=0.1,p:2=0.9"
    for number in range(2):
        first, second = (
            staged.split(f"{each}-{number}", by_decoder, candidates=each) for each in ("d:1", "d:2")
        )
        assert (first, second) == (("d:1", "p:1,p:2"), ("d:2", "p:2,p:1"))
    assert staged.prefill_counts() == {"p:1": 2, "p:2": 2}


def test_an_endpoint_that_only_encodes_gets_no_request_and_adds_nothing_to_the_bounds(
    staged: StagedPool,
) -> None:
    encoder = describe(Endpoint("e:1", encodes=True, decodes=False))
    staged.stages({"d:1": DECODE, "p:1": PREFILL, "e:1": encoder}, upper_per=2)
    assert staged.split("r1", candidates="e:1=1,d:1=0.1", prefill="e:1=1,p:1=0.1") == ("d:1", "p:1")
    for on in (1, 0):  # the mark `down` must not make an encoder a decoder
        staged.call("mark_endpoint", "a", "e:1", "down", on)
        assert staged.call("state", 60_000)[6] == 1
    assert staged.split("r2") == ("d:1", "p:1")
    assert staged.admit("r3")[0] == "queued"
    assert staged.sweep()[4] == 1
    assert staged.call("state", 60_000)[0] != b"0"  # no key counts as lost


@pytest.mark.parametrize("by", ["publish", "publish_changes"])
def test_an_endpoint_that_leaves_a_stage_finishes_its_requests_there(staged: StagedPool, by: str) -> None:
    def becomes(description: str, former: str, version: str) -> None:
        if by == "publish":
            staged.stages({"d:1": DECODE, "x:1": description}, version=version, upper_per=10)
        else:
            assert staged.call("publish_changes", "a", former, version, "x:1", description)[4] == 1

    staged.stages({"d:1": DECODE, "x:1": BOTH}, upper_per=10)
    staged.split("decodes", candidates="x:1", prefill="")
    staged.split("split", candidates="d:1", prefill="x:1")
    becomes(PREFILL, "e", "e2")
    assert (staged.counts()["x:1"], staged.prefill_counts()["x:1"]) == (CLOSED + 1, 1)
    assert staged.sweep()[4] == 1
    assert staged.call("state", 60_000)[6] == 1
    becomes(DECODE, "e2", "e3")
    assert (staged.counts()["x:1"], staged.prefill_counts()["x:1"]) == (1, CLOSED + 1)
    assert staged.call("state", 60_000)[6] == 2
    staged.settle("split")
    assert staged.prefill_counts() == {}
    assert staged.sweep()[4] == 1
    assert staged.call("state", 60_000)[0] != b"0"  # no key counts as lost


def test_a_reservation_of_a_lost_request_ends_with_its_lease(staged: StagedPool, client: redis.Redis) -> None:
    clock = f"{staged.prefix}test-clock"
    client.set(clock, START_MS * 1000)
    staged.library = staged.load(load_library(clock_of(clock, "stages")))
    staged.stages({"d:1": DECODE, "p:1": PREFILL}, lease_ms=10_000)
    client.zadd(f"{staged.prefix}prefills", {"p:1\x1fnobody": START_MS + 10_000})
    client.zadd(f"{staged.prefix}prefill_load", {"p:1": 1})
    client.set(clock, (START_MS + 11_000) * 1000)
    staged.sweep()
    assert staged.prefill_counts() == {"p:1": 0}
    assert client.zcard(f"{staged.prefix}prefills") == 0


def test_a_request_restored_after_a_flushall_has_no_prefill(staged: StagedPool, client: redis.Redis) -> None:
    staged.stages(upper_per=10)
    staged.split("r1")
    for key in client.scan_iter(f"{staged.prefix}*"):
        client.delete(key)
    staged.stages(upper_per=10)
    token = "flow\t1\t1\t1\tw\t3\tm\td:1\t0"
    assert staged.call("renew", "a", "r1", "1", "", token, 0)[4] == b"restored"
    assert staged.prefill_counts() == {"p:1": 0, "p:2": 0}
    assert staged.prefilled("r1") == "unknown"
    assert staged.settle("r1") == "settled m"


def test_the_audit_finds_prefills_beyond_a_limit_and_wrong_releases(staged: StagedPool) -> None:
    staged.stages({"d:1": DECODE, "p:1": PREFILL}, upper_per=10, prefill_caps={"p:1": 2})
    staged.split("r1")
    staged.split("r2")
    staged.prefilled("r1")
    staged.settle("r1")
    staged.settle("r2")
    log = staged.log()
    by_event = {(entry["event"], entry["request"]): at for at, entry in enumerate(log)}
    assert audit(log).violations == 0

    def audited(event: str, request: str, **changes: str) -> int:
        changed = [dict(entry) for entry in log]
        changed[by_event[event, request]] |= changes
        return audit(changed).violations

    tuned = log[by_event["tuned", ""]]["note"]
    assert audited("tuned", "", note=tuned.replace('{"p:1":2}', '{"p:1":1}')) == 1
    assert audited("completed", "r1", prefill="p:1") == 1  # the log claims a second release of the prefill
    assert audited("completed", "r2", prefill="") == 1  # the log lacks the release of the prefill
    assert audited("prefilled", "r1", prefill="p:2") == 1
