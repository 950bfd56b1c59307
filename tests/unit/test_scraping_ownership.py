"""The assignment of endpoints: replicas agree on it, it is even, and a change moves the least possible."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.endpoints.scraping import ReplicaLiveness, assigned_endpoints, assigned_replica

ADDRESSES = [f"10.0.{number // 250}.{number % 250}:8000" for number in range(2000)]
REPLICAS = [f"host-{number:08x}" for number in range(8)]


@given(st.lists(st.text(max_size=8), min_size=1, max_size=6, unique=True), st.randoms(), st.text(max_size=8))
def test_the_order_of_the_replicas_does_not_matter(replicas: list[str], random: object, address: str) -> None:
    shuffled = list(replicas)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert assigned_replica(address, shuffled) == assigned_replica(address, replicas)


def test_every_endpoint_has_exactly_one_owner() -> None:
    shares = [assigned_endpoints(ADDRESSES, replica, REPLICAS) for replica in REPLICAS]
    assert sorted(address for share in shares for address in share) == sorted(ADDRESSES)


@pytest.mark.parametrize("replicas", range(1, 9))
def test_shares_are_even(replicas: int) -> None:
    counts = Counter(assigned_replica(address, REPLICAS[:replicas]) for address in ADDRESSES)
    fair = len(ADDRESSES) / replicas
    assert max(counts.values()) <= 1.2 * fair
    assert min(counts.values()) >= 0.8 * fair


def test_a_replica_that_leaves_gives_up_only_its_own() -> None:
    before = {address: assigned_replica(address, REPLICAS) for address in ADDRESSES}
    after = {address: assigned_replica(address, REPLICAS[1:]) for address in ADDRESSES}
    moved = {address for address in ADDRESSES if before[address] != after[address]}
    assert moved == {address for address in ADDRESSES if before[address] == REPLICAS[0]}
    assert {after[address] for address in moved} == set(REPLICAS[1:])


def test_a_replica_that_joins_takes_only_what_becomes_its_own() -> None:
    before = {address: assigned_replica(address, REPLICAS[:-1]) for address in ADDRESSES}
    after = {address: assigned_replica(address, REPLICAS) for address in ADDRESSES}
    assert {after[address] for address in ADDRESSES if before[address] != after[address]} == {REPLICAS[-1]}


def test_owners_are_the_same_in_every_process() -> None:
    # A change of the hash would have two versions disagree in one fleet.
    assert [assigned_replica(address, REPLICAS) for address in ADDRESSES[:4]] == [
        "host-00000002",
        "host-00000002",
        "host-00000004",
        "host-00000005",
    ]


def test_a_stranger_owns_nothing_and_no_replicas_are_an_error() -> None:
    assert assigned_endpoints(ADDRESSES, "stranger", REPLICAS) == frozenset()
    with pytest.raises(ValueError, match="there are no replicas"):
        assigned_replica("a:1", [])


def present(silence_s: float = 1.0) -> ReplicaLiveness:
    return ReplicaLiveness("b", silence_s)


def test_a_live_replica_counts_until_it_is_silent() -> None:
    presence = present()
    assert presence.alive(["c", "b", "a"], 0.0) == ("a", "b", "c")
    for moment_s in (0.5, 1.0, 1.5):
        presence.seen("a", moment_s)
    assert presence.alive(["a", "b", "c"], 1.5) == ("a", "b")
    presence.seen("c", 1.6)
    assert presence.alive(["a", "b", "c"], 1.6) == ("a", "b", "c")


def test_a_replica_that_joins_has_time_to_publish() -> None:
    presence = present()
    presence.seen("b", 10.0)
    assert presence.alive(["b", "c"], 10.0) == ("b", "c")
    presence.seen("b", 10.9)
    assert presence.alive(["b", "c"], 10.9) == ("b", "c")
    presence.seen("b", 11.1)
    assert presence.alive(["b", "c"], 11.1) == ("b",)


def test_every_replica_is_live_while_none_publishes() -> None:
    presence = present()
    presence.alive(["a", "b"], 0.0)
    presence.seen("b", 0.5)
    assert presence.alive(["a", "b"], 60.0) == ("a", "b")
    presence.on_subscribed(60.0)
    presence.seen("b", 60.1)
    assert presence.alive(["a", "b"], 60.1) == ("a", "b")


def test_this_replica_is_there_if_it_is_live_and_alone_if_nobody_is() -> None:
    presence = present()
    presence.seen("a", 100.0)
    assert presence.alive(["a", "b"], 100.0) == ("a", "b")
    assert presence.alive(["a"], 100.0) == ("a",)
    assert presence.alive([], 100.0) == ("b",)
