"""A request that one replica starts in an outage stays ended once a peer has reported its end (G6, G8)."""

import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
from direct_calls import OPEN, arrival
from returns import ENDPOINT, Pool, World, search, walk
from script_fleet import SETTINGS
from script_side import SILENCE_MS, ScriptSide

from picker_fleet.state.replies import SettleReply, name_of

START_US = 1_750_000_000_000_000
# Each case has the number of replicas, and options of `World`.
CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"patient": False}),
    (2, {"patient": False, "signs": 0, "unread": True}),
    (2, {"patient": False, "losses": 1, "whole": True}),
    (2, {"patient": True, "outs": 2, "whole": True}),
    (3, {"patient": True, "whole": True}),
]
WALKS, LONGEST_WALK, COMPARED = 200, 60, 20  # every 20th walk is compared with the scripts


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Disable the log: the replicas' failover state changes a hundred thousand times."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def word(answer: Any) -> str:
    """The first word of the script's reply that the store turned into `answer`."""
    if isinstance(answer, SettleReply):
        return answer.kind
    return answer if isinstance(answer, str) else name_of(answer)


@pytest.mark.parametrize(("replicas", "how"), CASES)
@pytest.mark.timeout(3600)
async def test_after_every_order_of_outages_exactly_the_running_requests_are_counted(
    replicas: int, how: dict[str, Any]
) -> None:
    states, fault = search(World(replicas, **{"outs": 1, **how}))
    assert fault == ""
    assert states > 1000


@pytest.mark.parametrize("replicas", [2, 3])
async def test_the_scripts_answer_as_the_python_model_of_outages(replicas: int, side: ScriptSide) -> None:
    world = World(replicas, outs=2, signs=2, patient=False, losses=1)
    chance = random.Random(replicas)
    for number in range(WALKS):
        taken, fault = walk(world, chance, LONGEST_WALK)
        assert fault == "", taken
        if number % COMPARED == 0:
            _compare(world.pool, side)


def _compare(pool: Pool, side: ScriptSide) -> None:
    """Assert that the scripts answer the calls that `pool` recorded as `pool` did."""
    _begin(side)
    for name, args, answer in pool.asked:
        if name == "lose":
            _begin(side)
            continue
        seen = side.call(START_US, name, ["a", *_arguments(name, args)])
        assert str(seen.reply.answers[0]).split()[0] == word(answer), (name, args)


def _begin(side: ScriptSide) -> None:
    side.clear()
    side.call(START_US, "publish", ["a", "1", "1", json.dumps(SETTINGS), ENDPOINT, OPEN])
    side.call(START_US, "heartbeat", ["a", "{}", SILENCE_MS])


def _arguments(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if name == "admit":
        return (arrival(*args),)
    return {"tombstone": (*args, 0), "renew": (*args, 0), "settle": (*args, "", "", "")}[name]
