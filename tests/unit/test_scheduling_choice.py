"""Which endpoint comes first: filters and weighted scorers together, as tables."""

import random
from collections import Counter
from collections.abc import Mapping

import pytest

from picker_fleet.scheduling.scheduler import Ranking, Scheduler
from picker_fleet.scheduling.scorers import SCORERS, EndpointState, LatencyStats, PickRequest

A, B, C, V6 = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000", "[fd00::1]:8000"
DEFAULT = {"queue-depth": 2.0, "kv-cache": 2.0, "lora-affinity": 3.0}


def at(
    address: str,
    waiting: float | None = 0,
    kv: float | None = 0.0,
    *,
    active: str = "",
    queued: str = "",
    slots: int | None = 2,
    **more: object,
) -> EndpointState:
    return EndpointState(
        address,
        waiting=waiting,
        kv_utilisation=kv,
        max_adapters=slots,
        active_adapters=frozenset(active.split()),
        waiting_adapters=frozenset(queued.split()),
        **more,  # type: ignore[arg-type]
    )


def rank(weights: Mapping[str, float], pick: PickRequest, *endpoints: EndpointState) -> Ranking:
    return Scheduler(weights).rank(pick, endpoints)


def first(weights: Mapping[str, float], pick: PickRequest, *endpoints: EndpointState) -> str:
    return rank(weights, pick, *endpoints).best[0].address


PLAIN = PickRequest()
SUMMARISE = PickRequest(adapter="sum")


@pytest.mark.parametrize(
    ("pick", "endpoints", "expected"),
    [
        pytest.param(PLAIN, [at(A, 3, 0.2), at(B, 0, 0.1), at(C, 10, 0.2)], B, id="lower queue and KV"),
        pytest.param(PLAIN, [at(A, 5, 0.9), at(B, 5, 0.1)], B, id="equal queues: lower KV"),
        pytest.param(PLAIN, [at(A, 9, 0.5), at(B, 1, 0.5)], B, id="equal KV: lower queue"),
        pytest.param(PLAIN, [at(V6, 0, 0.1), at(A, 9, 0.5)], V6, id="an IPv6 address"),
        pytest.param(PLAIN, [at(A, None, None), at(B, 50, 0.99)], B, id="unknown behind loaded"),
        pytest.param(
            SUMMARISE,
            [
                at(A, 0, 0.2, active="foo bar"),
                at(B, 0, 0.1, active="sum foo"),
                at(C, 10, 0.2, active="foo bar"),
            ],
            B,
            id="active adapter with a low queue",
        ),
        pytest.param(
            SUMMARISE,
            [at(A, 2, 0.1, active="foo"), at(B, 2, 0.8, active="sum", slots=8)],
            A,
            id="a free slot and much less KV over the adapter",
        ),
        pytest.param(
            SUMMARISE,
            [
                at(A, 10, 0.2, active="foo bar"),
                at(B, 10, 0.85, active="sum foo"),
                at(C, 10, 0.9, active="foo"),
            ],
            B,
            id="adapter affinity over KV where only it and a slot can serve",
        ),
        pytest.param(
            SUMMARISE,
            [at(A, active="foo bar"), at(B, active="foo bar", queued="sum"), at(C, active="x y")],
            B,
            id="nobody has a slot: where the adapter waits",
        ),
        pytest.param(
            SUMMARISE,
            [at(A, active="foo bar"), at(B, 40, 0.9, slots=None)],
            B,
            id="unknown slots may serve, full ones not",
        ),
        pytest.param(
            PickRequest(subset=frozenset((A, C))),
            [at(A, 9), at(B, 0), at(C, 4)],
            C,
            id="the best of the subset",
        ),
        pytest.param(
            PickRequest(subset=frozenset((A, "10.9.9.9:1"))),
            [at(A, 9), at(B, 0)],
            A,
            id="a partly known subset",
        ),
        pytest.param(PLAIN, [at(A, 0, healthy=False), at(B, 9)], B, id="health over queue"),
        pytest.param(PLAIN, [at(A, 0, draining=True), at(B, 9)], B, id="drain over queue"),
        pytest.param(
            PickRequest(selector={"zone": "b"}),
            [at(A, 0, labels={"zone": "a"}), at(B, 9, labels={"zone": "b"}), at(C, 0)],
            B,
            id="the label selector over queue",
        ),
    ],
)
def test_the_first_choice(pick: PickRequest, endpoints: list[EndpointState], expected: str) -> None:
    assert first(DEFAULT, pick, *endpoints) == expected


@pytest.mark.parametrize(("lora", "expected"), [(1.0, A), (6.0, B)])
def test_weights_decide_between_adapter_affinity_and_kv(lora: float, expected: str) -> None:
    """A free slot with an empty cache and the adapter with a full one: when either weighs more, then
    it wins."""
    slot, adapter = at(A, 0, 0.1, active="foo"), at(B, 0, 0.7, active="sum")

    chosen = first({"queue-depth": 1.0, "kv-cache": 1.0, "lora-affinity": lora}, SUMMARISE, slot, adapter)

    assert chosen == expected


@pytest.mark.parametrize(
    ("pick", "endpoints", "reasons"),
    [
        pytest.param(PLAIN, [], {}, id="no endpoint"),
        pytest.param(
            PickRequest(subset=frozenset()), [at(A)], {A: "not in the subset hint"}, id="the empty subset"
        ),
        pytest.param(
            PickRequest(subset=frozenset((B,))),
            [at(A)],
            {A: "not in the subset hint"},
            id="an unknown subset",
        ),
        pytest.param(
            PLAIN,
            [at(A, healthy=False), at(B, draining=True)],
            {A: "unhealthy", B: "draining"},
            id="all out",
        ),
        pytest.param(
            PickRequest(selector={"zone": "b"}), [at(A)], {A: "label zone is not b"}, id="no such label"
        ),
    ],
)
def test_hard_filters_leave_nobody_and_say_why(
    pick: PickRequest, endpoints: list[EndpointState], reasons: dict[str, str]
) -> None:
    ranking = rank(DEFAULT, pick, *endpoints)

    assert ranking.best == ()
    assert ranking.excluded == reasons


