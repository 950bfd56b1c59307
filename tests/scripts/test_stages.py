"""Split requests: a decode endpoint and a prefill endpoint, chosen and reserved in one call."""

import json
from typing import Any

import pytest
import redis
from direct_calls import DirectPool
from script_fleet import settings_with

DECODE = json.dumps({"labels": {}, "draining": False})
PREFILL = json.dumps({"labels": {}, "draining": False, "stages": "prefill"})
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
        found = self.client.zrange(f"{self.prefix}load", 0, -1, withscores=True)
        return {address.decode(): count for address, count in found}

    def place(self, request_id: str, candidates: str = "*", prefill: str = "*") -> list[str]:
        return bytes(self.call("place", "a", request_id, "1", candidates, prefill)[4]).decode().split()

    def prefilled(self, request_id: str) -> str:
        return bytes(self.call("prefilled", "a", request_id)[4]).decode()

    def split(self, request_id: str, prefill: str = "*", **fields: Any) -> tuple[str, str]:
        """Admit a request; return its endpoint and its prefill endpoints."""
        words = self.admit(request_id, prefill=prefill, **fields)
        assert words[0] == "placed", words
        decode, _, prefillers = words[1].partition(">")
        return decode.split(",")[0], prefillers


@pytest.fixture
def staged(client: redis.Redis, pool: str) -> StagedPool:
    return StagedPool(client, pool)


def test_one_call_reserves_an_endpoint_of_each_stage(staged: StagedPool) -> None:
    staged.stages(fallbacks=1)
    (first, prefillers), (second, others) = staged.split("r1"), staged.split("r2")
    assert {first, second} == {"d:1", "d:2"}
    assert {prefillers, others} == {"p:1,p:2", "p:2,p:1"}
    assert staged.counts() == {"d:1": 1, "d:2": 1}
    assert staged.prefill_counts() == {"p:1": 1, "p:2": 1}


def test_a_whole_request_reserves_no_prefill_endpoint(staged: StagedPool) -> None:
    staged.stages()
    assert staged.split("whole", prefill="")[1] == ""
    assert staged.prefill_counts() == {"p:1": 0, "p:2": 0}
    assert staged.prefilled("whole") == staged.prefilled("nobody") == "unknown"


def test_an_endpoint_that_only_prefills_is_never_asked_to_decode(staged: StagedPool) -> None:
    staged.stages({"d:1": DECODE, "p:1": PREFILL}, upper_per=10)
    for n in range(6):
        assert staged.split(f"r{n}")[0] == "d:1"
    assert staged.admit("picky", candidates="p:1")[:2] == ["refused", "no-endpoints"]
    state = staged.call("state", 60_000)
    assert (state[6], float(state[4])) == (1, 10)  # one ready endpoint; the upper bound is its share


@pytest.mark.parametrize("end", ["the first token", "the end", "a cancel"])
def test_a_prefill_reservation_ends_once(staged: StagedPool, end: str) -> None:
    staged.stages()
    staged.split("r1")
    if end == "the first token":
        assert [staged.prefilled("r1"), staged.prefilled("r1")] == ["released", "unknown"]
    if end == "a cancel":
        staged.call("cancel", "a", "r1", "1", "cancelled")
    staged.settle("r1")
    assert staged.prefill_counts() == {"p:1": 0, "p:2": 0}
    assert staged.client.zcard(f"{staged.prefix}prefills") == 0


def test_a_request_without_a_ready_prefill_endpoint_is_served_whole(staged: StagedPool) -> None:
    staged.stages({"d:1": DECODE})
    assert staged.split("r1") == ("d:1", "")
    assert staged.split("r2", prefill="p:1=0.5") == ("d:1", "")


def test_an_endpoint_of_both_stages_serves_a_request_whole(staged: StagedPool) -> None:
    staged.stages({"b:1": BOTH, "p:1": PREFILL}, upper_per=10)
    staged.split("busy", prefill="p:1")
    assert staged.split("r1", prefill="b:1=1,p:1=0") == ("b:1", "")
    assert staged.split("r2", prefill="p:1") == ("b:1", "p:1")
    assert (staged.counts(), staged.prefill_counts()) == ({"b:1": 3}, {"b:1": 0, "p:1": 2})


def test_a_request_waits_while_the_prefill_endpoints_are_at_their_limits(staged: StagedPool) -> None:
    staged.stages({"d:1": DECODE, "p:1": PREFILL}, upper_per=10, lower_per=10, prefill_caps={"p:1": 1})
    staged.split("r1")
    assert staged.admit("waits", prefill="*")[0] == "queued"
    assert staged.place("waits")[0] == "queued"
    assert staged.place("waits") == ["gone"]  # no further grant while p:1 is full
    assert staged.admit("whole", flow="other")[:2] == ["queued", "60000"]  # placed by its grant in this call
    assert staged.counts() == {"d:1": 2}
    assert staged.prefilled("r1") == "released"
    assert staged.place("waits")[:2] == ["placed", "d:1>p:1"]
    assert staged.prefill_counts() == {"p:1": 1}


def test_a_repeated_call_returns_the_same_endpoints_of_both_stages(staged: StagedPool) -> None:
    staged.stages(fallbacks=1)
    placed = staged.admit("r1", prefill="*")
    assert staged.admit("r1", prefill="*")[1] == staged.place("r1")[1] == placed[1]
    assert sum(staged.prefill_counts().values()) == 1


def test_a_request_that_moves_keeps_its_prefill(staged: StagedPool) -> None:
    staged.stages(fallbacks=1)
    first, prefillers = staged.split("r1")
    staged.call("report_fault", "a", "r1", first, "", "500", 0)
    assert staged.counts() == {"d:1": float(first == "d:2"), "d:2": float(first == "d:1")}
    assert staged.prefill_counts()[prefillers.split(",")[0]] == 1
    staged.settle("r1")
    assert staged.prefill_counts() == {"p:1": 0, "p:2": 0}
