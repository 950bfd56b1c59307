"""The Lua scripts as shipped: read from `lua/`, their shared pieces put in, named by their SHA-1.

A script's `-- include: a b` line names files of `lua/lib/`, which may include others; each is put in
once, before what needs it. The whole is one chunk, so pieces are plain locals.
"""

import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_INCLUDE = re.compile(r"^-- include: (.+)$", re.MULTILINE)
_PACKAGED = Path(__file__).parent.parent / "_lua"  # in a wheel
_SOURCES = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent.parent / "lua"

NAMES = ("renew", "settle", "admit", "place", "cancel", "heartbeat", "publish", "sweep", "state")


@dataclass(frozen=True, slots=True)
class Script:
    """One atomic transition: its name, whole source and SHA-1, by which Redis knows it."""

    name: str
    source: str
    sha: str


def load(name: str) -> Script:
    """The script `name` with its pieces. Raises KeyError if `lua/` has no such script."""
    if name not in NAMES:
        raise KeyError(name)
    pieces: list[str] = []
    _collect(_SOURCES / f"{name}.lua", pieces, set())
    source = "\n".join(pieces)
    return Script(name, source, hashlib.sha1(source.encode()).hexdigest())


def _collect(path: Path, pieces: list[str], seen: set[Path]) -> None:
    if path in seen:
        return
    seen.add(path)
    text = path.read_text(encoding="utf-8")
    for names in _INCLUDE.findall(text):
        for name in names.split():
            _collect(_SOURCES / "lib" / f"{name}.lua", pieces, seen)
    pieces.append(text)


def write_all(folder: Path) -> None:
    """Write every assembled script into `folder`, where luacheck sees what Redis would."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        (folder / f"{name}.lua").write_text(load(name).source, encoding="utf-8")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))
