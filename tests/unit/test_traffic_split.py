"""Which variant of a model a request is sent as: shares, and what an identity leads to.

Which identity a request has: tests/unit/test_intake.py.
"""

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.config import parse
from picker_fleet.extproc.context import BodyBudget, OpenRequests
from picker_fleet.intake import Ask
from picker_fleet.pool import Pool
from picker_fleet.traffic_split import Split, identity_of_body

CANARY = Split.of([("stable", 90), ("canary", 10), ("never", 0)])
KEY = b"the pool's"


def identities(count: int) -> list[bytes]:
    return [f"id-{number}".encode() for number in range(count)]


@pytest.mark.parametrize("weights", [(90, 10, 0), (1, 1), (1, 2, 3, 4), (0, 1, 1_000_000), (1,) * 7])
def test_shares_keep_within_the_binomial_spread(weights: tuple[int, ...]) -> None:
    split = Split.of((f"v{number}", weight) for number, weight in enumerate(weights))
    rng, count = random.Random(1), 20_000
    found = Counter(split.variant(KEY, rng.randbytes(16)) for _ in range(count))
    for number, weight in enumerate(weights):
        share = weight / sum(weights)
        spread = math.sqrt(count * share * (1 - share))
        assert abs(found[f"v{number}"] - count * share) <= 4.5 * spread + 1e-6


@given(st.lists(st.integers(0, 1_000_000), min_size=1, max_size=5).filter(any), st.binary(), st.binary())
def test_every_identity_leads_to_a_variant_with_a_weight(
    weights: list[int], key: bytes, identity: bytes
) -> None:
    split = Split.of((str(number), weight) for number, weight in enumerate(weights))
    assert weights[int(split.variant(key[:64], identity))] > 0


def test_one_variant_gets_everything() -> None:
    assert {Split.of([("a", 3), ("b", 0)]).variant(KEY, each) for each in identities(100)} == {"a"}


def test_another_key_is_another_assignment() -> None:
    # By chance two keys agree about 0.9 * 0.9 + 0.1 * 0.1 of the identities.
    count, expected = 10_000, 0.82
    same = sum(CANARY.variant(KEY, each) == CANARY.variant(b"other", each) for each in identities(count))
    assert abs(same - expected * count) < 5 * math.sqrt(count * expected * (1 - expected))


def test_new_weights_move_only_the_difference() -> None:
    more = Split.of([("stable", 80), ("canary", 20)])
    moves = Counter((CANARY.variant(KEY, each), more.variant(KEY, each)) for each in identities(10_000))
    assert ("canary", "stable") not in moves
    assert abs(moves["stable", "canary"] - 1000) < 5 * math.sqrt(10_000 * 0.1 * 0.9)


def test_bodies_spread_by_key_flow_and_content() -> None:
    prompts = [b'{"model": "m", "prompt": "%d"}' % number for number in range(2000)]
    found = [CANARY.variant(KEY, identity_of_body(KEY, "tenant", each)) for each in prompts]
    assert abs(found.count("canary") - 200) < 5 * math.sqrt(2000 * 0.1 * 0.9)
    assert found != [CANARY.variant(KEY, identity_of_body(KEY, "other", each)) for each in prompts]
    # The key seeds the hash of the body, too.
    assert len({identity_of_body(bytes([seed]) * 16, "tenant", b"body") for seed in range(20)}) == 20


async def test_a_pool_chooses_by_the_key_that_its_heartbeats_bring() -> None:
    targets = [{"name": name, "weight": weight} for name, weight in (("stable", 90), ("canary", 10))]
    settings = parse({"models": [{"name": "m", "target_models": targets}]})
    pool = Pool(settings, "r", bodies=BodyBudget(1), open_requests=OpenRequests())
    pool.parts.signing.take("", "1750000000000:0a")
    key = pool.parts.signing.variant_key
    for each in identities(200):
        asked = pool.context.intake.request(
            Ask("m", False, b"{}"), {"x-request-id": each}, subset=None, trusted=True
        )
        assert asked.target_model == CANARY.variant(key, each)
