"""What one process has for all pools: the pools, memory for request bodies, and open files."""

import asyncio
import contextlib
import logging
import math
import resource
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final, Generic, TypeVar

from picker_fleet.domain.errors import BufferFull, PayloadTooLarge

SMALL_BYTES = 64 * 1024  # a body up to this size may use the whole budget
_FLOOR_BYTES_S = 512 * 1024  # an unfinished body that arrives at this rate is not dropped
_PAUSE_S = 1.0  # a body that arrived faster may pause for this time and is not dropped
_MIN_DROPPED_BYTES = 16 * 1024
_RESERVED_PART = 32  # 1/32 of the budget is for small bodies only, which slow large uploads must not block

# A proxy names a request's pool in this gRPC metadata key, or in this header of an HTTP check. Only the
# proxy's configuration can set this key or header (docs/protocol.md).
POOL_HEADER: Final = "x-picker-pool"
_TOLD_POOLS = 100  # log at most this many unknown pool names

_log = logging.getLogger(__name__)
_Each = TypeVar("_Each")
_Other = TypeVar("_Other")


def allow_many_files() -> None:
    """Raise this process's limit of open files to the hard limit: container runtimes begin with 1024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_connections(most: int) -> int:
    """How many connections a port takes: `most`, but at most a quarter of the files that this process may
    open. Without this limit connections to one port would leave no files for other ports and for Redis."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if files == resource.RLIM_INFINITY else min(most, files // 4)


class ByPool(Generic[_Each]):
    """Maps pool names to the objects in `each`: '' to pool `default`, unknown names to `unknown`."""

    def __init__(self, each: Mapping[str, _Each], default: str, unknown: _Each) -> None:
        self._each = {**{name.encode(): thing for name, thing in each.items()}, b"": each[default]}
        self._unknown = unknown
        self._told: set[bytes] = set()

    def of(self, name: bytes) -> _Each:
        """The object of the pool `name`; logs unknown names."""
        found = self._each.get(name)
        if found is not None:
            return found
        if name not in self._told and len(self._told) < _TOLD_POOLS:
            self._told.add(name)
            _log.warning("a proxy names a pool that is not served here", extra={"named": repr(name[:64])})
        return self._unknown

    def where(self, default: str) -> "ByPool[_Each]":
        """A copy with pool `default` for requests that name no pool; '' keeps the current default pool."""
        each = {name.decode(): thing for name, thing in self._each.items()}
        return ByPool(each, default, self._unknown)

    def each(self, of: "Callable[[_Each], _Other]") -> "ByPool[_Other]":
        """A copy that maps each pool name to `of(object)` instead of the object."""
        made = {name.decode(): of(thing) for name, thing in self._each.items()}
        return ByPool(made, "", of(self._unknown))

    @property
    def all(self) -> tuple[_Each, ...]:
        """All distinct objects, the default pool's first, `unknown` included."""
        things = (self._each[b""], *self._each.values(), self._unknown)
        return tuple({id(thing): thing for thing in things}.values())


