"""Why a request went where it went."""

import orjson

from picker_fleet.request import Endpoint
from picker_fleet.scheduling.chooser import ExplanationCache
from picker_fleet.scheduling.explain import LeastLoadedPick
from picker_fleet.scheduling.scheduler import Ranking, Scheduler
from picker_fleet.scheduling.scorers import EndpointState, PickRequest


def ranking() -> Ranking:
    return Scheduler({"queue-depth": 1.0, "kv-cache": 3.0}).rank(
        PickRequest(),
        [
            EndpointState("a", waiting=4, kv_utilisation=0.5, in_flight=2),
            EndpointState("b", waiting=0, kv_utilisation=0.2),
            EndpointState("c", draining=True),
            EndpointState("d", waiting=2, kv_utilisation=1.0),
        ],
        limit=2,
    )


def test_every_candidate_is_explained_even_those_not_listed() -> None:
    """A pick of the best two of three: when it is explained, all scores and reasons are there."""
    cache = ExplanationCache()

    cache.add("r1", ranking(), ("b", "a"), "1,")

    found = cache.get("r1")
    assert found is not None
    assert orjson.loads(orjson.dumps(found.to_dict())) == {
        "request_id": "r1",
        "chosen": ["b", "a"],
        "candidates": [
            {
                "address": "b",
                "score": 0.85,
                "parts": {"queue-depth": 1.0, "kv-cache": 0.8},
                "in_flight": 0.0,
                "live": 1.0,
                "final": 0.85,
            },
            {
                "address": "a",
                "score": 0.375,
                "parts": {"queue-depth": 0.0, "kv-cache": 0.5},
                "in_flight": 2,
                "live": None,
                "final": None,
            },
            {
                "address": "d",
                "score": 0.125,
                "parts": {"queue-depth": 0.5, "kv-cache": 0.0},
                "in_flight": 0.0,
                "live": None,
                "final": None,
            },
        ],
        "excluded": {"c": "draining"},
        "waived": [],
        "weights": {"queue-depth": 0.25, "kv-cache": 0.75},
        "rule": found.rule,
    }
    assert found.rule.startswith("highest `final`")
    assert found.summary() == {"candidates": "b 0.85/1, a 0.375/?, d 0.125/?", "excluded": "c draining"}


def test_the_ring_keeps_the_last_ones() -> None:
    """Room for three: when five come and one comes again, the last three are known."""
    cache = ExplanationCache(max_choices=3)

    for request_id in ("1", "2", "3", "4", "2", "5"):
        cache.add(request_id, ranking(), ("b",))

    assert len(cache) == 3
    assert [cache.get(request_id) is not None for request_id in "12345"] == [False, True, False, True, True]


def test_large_rankings_leave_room_for_fewer() -> None:
    """Room for 30 figures: when rankings of 15 come, two are kept; and one too large alone."""
    cache = ExplanationCache(max_values=30)

    for request_id in ("1", "2", "3"):
        cache.add(request_id, ranking(), ("b",))

    assert [cache.get(request_id) is not None for request_id in "123"] == [False, True, True]

    small = ExplanationCache(max_values=1)
    small.add("1", ranking(), ("b",))
    assert len(small) == 1


def test_equals_are_explained_in_the_order_they_were_drawn() -> None:
    """Three equal candidates: when lots put them b, c, a, the explanation has that order."""
    chances = iter([0.1, 0.9, 0.5])
    equal = [EndpointState(address, kv_utilisation=0.5) for address in "abc"]
    cache = ExplanationCache()

    drawn = Scheduler({"kv-cache": 1.0}).rank(PickRequest(random=lambda: next(chances)), equal, limit=2)
    cache.add("r1", drawn, ("b", "c"))

    found = cache.get("r1")
    assert found is not None
    assert [one.address for one in found.candidates] == ["b", "c", "a"]


def test_the_live_load_decides_among_equal_scores() -> None:
    """Equals by all that a replica knows: when the script saw other loads, those decide."""
    equal = [EndpointState(address, kv_utilisation=0.5) for address in "abc"]
    order = iter([0.9, 0.5, 0.1])
    cache = ExplanationCache()

    drawn = Scheduler({"kv-cache": 1.0, "in-flight": 1.0}).rank(
        PickRequest(random=lambda: next(order)), equal
    )
    cache.add("r1", drawn, ("b", "c"), "4,0,2")

    found = cache.get("r1")
    assert found is not None
    assert {one.address: (one.live, one.final) for one in found.candidates} == {
        "a": (4.0, 0.25),
        "b": (0.0, 0.75),
        "c": (2.0, 0.5),
    }


def pool(*endpoints: Endpoint, candidates: str = "*", **asked: object) -> LeastLoadedPick:
    fields = {"subset": None, "selector": {}, **asked}
    return LeastLoadedPick(endpoints, {"a": 3, "d": 9}, candidates=candidates, **fields)  # type: ignore[arg-type]


def test_without_scorers_the_explanation_says_so() -> None:
    """The fewest in flight as the only rule: when it is explained, with the loads that were seen,
    with what was last known of the others, and with who was out."""
    cache = ExplanationCache()
    four = [*map(Endpoint, "ab"), Endpoint("c", down=True), Endpoint("d")]

    cache.add("r1", pool(*four), ("b", "a"), "0,2")

    found = cache.get("r1")
    assert found is not None
    assert [(one.address, one.score, one.live, one.in_flight) for one in found.candidates] == [
        ("b", None, 0.0, 0.0),
        ("a", None, 2.0, 3.0),
        ("d", None, None, 9.0),
    ]
    assert found.excluded == {"c": "unhealthy"}
    assert found.rule.startswith("no scorers: the fewest in flight")
    assert found.weights == {}
    assert orjson.dumps(found.to_dict())


def test_named_candidates_have_the_loads_of_the_named() -> None:
    """A subset with one name twice and one that takes nothing new: when it is explained, each load
    is that of its name."""
    cache = ExplanationCache()
    seen = pool(*map(Endpoint, "abc"), subset=("c", "a", "c", "b"), candidates="c,a,c,b")

    cache.add("r1", seen, ("b",), "5,,1")

    found = cache.get("r1")
    assert found is not None
    assert {one.address: one.live for one in found.candidates} == {"b": 1.0, "c": 5.0, "a": None}


def test_a_refusal_says_who_was_out_and_why() -> None:
    """Nobody who may take a request: when it is refused, each endpoint has its reason."""
    cache = ExplanationCache()
    seen = pool(
        Endpoint("a", drained=True),
        Endpoint("b", labels={"gpu": "a10"}),
        Endpoint("c"),
        subset=("a", "b"),
        selector={"gpu": "h100"},
        candidates="",
    )

    cache.add("r1", seen, ())

    found = cache.get("r1")
    assert found is not None
    assert (found.chosen, found.candidates) == ((), ())
    assert found.excluded == {
        "a": "draining",
        "b": "label gpu is not h100",
        "c": "not in the subset hint",
    }
