"""Connections to the server that a pool's keys are on, whoever that is at the moment.

One server is where its URL says. Sentinels are asked for the primary that they agree on. A Cluster's nodes
are asked for the owner of the pool's slot: all of a pool's keys and channels carry one hash tag, so one
plain connection to that node is all that a replica needs.

It is asked anew for each connection that is made, and a connection that meets a server which is not the
primary any more is over. So whoever connects again after a fault follows the primary wherever it goes.
"""

import asyncio
import contextlib
import enum
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import hiredis
from redis import exceptions as redis_errors
from redis.asyncio import Redis
from redis.asyncio.connection import (
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.crc import key_slot

from picker_fleet.state.address import Address


def raise_if_cancelled() -> None:
    """Raise the CancelledError that the current task was owed."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


ERROR_REPLIES = (
    # Not, or not now, the server to ask.
    ("MOVED ", "elsewhere"),
    ("ASK ", "elsewhere"),
    ("TRYAGAIN ", "elsewhere"),
    ("READONLY ", "elsewhere"),
    ("MASTERDOWN ", "elsewhere"),
    ("UNBLOCKED ", "elsewhere"),
    ("NOREPLICAS ", "elsewhere"),  # `min-replicas-to-write`: another primary may have been chosen
    ("CLUSTERDOWN ", "elsewhere"),
    ("LOADING ", "elsewhere"),
    ("NOAUTH ", "elsewhere"),
    ("DENIED ", "elsewhere"),
    ("ERR max number of clients", "elsewhere"),
    # The one to ask, but it does not do this for anyone.
    ("BUSY ", "denied"),
    ("NOPERM ", "denied"),
    ("ERR ACL failure in script", "denied"),
    ("ERR unknown command", "denied"),
    ("ERR Function not found", "denied"),  # and it cannot be given the library
    # It takes nothing that would add to what it holds, or nothing at all that it would have to write down.
    ("OOM ", "full"),
    ("MISCONF ", "full"),
)
NO_ANSWER = "no-answer"  # among the metrics' kinds of errors, beside the meanings of those that are answered


class Meaning(enum.Enum):
    """ELSEWHERE: asked once more, on a new connection, which leads to whoever is the primary by then. DENIED:
    asked once more a moment later. Either, if it lasts, is as if Redis had not answered. FULL: it takes no
    writes for now. ITEM: a script's error, on a damaged record for example."""

    ELSEWHERE = "elsewhere"
    DENIED = "denied"
    FULL = "full"
    ITEM = "item"


def meaning_of(error: str) -> Meaning:
    """What `error`, the text of an error reply, means; ITEM unless it is known to mean something else."""
    return next(
        (Meaning(meaning) for prefix, meaning in ERROR_REPLIES if error.startswith(prefix)), Meaning.ITEM
    )


Node = tuple[str, int]

_ASK_S = 0.3  # until most agree, or for those that have answered by then
_ASKED = 5  # nodes of a Cluster, at most
_CONNECT_S = 1.0
_TIMEOUTS = (TimeoutError, redis_errors.TimeoutError)
_FAULTS = (redis_errors.RedisError, OSError, TimeoutError, ValueError)
# A peer that has vanished is noticed by the system within about this many seconds, whatever waits for it.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


def connections(url: str, key: str, **options: Any) -> ConnectionPool:
    """A pool whose connections lead to the server that holds `key`; `options` are those of redis-py's
    connections. Without retries or a timeout for replies: deadlines are their users'.

    Raises:
        ValueError: the URL is not valid.
    """
    address = Address.parse(url)
    options = {"socket_connect_timeout": _CONNECT_S, "socket_timeout": None, **options}
    # Without a word about the library (CLIENT SETINFO): one command less to be allowed.
    options |= {"protocol": 2, "retry": None, "db": address.db, "driver_info": None}
    options |= {"username": address.username, "password": address.password}
    if address.kind == "socket":
        return ConnectionPool(_Socket, path=address.path, **options)
    options |= _tcp_options()
    kind: type[Connection] = _Plain
    if address.tls is not None:
        kind, options = _Encrypted, options | dict(address.tls)
    return ConnectionPool(kind, find=_finder(address, key), **options)


def client(url: str, key: str, **options: Any) -> Redis:
    """redis-py's client over `connections`; closing it closes them."""
    return Redis.from_pool(connections(url, key, **options))


async def find(url: str, key: str) -> Node:
    """Host and port of the server that holds `key` now. Raises redis-py's ConnectionError: nobody could tell;
    its TimeoutError: some did not answer."""
    return await _finder(Address.parse(url), key)()


class _Following(Connection):
    """Leads to whoever `find` names; a server that is not the primary counts as a lost connection."""

    def __init__(self, *, find: Callable[[], Awaitable[Node]] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._find = find

    async def connect(self) -> None:
        if self._find is not None and not self.is_connected:
            self.host, self.port = await self._find()
        await super().connect()  # type: ignore[no-untyped-call]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except (
            redis_errors.AskError,  # and MOVED
            redis_errors.ClusterDownError,  # and MASTERDOWN
            redis_errors.TryAgainError,
            redis_errors.ReadOnlyError,
        ) as fault:
            await self.disconnect(nowait=True)
            raise redis_errors.ConnectionError(f"not the primary: {fault}") from None


class _Plain(_Following):
    pass


class _Encrypted(_Following, SSLConnection):
    pass


class _Socket(UnixDomainSocketConnection):
    pass


def _tcp_options() -> dict[str, Any]:
    known = {getattr(socket, name): value for name, value in _KEEPALIVE.items() if hasattr(socket, name)}
    return {"socket_keepalive": True, "socket_keepalive_options": known}


def _finder(address: Address, key: str) -> Callable[[], Awaitable[Node]]:
    if address.kind == "sentinel":
        return _Sentinels(address)
    if address.kind == "cluster":
        return _Nodes(address, key)

    async def there() -> Node:
        return address.nodes[0]

    return there


class _Sentinels:
    """Asks all Sentinels at once: a dead one costs nobody its deadline while the others agree."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def __call__(self) -> Node:
        return await _agreed([self._ask(node) for node in self._address.nodes])

    async def _ask(self, node: Node) -> Node:
        address = self._address
        said = await _answer(
            node,
            ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", address.service),
            username=address.sentinel_username,
            password=address.sentinel_password,
            tls=dict(address.tls or {}) if address.sentinel_tls else None,
        )
        if said is None:
            raise redis_errors.ConnectionError(f"the Sentinels know no service {address.service!r}")
        return said[0], int(said[1])


class _Nodes:
    """Asks some nodes of a Cluster who owns the slot of `key`; remembers who else there is to ask."""

    def __init__(self, address: Address, key: str) -> None:
        self._address = address
        self._slot = key_slot(key.encode())
        self._known: set[Node] = set(address.nodes)

    async def __call__(self) -> Node:
        asked = random.sample(sorted(self._known), min(_ASKED, len(self._known)))
        try:
            return await _agreed([self._ask(node) for node in asked])
        except (redis_errors.ConnectionError, redis_errors.TimeoutError):
            self._known |= set(self._address.nodes)
            raise

    async def _ask(self, node: Node) -> Node:
        address = self._address
        tls = None if address.tls is None else dict(address.tls)
        slots = await _answer(
            node, ("CLUSTER", "SLOTS"), username=address.username, password=address.password, tls=tls
        )
        ranges = [(first, last, _named(primary, node)) for first, last, primary, *_ in slots]
        self._known = {primary for _, _, primary in ranges} | set(self._address.nodes)
        for first, last, primary in ranges:
            if first <= self._slot <= last:
                return primary
        raise redis_errors.ConnectionError(f"no node of the Cluster serves slot {self._slot}")


def _named(entry: Sequence[Any], asked: Node) -> Node:
    """A node of CLUSTER SLOTS; one that does not know its own name is the one that was asked."""
    host = entry[0] or asked[0]
    return (asked[0] if host == "?" else host), int(entry[1])


async def _agreed(asks: Sequence[Awaitable[Node]]) -> Node:
    """What more than half of those asked say, or most of those that answer in time."""
    pending = {asyncio.ensure_future(ask) for ask in asks}
    votes: Counter[Node] = Counter()
    fault, silent = "no answer in time", False
    end = asyncio.get_running_loop().time() + _ASK_S
    try:
        while pending and not any(count > len(asks) // 2 for count in votes.values()):
            left_s = end - asyncio.get_running_loop().time()
            done, pending = await asyncio.wait(
                pending, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                silent = True
                break
            for task in done:
                try:
                    votes[task.result()] += 1
                except _TIMEOUTS:
                    silent = True
                except _FAULTS as told:
                    fault = str(told) or fault
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    raise_if_cancelled()
    if not votes:
        # Some may only be slow: that is no proof that there is no primary.
        kind = redis_errors.TimeoutError if silent else redis_errors.ConnectionError
        raise kind(f"the primary cannot be found: {fault}")
    return votes.most_common(1)[0][0]


async def _answer(node: Node, command: Sequence[str], *, tls: dict[str, Any] | None, **options: Any) -> Any:
    """One node's reply to one command, on a connection of its own."""
    kind: type[Connection] = Connection if tls is None else SSLConnection
    connection = kind(
        host=node[0], port=node[1], protocol=2, socket_timeout=None, socket_connect_timeout=_ASK_S,
        decode_responses=True, encoding_errors="replace", driver_info=None, **(tls or {}), **options,
    )  # fmt: skip
    try:
        await connection.connect()  # type: ignore[no-untyped-call]
        await connection.send_command(*command)
        return await connection.read_response()
    finally:
        with contextlib.suppress(*_FAULTS):
            await connection.disconnect(nowait=True)


DOWN = (redis_errors.RedisError, OSError, TimeoutError, EOFError)


class RedisConnection(asyncio.Protocol):
    """An open connection. `on_reply` gets each reply in order, errors as `hiredis.ReplyError`; `on_lost` is
    called once, if the connection ends other than by `close`."""

    def __init__(
        self,
        connection: Connection,
        on_reply: Callable[[Any], None],
        on_lost: Callable[[str], None],
        *,
        text: bool,
    ) -> None:
        self._connection = connection
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._reader = hiredis.Reader(encoding="utf-8", errors="replace") if text else hiredis.Reader()
        self._closed = False
        self._transport = cast(asyncio.Transport, connection._writer.transport)  # type: ignore[union-attr]
        self._transport.set_protocol(self)

    @classmethod
    async def connect(
        cls,
        pool: ConnectionPool,
        on_reply: Callable[[Any], None],
        on_lost: Callable[[str], None],
        *,
        text: bool = True,
    ) -> "RedisConnection":
        """A new connection of `pool`, whose protocol must be RESP2; replies as str, or as bytes.

        Raises:
            one of DOWN: it cannot be had.
        """
        connection: Connection = pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            raise_if_cancelled()
        except BaseException:
            with contextlib.suppress(*DOWN):
                await connection.disconnect(nowait=True)
            raise
        return cls(connection, on_reply, on_lost, text=text)

    def write(self, message: bytes) -> None:
        self._transport.write(message)

    async def close(self) -> None:
        """Drop the connection at once; nothing is reported of it any more."""
        self._closed = True
        self._transport.abort()
        with contextlib.suppress(*DOWN):
            await self._connection.disconnect(nowait=True)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while not self._closed:
            try:
                reply = self._reader.gets()
            except hiredis.ProtocolError as fault:
                self._lose(f"not a Redis reply: {fault}")
                return
            if reply is False:  # no script returns a boolean over RESP2
                return
            self._on_reply(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(str(exc) if exc else "the connection was closed")

    def _lose(self, why: str) -> None:
        if not self._closed:
            self._closed = True
            self._transport.abort()
            self._on_lost(why)
