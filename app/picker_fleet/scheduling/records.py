"""What replicas tell each other of their routing, and its packed form in the stream.

An entry's body is a run of records. Numbers are big-endian. A route: `R`, length of the address (2 bytes),
number of hashes (2), address, hashes (8 each). A completion: `C`, length of the address (2), seconds (double,
8), address.
"""

import math
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from picker_fleet.scheduling.blocks import HASH_BYTES

_ROUTE = struct.Struct(">cHH")
_DONE = struct.Struct(">cHd")
_MOST_HASHES = 0xFFFF


@dataclass(frozen=True, slots=True)
class Routed:
    """`address` (`ip:port`) was given a prompt of these block hashes, first block first."""

    address: str
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """`address` completed a request after `seconds`."""

    address: str
    seconds: float


Record = Routed | Done


def pack(record: Record) -> bytes:
    """`record` for the stream; hashes beyond 65 535 are left out."""
    address = record.address.encode()
    if isinstance(record, Done):
        return _DONE.pack(b"C", len(address), record.seconds) + address
    hashes = record.hashes[:_MOST_HASHES]
    return _ROUTE.pack(b"R", len(address), len(hashes)) + address + b"".join(hashes)


def bodies(packed: Iterable[bytes], most_bytes: int) -> Iterator[bytes]:
    """Join packed records, in order, into entries of at most `most_bytes`; a longer record stands alone."""
    body: list[bytes] = []
    length = 0
    for one in packed:
        if body and length + len(one) > most_bytes:
            yield b"".join(body)
            body, length = [], 0
        body.append(one)
        length += len(one)
    if body:
        yield b"".join(body)


def unpack(body: bytes) -> list[Record]:
    """The records of one entry.

    Raises:
        ValueError: it is cut off, or no such thing.
    """
    found: list[Record] = []
    at = 0
    try:
        while at < len(body):
            kind = body[at : at + 1]
            if kind == b"R":
                _, length, count = _ROUTE.unpack_from(body, at)
                start = at + _ROUTE.size + length
                at = start + count * HASH_BYTES
                _within(body, at)
                address = body[start - length : start].decode()
                hashes = tuple(body[i : i + HASH_BYTES] for i in range(start, at, HASH_BYTES))
                found.append(Routed(address, hashes))
            elif kind == b"C":
                _, length, seconds = _DONE.unpack_from(body, at)
                start = at + _DONE.size
                at = start + length
                _within(body, at)
                if not 0.0 <= seconds < math.inf:
                    raise ValueError(f"{seconds} s is no time")
                found.append(Done(body[start:at].decode(), seconds))
            else:
                raise ValueError(f"no record begins with {kind!r}")
    except struct.error as fault:
        raise ValueError(f"cut off: {fault}") from None
    return found


def _within(body: bytes, end: int) -> None:
    if end > len(body):
        raise ValueError(f"cut off: {end - len(body)} bytes are missing")
