"""Shares routes, placements and completions between replicas, through a capped Redis stream.

The module pool.py runs one RouteStream per replica; the chooser adds records and reads the indexes. Each
replica appends to the stream and follows the stream, on two connections of its own. The stream is a cache,
not a ledger: a lost record (trimmed before it was read, or not written) costs a cache hit or a latency
sample. No request waits for the stream.

A replica adds its own routes and placements at once, and other replicas' routes and placements from the
stream. All other records a replica takes from the stream, its own included, so all replicas see them in the
same order. If such a record cannot be written at the second try, only the replica that made the record counts
it, so each replica keeps its own latencies up to date without Redis (G8).

The body of an entry is a sequence of records. Numbers are big-endian. Record of a route: `R`, length
of the address (2 bytes), number of hashes (2 bytes), address, hashes (8 bytes each); the same with `S`
(blocks stored), `X` (blocks removed) or `T` (tokens). Further records begin with `C` (completion), `P`
(placement), `O` (observation), `E` (evidence of a prefix cache), `D` (loss of a prefix cache) or `F` (KV
events are read), the length of the address (2 bytes) and, of an observation, the length of the model (2
bytes); then the record's numbers as doubles, address and model.
"""

import asyncio
import logging
import math
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

from picker_fleet.background import keep
from picker_fleet.domain.errors import StateUnavailable
from picker_fleet.scheduling.endpoint_history import HASH_BYTES, LatencyTracker, PrefixIndex
from picker_fleet.scheduling.engine_cache import Evidence
from picker_fleet.scheduling.latency_model import LatencyModel, Load, PrefillBacklogs
from picker_fleet.state.primary import raise_if_cancelled
from picker_fleet.state.subscriptions import Command, CommandClient

FLUSH_S: Final = 0.02  # the shortest interval between two writes
MAX_ENTRIES: Final = 4096
MAX_ENTRY_BYTES: Final = 32 * 1024  # with MAX_ENTRIES entries, the stream takes at most about 128 MB
MAX_ROUTES: Final = 2000  # maximum unwritten routes kept, the newest; 7 MB with the default prompt cap
MAX_COMPLETIONS: Final = 10_000
LOOK_BACK_S: Final = 600.0  # seconds of the stream that a replica reads when it starts

_CALL_S = 1.0
_BLOCK_MS = 1000
_READ_S = 3.0  # deadline of a read; longer than _BLOCK_MS: only dead connections exceed it
_READ_ENTRIES = 16
_PAUSE_S = 0.2

_MAX_HASHES = 0xFFFF

_log = logging.getLogger(__name__)


class RouteRecord(NamedTuple):
    """A prompt with these block hashes, first block first, was routed to `address` (`ip:port`)."""

    address: str
    hashes: tuple[bytes, ...]


class PlacementRecord(NamedTuple):
    """A prompt with `tokens` uncached tokens was placed on `address`; the request's first token is due after
    `ttft_s`."""

    address: str
    tokens: float
    ttft_s: float


class CompletionRecord(NamedTuple):
    """`address` completed a request after `seconds`."""

    address: str
    seconds: float


class ObservationRecord(NamedTuple):
    """A request of `model`, placed on `address` under `load`, took `ttft_s` to its first token, and `tpot_s`
    for each further token (0: unknown)."""

    address: str
    model: str
    load: Load
    ttft_s: float
    tpot_s: float


class EvidenceRecord(NamedTuple):
    """Evidence from an answer of `address` about its engine's prefix cache (`engine_cache.Evidence`); the
    prompt had `bytes_per_token` (0: unknown)."""

    address: str
    kept: float
    evicted: float
    bytes_per_token: float = 0.0


class LossRecord(NamedTuple):
    """The engine at `address` has lost its prefix cache."""

    address: str


class StoredRecord(NamedTuple):
    """The engine at `address` has stored these blocks of prompts, by its KV events."""

    address: str
    hashes: tuple[bytes, ...]


class RemovedRecord(NamedTuple):
    """The engine at `address` has removed these blocks of prompts, by its KV events."""

    address: str
    hashes: tuple[bytes, ...]


class TokensRecord(NamedTuple):
    """Pairs: the link of a block of tokens (`kv_events.token_links`), and the hash of a prompt's block that
    is cached as long as these tokens are. `address` has tokenized the prompt."""

    address: str
    hashes: tuple[bytes, ...]


