"""Cursors come back as they were given, and nothing else is taken for one."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker_fleet.admin.views import BadCursor, decode_cursor, encode_cursor, finite_score


@given(st.integers(0, 2**63 - 1), st.text(st.characters(exclude_categories=["Cs"])))
def test_a_cursor_brings_back_what_it_was_given(number: int, text: str) -> None:
    made = encode_cursor("flows", number, text)
    assert decode_cursor(made, "flows", int, str) == [number, text]
    assert made.replace("-", "").replace("_", "").isalnum()


@given(st.text(max_size=60))
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(BadCursor, match="leave it out"):
        decode_cursor(text, "flows", int, str)


@pytest.mark.parametrize(
    "told",
    [
        b'["queue",1,"a"]',
        b'["flows",1]',
        b'["flows",1,"a",2]',
        b'["flows",-1,"a"]',
        b'["flows",9223372036854775808,"a"]',
        b'["flows",true,"a"]',
        b'["flows",1.0,"a"]',
        b'{"flows":1}',
        b"[" * 500,
        b"1e999",
        b"\xff",
    ],
)
def test_what_another_list_gave_or_nobody_is_refused(told: bytes) -> None:
    with pytest.raises(BadCursor):
        decode_cursor(base64.urlsafe_b64encode(told).decode().rstrip("="), "flows", int, str)


def test_one_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(BadCursor):
        decode_cursor(encode_cursor("flows", 1, "a" * 5000), "flows", int, str)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "(1", "1_000", "٣", "", "x", 1.5, None])
def test_only_a_finite_number_is_a_score(text: object) -> None:
    with pytest.raises(BadCursor):
        finite_score(text)


def test_a_score_is_handed_on_as_it_was_spelled() -> None:
    assert finite_score("0.30000000000000004") == "0.30000000000000004"
