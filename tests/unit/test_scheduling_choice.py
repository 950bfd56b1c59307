"""Choice of endpoints: single scorers, filters, weighted scorers, and explanations."""

import random
from collections.abc import Mapping
from typing import Any

import orjson
import pytest
from tables import cases

from picker_fleet.domain.request import Endpoint, LatencyObjective
from picker_fleet.domain.scheduling import Latency
from picker_fleet.scheduling.chooser import ExplanationCache
from picker_fleet.scheduling.explain import Explanation, LeastLoadedPick
from picker_fleet.scheduling.latency_model import UNKNOWN, Forecast, Prediction
from picker_fleet.scheduling.scheduler import Ranking, Scheduler
from picker_fleet.scheduling.scorers import SCORERS, EndpointState, LatencyStats, PickRequest
from picker_fleet.scheduling.sessions import session_token_of

A, B, C = "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"
DEFAULT = {"queue-depth": 2.0, "kv-cache": 2.0, "lora-affinity": 3.0}
PLAIN = PickRequest()


def row(name: str, *values: object) -> list[EndpointState]:
    return [EndpointState(f"10.0.0.{n}:80", **{name: value}) for n, value in enumerate(values)]  # type: ignore[arg-type]


FEWEST = {"queue-depth": "waiting", "running-requests": "running", "in-flight": "in_flight"}


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
    more |= {"active_adapters": frozenset(active.split()), "waiting_adapters": frozenset(queued.split())}
    return EndpointState(address, waiting=waiting, kv_utilisation=kv, max_adapters=slots, **more)  # type: ignore[arg-type]


def timed(mean_s: float | None, spread_s: float = 0.0, load: int = 0) -> EndpointState:
    """An endpoint with these statistics of its latency (None: no statistics) and load in flight."""
    return EndpointState("a", latency=mean_s and LatencyStats(9, mean_s, spread_s), in_flight=load)


# Endpoints where adapter `a` runs, has a free slot, waits, lacks a slot (twice), is not supported.
ADAPTERS = [
    at(A, slots=slots, active=active, queued=queued)
    for slots, active, queued in (
        (2, "a b", ""), (2, "b", ""), (2, "b c", "a"), (2, "b c", ""), (2, "b", "c"), (None, "", ""),
    )
]  # fmt: skip
SEVERAL = PickRequest(prefix_blocks=8, prefix_matches={"10.0.0.0:80": 8, "10.0.0.1:80": 2, "elsewhere": 8})
# The worse p90 is 1, 2 and 0.5 times the objective (0.2 s and 0.05 s), or unknown.
FORECASTS = {
    "10.0.0.0:80": Forecast(Prediction(0.1, 0.2), Prediction(0.01, 0.02)),
    "10.0.0.1:80": Forecast(Prediction(0.1, 0.1), Prediction(0.05, 0.1)),
    "10.0.0.2:80": Forecast(Prediction(0.05, 0.1), None),
    "10.0.0.3:80": UNKNOWN,
}


