"""The shipped Lua library: version, refusals, and texts that an arrival cannot carry."""

import pytest

from picker_fleet.admission import waits
from picker_fleet.state import schema, store
from picker_fleet.state.scripts import load_library


def test_a_changed_lua_source_changes_the_version_of_the_library() -> None:
    assert load_library(clock="-- another").version != load_library().version


def test_every_refusal_by_a_lua_script_has_an_error_for_the_client() -> None:
    by_limit = {schema.Refusal.OVER_LIMIT, schema.Refusal.OVER_BURST}  # tests/unit/test_tenants.py
    assert set(waits.REFUSALS) | by_limit == set(schema.Refusal)


def test_a_text_of_an_arriving_request_that_contains_a_byte_0_is_not_packed() -> None:
    numbers = (1, 1.0, 1, 60_000, 0, 3, 0, False, 900, 10, 20)
    with pytest.raises(ValueError, match="byte 0"):
        store.pack_arrival(("i\0d", "1", "flow", "", "m", "*", ""), numbers)