class FollowedRecord(NamedTuple):
    """A replica reads the KV events of the engine at `address`, whose blocks have `block_tokens` tokens; 0:
    it has missed events, or reads them no longer."""

    address: str
    block_tokens: float


_ROUTE = struct.Struct(">cHH")
_HASHES: Final[Mapping[bytes, Callable[..., "Record"]]] = {
    b"R": RouteRecord,
    b"S": StoredRecord,
    b"X": RemovedRecord,
    b"T": TokensRecord,
}
_HASH_MARKS = {kind: mark for mark, kind in _HASHES.items()}
_OBSERVATION = struct.Struct(">cHH6d")
# The layouts of the records that have only numbers besides their address.
_LAYOUTS: Final[Mapping[bytes, tuple[Callable[..., "Record"], struct.Struct]]] = {
    b"C": (CompletionRecord, struct.Struct(">cHd")),
    b"P": (PlacementRecord, struct.Struct(">cH2d")),
    b"E": (EvidenceRecord, struct.Struct(">cH3d")),
    b"D": (LossRecord, struct.Struct(">cH")),
    b"F": (FollowedRecord, struct.Struct(">cHd")),
}
_MARKS = {kind: (mark, layout) for mark, (kind, layout) in _LAYOUTS.items()}

# Records that all replicas, also their sender, take from the stream.
Engines = StoredRecord | RemovedRecord | TokensRecord | FollowedRecord
Ending = CompletionRecord | ObservationRecord | EvidenceRecord | LossRecord | Engines
Record = RouteRecord | PlacementRecord | Ending


