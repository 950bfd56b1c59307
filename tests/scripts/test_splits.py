"""Variants of a model by the counts of the whole fleet (lua/split.lua)."""

import asyncio
import itertools
import random
from collections import Counter

import pytest
import redis
from direct_calls import START_MS, ClockedPool, DirectPool
from script_fleet import DEADLINE_S, OpenFleet, Replica

from picker_fleet.admission import variants
from picker_fleet.admission.variants import Variants
from picker_fleet.traffic_split import Shares, Split

CANARY = Split.of([("stable", 90), ("canary", 10)])


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's Redis is not late."""
    monkeypatch.setattr(variants, "DEADLINE_S", DEADLINE_S)


def variants_of(replica: Replica) -> Variants:
    return Variants(replica.store, lambda: True)


async def test_a_thousand_requests_on_three_replicas_are_split_exactly_and_a_retry_elsewhere_gets_the_same(
    fleet: OpenFleet,
) -> None:
    async with fleet("a", "b", "c") as (_, *replicas):
        choosers = [(variants_of(each), Shares(CANARY, "m")) for each in replicas]

        async def ask(number: int, replica: int) -> str:
            chooser, shares = choosers[replica % len(choosers)]
            return await chooser.of(shares, f"id-{number}", DEADLINE_S)

        given = await asyncio.gather(*(ask(number, number) for number in range(1000)))
        assert Counter(given) == {"stable": 900, "canary": 100}
        # Each id once more, at another replica, as if the first had been killed: it changes no count.
        assert await asyncio.gather(*(ask(number, number + 1) for number in range(1000))) == given
        further = [await ask(1000 + number, number) for number in range(20)]
        assert abs(further.count("canary") - 2) <= 1


async def test_one_id_that_comes_to_all_replicas_at_once_gets_one_variant(fleet: OpenFleet) -> None:
    async with fleet("a", "b") as (_, *replicas):
        each_twice = itertools.product(range(100), replicas * 2)
        asked = (variants_of(a).of(Shares(CANARY, "m"), f"id-{n}", DEADLINE_S) for n, a in each_twice)
        given = await asyncio.gather(*asked)
    assert all(len(set(given[at : at + 4])) == 1 for at in range(0, 400, 4))
    assert abs(given.count("canary") / 4 - 10) <= 1


async def test_new_weights_have_shares_of_their_own_at_once_and_ids_keep_their_variant(
    fleet: OpenFleet,
) -> None:
    # Ten thousand requests at 90:10, and then an even split.
    async with fleet("a", "b") as (it, a, b):
        before, after = Shares(CANARY, "m"), Shares(Split.of([("stable", 1), ("canary", 1)]), "m")
        here, there = map(variants_of, (a, b))
        first = await asyncio.gather(*(here.of(before, f"id-{n}", DEADLINE_S) for n in range(500)))
        # No variant catches up: from the first request on both have their halves.
        given = Counter[str]()
        for number in range(40):
            given[await here.of(after, f"new-{number}", DEADLINE_S)] += 1
            assert abs(given["canary"] - given["stable"]) <= 2
        assert [await there.of(after, f"id-{n}", DEADLINE_S) for n in range(50)] == first[:50]
        # Another model with the same variants is counted apart, and so is another pool by its keys.
        other = Shares(CANARY, "n")
        assert len({await here.of(other, f"id-{n}", DEADLINE_S) for n in range(60)}) == 2
        assert await it.redis.hlen(it.keys.prefix + "splits") == 3


@pytest.mark.parametrize("weights", [(90, 10), (1, 1, 1), (70, 20, 9, 1), (1, 1_000_000)])
def test_the_script_decides_as_a_replica_alone_does(direct: DirectPool, weights: tuple[int, ...]) -> None:
    names = [f"v{number}" for number in range(len(weights))]
    shares = Shares(Split.of(zip(names, weights, strict=True)), "m")
    ids = [f"id-{random.Random(7).random()}-{number}" for number in range(600)]
    due = [names.index(shares.of(each)) + 1 for each in ids]
    found: list[int] = []
    while len(found) < len(ids):
        digests = map(shares.hash_of, ids[len(found) : len(found) + 1 + len(found) % 16])
        items = ((shares.key, shares.weights, each, shares.propose(each) + 1) for each in digests)
        found += direct.call("split", "r", *itertools.chain(*items))[4:]
    assert found == due


def test_ids_are_forgotten_after_ten_minutes_and_beyond_a_hundred_thousand(
    client: redis.Redis, pool: str
) -> None:
    library = ClockedPool(client, pool)
    library.publish("e:1")
    ids, sweep = f"{library.prefix}variants", ("sweep", "a", 0, 3000, 60_000, 2000)
    library.call("split", "a", "rule", "1 1", "first", 1)
    library.passes(599_000)
    library.call("split", "a", "rule", "1 1", "second", 1)
    library.call(*sweep)
    assert client.zcard(ids) == 2
    library.passes(2000)
    library.call(*sweep)
    assert client.zrange(ids, 0, -1) == [b"second"]
    client.zadd(ids, {f"id-{n}": START_MS + 600_000 + n % 1000 / 1024 for n in range(101_000)})
    while library.call(*sweep)[7]:
        pass
    assert client.zcard(ids) == 100_000


def test_counts_that_nobody_uses_for_an_hour_go_when_new_ones_come(client: redis.Redis, pool: str) -> None:
    library = ClockedPool(client, pool)
    counts = f"{library.prefix}splits"
    library.call("split", "a", "old", "1 1", "one", 1)
    library.passes(1_800_000)
    library.call("split", "a", "in use", "1 1", "two", 1)
    client.hset(counts, "damaged", "x y")
    library.passes(1_900_000)
    library.call("split", "a", "in use", "1 1", "three", 1)
    assert set(client.hkeys(counts)) == {b"old", b"in use", b"damaged"}
    library.call("split", "a", "new", "1 1", "four", 1)
    assert set(client.hkeys(counts)) == {b"in use", b"new"}


def test_damaged_counts_begin_anew(direct: DirectPool) -> None:
    for damaged in ("", "x", "1 2 3 4 5", "1 a b"):
        direct.client.hset(f"{direct.prefix}splits", "rule", damaged)
        items = (("rule", "1 1", damaged + str(n), 1) for n in range(4))
        assert set(direct.call("split", "r", *itertools.chain(*items))[4:]) == {1, 2}
