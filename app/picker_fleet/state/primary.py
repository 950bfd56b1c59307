"""Finds and connects to the Redis server that holds a pool's keys, from `redis.url`. The other modules of
state/ connect to Redis through this module.

`redis.url` is one of:

    redis://[USER:PASSWORD@]HOST[:PORT][/DB]                        one server (PORT 6379, DB 0)
    rediss://…                                                      the same over TLS
    unix://[USER:PASSWORD@]/PATH[?db=DB]                            one server's socket
    redis+sentinel://[USER:PASSWORD@]HOST[:PORT],…/SERVICE[/DB]     Sentinels (PORT 26379) that watch SERVICE
    redis+cluster://[USER:PASSWORD@]HOST[:PORT],…                   some nodes of a Cluster

Options follow a `?`: `username`, `password`, `db`, unless given before it; `ssl=true` for TLS with Sentinels
or a Cluster; with TLS `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, `ssl_check_hostname`, `ssl_cert_reqs`;
for Sentinels `sentinel_username`, `sentinel_password`, `sentinel_ssl` (defaults to `ssl`).

A single server is used as given. Sentinels name the primary, by majority. The nodes of a Cluster name the
owner of the pool's slot: all keys and channels of a pool carry one hash tag, so a replica needs a plain
connection to the owner only.

The primary is looked up for each new connection, and a connection to a server that is not the primary counts
as lost. So reconnecting after a fault follows the primary. A replaced primary may keep its connections and
accept writes, so state/batching.py looks the primary up every two seconds, and all connections leave a server
once a majority names another (`named_primary`, `is_replaced`).
"""

import asyncio
import contextlib
import os
import random
import socket
import ssl
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from redis import exceptions as redis_errors
from redis.asyncio import Redis
from redis.asyncio.connection import (
    Connection,
    ConnectionPool,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.crc import key_slot

from picker_fleet.domain.redis_address import Address


def raise_if_cancelled() -> None:
    """Raise CancelledError if the current task was cancelled. Call this function after connecting and after a
    handled fault: uvloop (seen with 0.23) can lose a cancellation that arrives while a connection is made,
    and an error while a connection is closed can replace the CancelledError."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


Node = tuple[str, int]

_ASK_S = 0.3  # seconds in which a majority may agree; then the answers so far count
_MAX_ASKED = 5  # maximum nodes of a Cluster asked at once
_CONNECT_S = 1.0
TIMEOUTS = (TimeoutError, redis_errors.TimeoutError)  # the server is silent, but does not refuse connections
_FAULTS = (redis_errors.RedisError, OSError, TimeoutError, ValueError)
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


def connections(url: str, key: str, **options: Any) -> ConnectionPool:
    """A pool of connections to the server that holds `key`; `options` are redis-py's connection options.
    The connections neither retry nor time out waiting for replies: callers set deadlines.

    Raises:
        ValueError: the URL is not valid.
    """
    address = Address.parse(url)
    options = {"socket_connect_timeout": _CONNECT_S, "socket_timeout": None, **options}
    # Without `driver_info`, redis-py sends no CLIENT SETINFO, which an ACL may deny.
    options |= {"protocol": 2, "retry": None, "db": address.db, "driver_info": None}
    options |= {"username": address.username, "password": address.password}
    if address.kind == "socket":
        return ConnectionPool(UnixDomainSocketConnection, path=address.path, **options)
    options |= {"socket_keepalive": True, "socket_keepalive_options": keepalive_options()}
    kind: type[Connection] = _Following
    if address.tls is not None:
        kind, options = _Encrypted, options | dict(address.tls)
    return ConnectionPool(kind, find=_finder(address, key), **options)


def client(url: str, key: str, **options: Any) -> Redis:
    """redis-py's client over `connections`; closing the client closes its connections."""
    return Redis.from_pool(connections(url, key, **options))


# URL -> the primary that a majority last named, and when it was asked, in event-loop time.
_named_last: dict[str, tuple[Node, float]] = {}


async def named_primary(url: str, pool: ConnectionPool) -> Node | None:
    """The primary that a majority of the Sentinels, or of the asked Cluster nodes, names now; None if there
    is no majority, or `redis.url` names a single server."""
    find = pool.connection_kwargs.get("find")
    if not isinstance(find, _Sentinels | _Nodes):
        return None
    asked_s = asyncio.get_running_loop().time()
    try:
        named = await find(by_majority=True)
    except (redis_errors.ConnectionError, redis_errors.TimeoutError):
        return None
    _named_last[url] = named, asked_s
    return named


def is_replaced(url: str, connected: Node, since_s: float) -> bool:
    """Whether `named_primary` found another server than `connected` after `since_s`, its connection time."""
    named, asked_s = _named_last.get(url, (connected, 0.0))
    return named != connected and asked_s > since_s


async def find_primary(url: str, key: str) -> Node:
    """Host and port of the server that holds `key` now.

    Raises:
        redis-py's ConnectionError: no server names a primary; redis-py's TimeoutError: some servers did not
        answer.
    """
    return await _finder(Address.parse(url), key)()


class _Following(Connection):
    """A connection to the server that `find` names; closes if a reply shows another primary."""

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
            redis_errors.AskError,  # also MOVED
            redis_errors.ClusterDownError,  # also MASTERDOWN
            redis_errors.TryAgainError,
            redis_errors.ReadOnlyError,
        ) as fault:
            await self.disconnect(nowait=True)
            raise redis_errors.ConnectionError(f"not the primary: {fault}") from None


