"""Subscriptions and plain commands on separate Redis connections, beside the batches of state/batching.py.

The function `listen` follows the wake-up channel (pool.py), `follow` any channel
(endpoints/metrics_channel.py); CommandClient runs commands that must not delay decisions (endpoints/,
scheduling/route_stream.py). A subscriber misses messages that are published while it is not connected.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import hiredis
from redis import exceptions as redis_errors

from picker_fleet.domain.errors import StateUnavailable
from picker_fleet.state.connection import DOWN, RedisConnection
from picker_fleet.state.error_replies import Meaning, meaning_of
from picker_fleet.state.primary import connections, is_replaced, raise_if_cancelled
from picker_fleet.state.replies import Notification
from picker_fleet.state.store import parse_notification

CHECK_S = 1.0  # seconds between a subscription's PINGs, and the deadline of each answer
_CONNECT_S = 2.0
_PAUSE_S = 0.2

_log = logging.getLogger(__name__)

OnSubscribed = Callable[[], Awaitable[object]]


async def follow(
    url: str,
    channel: str,
    on_message: Callable[[bytes], object],
    *,
    what: str,
    on_subscribed: OnSubscribed | None = None,
    check_s: float = CHECK_S,
) -> None:
    """Pass each message of `channel` to `on_message` until cancelled, reconnecting as needed.

    The connection is pinged every `check_s`, to detect a server that has vanished. The callback
    `on_subscribed` is awaited after each SUBSCRIBE, to read the changes that missed messages announced; if it
    raises StateUnavailable, the connection is made again. `what` names the messages in the log. Each
    interruption causes one log line, however many attempts to reconnect fail."""
    interrupted = False
    while True:
        subscription = _Subscription(channel, on_message)
        try:
            await subscription.follow(url, on_subscribed, check_s)
        except (*DOWN, StateUnavailable) as fault:
            raise_if_cancelled()
            if subscription.began or not interrupted:
                _log.warning("%s interrupted: %s", what, str(fault) or "no answer in time")
            interrupted = True
        await asyncio.sleep(_PAUSE_S)


class _Subscription:
    def __init__(self, channel: str, on_message: Callable[[bytes], object]) -> None:
        loop = asyncio.get_running_loop()
        self._channel = channel
        self._on_message = on_message
        self._received = True  # whether anything was received since the last PING
        self._subscribed: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[str] = loop.create_future()

    @property
    def began(self) -> bool:
        """Whether Redis has confirmed the subscription."""
        return self._subscribed.done()

    async def follow(self, url: str, on_subscribed: OnSubscribed | None, check_s: float) -> None:
        """Follow the channel. Raises one of DOWN when the connection ends, or leaves a PING unanswered."""
        async with asyncio.timeout(_CONNECT_S):
            connection = await RedisConnection.connect(
                connections(url, self._channel), self._take, self._end, text=False
            )
        try:
            subscribe: tuple[Any, ...] = ("SUBSCRIBE", self._channel)
            connection.write(hiredis.pack_command(subscribe))
            await asyncio.wait(
                (self._subscribed, self._ended), timeout=_CONNECT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if on_subscribed is not None and self._subscribed.done():
                await on_subscribed()
                raise_if_cancelled()
            while not self._ended.done():
                if not self._received:
                    raise TimeoutError("the connection is silent")
                if is_replaced(url, connection.server, connection.made_s):
                    raise ConnectionError("another primary is named now")
                self._received = False
                connection.write(hiredis.pack_command(("PING",)))
                await asyncio.wait((self._ended,), timeout=check_s)
        finally:
            await connection.close()
        raise ConnectionError(self._ended.result())

    def _take(self, reply: Any) -> None:
        self._received = True
        if isinstance(reply, hiredis.ReplyError):
            self._end(str(reply))
        elif reply[0] == b"message":
            self._on_message(reply[2])
        elif reply[0] == b"subscribe" and not self._subscribed.done():
            self._subscribed.set_result(None)

    def _end(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result(why)


async def listen(
    url: str, name: str, on_notification: Callable[[Notification], object], *, check_s: float = CHECK_S
) -> None:
    """Pass each message `WHAT ABOUT` of the wake-up channel `name` to `on_notification` until cancelled.
    Wake-ups are hints: a lost wake-up delays its request by at most a heartbeat interval."""

    def take(message: bytes) -> None:
        for line in message.decode(errors="replace").split("\n"):
            what, _, about = line.partition(" ")
            if (notification := parse_notification(what, about)) is not None:
                on_notification(notification)

    await follow(url, name, take, what="wake-ups", check_s=check_s)


Command = tuple[Any, ...]


class CommandClient:
    """Runs commands on the server that holds `key`. CommandClient connects at the first call, and again after
    a fault. All calls come from one event loop; concurrent calls run one after another."""

    def __init__(self, url: str, key: str, *, deadline_s: float) -> None:
        self._url, self._pool = url, connections(url, key)
        self._deadline_s = deadline_s
        self._connection: RedisConnection | None = None
        self._lost = False
        self._lock = asyncio.Lock()
        self._replies: list[Any] = []
        self._answer: asyncio.Future[None] | None = None
        self._missing = 0

    async def execute(self, commands: Sequence[Command]) -> list[Any]:
        """Send all `commands` at once. Returns the commands' replies, strings as bytes; one error reply fails
        the whole call.

        Raises:
            StateUnavailable: no answer within the deadline, no server, or an error reply.
        """
        try:
            async with asyncio.timeout(self._deadline_s), self._lock:
                replies = await self._send(commands)
            raise_if_cancelled()
        except DOWN as fault:
            raise_if_cancelled()
            raise StateUnavailable(str(fault) or "no answer in time") from None
        return replies

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _send(self, commands: Sequence[Command]) -> list[Any]:
        used = self._connection
        if used is not None and (self._lost or is_replaced(self._url, used.server, used.made_s)):
            await self.close()
        if self._connection is None:
            self._connection = await RedisConnection.connect(self._pool, self._take, self._lose, text=False)
            self._lost = False
        self._replies, self._missing = [], len(commands)
        self._answer = asyncio.get_running_loop().create_future()
        try:
            self._connection.write(b"".join([hiredis.pack_command(command) for command in commands]))
            await self._answer
        except BaseException:
            # Close the connection: its late replies would be taken for replies to the next commands.
            await self.close()
            raise
        finally:
            self._answer = None
        for reply in self._replies:
            if isinstance(reply, hiredis.ReplyError):
                if meaning_of(str(reply)) is Meaning.ELSEWHERE:
                    await self.close()
                raise redis_errors.ResponseError(str(reply))
        return self._replies

    def _take(self, reply: Any) -> None:
        self._replies.append(reply)
        self._missing -= 1
        if self._missing == 0 and self._answer is not None and not self._answer.done():
            self._answer.set_result(None)

    def _lose(self, why: str) -> None:
        self._lost = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(why))
