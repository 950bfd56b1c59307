"""What a line of a decision says of how its endpoint was chosen, and at which level."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
from local_requests import ask

from picker_fleet.endpoints.snapshot import Endpoint, Snapshot, SnapshotCell
from picker_fleet.scheduling.chooser import LeastLoadedChooser
from picker_fleet.scheduling.explain import Explanation
from picker_fleet.telemetry.logs import DecisionLines, setup

A, B, C = (f"10.0.0.{i}:8000" for i in (1, 2, 3))


@pytest.fixture(params=["DEBUG", "INFO"])
def written(request: pytest.FixtureRequest) -> Iterator[tuple[str, io.StringIO]]:
    """The level, and what is logged at it."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    lines = io.StringIO()
    setup(request.param, lines)
    yield request.param, lines
    root.handlers[:], level = before
    root.setLevel(level)


def test_a_decision_at_debug_level_says_why(written: tuple[str, io.StringIO]) -> None:
    # Given a choice without scorers, one that nobody was left for, and a replica that logs at a level
    level, lines = written
    cell = SnapshotCell()
    cell.publish(Snapshot("1", (Endpoint(A), Endpoint(B), Endpoint(C, down=True))))
    chooser = LeastLoadedChooser(cell, lambda: {B: 2})
    placed, refused = ask("r1"), ask("r2", subset=(C,))
    chooser.placed(placed, chooser.choose(placed), (A, B), "0,3")
    chooser.refused(refused, chooser.choose(refused))
    asked: list[str] = []

    def explain(request_id: str) -> Explanation | None:
        asked.append(request_id)
        return chooser.explain(request_id)

    decisions = DecisionLines(lambda: 0.0, explain)
    # When they are told of, as exchanges do, and a refusal for another reason
    if decisions.debug:
        decisions.placed(placed, (A, B), "lean", 0.1)
    decisions.refused(refused, "no_endpoints", 503, "lean", 0.1)
    decisions.refused(refused, "total_capacity", 503, "lean", 0.1)
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    # Then at debug level the lines have scores, loads and reasons, and at others nobody asks for them
    if level == "INFO":
        assert asked == []
        assert ["candidates" in line for line in told] == [False, False]
        return
    one, two, other = told
    assert (one["candidates"], one["excluded"]) == (f"{A} ?/0, {B} ?/3", f"{C} unhealthy")
    assert two["candidates"] == ""
    assert f"{C} unhealthy" in two["excluded"]
    assert f"{A} not in the subset hint" in two["excluded"]
    assert "candidates" not in other
    assert asked == ["r1", "r2"]
