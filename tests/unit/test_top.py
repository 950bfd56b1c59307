"""`picker top` without a terminal: what a frame says, what keys do, and what names cannot do."""

import io
from typing import Any

import pytest
from rich.console import Console

from app.top.admin import Admin, AdminFault
from app.top.feed import News
from app.top.frame import Place, frame
from app.top.keys import parsed
from app.top.operator import Operator
from app.top.words import bar, number, percent, plain, seconds

HOSTILE = "\x1b[2J\x1b]0;owned\x07[red]gold\u202e"


def shot(flows: int = 3, **state: Any) -> dict[str, Any]:
    """A snapshot with so many flows, the last of them with a hostile name."""
    names = [*(f"flow-{number}" for number in range(flows - 1)), HOSTILE]
    return {
        "at": 1_700_000_000.0,
        "state": {
            "pool": "default",
            "replica": "r-1",
            "degraded": False,
            "paused": False,
            "stock": 8,
            "bounds": {"lower": 7.2, "watermark": 8, "upper": 8.8},
            "unit": "requests",
            "queued": 12,
            "overdue": 2,
            "drain_rate": 21.25,
            "guard_dispatches_total": 4,
            "bands": [{"band": "Default", "queued": 12, "oldest_s": 4.04}],
            **state,
        },
        "flows": [
            {
                "flow": name,
                "band": "Default",
                "queued": 4,
                "oldest_s": 4.04,
                "weight": 1,
                "parked": False,
                "in_flight": None,
                "served_cost_per_s": 1.5,
                "share": 0.5,
                "fair_share": 0.25,
            }
            for name in names
        ],
        "flows_total": 1000,
        "workloads": [],
        "workloads_total": 0,
        "endpoints": [
            {"address": "10.0.0.1:8000", "status": "ready", "in_flight": 2},
            {"address": "10.0.0.2:8000", "status": "drained", "in_flight": 0},
        ],
        "replicas": [{"id": "r-1", "live": True, "degraded": False, "this": True}],
    }


def lines(news: News, place: Place, width: int = 80, height: int = 24) -> list[str]:
    """The frame as a terminal of that size gets it."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as caught:
        console.print(frame(news, place, url="http://r", width=width, height=height), end="")
    return caught.get().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (100, 30), (200, 50), (60, 12)])
@pytest.mark.parametrize("view", [0, 1, 2, 3])
def test_given_a_terminal_when_drawn_then_the_frame_fits_it(width: int, height: int, view: int) -> None:
    drawn = lines(News(shot(flows=50), 0.2, ""), Place(view), width, height)
    assert len(drawn) <= height
    assert max(map(len, drawn)) <= width
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
        operator.press("down", seen)
    text = "\n".join(lines(News(seen, 0.2, ""), operator.place))
    assert "flow-40" in text
    assert "flow-0 " not in text


def test_given_a_drain_when_confirmed_then_it_is_made_and_otherwise_not() -> None:
    # Given the endpoints' view with its second row selected
    made: list[str] = []
    operator = Operator(made.append)
    for key in ("3", "down", "d"):
        operator.press(key, shot())
    assert operator.place.question == "Give 10.0.0.2:8000 requests again?"
    # When anything but y is pressed, then nothing is done, and q does not leave
    operator.press("q", shot())
    assert (made, operator.leaving, operator.place.question) == ([], False, "")
    # When y is pressed, then it is
    operator.press("d", shot())
    operator.press("y", shot())
    assert made == ["endpoints/10.0.0.2%3A8000/undrain"]
    assert operator.place.said == "10.0.0.2:8000 takes requests"


@pytest.mark.parametrize(("paused", "path"), [(False, "pause"), (True, "resume")])
def test_given_a_pause_key_when_confirmed_then_the_other_state_is_asked_for(paused: bool, path: str) -> None:
    made: list[str] = []
    operator = Operator(made.append)
    operator.press("p", shot(paused=paused))
    operator.press("y", shot(paused=paused))
    assert made == [path]


def test_given_a_refusal_when_a_change_is_made_then_the_apis_words_are_shown() -> None:
    def refuse(path: str) -> None:
        raise AdminFault("http://r: 401, the bearer token of this fleet is needed")

    operator = Operator(refuse)
    operator.press("p", shot())
    operator.press("y", shot())
    assert "the bearer token of this fleet is needed" in lines(News(shot(), 0.2, ""), operator.place)[-1]


def test_given_views_when_tabbed_through_then_they_come_around() -> None:
    operator = Operator(lambda path: None)
    seen = []
    for _ in range(4):
        operator.press("tab", None)
        seen.append(operator.place.view)
    assert seen == [1, 2, 3, 0]
    operator.press("back-tab", None)
    assert operator.place.view == 3
    operator.press("q", None)
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
