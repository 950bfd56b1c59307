"""All lanes, read once for the whole fleet.

To read a thousand lanes takes twenty calls. So a replica that needs them asks first whether another has left
them (`lua/claim_queue_snapshot.lua`). If nobody has, it reads them, and leaves them to the others in a key
that ends by itself. The others wait meanwhile, though no longer than its claim is good: it may have died.
Lanes that nobody asks for are not read. Where Redis takes no writes, or what was left has another version's
shape, each replica reads for itself.
"""

import asyncio
from dataclasses import dataclass

import orjson

from picker_fleet.errors import StateFault
from picker_fleet.state.link import Link
from picker_fleet.state.reads import CHUNK, Lanes, Reads
from picker_fleet.state.rows import Lane

CLAIM_MS = 500  # more than reading takes; on a machine so busy that it does not, two read
_GOOD_S = 1.0  # how old lanes may be
_LANE_S = 0.001  # and no older than this for each: a few are read in no time
_FRESH = 0.7  # of that time they are left to others, so that newer ones can be had before they are too old
_LOOK_S = 0.02  # between looks whether another has read them
_PIECE = 250  # lanes of what was left that are taken over at a time
_FIELDS = list(Lane._fields)


@dataclass(frozen=True, slots=True)
class Surveyed:
    """`fresh_s`: for how long nobody reads newer ones; `good_s`: for how long these will do. From now on."""

    lanes: Lanes
    fresh_s: float
    good_s: float


class Survey:
    """`key` is where lanes are left. One event loop."""

    def __init__(self, link: Link, reads: Reads, key: str) -> None:
        self._link = link
        self._reads = reads
        self._key = key
        self._few = False  # one call has brought them all, the last time
        self._clock = asyncio.get_running_loop().time

    async def lanes(self, limit: int, *, pause_s: float = 0.0) -> Surveyed:
        """At most `limit` lanes in their order; decisions have their turn in the pauses.

        Raises:
            StateFault: as Reads does.
        """
        found = await (self._read(limit, pause_s) if self._few else self._shared(limit, pause_s))
        self._few = len(found.lanes.lanes) <= CHUNK
        return found

    async def _shared(self, limit: int, pause_s: float) -> Surveyed:
        while True:
            try:
                text, left_ms = await self._link.call("claim_queue_snapshot", CLAIM_MS)
            except StateFault:
                if self._link.fault is not None:
                    raise
                return await self._read(limit, pause_s)  # what takes no writes can be read still
            if text:
                until_s = self._clock() + left_ms / 1000
                lanes = await _parsed(text, pause_s)
                if lanes is None:
                    return await self._read(limit, pause_s)
                fresh_s = until_s - self._clock()
                return Surveyed(lanes, fresh_s, fresh_s + (1 - _FRESH) * _longest_s(lanes))
            if not left_ms:
                found = await self._read(limit, pause_s)
                await asyncio.sleep(pause_s)
                self._leave(found)
                return found
            await asyncio.sleep(min(_LOOK_S, left_ms / 1000))

    def _leave(self, found: Surveyed) -> None:
        """Nobody waits for the answer."""
        left_ms = int(found.fresh_s * 1000)
        if left_ms > 0:
            self._link.command("SET", self._key, _text(found.lanes), "PX", left_ms)
        else:
            self._link.command("DEL", self._key)

    async def _read(self, limit: int, pause_s: float) -> Surveyed:
        begun_s = self._clock()
        lanes = await self._reads.lanes(limit, pause_s=pause_s)
        longest_s, took_s = _longest_s(lanes), self._clock() - begun_s
        return Surveyed(lanes, _FRESH * longest_s - took_s, longest_s - took_s)


def _longest_s(lanes: Lanes) -> float:
    return min(_GOOD_S, _LANE_S * len(lanes.lanes))


def _text(lanes: Lanes) -> bytes:
    rows = [tuple(lane) for lane in lanes.lanes]
    return orjson.dumps({"fields": _FIELDS, "totals": lanes.totals, "lanes": rows})


async def _parsed(text: str, pause_s: float) -> Lanes | None:
    """None: it is of another version's shape."""
    told = orjson.loads(text)
    if told.get("fields") != _FIELDS:
        return None
    lanes: list[Lane] = []
    for at in range(0, len(told["lanes"]), _PIECE):
        await asyncio.sleep(pause_s)
        lanes += map(Lane._make, told["lanes"][at : at + _PIECE])
    return Lanes(lanes, tuple(told["totals"]))
