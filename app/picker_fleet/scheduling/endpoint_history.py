"""Records the prompt prefixes and completion times that each endpoint has served. The module bounds its
memory and does no I/O.

Every replica fills these indexes from one stream of routes and completions (`route_stream`), so that all
replicas have the same data without asking each other. The chooser reads these indexes for the scorers
`prefix-affinity` and `latency`.

A prompt is a chain of block hashes, equal for equal prefixes on every replica: h_0 = xxh64(model and cache
salt), h_i = xxh64(block_i, h_(i-1)). So h_i stands for the whole prompt up to and including block i
(docs/protocol.md). Only whole blocks count, and only the first `MAX_PROMPT_BYTES` of a prompt are read, which
bounds the cost of a request. The JSON text of the prompt is hashed as the client wrote it, without decoding
it, since it may have megabytes; the same text written differently (spaces, escapes) has different hashes.
"""

import math
import re
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Final, NamedTuple

import msgspec
from xxhash import xxh64_digest

from picker_fleet.scheduling.engine_cache import EngineCache, Evidence, Expectation
from picker_fleet.scheduling.scorers import LatencyStats

BLOCK_BYTES: Final = 256  # about 64 tokens
MAX_PROMPT_BYTES: Final = 100 * 1024
HASH_BYTES: Final = 8
BLOCKS_PER_ENDPOINT: Final = 31_250
MAX_BLOCKS: Final = 500_000
# Measured with CPython 3.11: an entry takes 190 to 241 bytes, depending on how full the hash tables are.
BYTES_PER_BLOCK: Final = 250
HOLDER_BYTES_PER_BLOCK: Final = 150  # additional bytes per block if the index keeps holders
_MOST_HOLDERS: Final = 4  # maximum endpoints kept per hash: the last that served it
_WITH_EVICTED = 1.5  # hashes kept per endpoint, as a multiple of the blocks that its engine keeps
_BYTES_PER_TOKEN = 4.0  # JSON bytes a token, until answers show a moving mean
_NEW_SHARE = 0.05
_FOLLOWED_S = 5.0  # for how long after the last sign an engine's KV events count as read
LATENCY_WINDOW: Final = 100  # completions kept per endpoint (spec 004)

# Members of the body that chat templates put before the first message, such as Anthropic's system prompt.
_BEFORE_MESSAGES = ("tools", "functions", "instructions", "system", "systemInstruction")
_PROMPT_FIELDS = ("messages", "prompt", "input", "contents", "inputs")
PROMPT_MEMBERS: Final = (*_BEFORE_MESSAGES, *_PROMPT_FIELDS)
# Anthropic's mark of the end of a cached prefix, which moves in each turn of a chat. Only a message content
# that is a list of blocks can carry the mark, so a list of one text block is hashed like the plain text.
_MARK = b'"cache_control"'
_MARKS = re.compile(
    rb',\s*+"cache_control"\s*+:\s*+(?:\{[^{}]*+\}|null)|"cache_control"\s*+:\s*+(?:\{[^{}]*+\}|null)\s*+,?+'
)
_ONE_TEXT = re.compile(
    rb'\[\s*+\{\s*+"type"\s*+:\s*+"text"\s*+,\s*+"text"\s*+:\s*+("[^"\\]*+(?:\\.[^"\\]*+)*+")\s*+\}\s*+\]',
    re.DOTALL,
)
_CLOSING = b']}"'
_EMPTY = (b"", b"[]", b"{}", b'""', b"null", b"false")


def prompt_bytes(members: Mapping[str, msgspec.Raw | memoryview]) -> bytes:
    """The first `MAX_PROMPT_BYTES` of the prompt in a request body whose `members` are given (key -> JSON
    text); b'' if the body has no prompt.

    If one prompt continues another (a chat with one more message, a text with more text), the bytes of the
    longer begin with the bytes of the shorter.
    """
    parts: list[bytes] = []
    room = MAX_PROMPT_BYTES
    for name in _BEFORE_MESSAGES:
        if name in members and room > 0 and (text := _text(members, name)):
            parts.append(_unmarked(bytes(text[:room])) + b"\x1e")
            room -= len(parts[-1])
    for name in _PROMPT_FIELDS:
        if text := _text(members, name):
            open_ended = text[:-1] if text[-1] in _CLOSING else text  # a longer prompt continues here
            parts.append(_unmarked(bytes(open_ended[: max(room, 0)])))
            break
    return b"".join(parts)[:MAX_PROMPT_BYTES]


