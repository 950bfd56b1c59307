"""Corrects the prefix index by engines' KV events, which say which blocks an engine stores and removes.

The index identifies prompts by hashes of their bytes; the events identify blocks of tokens by links
(`kv_events.token_links`). After a prompt is placed, the placing replica has the engine tokenize it
(`/tokenize` of vLLM), off the request's path, and shares which block of the prompt ends in which block of
tokens. The one replica that reads an engine's events translates them and shares blocks of prompts, through
the stream of routes, so that all replicas correct their index alike.

Within the new part of a prompt, tokens are assumed to be spread evenly over its bytes. Prompts that are not
tokenized (other APIs, a salt, a busy engine) stay in the index until its bound drops them.
"""

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Final, NamedTuple

import msgspec

from picker_fleet.background import keep
from picker_fleet.domain.request import InferenceRequest
from picker_fleet.domain.scraping import Scraping
from picker_fleet.endpoints.kv_events import Changes, TokenId, token_links
from picker_fleet.endpoints.page_fetch import Access, Connection, FetchError
from picker_fleet.scheduling.endpoint_history import BLOCK_BYTES, HASH_BYTES, MAX_PROMPT_BYTES
from picker_fleet.scheduling.route_stream import (
    FollowedRecord,
    LossRecord,
    RemovedRecord,
    RouteStream,
    StoredRecord,
    TokensRecord,
)
from picker_fleet.state.primary import raise_if_cancelled

TOKENIZED: Final = ("/chat/completions", "/completions")  # ends of paths whose bodies /tokenize accepts
_PATH = "/tokenize"
_HEADER = b"Content-Type: application/json\r\n"
_DEADLINE_S = 1.0
_PAUSE_S = 1.0  # pause after an unusable answer before the engine is asked again
_WORKERS, _MOST_WAITING = 2, 32
_MOST_BODY_BYTES = 256 * 1024
# Most bytes of an answer: 8 for each byte of the body, and 64 KiB for a chat template.
_ANSWER_BYTES, _FURTHER_BYTES = 8, 64 * 1024
_PIECE = 256  # maximum blocks hashed at once, in less than a millisecond
_MOST_BLOCKS: Final = 250_000  # tokenized blocks of prompts kept, in each of two tables of about 40 MB
_MOST_OF_A_LINK = 64 * HASH_BYTES
_MOST_OF_A_RECORD = 4000  # most pairs in a record; an engine stores fewer blocks in a step
_SIGN_S = 1.0  # seconds between two records that say that an engine's events are read

_log = logging.getLogger(__name__)


class _Prompt(NamedTuple):
    address: str
    block_tokens: int
    blocks: tuple[bytes, ...]
    size: int
    body: bytes


class _Answer(msgspec.Struct):
    tokens: list[TokenId]


