"""Traffic splits: the shares of model variants, and the variant that a request's identity selects.

The file tests/unit/test_intake.py tests which identity a request has.
"""

import math
import random
from collections import Counter

import pytest

from picker_fleet.domain.budgets import BodyBudget
from picker_fleet.domain.config import parse
from picker_fleet.ingress.context import OpenRequests
from picker_fleet.ingress.intake import Ask
from picker_fleet.ingress.traffic_split import Split, identity_of_body
from picker_fleet.pool import Pool

CANARY = Split.of([("stable", 90), ("canary", 10), ("never", 0)])
KEY = b"the pool's"


def identities(count: int) -> list[bytes]:
    return [f"id-{number}".encode() for number in range(count)]


@pytest.mark.parametrize("weights", [(90, 10, 0), (1, 1), (1, 2, 3, 4), (0, 1, 1_000_000), (1,) * 7])
def test_shares_of_model_variants_keep_within_the_binomial_spread(weights: tuple[int, ...]) -> None:
    split = Split.of((f"v{number}", weight) for number, weight in enumerate(weights))
    rng, count = random.Random(1), 20_000
    found = Counter(split.variant(KEY, rng.randbytes(16)) for _ in range(count))
    for number, weight in enumerate(weights):
        share = weight / sum(weights)
        spread = math.sqrt(count * share * (1 - share))
        assert abs(found[f"v{number}"] - count * share) <= 4.5 * spread + 1e-6


def test_changed_weights_move_only_the_difference_in_shares_to_other_variants() -> None:
    more = Split.of([("stable", 80), ("canary", 20)])
    moves = Counter((CANARY.variant(KEY, each), more.variant(KEY, each)) for each in identities(10_000))
    assert ("canary", "stable") not in moves
    assert abs(moves["stable", "canary"] - 1000) < 5 * math.sqrt(10_000 * 0.1 * 0.9)


def test_the_variant_for_a_request_body_depends_on_the_hash_key() -> None:
    assert len({identity_of_body(bytes([seed]) * 16, "tenant", b"body") for seed in range(20)}) == 20


async def test_a_pool_chooses_variants_with_the_hash_key_that_heartbeats_return() -> None:
    targets = [{"name": name, "weight": weight} for name, weight in (("stable", 90), ("canary", 10))]
    settings = parse({"models": [{"name": "m", "target_models": targets}]})
    pool = Pool(settings, "r", bodies=BodyBudget(1), open_requests=OpenRequests())
    pool.signing.take("", "1750000000000:0a")
    key = pool.signing.variant_key
    for each in identities(200):
        asked = pool.context.intake.request(
            Ask("m", False, b"{}"), {"x-request-id": each}, subset=None, trusted=True
        )
        assert asked.target_model == CANARY.variant(key, each)
