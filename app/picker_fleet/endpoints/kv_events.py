"""Reads engines' KV events, which say which blocks of tokens an engine stores in its prefix cache or removes.

vLLM (`--kv-events-config`, vllm/distributed/kv_events.py) and SGLang publish the events on a ZeroMQ PUB
socket. A message has the topic, a sequence number of 8 bytes and a batch in MessagePack: time, events, rank.
An event is a map with the key `type` or, in older versions, an array that begins with the type. The replay
socket, a ROUTER, sends past batches again from a sequence number on.

Engines name blocks by hashes of their own. So that a replica can compute the name of a prompt's block from
token ids, events are translated into *links*: the hash of a block's token ids and of the link before it.
"""

import asyncio
import contextlib
import logging
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Annotated, Any, Final, NamedTuple, Protocol

import msgspec
from xxhash import xxh64_digest

from picker_fleet.background import keep
from picker_fleet.domain.request import KV_EVENTS_PORT, Endpoint
from picker_fleet.domain.units import split_host_port
from picker_fleet.endpoints.zmtp import connected
from picker_fleet.state.primary import raise_if_cancelled

MOST_BLOCKS: Final = 500_000  # maximum blocks of one engine: about 150 MB
_MOST_BLOCK_TOKENS = 4096
_MOST_NAME_BYTES = 64  # maximum bytes of an engine's hash
_PIECE = 256  # blocks or events that are read at once, in about a millisecond
_PAUSES = 19.0  # pause as a multiple of the time to read: a flooding engine gets 5 % of a core
_SKIPPED_S = 0.002  # pause after a batch that is already known
_IDLE_S = 1.0
_REPLAY_S, _REPLAY_SILENCE_S = 60.0, 1.0
_PAUSES_S = (0.5, 5.0)  # shortest and longest pause between two sessions
_SEQUENCE_BYTES = 8
_SUBSCRIBE = b"\x01"  # the message that subscribes to all topics

_log = logging.getLogger(__name__)

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
BlockName = int | Annotated[bytes, msgspec.Meta(max_length=_MOST_NAME_BYTES)]


def token_links(tokens: Sequence[int], block_tokens: int, link: bytes = b"") -> list[bytes]:
    """The links of the whole blocks of `tokens`, first to last; `link` is the previous block's link."""
    width = array("I").itemsize * block_tokens
    text = array("I", tokens).tobytes()
    links = []
    for start in range(0, len(text) - width + 1, width):
        link = xxh64_digest(text[start : start + width] + link)
        links.append(link)
    return links


class _Batch(msgspec.Struct, array_like=True):
    time: Any
    events: list[msgspec.Raw]


class _Stored(msgspec.Struct):
    block_hashes: list[BlockName]
    parent_block_hash: BlockName | None
    token_ids: list[TokenId]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=_MOST_BLOCK_TOKENS)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    cache_salt: str | None = None


class _Removed(msgspec.Struct):
    block_hashes: list[BlockName]
    medium: str | None = None
    group_idx: int | None = None


_EVENTS: Final[dict[str, type[_Stored] | type[_Removed]]] = {"BlockStored": _Stored, "BlockRemoved": _Removed}
_CLEARED: Final = "AllBlocksCleared"
_ALL: Final = b"*"  # stands in place of a link if all blocks are removed


class Changes(NamedTuple):
    """`is_cleared`: the engine has dropped its whole cache. `stored`: a block's link -> whether the engine
    has stored (True) or removed (False) the block."""

    is_cleared: bool
    stored: dict[bytes, bool]


