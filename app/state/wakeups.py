"""The wake-up channel: hints that a grant waits. A lost one costs at most a heartbeat (DESIGN, "Wait")."""

import asyncio
import logging
from collections.abc import Callable

from redis import exceptions as redis_errors
from redis.asyncio import Redis

from app.state import cancelling

_log = logging.getLogger(__name__)
_PAUSE_S = 0.2


async def listen(url: str, channel: str, on_news: Callable[[str, str], None]) -> None:
    """Pass each line `WHAT ID` of `channel` to `on_news` until cancelled, reconnecting as needed.

    A connection of its own, since a subscriber blocks; what is missed meanwhile the heartbeat finds.
    """
    while True:
        client: Redis = Redis.from_url(
            url, decode_responses=True, encoding_errors="replace", retry=None, socket_connect_timeout=1.0
        )
        try:
            async with client, client.pubsub(ignore_subscribe_messages=True) as subscription:
                await subscription.subscribe(channel)
                cancelling.heed()
                async for message in subscription.listen():
                    for line in message["data"].split("\n"):
                        what, _, request_id = line.partition(" ")
                        on_news(what, request_id)
        except (redis_errors.RedisError, OSError, TimeoutError) as fault:
            cancelling.heed()
            _log.warning("wake-ups interrupted: %s", fault)
        await asyncio.sleep(_PAUSE_S)
