"""The Lua as shipped: `lua/` put together into one library of Redis Functions.

A file's `-- include: a b` line names files of `lua/lib/`, which may include others; each is put in once,
before what needs it. `schema` is what Python and Lua share (state/schema.py). The whole is one chunk, so
pieces are plain locals, which Redis defines once when the library is loaded rather than at every call. Each
file of `lua/` defines one local function of its own name (`view.lua` several that begin with it), which
becomes a function of the library, and is a block of its own: a chunk may have 200 locals. Names end in the
library's own hash, so replicas of two versions never run each other's code.
"""

import hashlib
import itertools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from picker_fleet.state import schema

_INCLUDE = re.compile(r"^-- include: (.+)$", re.MULTILINE)
_CLOCK = re.compile(r"^-- \[clock\].*^-- \[/clock\]$", re.MULTILINE | re.DOTALL)
_PACKAGED = Path(__file__).parent.parent / "_lua"  # in a wheel
_SOURCES = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[3] / "lua"

# In the order in which a message carries them (state/batching.py).
NAMES = (
    "tombstone", "note_origin", "renew", "report_client_gone", "report_fault", "settle", "admit", "place",
    "acknowledge",
    "cancel", "mark_endpoint", "evict", "heartbeat", "publish",
    "publish_changes", "tune", "sweep", "claim_queue_snapshot", "state",
    "view_flows", "view_flow", "view_queue", "view_inflight", "view_request",
    "view_workloads", "view_workload", "view_replicas",
)  # fmt: skip
ENDS = ("settle", "cancel")  # of them, those that end requests; repeating them changes nothing
_READING = ("state", "view_")  # prefixes of scripts that also run on a Redis that takes no writes
# What adds to what Redis holds is refused while that is out of memory. All else goes on: the fleet empties.
_ADDING = ("note_origin", "admit", "publish", "publish_changes", "claim_queue_snapshot")
_REGISTER = (
    "redis.register_function{function_name='%s', flags={%s},\n"
    "  callback=function(keys, args) return run(%s, keys, args) end}"
)


@dataclass(frozen=True, slots=True)
class Library:
    """The source that FUNCTION LOAD takes, and the version that its functions' names carry."""

    source: str
    version: str

    @property
    def name(self) -> str:
        return f"picker_{self.version}"

    def function(self, name: str) -> str:
        """What FCALL knows the function `name` by. Raises KeyError if there is none."""
        if name not in NAMES:
            raise KeyError(name)
        return f"{name}_{self.version}"


def load_library(clock: str | None = None) -> Library:
    """The library; `clock` replaces the clock of `lua/lib/pool.lua`, for those who need to set the time."""
    pieces: list[str] = []
    seen: set[str] = set()
    for name, functions in itertools.groupby(NAMES, _file_of):
        text = (_SOURCES / f"{name}.lua").read_text(encoding="utf-8")
        _include(text, pieces, seen)
        registered = "\n".join(_REGISTER % (f"{each}_VERSION", _flags(each), each) for each in functions)
        pieces.append(f"do\n{text}{registered}\nend")
    body = "\n".join(pieces)
    if clock is not None:
        body = _CLOCK.sub(lambda _: clock, body)
    version = hashlib.sha1(body.encode()).hexdigest()[:8]
    body = body.replace("_VERSION'", f"_{version}'")
    return Library(f"#!lua name=picker_{version}\n{body}\n", version)


def _file_of(function: str) -> str:
    return "view" if function.startswith("view_") else function


def _flags(name: str) -> str:
    if name.startswith(_READING):
        return "'no-writes'"
    return "" if name in _ADDING else "'allow-oom'"


def _include(text: str, pieces: list[str], seen: set[str]) -> None:
    """Add what `text` includes and has not been added yet."""
    for name in (name for names in _INCLUDE.findall(text) for name in names.split()):
        if name in seen:
            continue
        seen.add(name)
        if name == "schema":
            pieces.append(schema.lua_source())
            continue
        piece = (_SOURCES / "lib" / f"{name}.lua").read_text(encoding="utf-8")
        _include(piece, pieces, seen)
        pieces.append(piece)


def write_library(folder: Path) -> None:
    """Write the library into `folder`, where luacheck sees what Redis would."""
    folder.mkdir(parents=True, exist_ok=True)
    body = load_library().source.split("\n", 1)[1]  # the first line is for Redis, not Lua
    (folder / "library.lua").write_text(body, encoding="utf-8")


if __name__ == "__main__":
    write_library(Path(sys.argv[1]))