@cases("scorer, pick, endpoints, expected", {
    **{
        f"{scorer}: the fewest of {len(figures)}": (scorer, PLAIN, row(signal, *figures), expected)
        for scorer, signal in FEWEST.items()
        for figures, expected in (((0, 5, 10), [1.0, 0.5, 0.0]), ((7, 7), [1.0, 1.0]), ((3,), [1.0]))
    },
    "an unknown queue is average": ("queue-depth", PLAIN, row("waiting", 0, None, 10, 10), [1, 1 / 3, 0, 0]),
    "an unknown queue beside a known queue": ("queue-depth", PLAIN, row("waiting", 4, None), [1.0, 1.0]),
    "unknown queues all score 0": ("queue-depth", PLAIN, row("waiting", None, None), [0.0, 0.0]),
    "free KV cache": (
        "kv-cache", PLAIN, row("kv_utilisation", 0.0, 0.25, 1.0, None), [1.0, 0.75, 0.0, 1.75 / 3]),
    "the part of the prompt served before": (
        "prefix-affinity", SEVERAL, row("waiting", 0, 0, 0), [1.0, 0.25, 0.0]),
    "no prompt": ("prefix-affinity", PLAIN, row("waiting", 0), [0.0]),
    "the endpoint of a session": (
        "session-affinity", PickRequest(session_endpoint="10.0.0.2:80"), row("waiting", 0, 0, 0), [0, 0, 1]),
    "no session": ("session-affinity", PLAIN, row("waiting", 0, 0), [0.0, 0.0]),
    "headroom below the latency objective": (
        "slo-headroom", PickRequest(objective=LatencyObjective(0.2, 0.05), forecasts=FORECASTS),
        row("waiting", 0, 0, 0, 0), [0.5, 1 / 17, 16 / 17, (0.5 + 1) / 3]),
    "no latency objective": ("slo-headroom", PickRequest(forecasts=FORECASTS), row("waiting", 0), [0.0]),
    "the part of the preferred labels": (
        "topology", PickRequest(preferred={"zone": "a", "rack": "1"}),
        [EndpointState(A, labels=labels) for labels in (
            {"zone": "a", "rack": "1", "gpu": "x"}, {"zone": "a", "rack": "2"}, {})], [1.0, 0.5, 0.0]),
    "no preferred labels": ("topology", PLAIN, row("waiting", 0, 0), [0.0, 0.0]),
    "running adapters, then free slots, then waiting adapters": (
        "lora-affinity", PickRequest(adapter="a"), ADAPTERS, [1.0, 0.8, 0.6, 0.0, 0.0, 0.0]),
    "no adapter": ("lora-affinity", PLAIN, ADAPTERS, [1.0] * 6),
    "latency by mean, load and spread": (  # weighted sums of the three endpoints: 1, 6, 11
        "latency", PickRequest(latency_weights=Latency(alpha=1.0, beta=2.0, gamma=3.0)),
        [timed(1.0), timed(1.0, 1.0, 1), timed(5.0, load=3)], [1.0, 0.5, 0.0]),
    "an idle endpoint of unknown latency": (
        "latency", PLAIN, [timed(1.0), timed(None), timed(2.0)], [0.5, 1.0, 0.0]),
    "a busy endpoint of unknown latency": (
        "latency", PLAIN, [timed(1.0), timed(None, load=4), timed(2.0)], [1.0, 0.0, 0.0]),
    "idle endpoints of unknown latency": ("latency", PLAIN, [timed(None)] * 2, [1.0, 1.0]),
    "a random score": (
        "random", PickRequest(random=iter([0.1, 0.7]).__next__), row("waiting", 0, 0), [0.1, 0.7]),
    **{f"{scorer}: empty": (scorer, PickRequest(adapter="a", session_endpoint="s", prefix_blocks=1), [], [])
       for scorer in SCORERS},
})  # fmt: skip
def test_each_scorer_gives_the_expected_scores(
    scorer: str, pick: PickRequest, endpoints: list[EndpointState], expected: list[float]
) -> None:
    assert SCORERS[scorer](pick, endpoints) == expected


def test_an_endpoint_with_stale_readings_is_unknown_to_every_scorer() -> None:
    stale = EndpointState(A, stale=True)
    busy, idle = at(B, 9, 0.9, running=9, slots=None), at(C, 1, 0.1, active="a", running=1)
    for scorer in ("queue-depth", "running-requests", "kv-cache", "lora-affinity"):
        scores = SCORERS[scorer](PickRequest(adapter="a"), [stale, busy, idle])
        assert scores[0] == pytest.approx(0.5)
        assert scores[1] < scores[0] < scores[2]
    # The adapters of a stale endpoint are unknown: a fresh endpoint with the adapter comes first.
    assert SCORERS["lora-affinity"](PickRequest(adapter="a"), [stale, idle]) == [0.8, 1.0]


@cases("token, expected", {
    "a well-formed token": (b" 0123456789abcdef0123456789ab ", "0123456789abcdef0123456789ab"),
    "a short one": (b"alice", ""),
    "no text": (b"\xff" * 28, ""),
    "a long one": (b"x" * 257, ""),
    "none": (None, ""),
})  # fmt: skip
def test_only_text_in_the_form_of_a_session_token_is_read_as_one(token: bytes | None, expected: str) -> None:
    assert session_token_of({} if token is None else {"x-session-token": token}) == expected


def rank(weights: Mapping[str, float], pick: PickRequest, *endpoints: EndpointState) -> Ranking:
    return Scheduler(weights).rank(pick, endpoints)


def first(weights: Mapping[str, float], pick: PickRequest, *endpoints: EndpointState) -> str:
    return addresses(rank(weights, pick, *endpoints))[0]


def addresses(ranking: Ranking) -> list[str]:
    return [one.address for one in ranking.best]


SUMMARISE = PickRequest(adapter="sum")
ZONE_B = PickRequest(selector={"zone": "b"})


OUTSIDE = {A: "not in the subset hint"}


