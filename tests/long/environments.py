"""Makes virtual environments for other programs in the user's cache folder, and keeps them between runs."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


class InstallFault(Exception):
    """A package cannot be installed; the message says why."""


def cache_folder(name: str) -> Path:
    """The folder that keeps files of `name` between runs; `make clean-cache` removes it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "picker-fleet" / name


def environment(
    name: str,
    version: str,
    packages: Sequence[str],
    *,
    python: str = sys.executable,
    overrides: Sequence[str] = (),
    finish: Callable[[Path], None] = lambda _: None,
) -> Path:
    """Make the virtual environment `name` with `packages`, unless it exists. Returns its folder. `overrides`:
    pins that replace other packages' requirements. `finish` is called with the path of site-packages.

    Raises:
        InstallFault: a package cannot be installed.
    """
    folder = cache_folder(name) / f"venv-{version}"
    own, done = folder / "bin" / "python", folder / ".complete"
    if done.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run(python, "-m", "venv", str(folder))
    _run(str(own), "-m", "pip", "install", "--quiet", "uv")
    override = folder / "override.txt"
    override.write_text("".join(f"{each}\n" for each in overrides), encoding="utf-8")
    _run(
        *(str(own), "-m", "uv", "pip", "install", "--quiet", "--python", str(own)),
        *("--override", str(override), *packages),
    )
    finish(next(folder.glob("lib/python3*/site-packages")))
    done.touch()
    return folder


def find_python(minor: int) -> str:
    """A Python 3 of at least this minor version: this Python, on the PATH or in pyenv; else InstallFault."""
    names = (*(f"python3.{number}" for number in range(minor, minor + 4)), "python3")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    places = [sys.executable, *filter(None, map(shutil.which, names))]
    places += sorted(map(str, pyenv.glob("3.*/bin/python3")))
    for each in places:
        if _minor_version(each) >= minor:
            return each
    raise InstallFault(f"no Python 3.{minor} or newer is on the PATH or in pyenv")


def _minor_version(python: str) -> int:
    """The minor version of `python`; -1 if it does not run (pyenv's shims may fail)."""
    try:
        done = subprocess.run([python, "--version"], capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return -1
    version = re.match(r"Python 3\.(\d+)", done.stdout)
    return int(version[1]) if done.returncode == 0 and version else -1


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InstallFault(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