class TokenPrefixes:
    """Has prompts tokenized, and translates the changes of engines' caches for `routes`; the `Listener` of
    the reader of KV events. One event loop; `clock` is in seconds. Call `run` in a task of its own."""

    def __init__(self, routes: RouteStream, scraping: Scraping, clock: Callable[[], float]) -> None:
        self._routes, self._clock = routes, clock
        self._scheme, self._access = scraping.probe_scheme or scraping.scheme, Access(scraping)
        self._waiting: asyncio.Queue[_Prompt] = asyncio.Queue(_MOST_WAITING)
        self._paused: dict[str, float] = {}  # address -> time until which it is not asked
        self._block_tokens = 0  # tokens of each block in `_ends`
        self._ends: OrderedDict[bytes, float] = OrderedDict()  # block of a prompt -> tokens up to its end
        self._by_link: OrderedDict[bytes, bytes] = OrderedDict()  # link -> hashes of prompt blocks
        self._signed_s: dict[str, float] = {}
        routes.on_tokens = self._learn

    # Handlers of the KV events of the endpoints that this replica reads.

    def changed(self, address: str, block_tokens: int, changes: Changes) -> None:
        if changes.is_cleared:
            self._routes.add(LossRecord(address))
        stored = self._blocks(link for link, is_stored in changes.stored.items() if is_stored)
        removed = self._blocks(link for link, is_stored in changes.stored.items() if not is_stored)
        if removed:
            self._routes.add(RemovedRecord(address, removed[:_MOST_OF_A_RECORD]))
        if stored:
            self._routes.add(StoredRecord(address, stored[:_MOST_OF_A_RECORD]))
        now_s = self._clock()
        if block_tokens and address not in self._signed_s:
            _log.info("reading KV events of %s, whose blocks have %d tokens", address, block_tokens)
        if block_tokens and now_s - self._signed_s.get(address, -math.inf) >= _SIGN_S:
            self._signed_s[address] = now_s
            self._routes.add(FollowedRecord(address, block_tokens))

    def lost(self, address: str) -> None:
        if self._signed_s.pop(address, None) is not None:
            _log.info("KV events of %s have ended or were missed", address)
            self._routes.add(FollowedRecord(address, 0))

    def _blocks(self, links: Iterable[bytes]) -> tuple[bytes, ...]:
        """The known blocks of prompts that end in the blocks of tokens `links`."""
        joined = (self._by_link.get(link, b"") for link in links)
        return tuple(each[at : at + HASH_BYTES] for each in joined for at in range(0, len(each), HASH_BYTES))

    def _learn(self, pairs: Sequence[bytes]) -> None:
        """Keep the pairs (link, hash of a prompt's block) of a TokensRecord from the stream."""
        for link, block in zip(pairs[::2], pairs[1::2], strict=False):
            joined = self._by_link.pop(link, b"")
            if block not in (joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)):
                joined = (joined + block)[-_MOST_OF_A_LINK:]
            self._by_link[link] = joined
        while len(self._by_link) > _MOST_BLOCKS:
            self._by_link.popitem(last=False)

    # The methods below have the prompts that this replica places tokenized.

    def placed(
        self, request: InferenceRequest, endpoints: Iterable[str], path: bytes, body: Callable[[], bytes]
    ) -> None:
        """Have the prompt of a request tokenized by the first of `endpoints`, which decode and prefill it,
        whose KV events are read, if the prompt is new and few prompts wait. `body` returns the request's body
        as the engine gets it. Returns at once."""
        able = (each for each in endpoints if self._routes.index.followed(each) and not self._is_paused(each))
        address, blocks = next(able, ""), request.prefix
        block_tokens = self._routes.index.followed(address)
        if block_tokens != self._block_tokens and block_tokens:
            self._block_tokens = block_tokens
            self._ends.clear()
        if not block_tokens or not blocks or blocks[-1] in self._ends or self._waiting.full():
            return
        is_apt = path.partition(b"?")[0].decode("latin-1").endswith(TOKENIZED)
        if not is_apt or request.body_bytes > _MOST_BODY_BYTES:
            return
        size = len(blocks) * BLOCK_BYTES + BLOCK_BYTES // 2
        if size >= MAX_PROMPT_BYTES:
            size = max(request.body_bytes, size)
        self._waiting.put_nowait(_Prompt(address, block_tokens, blocks, size, body()))

    async def run(self) -> None:
        """Have prompts tokenized until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(_WORKERS):
                group.create_task(keep("tokenize", self._work), name=f"tokenize-{number}")

    async def _work(self) -> None:
        connections: dict[str, Connection] = {}
        tls = self._access.context if self._scheme == "https" else None
        try:
            while True:
                prompt = await self._waiting.get()
                for gone in connections.keys() - self._routes.index.addresses:
                    connections.pop(gone).close()
                if self._is_paused(prompt.address):
                    continue
                connection = connections.get(prompt.address)
                if connection is None:
                    connection = connections[prompt.address] = Connection(prompt.address, tls=tls)
                tokens = await self._tokenized(connection, prompt.body)
                if tokens is None:
                    self._paused = {each: s for each, s in self._paused.items() if s > self._clock()}
                    self._paused[prompt.address] = self._clock() + _PAUSE_S
                else:
                    await self._share(prompt, tokens)
        finally:
            for connection in connections.values():
                connection.close()

    def _is_paused(self, address: str) -> bool:
        return self._paused.get(address, -math.inf) > self._clock()

    async def _tokenized(self, connection: Connection, body: bytes) -> list[int] | None:
        """The token ids of the prompt in `body`; None if the engine does not return them."""
        try:
            async with asyncio.timeout(_DEADLINE_S):
                header = _HEADER + self._access.header()
                with await connection.ask(_PATH, header, body) as answer:
                    found, most = bytearray(), _ANSWER_BYTES * len(body) + _FURTHER_BYTES
                    async for part in answer.parts():
                        found += part
                        if len(found) > most:
                            return None
                    if answer.status == 200:
                        return msgspec.json.decode(found, type=_Answer).tokens
        except (FetchError, TimeoutError):
            raise_if_cancelled()
        except (msgspec.MsgspecError, RecursionError):
            pass
        return None

    async def _share(self, prompt: _Prompt, tokens: Sequence[int]) -> None:
        """Share for each new block of the prompt the block of `tokens` in which it ends."""
        blocks, links, step = prompt.blocks, list[bytes](), _PIECE * prompt.block_tokens
        for at in range(0, len(tokens), step):
            before = links[-1] if links else b""
            links += token_links(tokens[at : at + step], prompt.block_tokens, before)
            await asyncio.sleep(0)
        new = next((at for at in range(len(blocks), 0, -1) if blocks[at - 1] in self._ends), 0)
        end = self._ends[blocks[new - 1]] if new else 0.0
        a_block = (len(tokens) - end) / (prompt.size - new * BLOCK_BYTES) * BLOCK_BYTES
        pairs = []
        for block in blocks[new:]:
            end += a_block
            number = math.ceil(end / prompt.block_tokens) - 1
            if not 0 <= number < len(links):
                break
            self._ends[block] = end
            pairs.append((links[number], block))
        while len(self._ends) > _MOST_BLOCKS:
            self._ends.popitem(last=False)
        if pairs:
            self._routes.add(TokensRecord(prompt.address, tuple(chain.from_iterable(pairs))))
