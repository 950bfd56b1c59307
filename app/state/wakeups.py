"""The wake-up channel: hints that a grant waits. A lost one costs at most a heartbeat (DESIGN, "Wait")."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import hiredis

from app.state import cancelling
from app.state.primary import connections
from app.state.wire import DOWN, Wire

CHECK_S = 1.0  # how often a silent channel is asked whether it lives; it has as long to answer
_CONNECT_S = 2.0
_PAUSE_S = 0.2

_log = logging.getLogger(__name__)


async def listen(
    url: str, channel: str, on_news: Callable[[str, str], object], *, check_s: float = CHECK_S
) -> None:
    """Pass each line `WHAT ID` of `channel` to `on_news` until cancelled, reconnecting as needed.

    A connection of its own, since a subscriber gets nothing else. One that is silent is asked for a sign of
    life every `check_s`: where the peer has vanished nothing else would tell. What is missed meanwhile the
    heartbeat finds.
    """
    while True:
        try:
            await _Subscription(channel, on_news).follow(url, check_s)
        except DOWN as fault:
            cancelling.heed()
            _log.warning("wake-ups interrupted: %s", str(fault) or "no answer in time")
        await asyncio.sleep(_PAUSE_S)


class _Subscription:
    """One connection that has subscribed to `channel`."""

    def __init__(self, channel: str, on_news: Callable[[str, str], object]) -> None:
        self._channel = channel
        self._on_news = on_news
        self._heard = True  # anything since the last look
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def follow(self, url: str, check_s: float) -> None:
        """Raises one of wire.DOWN when the connection has ended, or been silent for twice `check_s`."""
        async with asyncio.timeout(_CONNECT_S):
            wire = await Wire.connect(connections(url, self._channel), self._take, self._end)
        try:
            subscribe: tuple[Any, ...] = ("SUBSCRIBE", self._channel)
            wire.write(hiredis.pack_command(subscribe))
            while not self._ended.done():
                if not self._heard:
                    raise TimeoutError("the connection is silent")
                self._heard = False
                wire.write(hiredis.pack_command(("PING",)))
                await asyncio.wait([self._ended], timeout=check_s)
        finally:
            await wire.close()
        raise ConnectionError(self._ended.result())

    def _take(self, reply: Any) -> None:
        self._heard = True
        if isinstance(reply, hiredis.ReplyError):
            self._end(str(reply))
        elif reply[0] == "message":
            for line in reply[2].split("\n"):
                what, _, request_id = line.partition(" ")
                self._on_news(what, request_id)

    def _end(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result(why)