@cases("pick, endpoints, reasons", {
    "no endpoints": (PLAIN, [], {}),
    "the empty subset": (PickRequest(subset=frozenset()), [at(A)], OUTSIDE),
    "an unknown subset": (PickRequest(subset=frozenset((B,))), [at(A)], OUTSIDE),
    "none in service": (PLAIN, [at(A, healthy=False), at(B, draining=True)], {A: "unhealthy", B: "draining"}),
    "no such label": (ZONE_B, [at(A)], {A: "label zone is not b"}),
})  # fmt: skip
def test_hard_filters_may_exclude_every_endpoint_and_give_reasons(
    pick: PickRequest, endpoints: list[EndpointState], reasons: dict[str, str]
) -> None:
    ranking = rank(DEFAULT, pick, *endpoints)
    assert (ranking.best, ranking.excluded) == ((), reasons)


def test_a_soft_filter_that_excludes_every_endpoint_is_waived() -> None:
    # No endpoint has room for the adapter.
    ranking = rank(DEFAULT, SUMMARISE, at(A, active="x y"), at(B, active="x z"))
    assert set(addresses(ranking)) == {A, B}
    assert (ranking.waived, ranking.excluded) == (("adapter",), {})
    # An endpoint that a hard filter has excluded stays excluded.
    ranking = rank(DEFAULT, SUMMARISE, at(A, active="sum", draining=True), at(B, active="x y"))
    assert (addresses(ranking), ranking.excluded) == ([B], {A: "draining"})


def test_among_endpoints_of_equal_score_the_choice_is_random() -> None:
    by_chance = PickRequest(random=iter([0.2, 0.9, 0.5]).__next__)
    assert addresses(rank(DEFAULT, by_chance, at(A), at(B), at(C))) == [B, C, A]


def test_total_scores_stay_between_zero_and_one_with_every_scorer() -> None:
    chance = random.Random(7)
    weights = {name: chance.uniform(0.1, 50) for name in SCORERS}
    counts, shares = [None, 0.0, 1.0, 7.5, 1e12], [None, 0.0, 0.3, 1.0]
    for _ in range(100):
        endpoints = [
            EndpointState(
                f"10.0.2.{n}:80",
                waiting=chance.choice(counts),
                running=chance.choice(counts),
                kv_utilisation=chance.choice(shares),
                in_flight=chance.choice([0.0, 3.0, 1e9]),
                latency=chance.choice([None, LatencyStats(3, 2.5, 0.5)]),
            )
            for n in range(5)
        ]
        matches = {"10.0.2.1:80": 4, "10.0.2.2:80": 1}
        prompt: dict[str, Any] = {"prefix_blocks": 4, "prefix_matches": matches}
        pick = PickRequest(session_endpoint="10.0.2.3:80", random=chance.random, **prompt)

        ranking = rank(weights, pick, *endpoints)
        assert all(0.0 <= one.base <= one.score <= 1.0 for one in ranking.best)
        assert all(0.0 <= part <= 1.0 for parts in ranking.parts.values() for part in parts)


def test_without_scorers_all_endpoints_have_equal_scores() -> None:
    assert [one.score for one in rank({}, PLAIN, at(A, 3), at(B)).best] == [0.0, 0.0]
    assert [one.score for one in rank({"kv-cache": 0.0}, PLAIN, at(A, 3), at(B)).best] == [0.0, 0.0]


def test_new_readings_and_subset_hints_change_the_ranking_at_once() -> None:
    scheduler = Scheduler(DEFAULT)
    only, full = PickRequest(subset=frozenset((A,))), [at(A, 9), at(B, 0)]
    for pick, endpoints, order in (
        (PLAIN, [at(A, 0), at(B, 9)], [A, B]), (PLAIN, full, [B, A]), (only, full, [A]), (PLAIN, [], []),
        (PLAIN, full, [B, A]),
    ):  # fmt: skip
        assert addresses(scheduler.rank(pick, endpoints)) == order


def ranking() -> Ranking:
    endpoints = [
        EndpointState("a", waiting=4, kv_utilisation=0.5, in_flight=2),
        EndpointState("b", waiting=0, kv_utilisation=0.2),
        EndpointState("c", draining=True),
        EndpointState("d", waiting=2, kv_utilisation=1.0),
    ]
    return Scheduler({"queue-depth": 1.0, "kv-cache": 3.0}).rank(PLAIN, endpoints, limit=2)


def explained(seen: Ranking | LeastLoadedPick, chosen: tuple[str, ...] = (), loads: str = "") -> Explanation:
    cache = ExplanationCache()
    cache.add("r1", seen, chosen, loads)
    found = cache.get("r1")
    assert found is not None
    assert orjson.dumps(found.to_dict())
    return found


