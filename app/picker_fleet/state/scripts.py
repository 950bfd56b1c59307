"""Assembles the files of `lua/` into one library of Redis Functions.

A file's line `-- include: a b` names files of `lua/lib/`, which may include other files; each file is
included once, before the files that need it. The name `schema` stands for state/schema.py. The library is one
Lua chunk, so included files define plain locals, which Redis sets once when it loads the library rather than
at each call. Each file of `lua/` defines one local function of its own name (`view.lua` defines several with
that prefix), which becomes a function of the library. Each such file is a block, since a chunk may have at
most 200 locals. The names of functions end in the library's hash, so replicas of two versions never run each
other's code.
"""

import functools
import hashlib
import itertools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from picker_fleet.state import schema

_INCLUDE = re.compile(r"^-- include: (.+)$", re.MULTILINE)
_CLOCK = re.compile(r"^-- \[clock\].*^-- \[/clock\]$", re.MULTILINE | re.DOTALL)
_PACKAGED = Path(__file__).parent.parent / "_lua"  # the folder of the Lua files in a wheel
_SOURCES = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parents[3] / "lua"

# Script names, in the order in which a message carries their calls (state/batching.py).
NAMES = (
    "tombstone", "note_origin", "renew", "report_client_gone", "report_fault", "prefilled", "settle", "admit",
    "place", "acknowledge", "cancel", "mark_endpoint", "evict", "heartbeat", "publish",
    "publish_changes", "tune", "set_limits", "set_tenants", "sweep", "claim_queue_snapshot", "state",
    "top_up_tenant", "count_usage",
    "view_flows", "view_flow", "view_queue", "view_inflight", "view_request",
    "view_workloads", "view_workload", "view_replicas", "view_tenants",
)  # fmt: skip
ENDS = ("settle", "cancel")  # scripts that end requests; repeating a call changes nothing
_READING = ("state", "view_")  # prefixes of scripts that run even if Redis accepts no writes
# Scripts that add data, which Redis refuses while out of memory; other scripts run, so the pool empties.
_ADDING = (
    "note_origin", "admit", "publish", "publish_changes", "set_tenants", "claim_queue_snapshot",
    "count_usage",
)  # fmt: skip
_REGISTER = (
    "redis.register_function{function_name='%s', flags={%s},\n"
    "  callback=function(keys, args) return run(%s, keys, args) end}"
)


@dataclass(frozen=True, slots=True)
class Library:
    """The source for FUNCTION LOAD, and the version at the end of its functions' names."""

    source: str
    version: str

    @property
    def name(self) -> str:
        return f"picker_{self.version}"

    def function(self, name: str) -> str:
        """The function name for FCALL of script `name`. Raises KeyError for an unknown script."""
        if name not in NAMES:
            raise KeyError(name)
        return f"{name}_{self.version}"


@functools.cache
def load_library(clock: str | None = None) -> Library:
    """Assemble the library; `clock` replaces the clock in `lua/lib/pool.lua`, for tests that set the time."""
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
    """Append the files that `text` includes to `pieces`, except the files in `seen`."""
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


if __name__ == "__main__":  # writes the library into a folder, so that luacheck checks it as one chunk
    body = load_library().source.split("\n", 1)[1]  # without the shebang line, which is not Lua
    (Path(sys.argv[1]) / "library.lua").write_text(body, encoding="utf-8")
