"""The Lua as shipped: `lua/` put together into one library of Redis Functions.

A file's `-- include: a b` line names files of `lua/lib/`, which may include others; each is put in once,
before what needs it. The whole is one chunk, so pieces are plain locals, which Redis defines once when the
library is loaded rather than at every call. Each file of `lua/` defines one local function of its own name,
which becomes a function of the library. Names end in the library's own hash, so replicas of two versions
never run each other's code.
"""

import hashlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_INCLUDE = re.compile(r"^-- include: (.+)$", re.MULTILINE)
_PACKAGED = Path(__file__).parent.parent / "_lua"  # in a wheel
_SOURCES = _PACKAGED if _PACKAGED.is_dir() else Path(__file__).parent.parent.parent / "lua"

# In the order in which a message carries them (app/state/link.py).
NAMES = (
    "bury", "renew", "settle", "admit", "place", "cancel", "mark", "evict",
    "heartbeat", "publish", "tune", "sweep", "state",
    "view_flows", "view_flow", "view_queue", "view_inflight", "view_request",
    "view_workloads", "view_workload", "view_replicas",
)  # fmt: skip
_REGISTER = "redis.register_function('%s', function(keys, args) begin(keys[1]) return %s(args) end)"
_REGISTER_READING = (  # these run on a Redis that takes no writes, too
    "redis.register_function{function_name='%s', flags={'no-writes'},\n"
    "  callback=function(keys, args) begin(keys[1]) return %s(args) end}"
)


@dataclass(frozen=True, slots=True)
class Library:
    """The source that FUNCTION LOAD takes, and the version that its functions' names carry."""

    source: str
    version: str

    def function(self, name: str) -> str:
        """What FCALL knows the function of `lua/NAME.lua` by. Raises KeyError if there is none."""
        if name not in NAMES:
            raise KeyError(name)
        return f"{name}_{self.version}"


def load_library(clock: str | None = None) -> Library:
    """The library; `clock` replaces `lua/lib/clock.lua`, for those who need to set the time."""
    pieces: list[str] = []
    seen: set[str] = set()
    for name in NAMES:
        _collect(f"{name}.lua", pieces, seen, clock)
    body = "\n".join(pieces)
    version = hashlib.sha1(body.encode()).hexdigest()[:8]
    registered = [
        (_REGISTER_READING if name == "state" or name.startswith("view_") else _REGISTER)
        % (f"{name}_{version}", name)
        for name in NAMES
    ]
    return Library("\n".join([f"#!lua name=picker_{version}", body, *registered, ""]), version)


def _collect(file: str, pieces: list[str], seen: set[str], clock: str | None) -> None:
    if file in seen:
        return
    seen.add(file)
    text = (_SOURCES / file).read_text(encoding="utf-8")
    for names in _INCLUDE.findall(text):
        for name in names.split():
            _collect(f"lib/{name}.lua", pieces, seen, clock)
    pieces.append(clock if clock is not None and file == "lib/clock.lua" else text)


def write_library(folder: Path) -> None:
    """Write the library into `folder`, where luacheck sees what Redis would."""
    folder.mkdir(parents=True, exist_ok=True)
    body = load_library().source.split("\n", 1)[1]  # the first line is for Redis, not Lua
    (folder / "library.lua").write_text(body, encoding="utf-8")


if __name__ == "__main__":
    write_library(Path(sys.argv[1]))
