"""The queue, the log and the stock on a terminal, and what a chosen row tells where columns have no room."""

from top_news import HOSTILE, LOG, QUEUE, entry, lines, moments, news, page, shot

from picker_tools.top.chart import charts
from picker_tools.top.feed import News
from picker_tools.top.frame import Place, height_of
from picker_tools.top.operator import Operator
from picker_tools.top.views import VIEWS


def test_given_a_queue_when_drawn_at_80_by_24_then_its_first_requests_are_there_in_order() -> None:
    drawn = lines(news(), Place(QUEUE))
    rows = [line.split() for line in drawn if line.strip()[:1].isdigit() and "flow-" in line]
    assert [row[:2] for row in rows[:3]] == [["1", "flow-0"], ["2", "flow-1"], ["3", "flow-2"]]
    assert rows[0][2:5] == ["Default", "3.0", "s"]
    assert "5 queue (100 000)" in drawn[4]
    # And the chosen one's id is whole, with what there was no column for
    text = "".join(drawn[-3:])
    for said in ("4f1d9c00-0000-4000-8000-000000000000", "Score 0.254", "Held by r-77a0", "Workload chat"):
        assert said in text


def test_given_a_queue_when_paged_then_the_apis_cursors_are_followed_there_and_back() -> None:
    # Given the queue's second page
    operator = Operator(lambda path: None)
    operator.press("5", news())
    operator.press("down", news())
    operator.press("page-down", news(page=page(following="second")))
    assert (operator.place.cursor, operator.place.row) == ("second", 0)
    # When there is no next one, then the place stays, and the way back is that of the way there
    operator.press("page-down", news(page=page(following=None)))
    assert operator.place.cursor == "second"
    operator.press("page-up", news(page=page()))
    operator.press("page-up", news(page=page()))
    assert operator.place.cursor == ""


def test_given_a_request_when_its_eviction_is_confirmed_then_it_is_made_and_otherwise_not() -> None:
    made: list[str] = []
    operator = Operator(made.append)
    for key in ("5", "down", "e"):
        operator.press(key, news())
    assert operator.place.question == "Evict 4f1d9c00-0000-4000-8000-000000000001 of flow-1?"
    operator.press("n", news())
    assert (made, operator.place.said) == ([], "nothing was changed")
    operator.press("e", news())
    operator.press("y", news())
    assert made == ["requests/4f1d9c00-0000-4000-8000-000000000001/evict"]
    assert "has left the queue" in lines(news(), operator.place)[-1]
    # And nothing is asked where there is nothing to evict, or in another view
    for nowhere in (news(page=None), news(page=page(0, 0))):
        operator.press("e", nowhere)
        assert operator.place.question == ""
    operator.press("1", news())
    operator.press("e", news())
    assert operator.place.question == ""


def test_given_a_log_when_drawn_then_the_newest_is_first_and_held_it_stays() -> None:
    operator = Operator(lambda path: None)
    operator.press("6", news())
    drawn = lines(news(), operator.place)
    assert "flow-39" in drawn[6]
    assert "expired" in drawn[6]
    assert "request-39" in "".join(drawn[-3:])
    # When it is held, then what comes does not move it, until it is let go
    operator.press(" ", news())
    later = news(decisions=(entry(40), *(news().decisions or ())))
    assert "flow-39" in lines(later, operator.place)[6]
    assert "held" in lines(later, operator.place)[4]
    operator.press(" ", later)
    assert "flow-40" in lines(later, operator.place)[6]


def test_given_no_log_when_drawn_then_it_is_said_how_to_have_one() -> None:
    text = "\n".join(lines(news(decisions=None, logs=False), Place(LOG)))
    assert "decision_log: {enabled: true}" in text
    assert "no decision yet" in "\n".join(lines(news(decisions=None), Place(LOG)))


def test_given_five_minutes_of_stock_when_drawn_then_its_line_its_bounds_and_its_words_are_there() -> None:
    # Given a stock that went up from 0 to 8, of bounds of 7.2 and 8.8
    drawn = [str(line) for line in charts(moments(), "requests", width=80, height=18)]
    assert len(drawn) == 18
    assert drawn[0].startswith("in flight 8 requests now; 0 to 8 over 4 m 59 s; bounds 7.2 to 8.8")
    # Then each bound has a line with its figure, broken at most where the stock just crosses it
    for bound in ("8.8", "7.2"):
        (line,) = [line for line in drawn[1:12] if line.startswith(f"{bound:>8}")]
        assert line[9:].count("─") >= 69
    # And the stock's end is seen below the upper one
    assert drawn[3].startswith("       8 ")
    assert drawn[3][-1] in "▁▂▃▄▅▆▇"
    # And the columns go up, and stay
    heights = [
        sum(cell == "█" for cell in column)
        for column in zip(*(line[9:] for line in drawn[1:12]), strict=True)
    ]
    assert heights == sorted(heights)
    assert heights[0] == 0
    assert heights[-1] >= 6
    # And what waited is below it
    assert drawn[12].startswith("waiting 3 requests now; always 3")


def test_given_a_time_in_which_nothing_was_heard_when_drawn_then_it_is_blank() -> None:
    early, late = moments(60), moments(60, 1_700_000_200.0)
    drawn = [str(line) for line in charts(early + late, "requests", width=80, height=6)]
    assert drawn[-1][9:].strip() != ""
    assert drawn[-1][36:50].strip() == ""


def test_given_a_narrow_terminal_when_an_endpoint_is_chosen_then_its_adapters_are_told() -> None:
    seen = shot()
    seen["endpoints"][1]["adapters"] = ["poet", HOSTILE]
    told = News(seen, 0.2, "")
    operator = Operator(lambda path: None)
    for key in ("3", "down"):
        operator.press(key, told)
    text = "".join(lines(told, operator.place)[-3:])
    assert "10.0.0.2:8000 · Adapters poet, " in text
    assert not {"\x1b", "\x07"} & set(text)
    # And on a wide one they have their column
    assert "poet" in "\n".join(lines(told, Place(2), width=160)[:-3])


def test_given_no_terminal_when_drawn_then_the_frame_has_room_for_each_row() -> None:
    for width in (80, 160):
        drawn = lines(news(), Place(QUEUE), width, height_of(VIEWS[QUEUE], 30, width))
        assert sum("Default" in line for line in drawn[6:]) == 30
    assert "4f1d9c00-0000-4000-8000-000000000007" in "\n".join(drawn)
