"""Log lines: format, rate limits, and the content of decision lines at each level."""

import contextlib
import contextvars
import io
import json
import logging
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock, call

import pytest
from choosers import chooser_of
from local_requests import ask
from script_fleet import until

from picker_fleet.domain.request import Endpoint
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.telemetry import logs
from picker_fleet.telemetry.logs import DecisionLines

A, B, C = (f"10.0.0.{i}:8000" for i in (1, 2, 3))


@contextlib.contextmanager
def logged(level: str = "INFO") -> Iterator[io.StringIO]:
    """The log of a replica at the level `level`; other log handlers are removed meanwhile."""
    root = logging.getLogger()
    handlers, root_level = root.handlers[:], root.level
    stream = io.StringIO()
    logs.setup(level, stream, replica="r-1")
    try:
        yield stream
    finally:
        root.handlers[:] = handlers
        root.setLevel(root_level)


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_log_line_is_one_json_object_with_its_fields() -> None:
    fields = {"request_id": "id-1", "flow": "flow-1", "decision": "expired"}
    with logged() as stream:
        logging.getLogger("picker_fleet.x").warning("took %d", 3, extra=fields)
    (line,) = lines_of(stream)
    assert line.items() >= {**fields, "message": "took 3", "level": "warning", "replica": "r-1"}.items()


async def test_in_a_flood_one_log_line_a_second_of_each_kind_is_written_with_a_count_of_the_rest() -> None:
    log = logging.getLogger("picker_fleet.x")
    with logged() as stream:
        for number in range(500):
            log.warning("damaged entry %d", number)
        log.error("another kind")
        await until(lambda: len(lines_of(stream)) == 3, 5.0)
        lines = [(line["message"], line.get("left_out")) for line in lines_of(stream)]
    assert lines == [("damaged entry 0", None), ("another kind", None), ("damaged entry 1", 499)]


def test_each_pool_has_its_own_lines_of_one_kind() -> None:
    with logged() as stream:
        for pool in "abc":
            contextvars.Context().run(_log_of, pool)
    assert [(line["message"], line["pool"]) for line in lines_of(stream)] == [
        (f"InferencePool {pool} does not exist", pool) for pool in "abc"
    ]


def _log_of(pool: str) -> None:
    logs.POOL.set(pool)
    logging.getLogger("picker_fleet.x").warning("InferencePool %s does not exist", pool)


def test_a_log_line_is_written_even_with_values_that_json_cannot_encode() -> None:
    with logged() as stream:
        try:
            raise ValueError("bad \ud800 text\nsecond line")
        except ValueError:
            extra = {"what": {1, 2}, "size": 2**70}
            logging.getLogger("picker_fleet.x").exception("failed \ud800", extra=extra)
    (line,) = lines_of(stream)
    assert "ValueError" in line["exception"]


def test_a_log_entry_as_text_is_one_line_with_unambiguous_fields() -> None:
    fields = {"flow": "x y=\n", "request_id": "r-1", "none": ""}
    record = logging.makeLogRecord({"name": "picker_fleet.x", "levelname": "INFO", "msg": "a\nb", **fields})
    line = logs.TextFormatter().format(record)
    assert "\n" not in line
    assert line.endswith('INFO    picker_fleet.x a\\nb flow="x y=\\n" request_id=r-1 none=""')


@pytest.mark.parametrize("level", ["DEBUG", "INFO"])
def test_log_lines_explain_decisions_at_debug_level_only(level: str) -> None:
    cell = SnapshotCell()
    cell.publish(Snapshot("1", (Endpoint(A), Endpoint(B), Endpoint(C, down=True))))
    chooser = chooser_of(cell, in_flight={B: 2})
    placed, refused = ask("r1"), ask("r2", subset=(C,))
    chooser.placed(placed, chooser.choose(placed), (A, B), "0,3")
    chooser.refused(refused, chooser.choose(refused))
    explain = Mock(side_effect=chooser.explain)
    with logged(level) as stream:
        decisions = DecisionLines(lambda: 0.0, explain)
        if decisions.debug:
            decisions.placed(placed, (A, B), "lean", 0.1)
        decisions.refused(refused, "no_endpoints", 503, "lean", 0.1)
        decisions.refused(refused, "total_capacity", 503, "lean", 0.1)
    if level == "INFO":
        assert not explain.called
        assert ["candidates" in line for line in lines_of(stream)] == [False, False]
        return
    one, two, other = lines_of(stream)
    assert (one["candidates"], one["excluded"]) == (f"{A} ?/0, {B} ?/3", f"{C} unhealthy")
    assert two["candidates"] == ""
    assert all(reason in two["excluded"] for reason in (f"{C} unhealthy", f"{A} not in the subset hint"))
    assert "candidates" not in other
    assert explain.mock_calls == [call("r1"), call("r2")]


def test_a_few_refusals_a_second_are_logged_and_further_refusals_counted() -> None:
    now_s = 0.0
    with logged() as stream:
        decisions = DecisionLines(lambda: now_s)
        for _ in range(100):
            decisions.refused(None, "total_capacity", 503, "lean", 0.1)
        decisions.refused(None, "bad_request", 400, "lean", 0.1)
        now_s = 1.0
        decisions.refused(None, "total_capacity", 503, "lean", 0.1)
        assert not decisions.debug
    found = lines_of(stream)
    assert [line["decision"] for line in found] == ["total_capacity"] * 5 + ["bad_request", "total_capacity"]
    assert found[-1]["left_out"] == 95
