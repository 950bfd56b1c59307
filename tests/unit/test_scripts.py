"""The shipped Lua library: functions, version, refusals, and the binary layout of an arriving request."""

from pathlib import Path

import pytest

from picker_fleet.admission import waits
from picker_fleet.state import schema, store
from picker_fleet.state.scripts import NAMES, load_library

ROOT = Path(__file__).parents[2]


def test_the_lua_library_defines_each_function_once_and_before_its_use() -> None:
    source = load_library().source
    for name in NAMES:
        defined = f"\nlocal function {name}(args)"
        assert source.count(defined) == 1
        assert source.index(defined) < source.index(f"'{load_library().function(name)}'")
    assert source.count("  function use_keys(") == 1
    assert source.index("  function use_keys(") < source.index("local function begin")


def test_a_changed_lua_source_changes_the_version_of_the_library() -> None:
    assert load_library(clock="-- another").version != load_library().version


def test_every_refusal_by_a_lua_script_has_an_error_for_the_client() -> None:
    by_limit = {schema.Refusal.OVER_LIMIT, schema.Refusal.OVER_BURST}  # tests/unit/test_tenants.py
    assert set(waits.REFUSALS) | by_limit == set(schema.Refusal)


def test_an_arriving_request_is_packed_as_nul_terminated_texts_and_then_doubles() -> None:
    numbers = (1, 1.0, 1, 60_000, 0, 3, 0, False, 900, 10, 20)
    packed = store.pack_arrival(("id", "1", "flow", "", "modèle", "*", ""), numbers)
    texts = "id\0001\0flow\0\0modèle\0*\0\0".encode()
    assert packed.startswith(texts)
    assert len(packed) == len(texts) + 8 * len(numbers)
    with pytest.raises(ValueError, match="byte 0"):
        store.pack_arrival(("i\0d", "1", "flow", "", "m", "*", ""), numbers)
