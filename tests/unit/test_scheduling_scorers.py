"""Each scorer alone: scores for a row of endpoints."""

import pytest

from picker_fleet.scheduling.chooser import session_token_of
from picker_fleet.scheduling.scorers import SCORERS, EndpointState, LatencyStats, LatencyWeights, PickRequest


def row(name: str, *values: object) -> list[EndpointState]:
    return [EndpointState(f"10.0.0.{n}:80", **{name: value}) for n, value in enumerate(values)]  # type: ignore[arg-type]


@pytest.mark.parametrize("scorer", SCORERS)
def test_nobody_gets_no_scores(scorer: str) -> None:
    assert SCORERS[scorer](PickRequest(adapter="a", session_endpoint="s", prefix_blocks=1), []) == []


@pytest.mark.parametrize(
    ("scorer", "signal"),
    [("queue-depth", "waiting"), ("running-requests", "running"), ("in-flight", "in_flight")],
)
@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ((0, 5, 10), [1.0, 0.5, 0.0]),
        ((7, 7), [1.0, 1.0]),
        ((3,), [1.0]),
    ],
)
def test_fewest_are_best(scorer: str, signal: str, figures: tuple[float, ...], expected: list[float]) -> None:
    assert SCORERS[scorer](PickRequest(), row(signal, *figures)) == expected


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ((0, None, 10), [1.0, 0.0, 0.0]),
        ((4, None), [1.0, 0.0]),
        ((None, None), [0.0, 0.0]),
        ((2, float("nan"), 4), [1.0, 0.0, 0.0]),
    ],
)
def test_an_unknown_queue_counts_as_the_fullest(
    figures: tuple[float | None, ...], expected: list[float]
) -> None:
    assert SCORERS["queue-depth"](PickRequest(), row("waiting", *figures)) == expected


def test_kv_cache_scores_what_is_free() -> None:
    scores = SCORERS["kv-cache"](PickRequest(), row("kv_utilisation", 0.0, 0.25, 1.0, None, 1.5, -0.1))

    assert scores == [1.0, 0.75, 0.0, 0.0, 0.0, 1.0]


def test_a_stale_endpoint_is_unknown_to_every_scorer() -> None:
    stale = EndpointState(
        "10.0.0.9:80",
        waiting=0,
        running=0,
        kv_utilisation=0.0,
        max_adapters=9,
        active_adapters=frozenset("a"),
        stale=True,
    )
    fresh = EndpointState("10.0.0.1:80", waiting=9, running=9, kv_utilisation=0.9)

    for scorer in ("queue-depth", "running-requests", "kv-cache", "lora-affinity"):
        assert SCORERS[scorer](PickRequest(adapter="a"), [stale, fresh])[0] == 0.0


def test_lora_affinity_prefers_running_then_free_then_waiting() -> None:
    def lora(most: int | None, active: str, waiting: str = "") -> EndpointState:
        return EndpointState(
            f"{most}{active}{waiting}",
            max_adapters=most,
            active_adapters=frozenset(active.split()),
            waiting_adapters=frozenset(waiting.split()),
        )

    endpoints = [
        lora(2, "a b"),
        lora(2, "b"),
        lora(2, "b c", "a"),
        lora(2, "b c"),
        lora(2, "b", "c"),
        lora(None, ""),
    ]

    assert SCORERS["lora-affinity"](PickRequest(adapter="a"), endpoints) == [1.0, 0.8, 0.6, 0.0, 0.0, 0.0]
    assert SCORERS["lora-affinity"](PickRequest(), endpoints) == [1.0] * 6


def test_latency_weighs_mean_load_and_spread() -> None:
    """Spec 004's cost with every weight: the least cost scores 1, the most 0, others between."""
    pick = PickRequest(latency_weights=LatencyWeights(alpha=1.0, beta=2.0, gamma=3.0))
    endpoints = [
        EndpointState("a", latency=LatencyStats(9, 1.0, 0.0), in_flight=0),  # 1
        EndpointState("b", latency=LatencyStats(9, 1.0, 1.0), in_flight=1),  # 6
        EndpointState("c", latency=LatencyStats(9, 5.0, 0.0), in_flight=3),  # 11
    ]

    assert SCORERS["latency"](pick, endpoints) == [1.0, 0.5, 0.0]


def test_latency_explores_what_has_no_statistics_first_but_not_with_everything() -> None:
    endpoints = [
        EndpointState("a", latency=LatencyStats(9, 1.0, 0.0)),
        EndpointState("b"),
        EndpointState("c", latency=LatencyStats(9, 2.0, 0.0)),
    ]

    assert SCORERS["latency"](PickRequest(), endpoints) == [0.5, 1.0, 0.0]
    assert SCORERS["latency"](PickRequest(), row("latency", None, None)) == [1.0, 1.0]
    endpoints[1] = EndpointState("b", in_flight=4)
    assert SCORERS["latency"](PickRequest(), endpoints) == [1.0, 0.0, 0.0]


def test_prefix_affinity_is_the_part_of_the_prompt_served_before() -> None:
    pick = PickRequest(prefix_blocks=8, prefix_matches={"10.0.0.0:80": 8, "10.0.0.1:80": 2, "elsewhere": 8})

    assert SCORERS["prefix-affinity"](pick, row("waiting", 0, 0, 0)) == [1.0, 0.25, 0.0]
    assert SCORERS["prefix-affinity"](PickRequest(), row("waiting", 0)) == [0.0]


def test_a_session_stays_where_it_was_served() -> None:
    pick = PickRequest(session_endpoint="10.0.0.2:80")

    assert SCORERS["session-affinity"](pick, row("waiting", 0, 0, 0)) == [0.0, 0.0, 1.0]


def test_a_request_without_a_session_has_no_home() -> None:
    assert SCORERS["session-affinity"](PickRequest(), row("waiting", 0, 0)) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-session-token": b" 0123456789abcdef0123456789ab "}, "0123456789abcdef0123456789ab"),
        ({"x-session-token": b"alice"}, ""),
        ({"x-session-token": b"\xff" * 28}, ""),
        ({"x-session-token": b"x" * 257}, ""),
        ({}, ""),
    ],
)
def test_a_session_token_is_read_only_where_it_can_be_one(headers: dict[str, bytes], expected: str) -> None:
    assert session_token_of(headers) == expected


def test_random_asks_chance_for_each() -> None:
    chances = iter([0.1, 0.7])

    assert SCORERS["random"](PickRequest(random=lambda: next(chances)), row("waiting", 0, 0)) == [0.1, 0.7]
