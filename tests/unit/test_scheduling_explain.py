"""Why a request went where it went."""

import orjson

from app.scheduling.ask import PickAsk
from app.scheduling.explain import ExplanationRing
from app.scheduling.scheduler import Ranking, Scheduler
from app.scheduling.signals import Signals


def ranking() -> Ranking:
    return Scheduler({"queue-depth": 1.0, "kv-cache": 3.0}).rank(
        PickAsk(),
        [
            Signals("a", waiting=4, kv_utilisation=0.5, in_flight=2),
            Signals("b", waiting=0, kv_utilisation=0.2),
            Signals("c", draining=True),
            Signals("d", waiting=2, kv_utilisation=1.0),
        ],
        most=2,
    )


def test_every_candidate_is_explained_even_those_not_listed() -> None:
    """Given a pick of the best two of three, when it is explained, then all scores and reasons are there."""
    ring = ExplanationRing()

    ring.keep("r1", ranking(), ("b", "a"), {"b": 1.0})

    found = ring.find("r1")
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
            },
            {
                "address": "a",
                "score": 0.375,
                "parts": {"queue-depth": 0.0, "kv-cache": 0.5},
                "in_flight": 2,
                "live": None,
            },
            {
                "address": "d",
                "score": 0.125,
                "parts": {"queue-depth": 0.5, "kv-cache": 0.0},
                "in_flight": 0.0,
                "live": None,
            },
        ],
        "excluded": {"c": "draining"},
        "waived": [],
        "weights": {"queue-depth": 0.25, "kv-cache": 0.75},
    }


def test_the_ring_keeps_the_last_ones() -> None:
    """Given room for three, when five come and one comes again, then the last three are known."""
    ring = ExplanationRing(most=3)

    for request_id in ("1", "2", "3", "4", "2", "5"):
        ring.keep(request_id, ranking(), ("b",))

    assert len(ring) == 3
    assert [ring.find(request_id) is not None for request_id in "12345"] == [False, True, False, True, True]


def test_large_rankings_leave_room_for_fewer() -> None:
    """Given room for 30 figures, when rankings of 15 come, then two are kept; and one too large alone."""
    ring = ExplanationRing(most_figures=30)

    for request_id in ("1", "2", "3"):
        ring.keep(request_id, ranking(), ("b",))

    assert [ring.find(request_id) is not None for request_id in "123"] == [False, True, True]

    small = ExplanationRing(most_figures=1)
    small.keep("1", ranking(), ("b",))
    assert len(small) == 1


def test_equals_are_explained_in_the_order_they_were_drawn() -> None:
    """Given three equal candidates, when lots put them b, c, a, then the explanation has that order."""
    chances = iter([0.1, 0.9, 0.5])
    equal = [Signals(address, kv_utilisation=0.5) for address in "abc"]
    ring = ExplanationRing()

    drawn = Scheduler({"kv-cache": 1.0}).rank(PickAsk(chance=lambda: next(chances)), equal, most=2)
    ring.keep("r1", drawn, ("b", "c"))

    found = ring.find("r1")
    assert found is not None
    assert [one.address for one in found.candidates] == ["b", "c", "a"]
