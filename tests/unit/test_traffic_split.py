"""Shares of a model's variants: exact on each replica, and as far as can be the same for the same id.

With the counts of the fleet: tests/scripts/test_splits.py.
"""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.admission import variants
from picker_fleet.admission.variants import Variants
from picker_fleet.errors import ScriptFailed, StateFault, StateUnavailable, WritesRefused
from picker_fleet.traffic_split import Shares, Split

CANARY = Split.of([("stable", 90), ("canary", 10), ("never", 0)])


@given(st.lists(st.integers(0, 100), min_size=1, max_size=5).filter(any), st.integers(0, 10**9))
def test_shares_are_exact_but_for_one_request_or_with_more_than_two_names_two(
    weights: list[int], first: int
) -> None:
    most = 1 if len([each for each in weights if each]) <= 2 else 2
    names = [f"v{number}" for number in range(len(weights))]
    shares, given_to = Shares(Split.of(zip(names, weights, strict=True))), Counter[str]()
    for number in range(1, 400):
        given_to[shares.of(f"id-{first + number}")] += 1
        for name, weight in zip(names, weights, strict=True):
            assert abs(given_to[name] - number * weight / sum(weights)) <= most + 1e-6


def test_a_thousand_requests_on_three_replicas_are_split_within_three() -> None:
    replicas = [Shares(CANARY) for _ in range(3)]
    found = Counter(replicas[number % 3].of(f"id-{number}") for number in range(1000))
    assert found.keys() == {"stable", "canary"}
    assert abs(found["canary"] - 100) <= 3


def test_an_id_that_comes_again_gets_the_same() -> None:
    here, there = Shares(CANARY), Shares(CANARY)
    first = [here.of(f"id-{number}") for number in range(5000)]
    assert [here.of(f"id-{number}") for number in range(5000)] == first
    assert here.of("x" * 100_000) == here.of("x" * 100_000)
    # On another replica, which has seen other requests before, nearly always.
    for number in range(777):
        there.of(f"other-{number}")
    same = [there.of(f"id-{number}") == each for number, each in enumerate(first)]
    assert same.count(True) > 0.85 * len(same)


def test_only_the_last_ids_are_remembered() -> None:
    shares = Shares(CANARY)
    for number in range(30_000):
        shares.of(f"id-{number}")
    assert len(shares._given) == 10_000


class SplitStore:
    """Gives every request the variant at `given`; or raises `fault`, or never answers."""

    def __init__(self, given: int | None = None, fault: StateFault | None = None) -> None:
        self.given, self.fault, self.asked = given, fault, 0

    async def split(self, split: str, weights: str, request_id: str, proposed: int) -> int:
        self.asked += 1
        if self.fault is not None:
            raise self.fault
        if self.given is None:
            await asyncio.Event().wait()
        assert self.given is not None
        return self.given


async def test_the_shared_state_decides_and_is_asked_once_for_an_id() -> None:
    store, shares = SplitStore(given=1), Shares(CANARY)
    chooser = Variants(store, lambda: True)
    assert {await chooser.of(shares, f"id-{number % 50}", 60.0) for number in range(100)} == {"canary"}
    assert store.asked == 50
    # What it has decided counts for nothing here: without it the shares begin as they are.
    alone = Variants(store, lambda: False)
    given = Counter([await alone.of(shares, f"alone-{number}", 60.0) for number in range(100)])
    assert abs(given["canary"] - 10) <= 1
    assert await alone.of(shares, "id-7", 60.0) == "canary"
    assert store.asked == 50


@pytest.mark.parametrize(
    "fault", [StateUnavailable("away"), WritesRefused("full"), ScriptFailed("odd"), None]
)
async def test_a_shared_state_that_is_away_or_late_leaves_the_choice_to_the_replica(
    fault: StateFault | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "DEADLINE_S", 0.001)
    store, shares = SplitStore(fault=fault), Shares(CANARY)
    chooser = Variants(store, lambda: True)
    given = Counter([await chooser.of(shares, f"id-{number}", 60.0) for number in range(100)])
    assert abs(given["canary"] - 10) <= 1
    # One that is late is not asked again for a while, or each request would wait for it.
    assert store.asked == (100 if fault is not None else 1)


async def test_a_request_with_little_time_does_not_wait_for_longer_and_spoils_nothing_for_others() -> None:
    store, shares = SplitStore(), Shares(CANARY)
    chooser = Variants(store, lambda: True)
    assert await chooser.of(shares, "in haste", 0.001) in shares.split.names
    store.given = 1
    assert await chooser.of(shares, "patient", 60.0) == "canary"


async def test_more_variants_than_a_script_tells_apart_are_the_replicas_to_choose() -> None:
    store = SplitStore(given=0)
    shares = Shares(Split.of((f"v{number}", 1) for number in range(1024)))
    assert len({await Variants(store, lambda: True).of(shares, f"id-{n}", 60.0) for n in range(200)}) > 100
    assert store.asked == 0