class EngineBlocks:
    """The blocks that one engine has in its prefix cache. Pure.

    Blocks of LoRA adapters, salted prompts and images are left out, since their token ids do not identify
    them; so are blocks outside the accelerator's memory, and blocks whose predecessor is unknown.
    """

    def __init__(self, most: int = MOST_BLOCKS) -> None:
        self.block_tokens = 0  # tokens of a block; 0 until the first block is stored
        self._most = most
        # An engine may store a block several times, and then removes it as often.
        self._known: dict[int | bytes, tuple[bytes, int]] = {}  # the engine's hash -> link, number of copies

    def __len__(self) -> int:
        return len(self._known)

    def read(self, payload: bytes) -> Iterator[Changes]:
        """Apply a batch of events, in pieces of `_PIECE` blocks or events; yield the changes of each piece.

        Raises:
            ValueError: the batch is malformed; none of it, or only its first events, are applied.
        """
        is_cleared, stored = False, dict[bytes, bool]()
        try:
            batch = msgspec.msgpack.decode(payload, type=_Batch)
            steps = chain.from_iterable(map(self._apply, batch.events))
            for number, (link, is_stored) in enumerate(steps, 1):
                if link == _ALL:
                    is_cleared, stored = True, {}
                elif link:
                    stored[link] = is_stored
                if number % _PIECE == 0:
                    yield Changes(is_cleared, stored)
                    is_cleared, stored = False, {}
        except (msgspec.MsgspecError, RecursionError, LookupError, TypeError) as fault:
            raise ValueError(f"no batch of KV events: {fault!r}") from None
        yield Changes(is_cleared, stored)

    def _apply(self, text: msgspec.Raw) -> Iterator[tuple[bytes, bool]]:
        """Apply an event; yield pairs (link, whether its block is stored); ignore the first pair."""
        yield b"", False
        event = msgspec.msgpack.decode(text)
        kind = event["type"] if isinstance(event, dict) else event[0]
        if kind == _CLEARED:
            self._known.clear()
            yield _ALL, False
        if kind not in _EVENTS:
            return  # an unknown event, of a later version of the engine
        shape = _EVENTS[kind]
        fields = (
            event if isinstance(event, dict) else dict(zip(shape.__struct_fields__, event[1:], strict=False))
        )
        found = msgspec.convert(fields, shape)
        if found.medium in (None, "GPU") and not found.group_idx:
            yield from self._store(found) if isinstance(found, _Stored) else self._remove(found)

    def _store(self, event: _Stored) -> Iterator[tuple[bytes, bool]]:
        if event.lora_id is not None or event.lora_name or event.cache_salt or any(event.extra_keys or ()):
            return
        self.block_tokens = size = self.block_tokens or event.block_size
        before = b""
        if event.parent_block_hash is not None:
            before, _ = self._known.get(event.parent_block_hash, (b"", 0))
            if not before:
                return
        if event.block_size != size:
            return  # the tokens are only a part of a block
        names = event.block_hashes
        for at in range(0, len(names), _PIECE):
            links = token_links(event.token_ids[at * size : (at + _PIECE) * size], size, before)
            for name, before in zip(names[at : at + _PIECE], links, strict=False):
                _, copies = self._known.get(name, (before, 0))
                if copies or len(self._known) < self._most:
                    self._known[name] = before, copies + 1
                    yield before, True

    def _remove(self, event: _Removed) -> Iterator[tuple[bytes, bool]]:
        for name in event.block_hashes:
            link, copies = self._known.pop(name, (b"", 0))
            if copies > 1:
                self._known[name] = link, copies - 1
            yield (link, False) if copies == 1 else (b"", False)


class Listener(Protocol):
    """Receives the changes of engines' caches; no method blocks."""

    def changed(self, address: str, block_tokens: int, changes: Changes) -> None:
        """Called when the cache of the engine at `address` has changed, and each second without changes; its
        blocks have `block_tokens` tokens."""

    def lost(self, address: str) -> None:
        """Called if changes may have been missed; later calls of `changed` start from an empty cache."""


