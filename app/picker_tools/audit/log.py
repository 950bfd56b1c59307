"""The decision log: its entries, and the Redis stream that holds them.

The auditor, the load generator and the benchmarks read the log with this module. `lua/lib/pool.lua` writes
the entries (docs/redis-schema.md).
"""

import asyncio
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec
import redis
from redis.backoff import NoBackoff
from redis.maint_notifications import MaintNotificationsConfig
from redis.retry import Retry

from picker_fleet.domain.errors import PickerError
from picker_fleet.domain.redis_address import Address
from picker_fleet.state.keys import Keys
from picker_fleet.state.primary import find_primary

GUARD = "guard"
ENDS = frozenset({
    "completed", "client_gone", "upstream_failed", "withdrawn", "cancelled", "refused", "reclaimed",
    "expired", "abandoned", "preempted", "evicted",
})  # fmt: skip
THROTTLING = frozenset({"throttled", "unthrottled"})  # events of a flow queue, which the field `flow` names
CHARGES = frozenset({"charged", "refunded", "used"})  # events of tenants' quotas, caused by a request
EVENTS = ENDS | THROTTLING | CHARGES | {
    "queued", "bypassed", "granted", "placed", "requeued", "adopted", "orphaned", "restored", "moved",
    "prefilled", "corrected", "tuned", "rebased", "collected", "tenant",
    "topped_up",
}  # fmt: skip


_FIELD = re.compile(r"(?:\$\.|field `)(\w+)")  # finds the field's name in an error message of msgspec


class EntryError(ValueError):
    """Raised if a log entry cannot be parsed; the message names the entry and the field."""


class Entry(msgspec.Struct, frozen=True):
    """A decision in the log. `stock`, `queued`, `v`, `upper` and `lower` have the values after the decision.

    `band` is the number of a band; another band may get this number after an event `collected`. `priority`
    orders bands, the highest first. `tag` is the flow's start tag; in `rebased` entries, the amount by which
    all tags of the band fall. `due_ms` is the time at which the request becomes overdue. `tag` and `due_ms`
    are None if the log omits the field. `limit` is the flow's limit on each endpoint (0: no limit).
    `endpoint` is '' while the request has no endpoint; `prefill` is another endpoint that computes the prompt
    of a placed request, '' without such an endpoint or once it is done. `body_bytes` is 0 if unknown, and
    once the request is placed.
    """

    seq: int
    time_us: int
    event: str
    request: str
    flow: str
    band: int
    priority: int
    workload: str
    cost: float
    weight: float
    arrived: int
    deadline_ms: int
    due_ms: int | None
    limit: int
    tag: float | None
    v: float
    by: str
    owner: str
    endpoint: str
    stock: float
    queued: int
    upper: float
    lower: float
    note: str
    body_bytes: int = msgspec.field(name="bytes")
    prefill: str = ""
    early_ms: int = 0  # ordering `edf`: how long before its deadline the request is due

    @classmethod
    def parse(cls, raw: Mapping[str, str]) -> "Entry":
        """Parse an entry whose fields are in `raw`.

        Raises:
            EntryError: a field is missing or not a number, or the event is unknown.
        """
        absent = {field: None for field in ("tag", "due_ms") if raw.get(field) == ""}
        try:
            entry = msgspec.convert({**raw, **absent}, cls, strict=False)
        except msgspec.ValidationError as fault:
            named = _FIELD.search(str(fault))
            raise _unreadable(raw, named[1] if named else "") from None
        if entry.event not in EVENTS:
            raise _unreadable(raw, "event")
        return entry

    @property
    def now_ms(self) -> int:
        """The time of the decision in milliseconds, rounded down as in the Lua scripts."""
        return self.time_us // 1000

    @property
    def number(self) -> float:
        """The number in the entry's note; NaN if the note is no number."""
        try:
            return float(self.note)
        except ValueError:
            return math.nan

    def __str__(self) -> str:
        about = [f"#{self.seq}", f"{self.time_us / 1e6:.6f}", self.event]
        if self.event in THROTTLING:
            about.append(f"flow={self.flow!r} priority={self.priority}")
        elif self.request:
            about.append(f"{self.request} flow={self.flow!r} priority={self.priority} cost={self.cost:g}")
            about.append(f"arrived={self.arrived / 1e6:.6f}")
        about += [
            f"{name}={value}"
            for name, value in (
                ("tag", self.tag),
                ("by", self.by),
                ("endpoint", self.endpoint),
                ("prefill", self.prefill),
            )
            if value not in (None, "")
        ]
        about.append(f"v={self.v:g} stock={self.stock:g}/{self.upper:g} queued={self.queued}")
        if self.note and self.event not in ("tuned", "tenant"):
            about.append(f"note={self.note}")
        return " ".join(about)


