"""docs/errors.md beside the code: each fault there is, and nothing else, as it is answered."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse

from picker_fleet import cli
from picker_fleet.admin import protection
from picker_fleet.admin.views import BadCursor
from picker_fleet.errors import (
    Dropped,
    RequestError,
    ScriptFailed,
    StateFault,
    StateUnavailable,
    WritesRefused,
)
from picker_fleet.extproc import codec
from picker_fleet.state.error_replies import ERROR_REPLIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
CODE = re.compile(r"`([a-z_]+)`")
QUOTED = re.compile(r"`([^`]+)`")


def table(section: str) -> list[list[str]]:
    """The cells of each row of the first table under `## section`."""
    text = PAGE.split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]
    rows = [row for row in rows if len(row) > 3]
    return rows[2:]


def faults(of: type[RequestError] = RequestError) -> Iterator[type[RequestError]]:
    """Every fault that a client can be answered with: those of picker_fleet.errors."""
    if of.__module__ == "picker_fleet.errors" and of not in (
        Dropped,
        StateFault,
    ):  # those are only names for several
        yield of
    for one in of.__subclasses__():
        yield from faults(one)


@pytest.mark.parametrize("fault", list(faults()), ids=lambda fault: fault.code)
def test_what_a_client_gets_is_as_the_page_says(fault: type[RequestError]) -> None:
    row = {CODE.findall(cells[0])[0]: cells for cells in table("What clients get")}.get(fault.code)
    assert row is not None, f"docs/errors.md does not tell of {fault.code}"
    refusal = codec.refusal(fault("why"), 503, lambda: 0.0)
    answer = ProcessingResponse.FromString(codec.refused(refusal, fault.code)).immediate_response
    headers = {option.header.key: option.header.raw_value.decode() for option in answer.headers.set_headers}
    error = orjson.loads(answer.body)["error"]
    _, status, kind, reason, *_ = row
    assert status == f"{int(answer.status.code)}" + ("¹" if issubclass(fault, Dropped) else "")
    assert kind == f"`{error['type']}`"
    assert reason.strip("`") == headers.get(codec.DROPPED_REASON, "–")
    assert ("retry-after" in headers) == status.startswith(("503", "429"))


def test_the_page_tells_of_no_fault_that_is_not_there() -> None:
    listed = [CODE.findall(cells[0])[0] for cells in table("What clients get")]
    assert sorted(listed) == sorted(fault.code for fault in faults())


def test_what_redis_answers_means_what_the_page_says() -> None:
    listed = [
        (prefix, cells[1]) for cells in table("What Redis answers") for prefix in QUOTED.findall(cells[0])
    ]
    assert sorted(listed) == sorted((prefix.strip(), f"`{meaning}`") for prefix, meaning in ERROR_REPLIES)
    assert "`item`" in [cells[1] for cells in table("What Redis answers")]


def admin_codes() -> Iterator[tuple[str, str]]:
    """Code and status of each fault that the admin API names in its source, and of its parameters."""
    for file in sorted((ROOT / "app" / "picker_fleet" / "admin").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Call) and name in ("Refused", "_problem"):
                given = [each.value for each in node.args if isinstance(each, ast.Constant)]
                number = next((value for value in given if isinstance(value, int)), None)
                code = next((value for value in given if isinstance(value, str)), None)
                if number is not None and code is not None:
                    yield code, str(number)
    yield from ((code, str(status)) for status, code in protection._CODES.items())
    for fault in (BadCursor, StateUnavailable, WritesRefused, ScriptFailed):
        yield fault.code, str(fault.status)


def test_the_codes_of_the_admin_api_are_those_of_the_page() -> None:
    listed = {(CODE.findall(cells[0])[0], cells[1]) for cells in table("The admin API")}
    of_parameters = {("bad_limit", "422"), ("bad_band", "422")}
    found = set(admin_codes())
    assert ("bad_config", "422") in found, "the source is not read as it was meant to be"
    assert listed - of_parameters == found
    assert of_parameters <= listed


def test_every_command_has_its_exit_codes_on_the_page() -> None:
    commands = [f"`picker {name}`" for name in (*cli._COMMANDS, "check")]
    assert sorted(cells[0] for cells in table("Exit codes")) == sorted(commands)