class KvEventReader:
    """Reads the events of a set of endpoints, which `set_targets` changes, and passes them to `listener`.
    The endpoint's label `picker-fleet/kv-events-port`, else `port`, is the port of its PUB socket; the replay
    socket, if there is one, has the next port. One event loop.

    A session lasts as long as a connection. A session first reads the past batches that the engine still has,
    and reads missed batches again. If missed batches are gone, or a batch is malformed or out of order, a new
    session begins.
    """

    def __init__(self, port: int, listener: Listener) -> None:
        self._port, self._listener = port, listener
        self._targets: frozenset[tuple[str, int]] = frozenset()
        self._changed = asyncio.Event()

    def set_targets(self, endpoints: Iterable[Endpoint]) -> None:
        """Read the events of exactly these endpoints from now on."""
        self._targets = frozenset((each.address, self._port_of(each)) for each in endpoints)
        self._changed.set()

    def _port_of(self, endpoint: Endpoint) -> int:
        text = endpoint.labels.get(KV_EVENTS_PORT, "")
        is_port = text.isascii() and text.isdecimal() and len(text) <= 5 and 0 < int(text) < 65535
        return int(text) if is_port else self._port

    async def run(self) -> None:
        """Read events until cancelled."""
        tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        try:
            while True:
                self._changed.clear()
                for gone in tasks.keys() - self._targets:
                    tasks.pop(gone).cancel()
                for target in self._targets - tasks.keys():
                    work = keep("kv-events", partial(self._follow, *target))
                    tasks[target] = asyncio.create_task(work, name=f"kv-events-{target[0]}")
                await self._changed.wait()
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _follow(self, address: str, port: int) -> None:
        """Run one session after another; the pause between short sessions doubles. Log why a session ended,
        but no reason twice in a row."""
        pause_s, logged = _PAUSES_S[0], ""
        while True:
            began_s = time.monotonic()
            try:
                await self._session(address, split_host_port(address)[0], port)
            except EOFError:
                pass  # the engine has ended the connection
            except (ValueError, OSError) as fault:
                raise_if_cancelled()
                reason = str(fault) or "too many"
                if reason != logged:
                    _log.warning("KV events of %s cannot be read: %s", address, reason)
                logged = reason
            finally:
                self._listener.lost(address)
            if time.monotonic() - began_s > _PAUSES_S[1]:
                pause_s, logged = _PAUSES_S[0], ""
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSES_S[1])

    async def _session(self, address: str, host: str, port: int) -> None:
        """Pass changes to the listener until the connection ends or batches are missed. Raises ValueError,
        OSError or EOFError."""
        blocks = EngineBlocks()
        async with connected(host, port, b"SUB") as events:
            replay = partial(self._replay, address, blocks, host, port + 1)
            expected, is_complete, last = await replay(0), False, -1
            await events.send(_SUBSCRIBE)
            while True:
                parts = await events.receive(_IDLE_S)
                if parts is None:
                    if expected is not None and not is_complete:  # read events that the subscription missed
                        expected, is_complete = await replay(expected), True
                    self._listener.changed(address, blocks.block_tokens, Changes(False, {}))
                    continue
                sequence, payload = _content(parts)
                if sequence <= last:
                    return  # the engine has restarted behind a proxy that keeps the connection
                last = sequence
                if expected is not None and sequence > expected:
                    expected = await replay(expected)
                if expected is not None and sequence < expected:
                    await asyncio.sleep(_SKIPPED_S)  # the replay already contained this batch
                    continue
                if expected and expected != sequence:
                    return
                expected = sequence + 1
                await self._apply(address, blocks, payload)

    async def _apply(self, address: str, blocks: EngineBlocks, payload: bytes) -> None:
        began_s = time.perf_counter()
        for changes in blocks.read(payload):
            self._listener.changed(address, blocks.block_tokens, changes)
            await asyncio.sleep(_PAUSES * (time.perf_counter() - began_s))
            began_s = time.perf_counter()

    async def _replay(
        self, address: str, blocks: EngineBlocks, host: str, port: int, start: int
    ) -> int | None:
        """Read the past batches that the engine still has, from number `start` on. Returns the number of the
        next batch, None if there is no replay socket. Raises ValueError.

        The engine drops batches that its socket cannot send at once: ask for the dropped batches again.
        """
        expected = start or None
        with contextlib.suppress(ConnectionError):
            async with connected(host, port, b"DEALER") as past, asyncio.timeout(_REPLAY_S):
                asked: int | None = -1
                while asked != expected:
                    asked = expected
                    await past.send(b"", (expected or 0).to_bytes(_SEQUENCE_BYTES))
                    while (parts := await past.receive(_REPLAY_SILENCE_S)) is not None:
                        sequence, payload = _content(parts)
                        if not payload:
                            return expected or 0
                        if expected not in (None, sequence):
                            await asyncio.sleep(_SKIPPED_S)
                            continue
                        expected = sequence + 1
                        await self._apply(address, blocks, payload)
        return expected


def _content(parts: Sequence[bytes]) -> tuple[int, bytes]:
    """The sequence number and payload of a message; a topic may come before. Raises ValueError."""
    if len(parts) < 2 or len(parts[-2]) != _SEQUENCE_BYTES:
        raise ValueError("a message has no sequence number")
    return int.from_bytes(parts[-2]), parts[-1]
