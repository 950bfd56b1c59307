"""Shares of a model's variants: exact on each replica, and as far as can be the same for the same id."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

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