# TLS options -> identities of the files they name, and the context that was made of these files.
_contexts: dict[tuple[object, ...], tuple[list[tuple[int, int]], ssl.SSLContext]] = {}


class _Tls(SSLConnection):
    """A connection that shares its TLS context with all others of the same options until a file changes.
    Making a context reads all of the system's CA certificates, which blocks the event loop for 0.1 s."""

    async def connect(self) -> None:
        tls = self.ssl_context
        files = [each for each in (tls.ca_certs, tls.certfile, tls.keyfile) if each]
        key = (*files, tls.cert_reqs, tls.check_hostname)
        with contextlib.suppress(OSError):  # if a file cannot be read, `super().connect` raises why
            read = [(each.st_ino, each.st_mtime_ns) for each in map(os.stat, files)]
            if key not in _contexts or _contexts[key][0] != read:
                tls.context = None
                _contexts[key] = read, tls.get()
            tls.context = _contexts[key][1]
        await super().connect()  # type: ignore[no-untyped-call]


class _Encrypted(_Following, _Tls):
    pass


def keepalive_options() -> dict[int, int]:
    """The options of TCP with which keepalive notices a dead connection within 11 s, as far as the system has
    them."""
    return {getattr(socket, name): value for name, value in _KEEPALIVE.items() if hasattr(socket, name)}


def _finder(address: Address, key: str) -> Callable[[], Awaitable[Node]]:
    if address.kind == "sentinel":
        return _Sentinels(address)
    if address.kind == "cluster":
        return _Nodes(address, key)

    async def the_server() -> Node:
        return address.nodes[0]

    return the_server


class _Sentinels:
    """Asks all Sentinels at once, so that a dead Sentinel causes no delay while a majority agrees."""

    def __init__(self, address: Address) -> None:
        self._address = address

    async def __call__(self, *, by_majority: bool = False) -> Node:
        return await _agreed([self._ask(node) for node in self._address.nodes], by_majority=by_majority)

    async def _ask(self, node: Node) -> Node:
        address = self._address
        reply = await _answer(
            node,
            ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", address.service),
            username=address.sentinel_username,
            password=address.sentinel_password,
            tls=dict(address.tls or {}) if address.sentinel_tls else None,
        )
        if reply is None:
            raise redis_errors.ConnectionError(f"the Sentinels know no service {address.service!r}")
        return reply[0], int(reply[1])


class _Nodes:
    """Asks some nodes of a Cluster which node owns the slot of `key`; remembers the nodes in the replies."""

    def __init__(self, address: Address, key: str) -> None:
        self._address = address
        self._slot = key_slot(key.encode())
        self._known: set[Node] = set(address.nodes)

    async def __call__(self, *, by_majority: bool = False) -> Node:
        asked = random.sample(sorted(self._known), min(_MAX_ASKED, len(self._known)))
        try:
            return await _agreed([self._ask(node) for node in asked], by_majority=by_majority)
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
    """Host and port of a node in a CLUSTER SLOTS reply; an unknown host stands for the asked node."""
    host = entry[0] or asked[0]
    return (asked[0] if host == "?" else host), int(entry[1])


async def _agreed(asks: Sequence[Awaitable[Node]], *, by_majority: bool) -> Node:
    """The answer that more than half of all asked nodes give. If there is no majority in time, raise if
    `by_majority`, else return the most frequent answer."""
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
                except TIMEOUTS:
                    silent = True
                except _FAULTS as error:
                    fault = str(error) or fault
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    raise_if_cancelled()
    if by_majority and votes and votes.most_common(1)[0][1] <= len(asks) // 2:
        raise redis_errors.ConnectionError("no majority names a primary")
    if not votes:
        # A server that did not answer in time might know the primary.
        kind = redis_errors.TimeoutError if silent else redis_errors.ConnectionError
        raise kind(f"the primary cannot be found: {fault}")
    return votes.most_common(1)[0][0]


async def _answer(node: Node, command: Sequence[str], *, tls: dict[str, Any] | None, **options: Any) -> Any:
    """The reply of `node` to `command`, on a new connection."""
    kind: type[Connection] = Connection if tls is None else _Tls
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