class RouteStream:
    """Keeps `index`, `latencies`, `model` and `backlogs` up to date with the whole fleet's routes,
    completions, observations and placements, from the first call of `share` on. One event loop.

    The argument `stream` is the stream's key (`epp:{POOL}:routes`). `replica` identifies this process, not
    the host: after a restart, its earlier entries are read like another replica's. `clock` is in seconds.
    Call `run` in a task of its own.
    """

    def __init__(
        self, url: str, *, stream: str, replica: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url = url
        self._stream = stream
        self._replica = replica.encode()
        self._clock = clock
        self.index, self.latencies = PrefixIndex(clock=clock), LatencyTracker()
        self.model, self.backlogs = LatencyModel(), PrefillBacklogs()
        self.on_tokens: Callable[[Sequence[bytes]], None] = lambda hashes: None  # gets a TokensRecord's pairs
        self._shared = asyncio.Event()
        self._routes: deque[bytes] = deque(maxlen=MAX_ROUTES)  # packed records
        self._completions: deque[Ending] = deque(maxlen=MAX_COMPLETIONS)
        self._is_retry = False  # whether a write of the waiting records has already failed once
        self._pending = asyncio.Event()
        self._last_id = ""  # id of the last entry read
        self._resumed = False  # whether the next read can continue after `_last_id`
        self.caught_up = asyncio.Event()

    def share(self) -> None:
        """Let `run` share routes between replicas, because a scorer needs the routes of all."""
        self._shared.set()

    def add_route(self, address: str, hashes: tuple[bytes, ...]) -> None:
        """Publish to the fleet that a prompt with `hashes` was routed to `address`. Returns at once."""
        if hashes:
            self.index.add(address, hashes)
            self._routes.append(pack(RouteRecord(address, hashes)))
            self._pending.set()

    def add_placement(self, address: str, tokens: float, ttft_s: float) -> None:
        """Publish to the fleet that a prompt of `tokens` uncached tokens was placed on `address`, and that
        the first token is due after `ttft_s`. Returns at once."""
        record = PlacementRecord(address, tokens, ttft_s)
        self._apply((record,))
        self._routes.append(pack(record))
        self._pending.set()

    def add(self, record: Ending) -> None:
        """Publish `record` to the fleet. Returns at once."""
        self._completions.append(record)
        self._pending.set()

    async def run(self) -> None:
        """Wait for a call of `share`, then write and follow the stream until cancelled; retry if Redis is
        lost."""
        await self._shared.wait()
        async with asyncio.TaskGroup() as group:
            write = partial(self._repeat, self._write, _CALL_S, "written")
            follow = partial(self._repeat, self._follow, _READ_S, "followed")
            group.create_task(keep("routes-write", write), name="routes-write")
            group.create_task(keep("routes-follow", follow), name="routes-follow")

    async def _repeat(
        self, step: Callable[[CommandClient], Awaitable[None]], deadline_s: float, done: str
    ) -> None:
        """Call `step` in a loop; log one line each time that `step` begins to fail."""
        client = CommandClient(self._url, self._stream, deadline_s=deadline_s)
        failing = False
        try:
            while True:
                try:
                    await step(client)
                    failing = False
                except (StateUnavailable, TimeoutError) as error:
                    raise_if_cancelled()
                    if not failing:
                        _log.warning("routes not %s: %s", done, str(error) or "no answer in time")
                    failing = True
                    await asyncio.sleep(_PAUSE_S)
        finally:
            await client.close()

    async def _write(self, client: CommandClient) -> None:
        await self._pending.wait()
        await self._flush(client)
        await asyncio.sleep(FLUSH_S)

    async def _flush(self, client: CommandClient) -> None:
        self._pending.clear()
        routes, completions = list(self._routes), list(self._completions)
        self._routes.clear()
        self._completions.clear()
        entries: list[Command] = [
            ("XADD", self._stream, "MAXLEN", "~", MAX_ENTRIES, "*", "by", self._replica, "body", body)
            for body in join_records(chain(routes, map(pack, completions)), MAX_ENTRY_BYTES)
        ]
        try:
            await client.execute(entries)
        except StateUnavailable:
            # Redis may have written the entries: counting a completion twice does less harm than losing it.
            if self._is_retry:
                self._apply(completions)
            else:
                self._routes = deque([*routes, *self._routes], maxlen=MAX_ROUTES)
                self._completions = deque([*completions, *self._completions], maxlen=MAX_COMPLETIONS)
                self._pending.set()
            self._is_retry = not self._is_retry
            raise
        self._is_retry = False

    async def _follow(self, client: CommandClient) -> None:
        resumed, self._resumed = self._resumed, False  # `_resumed` stays False if a read fails
        if not resumed:
            await self._resume(client)
        await self._read(client)
        self._resumed = True

    async def _resume(self, client: CommandClient) -> None:
        """Find the position in the stream to read from: after the last entry read, or `LOOK_BACK_S` ago.

        If the newest entry is older than the last entry read, the stream is a new one (Redis was emptied or
        replaced, and its clock is behind): read from `LOOK_BACK_S` ago.
        """
        async with asyncio.timeout(_CALL_S):
            (seconds, _), newest = await client.execute(
                [("TIME",), ("XREVRANGE", self._stream, "+", "-", "COUNT", 1)]
            )
        if not self._last_id or (newest and _id_parts(newest[0][0].decode()) < _id_parts(self._last_id)):
            self._last_id = f"{max(0, int((int(seconds) - LOOK_BACK_S) * 1000))}-0"

    async def _read(self, client: CommandClient) -> None:
        # During the catch-up do not block for new entries: an empty reply ends the catch-up.
        block = ("BLOCK", _BLOCK_MS) if self.caught_up.is_set() else ()
        command = ("XREAD", "COUNT", _READ_ENTRIES, *block, "STREAMS", self._stream, self._last_id)
        (found,) = await client.execute([command])
        if not found:
            self.caught_up.set()
            return
        for entry_id, flat in (entry for _, entries in found for entry in entries):
            self._last_id = entry_id.decode()
            fields = dict(zip(flat[::2], flat[1::2], strict=True))
            own = fields.get(b"by") == self._replica
            try:
                records = unpack(fields.get(b"body", b""))
            except ValueError as error:
                _log.warning("entry %s of the routes cannot be read: %s", self._last_id, error)
                continue
            if not self.caught_up.is_set():  # placements of the past are no longer pending
                records = [record for record in records if not isinstance(record, PlacementRecord)]
            self._apply(record for record in records if not own or isinstance(record, Ending))
            await asyncio.sleep(0)  # let other tasks run: an entry may hold thousands of hashes

    def _apply(self, records: Iterable[Record]) -> None:
        for record in records:
            match record:
                case RouteRecord(address, hashes):
                    self.index.add(address, hashes)
                case CompletionRecord(address, seconds):
                    self.latencies.add(address, seconds)
                case PlacementRecord(address, tokens, ttft_s):
                    self.backlogs.add(address, tokens, ttft_s, self._clock())
                case ObservationRecord(address, model, load, ttft_s, tpot_s):
                    self.model.learn(model, address, load, ttft_s, tpot_s, self._clock())
                case EvidenceRecord(address, kept, evicted, bytes_per_token):
                    self.index.learn(address, Evidence(kept, evicted), bytes_per_token)
                case LossRecord(address):
                    self.index.clear(address)
                case StoredRecord(address, hashes):
                    self.index.restore(address, hashes)
                case RemovedRecord(address, hashes):
                    self.index.remove(address, hashes)
                case TokensRecord(_, hashes):
                    self.on_tokens(hashes)
                case FollowedRecord(address, block_tokens):
                    self.index.follow(address, round(block_tokens))


def pack(record: Record) -> bytes:
    """Encode `record` for the stream; keeps at most the first 65 535 hashes."""
    address = record.address.encode()
    match record:
        case RouteRecord() | StoredRecord() | RemovedRecord() | TokensRecord():
            mark, hashes = _HASH_MARKS[type(record)], record.hashes[:_MAX_HASHES]
            return _ROUTE.pack(mark, len(address), len(hashes)) + address + b"".join(hashes)
        case ObservationRecord(_, name, load, ttft_s, tpot_s):
            model, times = name.encode(), (*load, ttft_s, tpot_s)
            return _OBSERVATION.pack(b"O", len(address), len(model), *times) + address + model
        case _:
            mark, layout = _MARKS[type(record)]
            return layout.pack(mark, len(address), *record[1:]) + address


def join_records(packed: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
    """Join packed records, in order, into entry bodies of at most `max_bytes`; a longer record gets its own
    body."""
    body: list[bytes] = []
    length = 0
    for record in packed:
        if body and length + len(record) > max_bytes:
            yield b"".join(body)
            body, length = [], 0
        body.append(record)
        length += len(record)
    if body:
        yield b"".join(body)


def unpack(body: bytes) -> list[Record]:
    """Decode the records of one entry.

    Raises:
        ValueError: the entry's `body` is truncated or malformed.
    """
    found: list[Record] = []
    at = 0
    try:
        while at < len(body):
            mark = body[at : at + 1]
            if mark in _HASHES:
                _, length, count = _ROUTE.unpack_from(body, at)
                address, start = _text(body, at + _ROUTE.size, length)
                at = start + count * HASH_BYTES
                _check_length(body, at)
                hashes = tuple(body[i : i + HASH_BYTES] for i in range(start, at, HASH_BYTES))
                found.append(_HASHES[mark](address, hashes))
            elif mark == b"O":
                _, length, of_model, *numbers = _OBSERVATION.unpack_from(body, at)
                address, at = _text(body, at + _OBSERVATION.size, length)
                model, at = _text(body, at, of_model)
                *load, ttft_s, tpot_s = _checked(numbers)
                found.append(ObservationRecord(address, model, Load(*load), ttft_s, tpot_s))
            elif mark in _LAYOUTS:
                kind, layout = _LAYOUTS[mark]
                _, length, *numbers = layout.unpack_from(body, at)
                address, at = _text(body, at + layout.size, length)
                found.append(kind(address, *_checked(numbers)))
            else:
                raise ValueError(f"no record begins with {mark!r}")
    except struct.error as error:
        raise ValueError(f"cut off: {error}") from None
    return found


def _text(body: bytes, start: int, length: int) -> tuple[str, int]:
    """The text of `length` bytes at `start`, and where it ends."""
    end = start + length
    _check_length(body, end)
    return body[start:end].decode(), end


def _checked(numbers: Sequence[float]) -> Sequence[float]:
    for number in numbers:
        if not 0.0 <= number < math.inf:
            raise ValueError(f"{number} is neither a duration nor an amount")
    return numbers


def _check_length(body: bytes, end: int) -> None:
    if end > len(body):
        raise ValueError(f"cut off: {end - len(body)} bytes are missing")


def _id_parts(entry_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = entry_id.partition("-")
    return int(milliseconds), int(sequence or 0)
