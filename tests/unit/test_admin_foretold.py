"""The foretold order of dispatch, against a queue that is really served one request after the other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.admin.queue_order import Position, PredictedRequest, count_before, predicted_order
from picker_fleet.state.reads import FlowQueueRow

SHARES = st.sampled_from([0.1, 1 / 3, 0.5, 1.0, 2.0, 7.0])
NAMES = ("", "a", "b", "c", "d")


def lane(name: str, group: int = 1, tag: float = 0.0, queued: int = 3, share: float = 1.0) -> FlowQueueRow:
    return FlowQueueRow(group, name, tag, queued, 1.0, 1.0, share, None)


@st.composite
def queues(draw: st.DrawFn) -> list[FlowQueueRow]:
    places = [(group, name) for group in range(6) for name in NAMES]
    chosen = draw(st.lists(st.sampled_from(places), unique=True, max_size=8))
    tags = st.sampled_from([0.0, 0.1, 1.0, 1e6])
    return [lane(name, group, draw(tags), draw(st.integers(1, 6)), draw(SHARES)) for group, name in chosen]


def served(lanes: list[FlowQueueRow]) -> list[tuple[int, str, int]]:
    """(group, lane, rank) in the order in which fair queueing serves them: the least tag, then the name."""
    order = []
    for group in range(6):
        tags = {each.name: each.start for each in lanes if each.group == group}
        ranks = dict.fromkeys(tags, 0)
        left = {each.name: each for each in lanes if each.group == group}
        while left:
            name = min(left, key=lambda name: (round(tags[name], 9), name))
            order.append((group, name, ranks[name]))
            tags[name] += left[name].share
            ranks[name] += 1
            if ranks[name] == left[name].queued:
                del left[name]
    return order


def keys(turns: list[PredictedRequest]) -> list[tuple[int, str, int]]:
    return [(turn.queue.group, turn.queue.name, turn.rank) for turn in turns]


@given(queues())
def test_turns_come_as_the_queue_would_serve_them(lanes: list[FlowQueueRow]) -> None:
    # Given any queue, when it is foretold, then each request comes once, lanes by tag
    turns = predicted_order(lanes, None, 10_000)
    assert sorted(keys(turns)) == sorted(served(lanes))
    order = [(turn.queue.group, turn.tag) for turn in turns]
    assert order == sorted(order)


def test_flows_of_unlike_weights_come_by_their_shares() -> None:
    # Given a flow of weight 3 and one of weight 1, and one in a lower band
    lanes = [lane("gold", share=1 / 3, queued=6), lane("iron", queued=2), lane("low", group=2, queued=1)]
    # Then three of the one come for each of the other, and the lower band last
    names = [turn.queue.name for turn in predicted_order(lanes, None, 99)]
    assert names == ["gold", "iron", "gold", "gold", "gold", "iron", "gold", "gold", "low"]


@given(queues(), st.integers(1, 5))
def test_pages_go_on_where_the_last_one_ended(lanes: list[FlowQueueRow], size: int) -> None:
    # Given any queue, when it is read in pages
    whole = keys(predicted_order(lanes, None, 10_000))
    read: list[tuple[int, str, int]] = []
    behind: Position | None = None
    while page := predicted_order(lanes, behind, size):
        # Then as many stand before each page as have been read
        assert count_before(lanes, page[0].position) == len(read)
        assert [turn.number for turn in page] == list(range(len(read) + 1, len(read) + len(page) + 1))
        read += keys(page)
        behind = page[-1].position
        assert len(read) <= len(whole)
    # And the pages are the whole
    assert read == whole


def test_a_page_goes_on_though_the_queue_is_served_meanwhile() -> None:
    # Given a page that ended at a request of a lane
    lanes = [lane("a", queued=50, share=0.1), lane("b", queued=50, share=0.1)]
    first = predicted_order(lanes, None, 20)
    # When ten of each lane are served: their tags grow as their ranks fall
    later = [each._replace(start=each.start + 10 * each.share, queued=40) for each in lanes]
    # Then the next page is what it would have been
    rest = predicted_order(later, first[-1].position, 99)
    assert [(turn.queue.name, turn.rank + 10) for turn in rest] == [
        (turn.queue.name, turn.rank) for turn in predicted_order(lanes, first[-1].position, 99)
    ]


@pytest.mark.parametrize("tag", [1e308, -1e308])
def test_a_point_far_off_is_behind_everything_or_nothing(tag: float) -> None:
    lanes = [lane("a", share=1e-9), lane("b", group=4)]
    count = count_before(lanes, Position(1, tag, "a"))
    assert count == (3 if tag > 0 else 0)
    assert len(predicted_order(lanes, Position(1, tag, "a"), 99)) == 6 - count
