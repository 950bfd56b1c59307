"""The embedded Valkey: the server binary of a package, in memory only."""

from pathlib import Path
from urllib.parse import quote

from picker_tools.local_fleet.child import Child
from picker_tools.local_fleet.part import READY_S, valkey_binary
from picker_tools.local_fleet.ports import LOOPBACK, free_port
from picker_tools.local_fleet.probe import redis_answers

# As docs/redis.md recommends them for any server.
SETTINGS = (
    *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
    *("--zset-max-listpack-entries", "32"),
)

_LONGEST_SOCKET_PATH = 100  # bytes: the kernel's own limit, with its end, is 108 on Linux and 104 elsewhere


class Valkey:
    """A Valkey on the loopback. It takes no port 0: a free one is found, another if it does not start."""

    name = "valkey"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder.absolute() / "valkey.sock"
        self._port = free_port()
        self._tried = False
        self._settled = False

    @property
    def url(self) -> str:
        return f"redis://{LOOPBACK}:{self._port}/0"

    @property
    def socket_url(self) -> str:
        """For replicas beside it: a trip over a socket takes less CPU than over TCP. `url` if none fits."""
        return f"unix://{quote(str(self._socket))}" if self._has_socket else self.url

    @property
    def _has_socket(self) -> bool:
        return len(bytes(self._socket)) <= _LONGEST_SOCKET_PATH

    def command(self) -> list[str]:
        if self._tried and not self._settled:
            self._port = free_port()
        self._tried = True
        return [
            valkey_binary(),
            *("--bind", LOOPBACK, "--port", str(self._port)),
            *(("--unixsocket", str(self._socket)) if self._has_socket else ()),
            *SETTINGS,
            *("--dir", str(self._folder)),
        ]

    async def ready(self, child: Child) -> str:
        async def answers() -> bool | None:
            return await redis_answers(LOOPBACK, self._port) or None

        await child.until(answers, within_s=READY_S, what="an answer to PING")
        self._settled = True
        return self.url
