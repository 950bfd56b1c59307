"""`picker top` without a terminal: what a frame shows, what keys do, and that client names are escaped."""

from typing import Any

import pytest
from tables import cases
from top_fleet import HOSTILE, LOG, NO_SNAPSHOT, QUEUE, entry, history, lines, page, snapshot, status

from picker_tools.top.client import AdminClient, AdminError
from picker_tools.top.controls import Controls, parsed
from picker_tools.top.format import bar, number, percent, plain, seconds
from picker_tools.top.frame import ViewState, charts, height_of
from picker_tools.top.status import FleetStatus
from picker_tools.top.views import VIEWS


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 50), (60, 12)])
@pytest.mark.parametrize("view", range(len(VIEWS)))
@pytest.mark.parametrize("known", [{}, {"page": None, "decisions": None, "history": ()}])
def test_a_frame_fills_the_terminal_in_every_view(
    width: int, height: int, view: int, known: dict[str, Any]
) -> None:
    drawn = lines(status(**known), ViewState(view), width, height)
    assert len(drawn) == height
    assert max(map(len, drawn)) <= width
    if width >= 80:
        assert f"{view + 1} {VIEWS[view].name}" in drawn[4]
    assert drawn[-1].startswith("q quit")


def test_a_frame_shows_stock_queue_endpoints_and_shares_or_an_error() -> None:
    text = "\n".join(lines(FleetStatus(snapshot(), 0.2, ""), ViewState()))
    figures = ("8 of 8.8 requests", "12: Default 12", "oldest 4.0 s", "2 overdue", "21.2/s", "1 of 2 ready")
    for expected in (*figures, "50% of 25%", "flows (3 of 1 000)"):
        assert expected in text
    error = FleetStatus(None, 1.0, "http://r: Connection refused")
    assert "Connection refused" in "\n".join(lines(error, ViewState()))


def test_escape_sequences_in_names_do_not_reach_the_terminal() -> None:
    text = "\n".join(lines(FleetStatus(snapshot(), 0.2, ""), ViewState(), width=200))
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "\\u001b[2J\\u001b]0;owned\\u0007[red]gold" in text


@cases("state, silence, text", {
    "a pause": ({"paused": True}, (0.2, ""), "PAUSED"),
    "an outage": ({"degraded": True}, (0.2, ""), "WITHOUT REDIS"),
    "old figures": ({}, (3.5, ""), "STALE since"),
    "an ended stream": ({}, (0.5, "the replica ended the stream"), "STALE since"),
})  # fmt: skip
def test_the_first_line_shows_a_pause_an_outage_and_stale_figures(
    state: dict[str, Any], silence: tuple[float, str], text: str
) -> None:
    drawn = lines(FleetStatus(snapshot(**state), *silence), ViewState())
    assert text in drawn[0]
    assert drawn[-1].startswith(silence[1])


def test_the_selected_row_stays_visible_when_there_are_more_rows_than_lines() -> None:
    terminal = Terminal(FleetStatus(snapshot(flows=50), 0.2, ""))
    terminal.press(*["down"] * 40)
    text = "\n".join(terminal.lines())
    assert "flow-40" in text
    assert "flow-0 " not in text


class Terminal:
    """Controls, the changes that they have made, and what is shown."""

    def __init__(self, shown: FleetStatus | None = None) -> None:
        self.made: list[str] = []
        self.shown = shown or FleetStatus(snapshot(), 0.2, "")
        self.controls = Controls(self.made.append)

    def press(self, *keys: str, on: FleetStatus | None = None) -> ViewState:
        for key in keys:
            self.controls.press(key, on or self.shown)
        return self.controls.state

    def lines(self, on: FleetStatus | None = None) -> list[str]:
        return lines(on or self.shown, self.controls.state)


def test_an_endpoint_is_drained_only_after_y() -> None:
    terminal = Terminal()
    assert terminal.press("3", "down", "d").question == "Give 10.0.0.2:8000 requests again?"
    # Any key but y cancels, and q does not leave.
    assert terminal.press("q").question == ""
    assert (terminal.made, terminal.controls.leaving) == ([], False)
    assert terminal.press("d", "y").message == "10.0.0.2:8000 takes requests"
    assert terminal.made == ["endpoints/10.0.0.2%3A8000/undrain"]