def _unmarked(text: bytes) -> bytes:
    """The JSON `text` without the marks `cache_control`."""
    return _ONE_TEXT.sub(rb"\1", _MARKS.sub(b"", text)) if _MARK in text else text


def _text(members: Mapping[str, msgspec.Raw | memoryview], name: str) -> memoryview | None:
    """The JSON text of the member `name`; None if it is missing or empty."""
    member = members.get(name)
    if member is None or (len(member) <= len(b"false") and bytes(member) in _EMPTY):
        return None
    return memoryview(member)


def block_hashes(
    model: str, prompt: bytes, *, block_bytes: int = BLOCK_BYTES, salt: bytes = b""
) -> tuple[bytes, ...]:
    """A hash of eight bytes for each whole block of `prompt`, first to last.

    `model` is the target model; `salt` is the request's `cache_salt`, which separates tenants that must not
    share a cache.
    """
    link = xxh64_digest(b"%s\x1f%s" % (model.encode(errors="surrogatepass"), salt))
    hashes: list[bytes] = []
    for start in range(0, len(prompt) - block_bytes + 1, block_bytes):
        link = xxh64_digest(prompt[start : start + block_bytes] + link)
        hashes.append(link)
    return tuple(hashes)


class Predicted(NamedTuple):
    """Of `asked` blocks sent to an endpoint, `hits` blocks were predicted to be cached, given a `capacity` in
    blocks. `tells`: the endpoint's answers report cached tokens."""

    asked: int
    hits: int
    capacity: float
    tells: bool


_NOTHING = Predicted(0, 0, 0.0, False)


