"""A Redis channel, followed for as long as it takes. What is said while nobody listens is missed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import hiredis

from picker_fleet.errors import StateUnavailable
from picker_fleet.state import cancelling
from picker_fleet.state.primary import connections
from picker_fleet.state.wire import DOWN, Wire

CHECK_S = 1.0  # how often a silent channel is asked whether it lives; it has as long to answer
_CONNECT_S = 2.0
_PAUSE_S = 0.2

_log = logging.getLogger(__name__)

OnLink = Callable[[], Awaitable[object]]


async def follow(
    url: str,
    channel: str,
    on_message: Callable[[bytes], object],
    *,
    what: str,
    on_link: OnLink | None = None,
    check_s: float = CHECK_S,
) -> None:
    """Pass each message of `channel` to `on_message` until cancelled, reconnecting as needed.

    A connection of its own, since a subscriber gets nothing else. One that is silent is asked for a sign of
    life every `check_s`: where the peer has vanished nothing else would tell. `on_link` is awaited each time
    messages begin to come, so that it can ask for what was missed; StateUnavailable from it begins anew.
    `what` the messages are is for the log.
    """
    while True:
        try:
            await _Subscription(channel, on_message).follow(url, on_link, check_s)
        except (*DOWN, StateUnavailable) as fault:
            cancelling.heed()
            _log.warning("%s interrupted: %s", what, str(fault) or "no answer in time")
        await asyncio.sleep(_PAUSE_S)


class _Subscription:
    """One connection that has subscribed to `channel`."""

    def __init__(self, channel: str, on_message: Callable[[bytes], object]) -> None:
        loop = asyncio.get_running_loop()
        self._channel = channel
        self._on_message = on_message
        self._heard = True  # anything since the last look
        self._linked: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[str] = loop.create_future()

    async def follow(self, url: str, on_link: OnLink | None, check_s: float) -> None:
        """Raises one of wire.DOWN when the connection has ended, or been silent for twice `check_s`."""
        async with asyncio.timeout(_CONNECT_S):
            wire = await Wire.connect(connections(url, self._channel), self._take, self._end, text=False)
        try:
            subscribe: tuple[Any, ...] = ("SUBSCRIBE", self._channel)
            wire.write(hiredis.pack_command(subscribe))
            await asyncio.wait(
                (self._linked, self._ended), timeout=_CONNECT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if on_link is not None and self._linked.done():
                await on_link()
                cancelling.heed()
            while not self._ended.done():
                if not self._heard:
                    raise TimeoutError("the connection is silent")
                self._heard = False
                wire.write(hiredis.pack_command(("PING",)))
                await asyncio.wait((self._ended,), timeout=check_s)
        finally:
            await wire.close()
        raise ConnectionError(self._ended.result())

    def _take(self, reply: Any) -> None:
        self._heard = True
        if isinstance(reply, hiredis.ReplyError):
            self._end(str(reply))
        elif reply[0] == b"message":
            self._on_message(reply[2])
        elif reply[0] == b"subscribe" and not self._linked.done():
            self._linked.set_result(None)

    def _end(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result(why)
