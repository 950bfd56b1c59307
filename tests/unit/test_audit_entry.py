"""Parsing entries and settings: an unreadable field is named, an unreadable log is reported on stderr."""

import pytest
from queue_simulator import QueueSimulator

from picker_fleet.cli import main
from picker_tools.audit.auditor import audit
from picker_tools.audit.log import Entry, EntryError
from picker_tools.audit.replay import Rules
from picker_tools.local_fleet.network import LOOPBACK, free_port


def raw(**changes: str) -> dict[str, str]:
    queue = QueueSimulator()
    queue.admit("r1", "flow", cost=2.5)
    return {**queue.log[-1], **changes}


def test_fields_are_parsed_to_their_types() -> None:
    entry = Entry.parse(raw(tag="1.5", due_ms="7"))
    assert (entry.event, entry.request, entry.cost, entry.tag, entry.due_ms) == (
        "bypassed",
        "r1",
        2.5,
        1.5,
        7,
    )
    assert Entry.parse(raw(tag="", due_ms="")).tag is None
    assert str(entry).startswith("#2 1700000000.000000 bypassed r1 flow='flow' band=1 cost=2.5")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stock": "much"}, "entry 2: stock is 'much'"),
        ({"band": ""}, "entry 2: band is ''"),
        ({"event": "dreamt"}, "entry 2: event is 'dreamt'"),
        ({"seq": "x" * 1000}, f"entry {'x' * 20}: seq is {'x' * 80!r}"),
    ],
)
def test_an_unreadable_field_is_named(changes: dict[str, str], says: str) -> None:
    with pytest.raises(EntryError) as fault:
        audit([raw(**changes)])
    assert str(fault.value) == says


def test_a_missing_field_is_named() -> None:
    with pytest.raises(EntryError, match="entry 2: flow is missing"):
        audit([{name: value for name, value in raw().items() if name != "flow"}])


@pytest.mark.parametrize("note", ["", "[]", '{"guard_share": "x"}', '{"weights": {"a": null}}'])
def test_unreadable_settings_raise_an_entry_error(note: str) -> None:
    with pytest.raises(EntryError, match="settings cannot be read"):
        Rules.parse(note)


def test_an_empty_table_may_be_a_json_list() -> None:
    assert Rules.parse('{"weights": []}').weights == {}


def test_an_empty_log_has_no_violation_and_no_remark() -> None:
    report = audit([])
    assert (report.entries, report.first_seq, report.violations, report.remarks) == (0, None, 0, ())


@pytest.mark.parametrize("url", ["redis://{host}:{port}/0", "http://{host}"])
def test_an_unreachable_redis_is_exit_code_2(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--redis", url.format(host=LOOPBACK, port=free_port())]) == 2
    shown = capsys.readouterr()
    assert (shown.out, len(shown.err.splitlines())) == ("", 1)