class BodyBudget:
    """Limits the bytes of request bodies that this replica holds to `limit_bytes`.

    A body counts from its first byte until its request is answered, including the wait in the queue. A body
    that finds no room drops unfinished bodies that arrive too slowly. `clock` is in seconds.
    """

    def __init__(self, limit_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.decoding = asyncio.Lock()  # lets one request body be decoded at a time
        self._limit_bytes = limit_bytes
        self._for_large_bytes = limit_bytes - limit_bytes // _RESERVED_PART
        self.held_bytes = 0
        self._clock = clock
        self.unfinished: dict[BodyBuffer, float] = {}  # body -> time until which it counts as fast enough
        self._none_until_s = 0.0  # until this time all unfinished bodies count as arriving fast enough

    def arrives(self, body: "BodyBuffer", size_bytes: int) -> None:
        """Record that `size_bytes` of the unfinished `body` have arrived."""
        until_s = self.unfinished.get(body, math.inf) + size_bytes / _FLOOR_BYTES_S
        self.unfinished[body] = min(until_s, self._clock() + _PAUSE_S)

    def take(self, size_bytes: int, body_bytes: int) -> None:
        """Charge the next `size_bytes` of a body, which then has `body_bytes` in all.

        Raises:
            BufferFull: the budget is used up; nothing is charged for the chunk.
        """
        while not self._has_room(size_bytes, body_bytes):
            self._drop_slowest()
        self.held_bytes += size_bytes

    def _has_room(self, size_bytes: int, body_bytes: int) -> bool:
        limit_bytes = self._limit_bytes if body_bytes <= SMALL_BYTES else self._for_large_bytes
        return self.held_bytes + size_bytes <= limit_bytes

    def _drop_slowest(self) -> None:
        """Drop the unfinished body with the largest bytes * seconds late; BufferFull if no body is late."""
        now_s = self._clock()
        if now_s > self._none_until_s:
            late = {body: (now_s - until_s) * body.size_bytes for body, until_s in self.unfinished.items()}
            slowest = max(late, key=late.__getitem__, default=None)
            if slowest is not None and late[slowest] > 0:
                slowest.drop()
                return
            self._none_until_s = min(self.unfinished.values(), default=0.0)
        raise BufferFull(f"this replica's {self._limit_bytes} bytes for request bodies are used up")

    def give_back(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes


class BodyBuffer:
    """The chunks of one request's body, charged to `budget`; a body may have at most `limit_bytes`.

    `content_length` is the value of the header content-length, -1 without a valid header.
    """

    __slots__ = (
        *("_budget", "_chunks", "_counted_bytes", "_is_dropped", "_limit_bytes"),
        *("content_length", "size_bytes"),
    )

    def __init__(self, budget: BodyBudget, limit_bytes: int) -> None:
        self._budget = budget
        self._limit_bytes = limit_bytes
        self._chunks: list[bytes] = []
        self._counted_bytes = 0
        self._is_dropped = False
        self.size_bytes = 0
        self.content_length = -1

    def expect(self, length: bytes) -> None:
        """Record the content-length header and check its value.

        Raises:
            PayloadTooLarge: the content-length is above the limit.
        """
        self.announce(length)
        if self.content_length > self._limit_bytes:
            raise self._too_large()

    def announce(self, length: bytes) -> None:
        """Record the content-length header unchecked: an earlier filter may have changed the body."""
        if length.isdigit():
            self.content_length = int(length[:20])

    def keep(self, body: bytes) -> None:
        """Put back the body that `join` returned; its bytes are still charged."""
        self._chunks = [body]

    def add(self, chunk: bytes) -> None:
        """Keep one more chunk.

        Raises:
            PayloadTooLarge: the body is larger than the limit.
            BufferFull: the replica's budget is used up, or the body was dropped.
        """
        if self._is_dropped:
            raise self._too_slow()
        size_bytes = len(chunk)
        self.size_bytes += size_bytes
        if self.size_bytes > self._limit_bytes:
            raise self._too_large()
        if self.size_bytes > _MIN_DROPPED_BYTES:
            self._budget.arrives(self, size_bytes)
        self._budget.take(size_bytes, self.size_bytes)
        self._counted_bytes += size_bytes
        self._chunks.append(chunk)

    def join(self) -> bytes:
        """Return the whole body and keep no copy; the body's bytes stay charged until `release`.

        Raises:
            BufferFull: the body was dropped.
        """
        if self._is_dropped:
            raise self._too_slow()
        self._budget.unfinished.pop(self, None)
        chunks, self._chunks = self._chunks, []
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def release(self) -> None:
        """Drop the body and return its bytes to the budget; a second call has no effect."""
        self._budget.unfinished.pop(self, None)
        if self._counted_bytes:
            self._budget.give_back(self._counted_bytes)
            self._counted_bytes = 0
            self._chunks = []

    def drop(self) -> None:
        """Release an unfinished body: its next chunk, or its end, raises BufferFull."""
        self.release()
        self._is_dropped = True

    def reset(self) -> None:
        """Drop the body and begin another."""
        self.release()
        self.size_bytes, self.content_length, self._is_dropped = 0, -1, False

    def _too_slow(self) -> BufferFull:
        return BufferFull("the body came too slowly while this replica's bytes for bodies were used up")

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the body is larger than {self._limit_bytes} bytes")


class _PoolBudget(BodyBudget):
    """The budget of one of several pools. The pool has `own_bytes` to itself, and borrows further bytes from
    `shared_bytes`, as all budgets in `pools` do.
    """

    def __init__(self, own_bytes: int, shared_bytes: int, pools: "list[_PoolBudget]") -> None:
        super().__init__(own_bytes + shared_bytes)
        self._own_bytes, self._shared_bytes, self._pools = own_bytes, shared_bytes, pools

    def _has_room(self, size_bytes: int, body_bytes: int) -> bool:
        others = sum(each.borrowed_bytes for each in self._pools if each is not self)
        reserve = self._shared_bytes // _RESERVED_PART if body_bytes > SMALL_BYTES else 0
        beyond_bytes = self.held_bytes + size_bytes - self._own_bytes
        return beyond_bytes <= max(self._shared_bytes - reserve - others, 0)

    @property
    def borrowed_bytes(self) -> int:
        """Bytes that this pool holds beyond its reserved bytes."""
        return max(self.held_bytes - self._own_bytes, 0)


def body_budgets(limit_bytes: int, pools: Collection[str]) -> Mapping[str, BodyBudget]:
    """A body budget for each of `pools`. Each of several pools gets an equal part of half of `limit_bytes`;
    all borrow from the second half, so no pool can stop another.
    """
    if len(pools) == 1:
        return {name: BodyBudget(limit_bytes) for name in pools}
    own_bytes = limit_bytes // (2 * len(pools))
    budgets: list[_PoolBudget] = []
    for _ in pools:
        budgets.append(_PoolBudget(own_bytes, limit_bytes - own_bytes * len(pools), budgets))
    return dict(zip(pools, budgets, strict=True))
