"""Token usage of an answer: what counts, and what cannot be a count."""

import json

import pytest

from picker_fleet.extproc.response import UsageTail


@pytest.mark.parametrize(
    ("told", "read"),
    [
        (100, 100),
        (0, 0),
        (1_000_000_000, 1_000_000_000),
        (1_000_000_001, None),
        (10**300, None),
        (-1, None),
        (True, None),
        ("100", None),
        (1.5, None),
    ],
)
def test_given_a_count_when_read_then_what_cannot_be_one_is_unknown(told: object, read: int | None) -> None:
    tail = UsageTail()
    tail.feed(json.dumps({"usage": {"prompt_tokens": 7, "completion_tokens": told}}).encode())
    assert tail.tokens() == (7, read)


@pytest.mark.parametrize("usage_first", [True, False])
def test_given_a_long_text_when_the_usage_stands_before_or_behind_it_then_it_is_found(
    usage_first: bool,
) -> None:
    usage, text = {"usage": {"prompt_tokens": 7, "completion_tokens": 9}}, {"choices": ["word " * 20_000]}
    answer = json.dumps({**usage, **text} if usage_first else {**text, **usage}).encode()
    tail = UsageTail()
    for at in range(0, len(answer), 1000):
        tail.feed(answer[at : at + 1000])
    assert tail.tokens() == (7, 9)