class PrefixIndex:
    """The prompt prefixes that each endpoint has served, as block hashes. One event loop; no I/O.

    An endpoint's `EngineCache` predicts which of its blocks the engine still has; the other methods use only
    the blocks predicted to be kept. Until pages or answers show another number, an engine has `per_endpoint`
    blocks. The index keeps at most `in_total` hashes in all, in equal shares: 500 000 hashes take at most 125
    MB (`BYTES_PER_BLOCK` each), and up to 10 endpoints have their full 31 250 hashes and half as many evicted
    ones.

    The least recently served hashes are dropped first, and later blocks of a chain before earlier ones. So if
    a hash is in the index, so are all hashes before it in its chain; `match` searches by halves.

    For pools too large for a pick to look at each endpoint, the index also keeps the holders of each hash
    (`name_holders`): the last few endpoints that served it and still have it in the index.
    """

    def __init__(
        self,
        *,
        per_endpoint: int = BLOCKS_PER_ENDPOINT,
        in_total: int = MAX_BLOCKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_endpoint, self._in_total, self._clock = per_endpoint, in_total, clock
        self._caches: dict[str, EngineCache] = {}
        self._kv_tokens: dict[str, float] = {}  # address -> KV cache in tokens, by the metrics page
        self._bytes_per_token = _BYTES_PER_TOKEN
        self._followed: dict[str, tuple[int, float]] = {}  # address -> tokens of a block, valid until
        self._holders: dict[bytes, tuple[str, ...]] | None = None

    def __len__(self) -> int:
        return sum(map(len, self._caches.values()))

    @property
    def addresses(self) -> Collection[str]:
        return self._caches.keys()

    def capacity(self, address: str) -> int:
        """The number of blocks that the engine at `address` is believed to keep."""
        cache = self._caches.get(address)
        return round(min(self._told(address) if cache is None else cache.capacity, self._share))

    def report_size(self, address: str, kv_tokens: float) -> None:
        """Record that the engine's page reports a KV cache of `kv_tokens` tokens."""
        if self._kv_tokens.get(address) != kv_tokens:
            self._kv_tokens[address] = kv_tokens
            if address in self._caches:
                self._caches[address].report_size(self._told(address))

    def add(self, address: str, hashes: Sequence[bytes]) -> None:
        """Record that `address` was sent a prompt with these block `hashes` (a chain, first block first)."""
        if not hashes:
            return
        cache = self._caches.get(address)
        if cache is None:
            cache = self._caches[address] = EngineCache(self._told(address))
            for other, others in self._caches.items():
                self._let_go(other, others.fit(self._most(others)))
        links = hashes[: self._share]
        cache.follows = self.followed(address) > 0
        gone = cache.add(links, self._most(cache), self._clock())
        if self._holders is not None:
            self._hold(self._holders, address, links)
        self._let_go(address, gone)

    def match(self, hashes: Sequence[bytes], among: Iterable[str] | None = None) -> dict[str, int]:
        """Endpoint -> how many of `hashes`, counted from the first, it has served and still has. Leaves out
        endpoints that have none or are not in `among` (if given).

        Takes one lookup per endpoint, and log2(len(hashes)) more per endpoint that has the first block.
        """
        if not hashes:
            return {}
        first = hashes[0]
        if among is None:
            pairs: Iterable[tuple[str, EngineCache]] = self._caches.items()
        else:
            pairs = [(address, cache) for address in among if (cache := self._caches.get(address))]
        return {address: _matched(hashes, cache.cached) for address, cache in pairs if first in cache.cached}

    def expect(self, address: str, hashes: Sequence[bytes]) -> Expectation | None:
        """The ranks of the blocks `hashes` on `address` now; None if it has no such block."""
        cache = self._caches.get(address)
        expected = cache.expect(hashes, self._clock()) if cache is not None else None
        return expected if expected is not None and expected.steps else None

    def teaches(self, address: str, evidence: Evidence, life: int | None = None) -> bool:
        """Whether `learn` would change anything; False if the cache was cleared since its clearing `life`."""
        cache = self._caches.get(address)
        return (
            cache is not None and life in (None, cache.life) and not cache.follows and cache.teaches(evidence)
        )

    def learn(self, address: str, evidence: Evidence, bytes_per_token: float) -> None:
        """Correct the capacity of the engine at `address` by an answer's evidence; its prompt had
        `bytes_per_token` (0: unknown)."""
        if bytes_per_token:
            self._bytes_per_token += _NEW_SHARE * (bytes_per_token - self._bytes_per_token)
        if (cache := self._caches.get(address)) is not None and not cache.follows:
            cache.report_size(self._told(address))
            self._let_go(address, cache.learn(evidence, self._share, of_answer=bytes_per_token > 0))

    def clear(self, address: str) -> None:
        """Forget the blocks of `address`: its engine has lost its cache."""
        if (cache := self._caches.get(address)) is not None:
            self._let_go(address, cache.clear())

    def follow(self, address: str, block_tokens: int) -> None:
        """Record that a replica reads the KV events of the engine at `address`, whose blocks have
        `block_tokens` tokens; 0: no replica does, so the capacity alone predicts evictions."""
        self._followed[address] = block_tokens, self._clock() + _FOLLOWED_S

    def followed(self, address: str) -> int:
        """Tokens per block of the engine at `address`; 0 if no replica reads its KV events."""
        block_tokens, until_s = self._followed.get(address, (0, 0.0))
        return block_tokens if block_tokens and self._clock() < until_s else 0

    def restore(self, address: str, hashes: Sequence[bytes]) -> None:
        """Record that the engine has stored the blocks `hashes`, by its KV events."""
        if (cache := self._caches.get(address)) is not None:
            gone = cache.restore(hashes, self._most(cache), self._clock())
            if self._holders is not None:
                self._hold(self._holders, address, hashes)
            self._let_go(address, gone)

    def remove(self, address: str, hashes: Sequence[bytes]) -> None:
        """Record that the engine has removed the blocks `hashes`, by its KV events."""
        if (cache := self._caches.get(address)) is not None:
            self._let_go(address, cache.remove(hashes))

    def predicted(self, address: str) -> Predicted:
        """The blocks of all prompts sent to `address` so far, and the predictions for them."""
        cache = self._caches.get(address)
        return _NOTHING if cache is None else Predicted(cache.asked, cache.hits, cache.capacity, cache.tells)

    def name_holders(self) -> None:
        """From now on, keep the holders of each hash. The first call reads the whole index."""
        if self._holders is None:
            self._holders = {}
            for address, cache in self._caches.items():
                self._hold(self._holders, address, chain(cache.evicted, cache.cached))

    def holders(self, hashes: Sequence[bytes], most: int) -> list[str]:
        """At most `most` endpoints: first the endpoints that have served the longest prefix of `hashes`, then
        some that have served less. Returns [] if the index keeps no holders.

        Finding the longest prefix takes about log2(len(hashes)) lookups; shorter prefixes take as many.
        """
        known = self._holders
        if not known or not hashes or hashes[0] not in known:
            return []
        at, step = _matched(hashes, known) - 1, 1
        found: dict[str, None] = {}
        while len(found) < most:
            for address in known.get(hashes[at], ()):
                found[address] = None
            if at == 0:
                break
            at, step = max(at - step, 0), 2 * step
        return list(found)[:most]

    def retain(self, addresses: AbstractSet[str]) -> None:
        if self._caches.keys() <= addresses:
            return
        for gone in self._caches.keys() - addresses:
            self._let_go(gone, self._caches.pop(gone).clear())
        self._kv_tokens = {each: told for each, told in self._kv_tokens.items() if each in addresses}
        self._followed = {each: until for each, until in self._followed.items() if each in addresses}

    @property
    def _share(self) -> int:
        """The most hashes kept per endpoint, given the current number of endpoints."""
        return self._in_total // max(1, len(self._caches))

    def _most(self, cache: EngineCache) -> int:
        """The most hashes kept of `cache`, evicted ones included."""
        return min(round(_WITH_EVICTED * cache.capacity) + 1, self._share)

    def _told(self, address: str) -> float:
        """The initial capacity in blocks, before answers correct it."""
        tokens = self._kv_tokens.get(address)
        if tokens is None:
            return float(self._per_endpoint)
        return max(tokens * self._bytes_per_token / BLOCK_BYTES, 1)

    @staticmethod
    def _hold(known: dict[bytes, tuple[str, ...]], address: str, links: Iterable[bytes]) -> None:
        alone = (address,)  # one tuple for all hashes whose only holder is this endpoint
        for link in links:
            holders = known.get(link)
            if holders is None:
                known[link] = alone
            elif address not in holders:
                known[link] = (address, *holders[: _MOST_HOLDERS - 1])

    def _let_go(self, address: str, links: Iterable[bytes]) -> None:
        if self._holders is None:
            return
        for link in links:
            if address not in (holders := self._holders.get(link, ())):
                continue
            if len(holders) == 1:
                del self._holders[link]
            else:
                self._holders[link] = tuple(other for other in holders if other != address)


def _matched(hashes: Sequence[bytes], served: Container[bytes]) -> int:
    """How many of `hashes`, counted from the first, are in `served`, which must have the first."""
    low, high = 1, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if hashes[middle] in served:
            low = middle + 1
        else:
            high = middle
    return low


class LatencyTracker:
    """Completion times from the whole fleet, the last `LATENCY_WINDOW` of each endpoint (spec 004). One event
    loop; no I/O.

    Keeps at most `max_endpoints` endpoints; first drops the endpoint whose last completion is the oldest.
    """

    def __init__(self, *, max_endpoints: int = 4096) -> None:
        self._max_endpoints = max_endpoints
        self._windows: dict[str, deque[float]] = {}
        self._stats: dict[str, LatencyStats] = {}  # statistics are cached, since picks read many

    def add(self, address: str, seconds: float) -> None:
        """Add one completion time; ignore it if it is negative, infinite or not a number."""
        if not 0.0 <= seconds < math.inf:
            return
        window = self._windows.pop(address, None)
        if window is None:
            window = deque(maxlen=LATENCY_WINDOW)
            if len(self._windows) >= self._max_endpoints:
                oldest = next(iter(self._windows))
                del self._windows[oldest]
                self._stats.pop(oldest, None)
        self._windows[address] = window
        window.append(seconds)
        self._stats.pop(address, None)

    def stats(self, address: str) -> LatencyStats | None:
        """Statistics of the endpoint's completions; None without completions."""
        stats, window = self._stats.get(address), self._windows.get(address)
        if stats is None and window is not None:
            count = len(window)
            mean_s = math.fsum(window) / count
            std_s = math.dist(window, [mean_s] * count) / math.sqrt(count)
            stats = self._stats[address] = LatencyStats(count, mean_s, std_s)
        return stats

    def retain(self, addresses: Collection[str]) -> None:
        for gone in self._windows.keys() - set(addresses):
            del self._windows[gone]
            self._stats.pop(gone, None)
