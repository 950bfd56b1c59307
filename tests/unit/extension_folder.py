"""Installs distributions with extensions into a folder, in the form in which pip leaves them."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from picker_fleet.domain import extensions

IMPORTS = """
import threading, time
from pydantic import BaseModel
from picker_fleet.extensions import Extension, NoParameters
"""


def scorers(bodies: Mapping[str, str]) -> str:
    """The source of a module with a scorer for each of `bodies`."""
    return IMPORTS + "\n".join(
        f"def {name}(pick, candidates):\n    {body}\n"
        f"def make_{name}(parameters):\n    return {name}\n"
        f"EXTENSION_{name} = Extension(version=1, make=make_{name}, parameters=NoParameters)\n"
        for name, body in bodies.items()
    )


def install(
    folder: Path, source: str, entries: Mapping[str, str], group: str = "scorers", name: str = "racks"
) -> None:
    """Install the distribution `name` 1.0 with the module `name` of the text `source`. `entries` are the
    distribution's entry points: name -> object."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"[picker_fleet.{group}]", *(f"{entry} = {name}:{what}" for entry, what in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))


@contextmanager
def installed_in(folder: Path) -> Iterator[Callable[..., None]]:
    """Yields `install` for `folder`, whose distributions this process finds until the end of the block."""
    modules = set(sys.modules)
    sys.path.insert(0, str(folder))

    def add(source: str, entries: Mapping[str, str], group: str = "scorers", name: str = "racks") -> None:
        install(folder, source, entries, group, name)
        extensions._installed.cache_clear()

    try:
        yield add
    finally:
        sys.path.remove(str(folder))
        for name in {each.stem for each in folder.glob("*.py")} - modules:
            sys.modules.pop(name, None)
        extensions._installed.cache_clear()
