"""The token usage that is read from the end of an answer."""

import json

import pytest

from picker_fleet.extproc.response import UsageTail


@pytest.mark.parametrize(
    ("count", "expected"),
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
def test_a_value_that_is_not_a_token_count_is_unknown(count: object, expected: int | None) -> None:
    tail = UsageTail()
    tail.add(json.dumps({"usage": {"prompt_tokens": 7, "completion_tokens": count}}).encode())
    assert tail.tokens() == (7, expected)


@pytest.mark.parametrize("usage_first", [True, False])
def test_usage_is_found_before_and_after_a_long_text(
    usage_first: bool,
) -> None:
    usage, text = {"usage": {"prompt_tokens": 7, "completion_tokens": 9}}, {"choices": ["word " * 20_000]}
    answer = json.dumps({**usage, **text} if usage_first else {**text, **usage}).encode()
    tail = UsageTail()
    for at in range(0, len(answer), 1000):
        tail.add(answer[at : at + 1000])
    assert tail.tokens() == (7, 9)
