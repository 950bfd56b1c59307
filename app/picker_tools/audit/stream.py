"""The decision log where Redis keeps it, read in pages from its first entry to what is its last by then."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from picker_fleet.errors import PickerError
from picker_fleet.state.address import Address
from picker_fleet.state.keys import Keys
from picker_fleet.state.primary import find

PAGE = 1000  # entries a call
TIMEOUT_S = 10.0  # for each call


class LogUnreadable(PickerError):
    """Redis cannot be reached, or has no decision log of this pool."""


@dataclass(frozen=True, slots=True)
class Page:
    """Entries that follow each other. `trimmed`: the cap may have taken those before the first of them."""

    entries: list[dict[str, str]]
    trimmed: bool


class LogStream:
    """Synchronous; every call is given up after TIMEOUT_S.

    Raises:
        LogUnreadable: from every method, when Redis does not answer or answers with an error.
    """

    def __init__(self, url: str, pool: str) -> None:
        self._keys = Keys.of(pool)
        try:
            address = Address.parse(url)
            self._redis: Any = redis.Redis(
                **_place(address, url, self._keys.log),
                db=address.db,
                username=address.username,
                password=address.password,
                decode_responses=True,
                encoding_errors="backslashreplace",
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                protocol=3,  # its greeting also takes in what TLS sends after its handshake
                maint_notifications_config=MaintNotificationsConfig(enabled=False),
                driver_info=None,
            )
        except ValueError as fault:
            raise LogUnreadable(f"the URL of Redis {fault}") from None
        except redis.RedisError as fault:
            raise LogUnreadable(f"the decision log cannot be read: {fault}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._redis.close()

    def pages(self) -> Iterator[Page]:
        """The log as it is now; what is added meanwhile is left out."""
        newest = self._call("XREVRANGE", self._keys.log, "+", "-", "COUNT", 1)
        if not newest:
            return
        until, read = newest[0][0], ""
        while True:
            with self._redis.pipeline(transaction=True) as both:
                both.xrange(self._keys.log, min=f"({read}" if read else "-", max=until, count=PAGE)
                both.xrange(self._keys.log, count=1)
                entries, oldest = self._run(both.execute)
            if not entries:
                return
            trimmed = bool(read) and _position(oldest[0][0]) > _position(read)
            yield Page([fields for _, fields in entries], trimmed)
            read = entries[-1][0]

    def settings_throughout(self) -> str | None:
        """The settings (JSON) that were in force all through a log that does not begin with the pool's first
        decision and shows no change of them. None if it does either, or they are unknown.
        """
        settings = self._call("HGET", self._keys.pool, "settings")
        for number, page in enumerate(self.pages()):
            if number == 0 and page.entries[0].get("seq") == "1":
                return None
            if page.trimmed or any(entry.get("event") == "tuned" for entry in page.entries):
                return None
        return settings if isinstance(settings, str) else None

    def _call(self, *command: object) -> Any:
        return self._run(lambda: self._redis.execute_command(*command))

    @staticmethod
    def _run(call: Any) -> Any:
        try:
            return call()
        except (redis.RedisError, OSError) as fault:
            raise LogUnreadable(f"the decision log cannot be read: {fault}") from None


def _place(address: Address, url: str, key: str) -> dict[str, Any]:
    """Which server to connect to, in redis-py's words."""
    if address.kind == "socket":
        return {"unix_socket_path": address.path}
    host, port = address.nodes[0] if address.kind == "server" else asyncio.run(find(url, key))
    return {"host": host, "port": port, "ssl": address.tls is not None, **(address.tls or {})}


def _position(entry_id: str) -> tuple[int, int]:
    ms, _, number = entry_id.partition("-")
    return int(ms), int(number)