def test_a_soft_filter_that_leaves_nobody_is_waived() -> None:
    """No endpoint with room for the adapter, when one is picked, all are candidates."""
    ranking = rank(DEFAULT, SUMMARISE, at(A, active="x y"), at(B, active="x z"))

    assert {one.address for one in ranking.best} == {A, B}
    assert ranking.waived == ("adapter",)
    assert ranking.excluded == {}


def test_a_soft_filter_never_brings_back_what_a_hard_one_took() -> None:
    """A draining endpoint with the adapter and a full one without: the full one is picked."""
    ranking = rank(DEFAULT, SUMMARISE, at(A, active="sum", draining=True), at(B, active="x y"))

    assert [one.address for one in ranking.best] == [B]
    assert ranking.excluded == {A: "draining"}


def test_all_stale_are_equal_and_pickable() -> None:
    """Only stale figures: when many requests are ranked, each endpoint comes first at times."""
    endpoints = [at(A, 1, 0.1, stale=True), at(B, 50, 0.9, stale=True), at(C, 0, 0.0, stale=True)]
    pick = PickRequest(random=random.Random(1).random)

    firsts = Counter(first(DEFAULT, pick, *endpoints) for _ in range(60))

    assert set(firsts) == {A, B, C}
    assert len({one.score for one in rank(DEFAULT, pick, *endpoints).best}) == 1


def test_ties_are_broken_by_chance_alone() -> None:
    """Equal endpoints: when the chances are known, the highest chance comes first."""
    chances = iter([0.2, 0.9, 0.5])

    ranking = rank(DEFAULT, PickRequest(random=lambda: next(chances)), at(A), at(B), at(C))

    assert [one.address for one in ranking.best] == [B, C, A]


def test_only_the_most_wanted_are_listed_best_first() -> None:
    """200 endpoints of different queues: when three are asked for, the three shortest come."""
    endpoints = [at(f"10.0.1.{n}:80", n) for n in range(200)]

    ranking = Scheduler(DEFAULT).rank(PLAIN, endpoints[::-1], limit=3)

    assert [one.address for one in ranking.best] == ["10.0.1.0:80", "10.0.1.1:80", "10.0.1.2:80"]


def test_totals_stay_between_zero_and_one_with_every_scorer() -> None:
    """All scorers with odd weights and odd figures: totals and bases are in [0, 1]."""
    chance = random.Random(7)
    weights = {name: chance.uniform(0.1, 50) for name in SCORERS}
    figures = [None, 0.0, 1.0, 7.5, 1e12, -3.0, float("nan"), float("inf")]
    for _ in range(100):
        endpoints = [
            EndpointState(
                f"10.0.2.{n}:80",
                waiting=chance.choice(figures),
                running=chance.choice(figures),
                kv_utilisation=chance.choice(figures),
                in_flight=chance.choice([0.0, 3.0, 1e9]),
                latency=chance.choice([None, LatencyStats(3, 2.5, 0.5)]),
            )
            for n in range(5)
        ]
        pick = PickRequest(
            session_endpoint="10.0.2.3:80",
            prefix_blocks=4,
            prefix_matches={"10.0.2.1:80": 9, "10.0.2.2:80": 1},
            random=chance.random,
        )

        ranking = rank(weights, pick, *endpoints)

        assert all(0.0 <= one.base <= one.score <= 1.0 for one in ranking.best)
        assert all(0.0 <= part <= 1.0 for parts in ranking.parts.values() for part in parts)


def test_the_part_of_the_load_in_flight_can_be_taken_out() -> None:
    """Given a script that adds live load: when a candidate's base is used, that part is not in it."""
    scheduler = Scheduler({"in-flight": 1.0, "kv-cache": 3.0})

    best = scheduler.rank(PLAIN, [at(A, kv=0.5, in_flight=0), at(B, kv=0.5, in_flight=4)]).best

    assert scheduler.live_weight == 0.25
    assert [(one.address, one.score, one.base) for one in best] == [(A, 0.625, 0.375), (B, 0.375, 0.375)]


def test_without_scorers_all_are_equal() -> None:
    assert [one.score for one in rank({}, PLAIN, at(A, 3), at(B)).best] == [0.0, 0.0]
    assert [one.score for one in rank({"kv-cache": 0.0}, PLAIN, at(A, 3), at(B)).best] == [0.0, 0.0]


def test_an_unknown_scorer_is_refused_with_the_valid_names() -> None:
    with pytest.raises(ValueError, match=r"no scorer is named 'kv-cash'; valid: queue-depth, .*random"):
        Scheduler({"kv-cash": 1.0})


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_an_impossible_weight_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="the weight of scorer kv-cache"):
        Scheduler({"kv-cache": weight})


def test_what_is_new_of_the_endpoints_counts_at_once() -> None:
    scheduler = Scheduler(DEFAULT)
    assert scheduler.rank(PLAIN, [at(A, 0), at(B, 9)]).best[0].address == A
    assert scheduler.rank(PLAIN, [at(A, 9), at(B, 0)]).best[0].address == B
    only = PickRequest(subset=frozenset((A,)))
    assert [each.address for each in scheduler.rank(only, [at(A, 9), at(B, 0)]).best] == [A]
    assert scheduler.rank(PLAIN, []).best == ()
    assert scheduler.rank(PLAIN, [at(A, 9), at(B, 0)]).best[0].address == B
