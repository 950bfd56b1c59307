"""Encodes and decodes header blocks (HPACK, RFC 7541), detects malformed requests (RFC 9113, 8.2 and 8.3)."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Generic, TypeVar

import hpack

LIST_BYTES: Final = 16 * 1024  # maximum bytes of one request's decoded headers; each counts 32 bytes more
_CACHED_BLOCKS: Final = 256  # maximum header blocks in the cache; an Envoy sends few different blocks
_CACHED_BYTES: Final = 1024  # maximum bytes of a header block in the cache

_HOP_HEADERS = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")
)
_PSEUDO = frozenset((b":method", b":scheme", b":path", b":authority"))
# Matches three HPACK table resizes at the start of a header block; RFC 7541, 4.2 allows two.
_RESIZES = re.compile(rb"(?:[\x20-\x3e]|\x3f[\x80-\xff]*[\x00-\x7f]){3}")

_Found = TypeVar("_Found")


def literal(name: bytes, value: bytes) -> bytes:
    """Encode a header field literally, without an entry in the HPACK table."""
    field = hpack.NeverIndexedHeaderTuple(name, value)
    return hpack.Encoder().encode([field], huffman=False)


def resizes_table(block: bytes) -> bool:
    """Whether the header block `block` begins with a resize of the HPACK table."""
    return block[:1] != b"" and 0x20 <= block[0] < 0x40


class HeaderReader(Generic[_Found]):
    """Decodes the header blocks of one connection, and caches the result of `find` for each block.

    The headers of an Envoy's requests are the same, so their blocks are identical once the headers are in the
    HPACK table. A cached result is valid until the HPACK table changes.
    """

    def __init__(self, find: Callable[[Mapping[bytes, bytes]], _Found], malformed: _Found) -> None:
        self.known: dict[bytes, _Found] = {}  # cached results, by header block
        self.decoded = 0  # number of header fields of the block that was read last
        self._find, self._malformed = find, malformed
        self._decoder = hpack.Decoder(max_header_list_size=LIST_BYTES)

    def read(self, block: bytes) -> _Found:
        """The result of `find` for a header block that is not cached; `malformed` for a malformed request.

        Raises:
            ValueError: the block cannot be decoded, and the connection's HPACK table is lost.
        """
        if _RESIZES.match(block):
            raise ValueError("a header block resizes the HPACK table too often")
        size, count, newest = self._table()
        try:
            headers = list(self._decoder.decode(block, raw=True))
            self.decoded, fields = len(headers), _fields(headers)
        except Exception as fault:  # the decoder may raise any exception for a damaged header block
            raise ValueError("a header block cannot be decoded") from fault
        found = self._malformed if fields is None else self._find(fields)
        now_size, now_count, now_newest = self._table()
        if size != now_size or count != now_count or newest is not now_newest:
            self.known.clear()
        elif len(self.known) < _CACHED_BLOCKS and len(block) <= _CACHED_BYTES:
            self.known[block] = found
        return found

    def _table(self) -> tuple[int, int, object]:
        """The HPACK table's size in bytes, the number of its entries, and its newest entry."""
        table = self._decoder.header_table
        entries = table.dynamic_entries
        return table.maxsize, len(entries), entries[0] if entries else None


def _fields(headers: Iterable[Any]) -> Mapping[bytes, bytes] | None:
    """The last value of each header field, by name; None if the request is malformed."""
    found: dict[bytes, bytes] = {}
    regular = False
    for name, value in headers:
        name, value = bytes(name), bytes(value)
        if name[:1] == b":":
            if regular or name not in _PSEUDO or name in found:
                return None
        else:
            regular = True
            if not name or name != name.lower() or name in _HOP_HEADERS:
                return None
            if name == b"te" and value != b"trailers":
                return None
        found[name] = value
    length = found.get(b"content-length", b"")
    complete = found.get(b":path") and found.get(b":method") and found.get(b":scheme")
    return found if complete and (not length or length.isdigit()) else None