def shown(
    address: str, score: float, queue: float, kv: float, in_flight: float, live: float | None
) -> object:
    """A candidate in an explanation; the field `final` is None if the live load is unknown."""
    return {
        "address": address, "score": score, "parts": {"queue-depth": queue, "kv-cache": kv},
        "in_flight": in_flight, "live": live, "final": score if live is not None else None,
    }  # fmt: skip


def test_the_explanation_of_a_choice_includes_candidates_beyond_the_limit() -> None:
    found = explained(ranking(), ("b", "a"), "1,")
    candidates = [
        shown("b", 0.85, queue=1.0, kv=0.8, in_flight=0.0, live=1.0),
        shown("a", 0.375, queue=0.0, kv=0.5, in_flight=2, live=None),
        shown("d", 0.125, queue=0.5, kv=0.0, in_flight=0.0, live=None),
    ]
    assert found.to_dict() == {
        "request_id": "r1", "chosen": ["b", "a"], "candidates": candidates, "excluded": {"c": "draining"},
        "waived": [], "weights": {"queue-depth": 0.25, "kv-cache": 0.75}, "rule": found.rule,
        "stages": "", "prefillers": [], "encoders": [],
    }  # fmt: skip
    assert found.rule.startswith("highest `final`")
    assert found.summary() == {"candidates": "b 0.85/1, a 0.375/?, d 0.125/?", "excluded": "c draining"}


@cases("limits, asked, kept", {
    "a repeated request is the newest": ({"max_choices": 3}, "123425", "245"),
    "two rankings of 15 figures fit": ({"max_values": 30}, "123", "23"),
    "a ranking above the limit is kept alone": ({"max_values": 1}, "1", "1"),
})  # fmt: skip
def test_only_the_latest_choices_keep_explanations(limits: dict[str, int], asked: str, kept: str) -> None:
    cache = ExplanationCache(**limits)
    for request_id in asked:
        cache.add(request_id, ranking(), ("b",))
    assert len(cache) == len(kept)
    assert [request_id for request_id in "12345" if cache.get(request_id) is not None] == list(kept)


def test_the_live_load_that_the_script_saw_decides_among_equal_scores() -> None:
    # Three candidates of equal scores are drawn at random in the order b, c, a.
    equal = [EndpointState(address, kv_utilisation=0.5) for address in "abc"]
    by_chance = PickRequest(random=iter([0.1, 0.9, 0.5]).__next__)
    ranking = rank({"kv-cache": 1.0, "in-flight": 1.0}, by_chance, *equal)
    found = explained(ranking, ("b", "c"), "4,0,2")
    seen = {one.address: (one.live, one.final) for one in found.candidates}
    assert seen == {"b": (4.0, 0.25), "c": (0.0, 0.75), "a": (2.0, 0.5)}


def pool(*endpoints: Endpoint, candidates: str = "*", **asked: object) -> LeastLoadedPick:
    fields = {"subset": None, "selector": {}, **asked}
    return LeastLoadedPick(endpoints, {"a": 3, "d": 9}, candidates=candidates, **fields)  # type: ignore[arg-type]


def test_without_scorers_the_explanation_says_that_there_are_no_scorers() -> None:
    # The explanation lists loads that the script saw, last known loads of other endpoints, and exclusions.
    four = [*map(Endpoint, "ab"), Endpoint("c", down=True), Endpoint("d")]
    found = explained(pool(*four), ("b", "a"), "0,2")
    seen = [(one.address, one.score, one.live, one.in_flight) for one in found.candidates]
    assert seen == [("b", None, 0.0, 0.0), ("a", None, 2.0, 3.0), ("d", None, None, 9.0)]
    assert found.excluded == {"c": "unhealthy"}
    assert found.rule.startswith("no scorers: the fewest in flight")
    assert found.weights == {}


def test_the_live_loads_of_named_candidates_are_matched_by_position() -> None:
    # The subset hint names one endpoint twice.
    found = explained(
        pool(*map(Endpoint, "abc"), subset=("c", "a", "c", "b"), candidates="c,a,c,b"), ("b",), "5,,1"
    )
    assert {one.address: one.live for one in found.candidates} == {"b": 1.0, "c": 5.0, "a": None}


def test_the_explanation_of_a_refusal_names_each_excluded_endpoint_and_the_reason() -> None:
    labelled = (Endpoint("a", drained=True), Endpoint("b", labels={"gpu": "a10"}), Endpoint("c"))
    found = explained(pool(*labelled, subset=("a", "b"), selector={"gpu": "h100"}, candidates=""))
    assert (found.chosen, found.candidates) == ((), ())
    assert found.rule == explained(ranking()).rule == "no endpoint could take the request"
    assert found.excluded == {"a": "draining", "b": "label gpu is not h100", "c": "not in the subset hint"}
