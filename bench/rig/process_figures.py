"""Figures from inside a Python process that was started with `INSIDE` on PYTHONPATH."""

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

INSIDE = Path(__file__).parent / "inside"
_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """`objects` that the garbage collector tracks, after a collection; `blocks` of Python's allocator; bytes
    that the C library's allocator has and does not use."""

    objects: int
    blocks: int
    c_free_bytes: int


def environment() -> Mapping[str, str]:
    """This process's environment, with `INSIDE` for its children."""
    paths = [str(INSIDE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def read_figures(pid: int) -> ProcessFigures:
    """What the process `pid` has now. OSError if it does not answer."""
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(_DEADLINE_S)
        one.connect(f"\0bench-inside-{pid}")
        text = b"".join(iter(lambda: one.recv(4096), b""))
    return ProcessFigures(**json.loads(text))
