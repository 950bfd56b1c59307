"""An arrival as one argument: texts, each ended by byte 0, then doubles."""

import pytest

from picker_fleet.state.schema import pack_arrival

NUMBERS = (1, 1.0, 1, 60_000, 0, 3, 0, False)


def test_given_texts_and_numbers_when_they_are_packed_then_each_has_its_place() -> None:
    # Given six texts, one of them empty, and eight numbers
    # When they are packed
    packed = pack_arrival(("id", "1", "flow", "", "modèle", "*"), NUMBERS)
    # Then texts end in byte 0 and numbers have eight bytes each
    assert packed.startswith("id\0001\0flow\0\0modèle\0*\0".encode())
    assert len(packed) == len("id\0001\0flow\0\0modèle\0*\0".encode()) + 8 * len(NUMBERS)


def test_given_a_text_with_byte_0_when_it_is_packed_then_it_is_refused() -> None:
    # Given a text that would end early
    # When it is packed, then it is refused
    with pytest.raises(ValueError, match="byte 0"):
        pack_arrival(("i\0d", "1", "flow", "", "m", "*"), NUMBERS)
