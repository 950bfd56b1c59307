"""The scripts as shipped."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from picker_fleet.admission import gate
from picker_fleet.state import schema
from picker_fleet.state.scripts import NAMES, load_library

ROOT = Path(__file__).parents[2]


def test_the_library_has_each_piece_once_and_before_what_needs_it() -> None:
    # Given the library
    source = load_library().source
    # When its functions are listed, then each is defined once, and registered after that
    for name in NAMES:
        defined = f"\nlocal function {name}(args)"
        assert source.count(defined) == 1
        assert source.index(defined) < source.index(f"'{load_library().function(name)}'")
    # And what all of them need comes first
    assert source.count("  function use_keys(") == 1
    assert source.index("  function use_keys(") < source.index("local function begin")


def test_another_source_has_other_names() -> None:
    assert load_library(clock="-- another").version != load_library().version


def test_every_refusal_of_the_scripts_has_an_error_for_its_client() -> None:
    assert set(gate._REFUSALS) == set(schema.REFUSALS)


def test_an_unknown_function_is_named() -> None:
    with pytest.raises(KeyError, match="nonesuch"):
        load_library().function("nonesuch")


def test_the_wheel_carries_the_scripts(tmp_path: Path) -> None:
    # When the distribution is built
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run([*command, str(ROOT)], check=True, timeout=100)
    # Then every script and piece is in it
    (wheel,) = tmp_path.glob("*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "lua").rglob("*.lua"):
        assert f"picker_fleet/_lua/{path.relative_to(ROOT / 'lua').as_posix()}" in shipped
