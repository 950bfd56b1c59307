"""`picker top` without a terminal: what a frame says, what keys do, and what names cannot do."""

from typing import Any

import pytest
from top_news import NOTHING, lines, news, shot

from picker_tools.top.admin import Admin, AdminFault
from picker_tools.top.feed import News
from picker_tools.top.frame import Place
from picker_tools.top.keys import parsed
from picker_tools.top.operator import Operator
from picker_tools.top.views import VIEWS
from picker_tools.top.words import bar, number, percent, plain, seconds


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 50), (60, 12)])
@pytest.mark.parametrize("view", range(len(VIEWS)))
@pytest.mark.parametrize("known", [{}, {"page": None, "decisions": None, "moments": ()}])
def test_given_a_terminal_when_drawn_then_the_frame_fills_it(
    width: int, height: int, view: int, known: dict[str, Any]
) -> None:
    drawn = lines(news(**known), Place(view), width, height)
    assert len(drawn) == height
    assert max(map(len, drawn)) <= width
    if width >= 80:
        assert f"{view + 1} {VIEWS[view].name}" in drawn[4]
    assert drawn[-1].startswith("q quit")


def test_given_a_busy_fleet_when_drawn_then_who_waits_and_who_is_served_is_there() -> None:
    text = "\n".join(lines(News(shot(), 0.2, ""), Place()))
    for said in (
        "8 of 8.8 requests",
        "12: Default 12",
        "oldest 4.0 s",
        "2 overdue",
        "21.2/s",
        "1 of 2 ready",
    ):
        assert said in text
    assert "50% of 25%" in text
    assert "flows (3 of 1 000)" in text


def test_given_a_name_with_escape_sequences_when_drawn_then_the_terminal_gets_none() -> None:
    text = "\n".join(lines(News(shot(), 0.2, ""), Place(), width=200))
    assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "\\u001b[2J\\u001b]0;owned\\u0007[red]gold" in text


@pytest.mark.parametrize(
    ("state", "news", "said"),
    [
        ({"paused": True}, (0.2, ""), "PAUSED"),
        ({"degraded": True}, (0.2, ""), "WITHOUT REDIS"),
        ({}, (3.5, ""), "STALE since"),
        ({}, (0.5, "the replica ended the stream"), "STALE since"),
    ],
)
def test_given_something_amiss_when_drawn_then_the_first_line_says_so(
    state: dict[str, Any], news: tuple[float, str], said: str
) -> None:
    drawn = lines(News(shot(**state), *news), Place())
    assert said in drawn[0]
    assert drawn[-1].startswith(news[1])


def test_given_no_figures_yet_when_drawn_then_it_says_why() -> None:
    assert "Connection refused" in "\n".join(lines(News(None, 1.0, "http://r: Connection refused"), Place()))


def test_given_more_rows_than_lines_when_going_down_then_the_row_stays_in_sight() -> None:
    operator = Operator(lambda path: None)
    seen = shot(flows=50)
    for _ in range(40):
        operator.press("down", News(seen, 0.2, ""))
    text = "\n".join(lines(News(seen, 0.2, ""), operator.place))
    assert "flow-40" in text
    assert "flow-0 " not in text


def test_given_a_drain_when_confirmed_then_it_is_made_and_otherwise_not() -> None:
    # Given the endpoints' view with its second row selected
    made: list[str] = []
    operator = Operator(made.append)
    for key in ("3", "down", "d"):
        operator.press(key, News(shot(), 0.2, ""))
    assert operator.place.question == "Give 10.0.0.2:8000 requests again?"
    # When anything but y is pressed, then nothing is done, and q does not leave
    operator.press("q", News(shot(), 0.2, ""))
    assert (made, operator.leaving, operator.place.question) == ([], False, "")
    # When y is pressed, then it is
    operator.press("d", News(shot(), 0.2, ""))
    operator.press("y", News(shot(), 0.2, ""))
    assert made == ["endpoints/10.0.0.2%3A8000/undrain"]
    assert operator.place.said == "10.0.0.2:8000 takes requests"


@pytest.mark.parametrize(("paused", "path"), [(False, "pause"), (True, "resume")])
def test_given_a_pause_key_when_confirmed_then_the_other_state_is_asked_for(paused: bool, path: str) -> None:
    made: list[str] = []
    operator = Operator(made.append)
    operator.press("p", News(shot(paused=paused), 0.2, ""))
    operator.press("y", News(shot(paused=paused), 0.2, ""))
    assert made == [path]


def test_given_a_refusal_when_a_change_is_made_then_the_apis_words_are_shown() -> None:
    def refuse(path: str) -> None:
        raise AdminFault("http://r: 401, the bearer token of this fleet is needed")

    operator = Operator(refuse)
    operator.press("p", News(shot(), 0.2, ""))
    operator.press("y", News(shot(), 0.2, ""))
    assert "the bearer token of this fleet is needed" in lines(News(shot(), 0.2, ""), operator.place)[-1]


def test_given_views_when_tabbed_through_then_they_come_around() -> None:
    operator = Operator(lambda path: None)
    seen = []
    for _ in VIEWS:
        operator.press("tab", NOTHING)
        seen.append(operator.place.view)
    assert seen == [1, 2, 3, 4, 5, 6, 0]
    operator.press("back-tab", NOTHING)
    assert operator.place.view == 6
    operator.press("q", NOTHING)
    assert operator.leaving


@pytest.mark.parametrize(
    ("raw", "keys"),
    [
        ("q", ["q"]),
        ("\x1b[A\x1b[Bd", ["up", "down", "d"]),
        ("\t\x1b[Z", ["tab", "back-tab"]),
        ("\x1b[15~p", ["p"]),  # a key that means nothing here
        ("\x1b", ["escape"]),
        ("jk", ["down", "up"]),
        ("\x1b[6~\x1b[5~nb", ["page-down", "page-up", "page-down", "page-up"]),
    ],
)
def test_given_what_a_terminal_sends_when_parsed_then_keys_come_out(raw: str, keys: list[str]) -> None:
    assert parsed(raw) == keys


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://h:port", "h:99999999", ""])
def test_given_no_address_when_asked_for_then_it_is_refused_at_once(url: str) -> None:
    with pytest.raises(AdminFault, match="no address of an admin API"):
        Admin(url)


def test_given_figures_when_written_then_they_are_short() -> None:
    assert [number(value) for value in (7, 7.25, 12400.0, None, float("nan"))] == [
        "7",
        "7.2",
        "12 400",
        "-",
        "-",
    ]
    said = [seconds(value) for value in (0.04, 3.21, 59.97, 3599.7, 11400, 400_000, -2, None)]
    assert said == ["40 ms", "3.2 s", "1 m 00 s", "1 h 00 m", "3 h 10 m", "4 d", "-2.0 s", "-"]
    assert [percent(value) for value in (0.5, 0.064, 0, None)] == ["50%", "6.4%", "0%", "-"]
    assert bar(0.5, 1, 4, 0.75) == "██░│"
    assert bar(2, 1, 4) == "████"
    assert bar(None, 0, 4) == "░░░░"
    assert plain("a\nb\u2028") == "a\\u000ab\\u2028"