@pytest.mark.parametrize(("paused", "path"), [(False, "pause"), (True, "resume")])
def test_p_and_y_pause_a_running_fleet_and_resume_a_paused_one(paused: bool, path: str) -> None:
    terminal = Terminal(FleetStatus(snapshot(paused=paused), 0.2, ""))
    terminal.press("p", "y")
    assert terminal.made == [path]


def test_a_refused_change_shows_the_api_s_message() -> None:
    def refuse(path: str) -> None:
        raise AdminError("http://r: 401, the bearer token of this fleet is needed")

    terminal = Terminal()
    terminal.controls = Controls(refuse)
    terminal.press("p", "y")
    assert "the bearer token of this fleet is needed" in terminal.lines()[-1]


def test_tab_and_back_tab_cycle_through_the_views() -> None:
    terminal = Terminal(NO_SNAPSHOT)
    assert [terminal.press("tab").view for _ in VIEWS] == [1, 2, 3, 4, 5, 6, 0]
    assert terminal.press("back-tab").view == 6
    terminal.press("q")
    assert terminal.controls.leaving


@cases("raw, keys", {
    "a letter": ("q", "q"),
    "arrows": ("\x1b[A\x1b[Bd", "up down d"),
    "tabs": ("\t\x1b[Z", "tab back-tab"),
    "F5, which is ignored": ("\x1b[15~p", "p"),
    "escape": ("\x1b", "escape"),
    "letters for arrows": ("jk", "down up"),
    "pages": ("\x1b[6~\x1b[5~nb", "page-down page-up page-down page-up"),
})  # fmt: skip
def test_terminal_input_is_parsed_into_keys(raw: str, keys: str) -> None:
    assert parsed(raw) == keys.split()


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port", "h:99999999", ""])
def test_an_invalid_admin_url_is_refused(url: str) -> None:
    with pytest.raises(AdminError, match="not the address of an admin API"):
        AdminClient(url)


def test_numbers_durations_and_bars_are_formatted() -> None:
    figures = [number(value) for value in (7, 7.25, 12400.0, None, float("nan"))]
    assert figures == ["7", "7.2", "12 400", "-", "-"]
    text = [seconds(value) for value in (0.04, 3.21, 59.97, 3599.7, 11400, 400_000, -2, None)]
    assert text == ["40 ms", "3.2 s", "1 m 00 s", "1 h 00 m", "3 h 10 m", "4 d", "-2.0 s", "-"]
    assert [percent(value) for value in (0.5, 0.064, 0, None)] == ["50%", "6.4%", "0%", "-"]
    assert bar(0.5, 1, 4, 0.75) == "██░│"
    assert bar(2, 1, 4) == "████"
    assert bar(None, 0, 4) == "░░░░"
    assert plain("a\nb\u2028") == "a\\u000ab\\u2028"


def test_the_queue_view_shows_its_first_requests_in_order() -> None:
    drawn = lines(status(), ViewState(QUEUE))
    rows = [line.split() for line in drawn if line.strip()[:1].isdigit() and "flow-" in line]
    assert [row[:2] for row in rows[:3]] == [["1", "flow-0"], ["2", "flow-1"], ["3", "flow-2"]]
    assert rows[0][2:5] == ["Default", "3.0", "s"]
    assert "5 queue (100 000)" in drawn[4]
    # Below the table: the selected request's full id and the columns that did not fit.
    text = "".join(drawn[-3:])
    for expected in ("4f1d9c00-0000-4000-8000-000000000000", "Score 0.254", "Owner r-77a0", "Workload chat"):
        assert expected in text


def test_pages_of_the_queue_follow_the_api_s_cursors_forwards_and_back() -> None:
    terminal = Terminal(status())
    terminal.press("5", "down")
    state = terminal.press("page-down", on=status(page=page(next_cursor="second")))
    assert (state.cursor, state.row) == ("second", 0)
    assert terminal.press("page-down", on=status(page=page(next_cursor=None))).cursor == "second"
    assert terminal.press("page-up", "page-up", on=status(page=page())).cursor == ""


