"""Compressed bodies: decoding, refusals, and limits on the cost of decoding."""

import asyncio
import functools
import gzip
import time
import zlib
from collections.abc import Callable, Iterator

import brotli
import pytest
import zstandard
from background import until
from hypothesis import given
from hypothesis import strategies as st
from tables import cases

from picker_fleet.domain.budgets import BodyBudget
from picker_fleet.domain.errors import BufferFull, PayloadTooLarge, UnsupportedEncoding
from picker_fleet.ingress import bodies
from picker_fleet.ingress.bodies import decode
from picker_fleet.ingress.context import BodyBuffer

LIMIT_BYTES = 4 * 1024 * 1024


def raw_deflate(text: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(text) + packer.flush()


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": functools.partial(gzip.compress, compresslevel=1),
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "Deflate": raw_deflate,
    "br": functools.partial(brotli.compress, quality=1),
    "zstd": zstandard.ZstdCompressor().compress,
    "identity": bytes,
}


async def decoded(text: bytes, encodings: str, budget: BodyBudget | None = None) -> bytes:
    """Decode `text`; assert that the budget counts the body exactly until the body is released."""
    budget = budget or BodyBudget(2 * LIMIT_BYTES)
    held_bytes = budget.held_bytes
    try:
        body, counted = await decode(
            text, encodings.encode(), lambda: BodyBuffer(budget, LIMIT_BYTES), asyncio.Lock()
        )
        assert budget.held_bytes - held_bytes == (len(body) if encodings.strip(" ,") != "identity" else 0)
        counted.release()
        return body
    finally:
        assert budget.held_bytes == held_bytes


@given(st.binary(max_size=5000), st.sampled_from(sorted(PACK)), st.integers(1, 300))
async def test_a_body_of_each_known_content_encoding_is_decoded(text: bytes, name: str, times: int) -> None:
    assert await decoded(PACK[name](text * times), name) == text * times


async def test_two_encodings_are_decoded_in_turn_and_three_are_refused() -> None:
    text = b'{"model": "m"}'
    assert await decoded(brotli.compress(gzip.compress(text)), "GZIP , identity,br") == text
    with pytest.raises(UnsupportedEncoding, match="more than 2"):
        await decoded(text, "gzip, br, zstd")


async def test_concatenated_gzip_members_are_decoded_as_one_body() -> None:
    parts = [b"a" * 70_000, b"", b"b"]
    for name in ("gzip", "zstd"):
        assert await decoded(b"".join(map(PACK[name], parts)), name) == b"".join(parts)
        with pytest.raises(UnsupportedEncoding, match="more than 64"):
            await decoded(PACK[name](b"") * 65, name)


FAULTS = {
    **{f"cut {name}": (name, lambda pack: pack(b"abc" * 100)[:-1], name) for name in ("gzip", "br", "zstd")},
    **{f"{name} of other bytes": (name, lambda _: b"{no}", name) for name in ("gzip", "deflate", "zstd")},
    "bytes after the end": ("br", lambda pack: pack(b"abc") + b"x", "br"),
    "an unknown encoding": ("compress", lambda _: b"abc", "'compress' is not supported; gzip"),
    "a dictionary": ("deflate", lambda _: b"\x78\xbb\0\0\0\1", "deflate"),
}


@cases("name, text, says", FAULTS)
async def test_a_body_that_cannot_be_decoded_is_refused_with_its_fault(
    name: str, text: Callable[[Callable[[bytes], bytes]], bytes], says: str
) -> None:
    with pytest.raises(UnsupportedEncoding, match=says):
        await decoded(text(PACK.get(name, bytes)), name)


BOMB = bytes(200_000_000)


@pytest.mark.parametrize("name", ["gzip", "br", "zstd", "zstd, zstd"])
async def test_a_decompression_bomb_is_refused_early_and_does_not_block_the_loop(name: str) -> None:
    text = BOMB
    for each in name.split(", "):
        text = PACK[each](text)
    longest_s, running = 0.0, True

    async def watch() -> None:
        nonlocal longest_s
        while running:
            before_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - before_s)

    watching = asyncio.create_task(watch())
    began_s = time.thread_time()
    with pytest.raises(PayloadTooLarge):
        await decoded(text, name)
    running = False
    await watching
    assert longest_s < 0.05
    assert time.thread_time() - began_s < 0.5


async def test_other_tasks_run_while_a_body_is_decoded_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(text: bytes) -> Iterator[bytes]:
        for _ in range(20):  # as with a deflate block that has only its code tables
            time.sleep(0.002)
            yield b""

    async def watch() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turns = 0
    monkeypatch.setitem(bodies._DECODERS, "gzip", slow)
    watching = asyncio.create_task(watch())
    assert await decoded(b"x", "gzip") == b""
    watching.cancel()
    assert turns >= 20


async def test_the_decoded_bytes_of_a_body_count_in_the_byte_budget() -> None:
    budget = BodyBudget(1_000_000)
    with pytest.raises(BufferFull):
        await decoded(gzip.compress(b"x" * 2_000_000), "gzip", budget)


async def test_decoding_of_a_body_stops_when_its_client_leaves() -> None:
    budget = BodyBudget(2 * LIMIT_BYTES)
    work = asyncio.create_task(decoded(gzip.compress(b"x" * LIMIT_BYTES), "gzip", budget))
    await until(lambda: budget.held_bytes)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert budget.held_bytes == 0