def _unreadable(raw: Mapping[str, str], field: str) -> EntryError:
    found = repr(raw[field][:80]) if field in raw else "missing"
    return EntryError(f"entry {raw.get('seq', '?')[:20]}: {field} is {found}")


PAGE = 1000  # maximum entries that one call to Redis reads
TIMEOUT_S = 10.0  # timeout, in seconds, of each call to Redis


class LogUnreadable(PickerError):
    """Raised if Redis cannot be reached, or has no decision log of this pool."""


@dataclass(frozen=True, slots=True)
class Page:
    """Consecutive log entries. `trimmed`: the stream's cap may have trimmed entries just before the page."""

    entries: list[dict[str, str]]
    trimmed: bool


class LogStream:
    """A synchronous reader of the decision log. Each call to Redis times out after TIMEOUT_S.

    Raises:
        LogUnreadable: every method raises it if Redis does not answer or answers with an error.
    """

    def __init__(self, url: str, pool: str, page: int = PAGE) -> None:
        self._keys = Keys.of(pool)
        self._page = page
        try:
            address = Address.parse(url)
            self._redis: Any = redis.Redis(
                **_connection(address, url, self._keys.log),
                db=address.db,
                username=address.username,
                password=address.password,
                decode_responses=True,
                encoding_errors="backslashreplace",
                socket_timeout=TIMEOUT_S,
                socket_connect_timeout=TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                protocol=3,  # reading the reply to HELLO also reads TLS messages sent after the handshake
                maint_notifications_config=MaintNotificationsConfig(enabled=False),
                driver_info=None,
            )
        except ValueError as fault:
            raise LogUnreadable(f"the URL of Redis {fault}") from None
        except redis.RedisError as fault:
            raise LogUnreadable(f"the decision log cannot be read: {fault}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._redis.close()

    def pages(self) -> Iterator[Page]:
        """The pages of the log up to its present end, without entries that are added during the read."""
        newest = self._call("XREVRANGE", self._keys.log, "+", "-", "COUNT", 1)
        if not newest:
            return
        until, read = newest[0][0], ""
        while True:
            with self._redis.pipeline(transaction=True) as both:
                both.xrange(self._keys.log, min=f"({read}" if read else "-", max=until, count=self._page)
                both.xrange(self._keys.log, count=1)
                entries, oldest = self._run(both.execute)
            if not entries:
                return
            trimmed = bool(read) and _position(oldest[0][0]) > _position(read)
            yield Page([fields for _, fields in entries], trimmed)
            read = entries[-1][0]

    def settings_throughout(self) -> str | None:
        """The settings (JSON) that were in force throughout a log that begins midway.

        None if the log begins with the pool's first decision or has a change of settings, or if the settings
        are unknown.
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


def _connection(address: Address, url: str, key: str) -> dict[str, Any]:
    """The arguments by which redis-py connects to the server at `address`."""
    if address.kind == "socket":
        return {"unix_socket_path": address.path}
    host, port = address.nodes[0] if address.kind == "server" else asyncio.run(find_primary(url, key))
    return {"host": host, "port": port, "ssl": address.tls is not None, **(address.tls or {})}


def _position(entry_id: str) -> tuple[int, int]:
    ms, _, number = entry_id.partition("-")
    return int(ms), int(number)