def test_a_request_is_evicted_only_after_y() -> None:
    terminal = Terminal(status())
    question = terminal.press("5", "down", "e").question
    assert question == "Evict 4f1d9c00-0000-4000-8000-000000000001 of flow-1?"
    assert terminal.press("n").message == "nothing was changed"
    assert terminal.made == []
    terminal.press("e", "y")
    assert terminal.made == ["requests/4f1d9c00-0000-4000-8000-000000000001/evict"]
    assert "has left the queue" in terminal.lines()[-1]
    # With nothing to evict, and in another view, e does nothing.
    for nowhere in (status(page=None), status(page=page(0, 0))):
        assert terminal.press("e", on=nowhere).question == ""
    assert terminal.press("1", "e").question == ""


def test_the_log_shows_the_newest_decision_first_until_it_is_frozen() -> None:
    terminal = Terminal(status())
    terminal.press("6")
    drawn = terminal.lines()
    assert "flow-39" in drawn[6]
    assert "expired" in drawn[6]
    assert "request-39" in "".join(drawn[-3:])
    terminal.press(" ")
    newer = status(decisions=(entry(40), *(status().decisions or ())))
    assert "flow-39" in terminal.lines(newer)[6]
    assert "frozen" in terminal.lines(newer)[4]
    terminal.press(" ", on=newer)
    assert "flow-40" in terminal.lines(newer)[6]


def test_without_a_decision_log_the_view_says_how_to_enable_it() -> None:
    text = "\n".join(lines(status(decisions=None, has_log=False), ViewState(LOG)))
    assert "decision_log: {enabled: true}" in text
    assert "no decision yet" in "\n".join(lines(status(decisions=None), ViewState(LOG)))


def test_the_stock_chart_has_its_curve_its_bounds_and_its_caption() -> None:
    drawn = [str(line) for line in charts(history(), "requests", width=80, height=18)]
    assert len(drawn) == 18
    assert drawn[0].startswith("in flight 8 requests now; 0 to 8 over 4 m 59 s; bounds 7.2 to 8.8")
    # Each bound is a line with its figure, interrupted at most where the stock crosses it.
    for bound in ("8.8", "7.2"):
        (line,) = [line for line in drawn[1:12] if line.startswith(f"{bound:>8}")]
        assert line[9:].count("─") >= 69
    assert drawn[3].startswith("       8 ")
    assert drawn[3][-1] in "▁▂▃▄▅▆▇"
    columns = zip(*(line[9:] for line in drawn[1:12]), strict=True)
    heights = [column.count("█") for column in columns]
    assert heights == sorted(heights)
    assert heights[0] == 0
    assert heights[-1] >= 6
    assert drawn[12].startswith("waiting 3 requests now; always 3")


def test_the_chart_is_blank_where_no_snapshot_came() -> None:
    early, late = history(60), history(60, 1_700_000_200.0)
    drawn = [str(line) for line in charts(early + late, "requests", width=80, height=6)]
    assert drawn[-1][9:].strip() != ""
    assert drawn[-1][36:50].strip() == ""


def test_a_narrow_terminal_shows_an_endpoint_s_adapters_below_the_table() -> None:
    seen = snapshot()
    seen["endpoints"][1]["adapters"] = ["poet", HOSTILE]
    terminal = Terminal(FleetStatus(seen, 0.2, ""))
    terminal.press("3", "down")
    text = "".join(terminal.lines()[-3:])
    assert "10.0.0.2:8000 · Adapters poet, " in text
    assert not {"\x1b", "\x07"} & set(text)
    # A wide terminal has a column for them.
    assert "poet" in "\n".join(lines(terminal.shown, ViewState(2), width=160)[:-3])


def test_without_a_terminal_the_frame_is_high_enough_for_every_row() -> None:
    for width in (80, 160):
        drawn = lines(status(), ViewState(QUEUE), width, height_of(VIEWS[QUEUE], 30, width))
        assert sum("Default" in line for line in drawn[6:]) == 30
    assert "4f1d9c00-0000-4000-8000-000000000007" in "\n".join(drawn)
