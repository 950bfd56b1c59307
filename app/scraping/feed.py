"""Redis's part in scraping: readings go into a hash for who comes later and over a channel to who is there.

    epp:{POOL}:metrics   hash      endpoint -> its newest reading (app/scraping/metrics.py)   `remove`
    epp:{POOL}:metrics   channel   batches of readings (app/scraping/message.py)              (never stored)

Moments in both are Redis's own, so that the age of a stored reading can be told without comparing replicas'
clocks: each round trip asks for TIME, and the difference to this replica's monotonic clock is kept.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

from redis import exceptions as redis_errors
from redis.asyncio import Redis

from app.errors import StateUnavailable
from app.scraping import message, metrics
from app.scraping.metrics import BadReading, EndpointMetrics
from app.state import cancelling, primary
from app.state.keys import Keys

_log = logging.getLogger(__name__)
_PAUSE_S = 0.2


class Feed:
    """One replica's reading and writing of its pool's readings, on connections of its own.

    `scraped_ms` of what goes in and comes out is of this replica's clock `now_ms` (monotonic, milliseconds).
    """

    def __init__(
        self, url: str, pool: str, replica: str, *, now_ms: Callable[[], int], deadline_s: float = 0.5
    ) -> None:
        self._url = url
        self._name = Keys.of(pool).prefix + "metrics"
        self._replica = replica
        self._now_ms = now_ms
        self._deadline_s = deadline_s
        self._client = self._connection()
        self._ahead_ms: int | None = None  # Redis's clock minus this replica's, or a little less

    async def publish(self, batch: Mapping[str, EndpointMetrics]) -> None:
        """Store and announce `batch`, in one round trip. An empty one only says that this replica lives.

        Raises:
            StateUnavailable: Redis did not take it in time.
        """
        async with self._deadline():
            if self._ahead_ms is None:
                await self._read_clock()
            ahead_ms = cast(int, self._ahead_ms)
            encoded = {address: metrics.encode(one, ahead_ms) for address, one in batch.items()}
            text = message.encode(self._replica, self._now_ms() + ahead_ms, encoded)
            pipeline = self._client.pipeline(transaction=False)
            pipeline.time()
            if encoded:
                pipeline.hset(self._name, mapping=cast(Mapping[Any, Any], encoded))
            pipeline.publish(self._name, text)
            self._note_clock((await pipeline.execute())[0])

    async def remove(self, addresses: Iterable[str]) -> None:
        """Drop what is stored of `addresses`.

        Raises:
            StateUnavailable: Redis did not take it in time.
        """
        if listed := list(addresses):
            async with self._deadline():
                await self._client.hdel(self._name, *listed)

    async def stored(self) -> dict[str, EndpointMetrics]:
        """Every stored reading that can be read.

        Raises:
            StateUnavailable: Redis did not answer in time.
        """
        async with self._deadline():
            pipeline = self._client.pipeline(transaction=False)
            pipeline.time()
            pipeline.hgetall(self._name)
            time, flat = await pipeline.execute()
        shift_ms = -self._note_clock(time)
        found: dict[str, EndpointMetrics] = {}
        for address, text in flat.items():
            try:
                found[address.decode()] = metrics.decode(text, shift_ms)
            except (BadReading, UnicodeDecodeError) as fault:
                _log.warning("a stored reading of %r is left out: %s", address[:60], fault)
        return found

    async def follow(
        self,
        on_readings: Callable[[str | None, Mapping[str, EndpointMetrics]], None],
        *,
        on_link: Callable[[], None],
        quiet_s: float,
    ) -> None:
        """Pass readings to `on_readings` until cancelled: first what is stored (sender None), then messages.

        It begins anew after a fault, and after `quiet_s` without a message: replicas speak more often than
        that, this one included, so the connection is dead. `on_link` is called each time messages begin to
        come.
        """
        while True:
            try:
                await self._follow_once(on_readings, on_link, quiet_s)
            except (redis_errors.RedisError, OSError, TimeoutError, StateUnavailable) as fault:
                cancelling.heed()
                _log.warning("metrics of other replicas interrupted: %s", str(fault) or "silence")
            await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        """End the connection that `publish` uses."""
        async with asyncio.timeout(self._deadline_s):
            await self._client.aclose()

    async def _follow_once(
        self,
        on_readings: Callable[[str | None, Mapping[str, EndpointMetrics]], None],
        on_link: Callable[[], None],
        quiet_s: float,
    ) -> None:
        clock = asyncio.get_running_loop().time
        told_fault = False
        async with (
            asyncio.timeout(quiet_s) as quiet,
            self._connection() as client,
            client.pubsub() as channel,
        ):
            await channel.subscribe(self._name)
            cancelling.heed()
            async for item in channel.listen():
                cancelling.heed()
                quiet.reschedule(clock() + quiet_s)
                if item["type"] == "subscribe":
                    # Only now is no message missed between what is stored and what is announced.
                    on_readings(None, await self.stored())
                    on_link()
                    continue
                try:
                    heard = message.decode(item["data"], self._now_ms())
                except BadReading as fault:
                    faults: tuple[str, ...] = (str(fault),)
                else:
                    on_readings(heard.sender, heard.readings)
                    faults = heard.faults
                if faults and not told_fault:
                    told_fault = True  # they would come with every message
                    _log.warning("readings of other replicas are left out: %s", "; ".join(faults[:3]))

    async def _read_clock(self) -> None:
        self._note_clock(await self._client.time())

    def _note_clock(self, time: tuple[int, int]) -> int:
        # Now is later than Redis's answer was: what is stamped seems a little older, never younger.
        self._ahead_ms = time[0] * 1000 + time[1] // 1000 - self._now_ms()
        return self._ahead_ms

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._deadline_s):
                yield
                cancelling.heed()
        except (redis_errors.RedisError, OSError, TimeoutError) as fault:
            cancelling.heed()
            raise StateUnavailable(f"Redis took no metrics: {str(fault) or 'no answer in time'}") from None

    def _connection(self) -> Redis:
        return primary.client(self._url, self._name)
