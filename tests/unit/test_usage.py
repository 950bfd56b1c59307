"""Token usage of an answer: what counts, and what cannot be a count."""

import json

import pytest

from app.extproc.usage import UsageTail


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
