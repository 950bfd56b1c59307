"""The stream of routes: what one replica routed and saw completed, every replica knows.

A capped Redis stream that each replica appends to and follows, each on a connection of its own. It is a
memory, not a ledger: what was trimmed before it was read, or could not be written, is missed, and costs a
cache hit or a sample. So nothing here waits for Redis, and no request waits for anything here.

A route is taken in at once by the replica that made it, and from the stream by the others. Completions are
taken in from the stream by all, so that every replica has them in the same order; those that could not be
written at the second try, by their own replica alone (it goes on learning without Redis, G8).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from itertools import chain
from typing import Any

from redis import exceptions as redis_errors
from redis.asyncio import Redis

from picker_fleet.scheduling.latency import LatencyBook
from picker_fleet.scheduling.prefix import PrefixIndex
from picker_fleet.scheduling.records import Done, Record, Routed, bodies, pack, unpack
from picker_fleet.state import cancelling, primary

FLUSH_S = 0.02  # between two writes, at least
MAX_ENTRIES = 4096
MAX_ENTRY_BYTES = 32 * 1024  # with MAX_ENTRIES: the stream takes at most about 128 MB
MAX_ROUTES = 2000  # not written yet; the oldest are dropped. With the default prompt cap they take 7 MB
MAX_DONE = 10_000
LOOK_BACK_S = 600.0  # how far a replica that starts reads back

_CALL_S = 1.0
_BLOCK_MS = 1000
_READ_S = 3.0  # longer than _BLOCK_MS: only a dead connection takes it
_READ_ENTRIES = 16
_PAUSE_S = 0.2
_FAULTS = (redis_errors.RedisError, OSError, TimeoutError)

_log = logging.getLogger(__name__)


class RouteFeed:
    """Keeps `index` and `latencies` at what the whole fleet routed and completed. One event loop.

    `stream` is the key (`epp:{POOL}:routes`), `replica` this incarnation's id: what it wrote in an earlier
    life it reads back like anybody else's. `run` it in a task of its own.
    """

    def __init__(
        self, url: str, *, stream: str, replica: str, index: PrefixIndex, latencies: LatencyBook
    ) -> None:
        self._url = url
        self._stream = stream
        self._replica = replica.encode()
        self._index = index
        self._latencies = latencies
        self._routes: deque[bytes] = deque(maxlen=MAX_ROUTES)  # packed
        self._done: deque[Done] = deque(maxlen=MAX_DONE)
        self._again = False  # what waits has been tried once already
        self._news = asyncio.Event()
        self._seen = ""  # id of the last entry read
        self._caught_up = asyncio.Event()

    def routed(self, address: str, hashes: tuple[bytes, ...]) -> None:
        """Tell the fleet that `address` was given a prompt of `hashes`. Returns at once."""
        if hashes:
            self._index.add(address, hashes)
            self._routes.append(pack(Routed(address, hashes)))
            self._news.set()

    def completed(self, address: str, seconds: float) -> None:
        """Tell the fleet that `address` completed a request after `seconds`. Returns at once."""
        self._done.append(Done(address, seconds))
        self._news.set()

    async def caught_up(self) -> None:
        """Wait until everything that was in the stream at the start has been read."""
        await self._caught_up.wait()

    async def run(self) -> None:
        """Write and follow until cancelled, through any outage of Redis."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write(), name="routes-write")
            group.create_task(self._follow(), name="routes-follow")

    async def _write(self) -> None:
        while True:
            client = self._client()
            try:
                async with client:
                    while True:
                        await self._news.wait()
                        await self._flush(client)
                        await asyncio.sleep(FLUSH_S)
            except _FAULTS as fault:
                cancelling.heed()
                _log.warning("routes not written: %s", fault)
            await asyncio.sleep(_PAUSE_S)

    async def _flush(self, client: Redis) -> None:
        self._news.clear()
        routes, done = list(self._routes), list(self._done)
        self._routes.clear()
        self._done.clear()
        try:
            async with asyncio.timeout(_CALL_S), client.pipeline(transaction=False) as pipeline:
                for body in bodies(chain(routes, map(pack, done)), MAX_ENTRY_BYTES):
                    entry: dict[Any, Any] = {"by": self._replica, "body": body}
                    pipeline.xadd(self._stream, entry, maxlen=MAX_ENTRIES, approximate=True)
                await pipeline.execute()
        except _FAULTS:
            # Redis may have taken it all the same. What counts twice is better than what never counts.
            if self._again:
                self._take(done)
            else:
                self._routes = deque([*routes, *self._routes], maxlen=MAX_ROUTES)
                self._done = deque([*done, *self._done], maxlen=MAX_DONE)
                self._news.set()
            self._again = not self._again
            raise
        self._again = False
        cancelling.heed()

    async def _follow(self) -> None:
        while True:
            client = self._client()
            try:
                async with client:
                    await self._resume(client)
                    while True:
                        await self._read(client)
            except _FAULTS as fault:
                cancelling.heed()
                _log.warning("routes not followed: %s", fault)
            await asyncio.sleep(_PAUSE_S)

    async def _resume(self, client: Redis) -> None:
        """Find where to read on: after what was read last, or a while back.

        A stream that ends before what was read last is another one (its Redis was emptied or replaced, and
        by its clock it is earlier): nothing of it is known.
        """
        async with asyncio.timeout(_CALL_S):
            seconds, _ = await client.time()
            newest: Any = await client.xrevrange(self._stream, count=1)
        cancelling.heed()
        if not self._seen or (newest and _number(newest[0][0].decode()) < _number(self._seen)):
            self._seen = f"{max(0, int((seconds - LOOK_BACK_S) * 1000))}-0"

    async def _read(self, client: Redis) -> None:
        # Until the past is read there is no need to wait for the future: an empty answer is its end.
        block = _BLOCK_MS if self._caught_up.is_set() else None
        async with asyncio.timeout(_READ_S):
            found: Any = await client.xread({self._stream: self._seen}, count=_READ_ENTRIES, block=block)
        cancelling.heed()
        if not found:
            self._caught_up.set()
            return
        for entry_id, fields in (entry for _, entries in found for entry in entries):
            self._seen = entry_id.decode()
            own = fields.get(b"by") == self._replica
            try:
                records = unpack(fields.get(b"body", b""))
            except ValueError as fault:
                _log.warning("entry %s of the routes cannot be read: %s", self._seen, fault)
                continue
            self._take(record for record in records if not own or isinstance(record, Done))
            await asyncio.sleep(0)  # an entry may hold thousands of hashes: others go first

    def _take(self, records: Iterable[Record]) -> None:
        for record in records:
            if isinstance(record, Done):
                self._latencies.add(record.address, record.seconds)
            else:
                self._index.add(record.address, record.hashes)

    def _client(self) -> Redis:
        # Deadlines are those of the calls here: the client's own can swallow a cancellation on Python 3.11.
        return primary.client(self._url, self._stream)


def _number(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)
