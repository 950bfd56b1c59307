"""The scripts as shipped."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from app.state.scripts import NAMES, load

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", NAMES)
def test_a_script_has_each_piece_once_and_before_what_needs_it(name: str) -> None:
    source = load(name).source
    assert source.count("local key = {") == 1
    assert source.index("local key = {") < source.index("KEYS[1] epp:{POOL}:pool\n")


def test_an_unknown_script_is_named() -> None:
    with pytest.raises(KeyError, match="nonesuch"):
        load("nonesuch")


def test_the_wheel_carries_the_scripts(tmp_path: Path) -> None:
    # When the distribution is built
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run([*command, str(ROOT)], check=True, timeout=100)
    # Then every script and piece is in it
    (wheel,) = tmp_path.glob("*.whl")
    shipped = set(zipfile.ZipFile(wheel).namelist())
    for path in (ROOT / "lua").rglob("*.lua"):
        assert f"app/_lua/{path.relative_to(ROOT / 'lua').as_posix()}" in shipped
