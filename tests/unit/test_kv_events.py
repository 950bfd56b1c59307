"""KV events of engines, read from a real ZeroMQ socket, correct the prefix indexes of two replicas through a
real Valkey."""

import asyncio
import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from background import running, until
from hypothesis import given
from hypothesis import strategies as st
from page_server import answered, serving
from redis_servers import redis_server

from picker_fleet.domain.bands import Band
from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.request import KV_EVENTS_PORT, Endpoint, InferenceRequest, Workload
from picker_fleet.domain.scraping import Scraping
from picker_fleet.endpoints.kv_events import Changes, EngineBlocks, KvEventReader, token_links
from picker_fleet.scheduling import token_prefixes
from picker_fleet.scheduling.endpoint_history import BLOCK_BYTES, PrefixIndex, block_hashes
from picker_fleet.scheduling.engine_cache import EngineCache
from picker_fleet.scheduling.route_stream import RouteStream
from picker_fleet.scheduling.token_prefixes import TokenPrefixes
from picker_tools.simulator.engine import PrefixCache

SIZE = 16
A = "10.0.0.1:8000"
NONE = Changes(False, {})


def tokens(blocks: int, name: int = 7) -> list[int]:
    return [name * 1000 + number for number in range(blocks * SIZE)]


def stored(
    names: Sequence[int | bytes], ids: list[int], parent: int | bytes | None = None, **more: Any
) -> dict[str, Any]:
    block = {"block_hashes": list(names), "parent_block_hash": parent, "token_ids": ids, "block_size": SIZE}
    return {"type": "BlockStored"} | block | {"lora_id": None, "medium": "GPU", "lora_name": None} | more


def removed(*names: int | bytes, medium: str = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": medium}


CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


def batch(*events: dict[str, Any], as_arrays: bool = False) -> bytes:
    """A batch in the form of vLLM 0.32 and SGLang 0.5.23 or, with `as_arrays`, of older versions."""
    written: list[Any] = [list(event.values()) for event in events] if as_arrays else list(events)
    return msgspec.msgpack.encode([1.5, written, 0])


@pytest.mark.parametrize("as_arrays", [False, True])
def test_blocks_are_known_by_their_tokens_until_the_engine_removes_them(as_arrays: bool) -> None:
    blocks, links = EngineBlocks(), token_links(tokens(4), SIZE)
    assert len(set(links)) == 4

    [read] = blocks.read(batch(stored([b"a", b"b"], tokens(2)), as_arrays=as_arrays))
    assert read == Changes(False, dict.fromkeys(links[:2], True))
    assert blocks.block_tokens == SIZE
    [read] = blocks.read(batch(stored([3, 4], tokens(4)[2 * SIZE :], b"b"), removed(4), as_arrays=as_arrays))
    assert read == Changes(False, {links[2]: True, links[3]: False})
    [read] = blocks.read(batch(removed(b"a"), CLEARED, stored([5], tokens(1)), as_arrays=as_arrays))
    assert read == Changes(True, {links[0]: True})
    assert len(blocks) == 1


def test_a_block_that_is_stored_twice_is_there_until_it_is_removed_twice() -> None:
    blocks, (link,) = EngineBlocks(), token_links(tokens(1), SIZE)
    for _ in range(2):
        assert [*blocks.read(batch(stored([1], tokens(1))))] == [Changes(False, {link: True})]
    assert [*blocks.read(batch(removed(1)))] == [NONE]
    assert [*blocks.read(batch(removed(1)))] == [Changes(False, {link: False})]


@pytest.mark.parametrize(
    "event",
    [
        stored([1], tokens(1), lora_id=3),
        stored([1], tokens(1), lora_name="adapter"),
        stored([1], tokens(1), extra_keys=[["salt"]]),
        stored([1], tokens(1), cache_salt="salt"),
        stored([1], tokens(1), medium="CPU"),
        stored([1], tokens(1), group_idx=1),
        stored([1], tokens(1), parent=99),
        {"type": "BlockMoved", "to": "the moon"},
    ],
)
def test_blocks_that_token_ids_do_not_identify_are_not_indexed(event: dict[str, Any]) -> None:
    blocks = EngineBlocks()
    assert [*blocks.read(batch(event)), *blocks.read(batch(removed(1)))] == [NONE, NONE]


def test_an_engine_that_floods_its_reader_takes_bounded_memory() -> None:
    blocks = EngineBlocks(most=10)
    names = list(range(50))
    list(blocks.read(batch(stored(names, tokens(50)))))
    assert len(blocks) == 10
    with pytest.raises(ValueError, match="length <= 64"):
        list(blocks.read(batch(stored([bytes(65)], tokens(1)))))


@pytest.mark.parametrize("of_an_event", [1, 3000])
def test_a_large_batch_of_kv_events_is_read_in_pieces(of_an_event: int) -> None:
    blocks, ids = EngineBlocks(), tokens(3000)
    names = [range(3000)[at : at + of_an_event] for at in range(0, 3000, of_an_event)]
    events = (
        stored(each, ids[each[0] * SIZE : (each[-1] + 1) * SIZE], each[0] - 1 if each[0] else None)
        for each in names
    )
    pieces = [piece.stored for piece in blocks.read(batch(*events))]
    assert max(map(len, pieces)) <= 256
    assert [link for piece in pieces for link in piece] == token_links(ids, SIZE)
    assert [*blocks.read(batch(*[removed()] * 1000))] == [NONE] * 4


nothing = st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=3) | st.binary(max_size=3)
anything = st.recursive(
    nothing, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner)
)
odd_events = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])},
    optional={
        "block_hashes": anything,
        "token_ids": anything,
        "block_size": anything,
        "parent_block_hash": anything,
    },
)


@given(st.binary(max_size=40) | (anything | odd_events).map(lambda each: msgspec.msgpack.encode([0, [each]])))
def test_a_malformed_batch_of_kv_events_raises_only_value_errors(payload: bytes) -> None:
    with contextlib.suppress(ValueError):
        list(EngineBlocks().read(payload))


prompts = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 9)), max_size=40)


@given(prompts, st.integers(9, 30), st.integers(30, 60))
def test_the_prefix_index_predicts_exactly_what_an_engine_has_if_it_gets_the_engines_events(
    served: list[tuple[int, int]], capacity: int, believed: int
) -> None:
    cache, index = PrefixCache(capacity), PrefixIndex(per_endpoint=believed, clock=lambda: 0.0)
    known: dict[bytes, None] = {}
    for name, count in served:
        prompt = tuple(f"{name}/{at}".encode() for at in range(count))
        index.follow(A, SIZE)
        assert index.match(prompt).get(A, 0) == cache.cached(prompt)
        index.add(A, prompt)
        cache.use(prompt)
        known.update(dict.fromkeys(prompt))
        there = {link for link in known if cache.cached((link,))}
        index.remove(A, [link for link in known if link not in there])
        index.restore(A, [link for link in known if link in there])


some = st.sets(st.integers(0, 8))
changes = st.tuples(st.sampled_from(["add", "remove", "restore"]), st.integers(0, 3), st.integers(1, 9), some)


@given(st.lists(changes, max_size=60), st.integers(5, 15))
def test_an_engine_may_remove_and_store_the_blocks_of_a_prompt_in_any_order(
    events: list[tuple[str, int, int, set[int]]], capacity: int
) -> None:
    cache = EngineCache(capacity)
    for event, name, count, places in events:
        prompt = [f"{name}/{at}".encode() for at in range(count)]
        chosen = [link for at, link in enumerate(prompt) if at in places]
        if event == "add":
            cache.add(prompt, 40, 0.0)
            assert all(link in cache.cached for link in prompt)
        elif event == "remove":
            cache.remove(chosen)
            assert not any(link in cache.cached or link in cache.evicted for link in chosen)
        else:
            cache.restore(chosen, 40, 0.0)
            assert all(link in cache.cached or link in cache.evicted for link in chosen)
        cache.expect(prompt, 0.0)
        last_users = Counter([*cache.cached.values(), *cache.evicted.values()])
        assert cache._left == last_users
        assert cache._since_s.keys() == last_users.keys()


def test_the_port_of_kv_events_must_leave_room_for_the_next_port() -> None:
    assert parse({"scheduling": {"kv_events_port": 65_534}}).scheduling.kv_events_port == 65_534
    with pytest.raises(ConfigError, match=r"kv_events_port: .* less than or equal to 65534"):
        parse({"scheduling": {"kv_events_port": 65_535}})


@pytest.mark.parametrize("label", ["", "x", "0", "65535", "0123456789", "012345" + "7" * 5000])
def test_a_label_that_is_no_port_leaves_the_configured_port_of_kv_events(label: str) -> None:
    reader = KvEventReader(5557, Listener())
    reader.set_targets([Endpoint(A, {KV_EVENTS_PORT: label})])
    assert reader._targets == {(A, 5557)}


class Engine:
    """Publishes events on a real ZeroMQ socket, and past batches on the next port, as vLLM does."""

    def __init__(self, context: zmq.asyncio.Context, *, replays: bool = True) -> None:
        self._context, self._replays = context, replays
        self.port, self.sequence = 0, 0
        self._past: list[tuple[int, bytes]] = []

    def start(self) -> None:
        self._events, self._asked = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self._events.setsockopt(zmq.HEARTBEAT_IVL, 50)
        first = self.port or 10_000 + os.getpid() % 1000 * 20  # other test processes try other ports
        for port in range(first, first + 20, 2):
            with contextlib.suppress(zmq.ZMQError):
                self._events.bind(f"tcp://127.0.0.1:{port}")
                break
        self.port = port
        if self._replays:
            self._asked.bind(f"tcp://127.0.0.1:{port + 1}")

    def stop(self) -> None:
        self._events.close(linger=0)
        self._asked.close(linger=0)
        self.sequence, self._past = 0, []

    async def publish(self, payload: bytes, *, is_sent: bool = True, is_kept: bool = True) -> None:
        """Publish a batch; without `is_sent` readers miss it, without `is_kept` it cannot be sent again."""
        if is_kept:
            self._past.append((self.sequence, payload))
        if is_sent:
            await self._events.send_multipart([b"", self.sequence.to_bytes(8), payload])
        self.sequence += is_kept

    def forget(self) -> None:
        """Lose a batch and all earlier batches, so that none of them can be sent again."""
        self.sequence += 1
        self._past.clear()

    async def replay(self) -> None:
        while True:
            try:
                who, _, start = await self._asked.recv_multipart()
            except (zmq.ZMQError, asyncio.CancelledError) as fault:
                if isinstance(fault, asyncio.CancelledError) and not self._asked.closed:
                    raise
                await asyncio.sleep(0.01)
                continue
            for sequence, payload in self._past:
                if sequence >= int.from_bytes(start):
                    await self._asked.send_multipart([who, b"", b"", sequence.to_bytes(8), payload])
            await self._asked.send_multipart([who, b"", b"", (-1).to_bytes(8, signed=True), b""])


class Listener:
    def __init__(self) -> None:
        self.stored: dict[bytes, bool] = {}
        self.losses = self.clearings = self.changes = 0

    def changed(self, address: str, block_tokens: int, changes: Changes) -> None:
        self.clearings += changes.is_cleared
        self.changes += 1
        self.stored.update(changes.stored)

    def lost(self, address: str) -> None:
        self.losses += 1


@contextlib.asynccontextmanager
async def publishing(*, replays: bool = True) -> AsyncIterator[Engine]:
    context = zmq.asyncio.Context()
    engine = Engine(context, replays=replays)
    engine.start()
    try:
        async with running(engine.replay()):
            yield engine
    finally:
        engine.stop()
        context.destroy(linger=0)


@contextlib.asynccontextmanager
async def reading(engine: Engine, listener: Any, address: str = A) -> AsyncIterator[KvEventReader]:
    reader = KvEventReader(1, listener)
    host = "127.0.0.1:" + address.rpartition(":")[2]
    reader.set_targets([Endpoint(host, {KV_EVENTS_PORT: str(engine.port)})])
    async with running(reader.run()):
        yield reader


async def test_a_reader_of_kv_events_that_begins_late_gets_the_past_batches_first() -> None:
    links, listener = token_links(tokens(3), SIZE), Listener()
    async with publishing() as engine:
        await engine.publish(batch(stored([1, 2], tokens(2))))
        async with reading(engine, listener):
            await until(lambda: len(listener.stored) == 2)
            await engine.publish(batch(stored([3], tokens(3)[2 * SIZE :], 2), removed(1)))
            await until(lambda: listener.stored == dict(zip(links, (False, True, True), strict=True)))
    assert listener.losses == 1, "at the end"


async def test_a_reader_of_kv_events_works_without_past_batches() -> None:
    listener = Listener()
    async with publishing() as engine, reading(engine, listener):
        engine.forget()
        while not listener.stored:
            await engine.publish(batch(stored([1], tokens(1))), is_kept=False)
            await asyncio.sleep(0.05)
    assert listener.losses == 1, "at the end"


async def test_after_missed_and_malformed_batches_and_after_a_restart_the_reader_begins_anew() -> None:
    links, listener = token_links(tokens(3), SIZE), Listener()

    def block(number: int) -> bytes:
        ids = tokens(3)[number * SIZE : (number + 1) * SIZE]
        return batch(stored([number], ids, number - 1 if number else None))

    async with publishing() as engine, reading(engine, listener):
        await engine.publish(block(0))
        await until(lambda: links[0] in listener.stored)
        await engine.publish(block(1), is_sent=False)
        await engine.publish(block(2))
        await until(lambda: links[2] in listener.stored)
        assert links[1] in listener.stored
        assert listener.losses == 0, "the engine could send it again"

        engine.forget()
        await engine.publish(block(2))
        await until(lambda: listener.losses == 1)

        while listener.losses < 2:  # ZeroMQ drops messages without a subscriber
            await engine.publish(b"no batch", is_kept=False)
            await asyncio.sleep(0.05)
        listener.stored.clear()
        for number in range(2):
            await engine.publish(block(number))
        await until(lambda: listener.stored == dict.fromkeys(links[:2], True))

        engine.stop()
        await until(lambda: listener.losses >= 3)
        listener.stored.clear()
        engine.start()
        await engine.publish(block(0))
        await until(lambda: listener.stored == {links[0]: True})

        losses = listener.losses
        while listener.losses == losses:
            for engine.sequence in (1, 0):  # batches are numbered anew on the same connection
                await engine.publish(block(0), is_kept=False)
            await asyncio.sleep(0.05)


_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB"
PUBLISHER_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + bytes((4, len(_READY))) + _READY


@pytest.mark.parametrize("part_bytes", [0, 100_000])
async def test_an_endless_message_ends_the_connection_before_it_fills_the_memory(part_bytes: int) -> None:
    most, taken = 30_000_000, asyncio.Queue[int]()

    async def publish(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(PUBLISHER_GREETING)
        parts, sent = 10 * (b"\x03" + part_bytes.to_bytes(8) + bytes(part_bytes)), 0
        with contextlib.suppress(ConnectionError):
            while sent < most:
                writer.write(parts)
                await writer.drain()
                sent += len(parts)
        writer.close()
        taken.put_nowait(sent)

    async with await asyncio.start_server(publish, "127.0.0.1", 0) as engine:
        reader = KvEventReader(engine.sockets[0].getsockname()[1], Listener())
        reader.set_targets([Endpoint("127.0.0.1:8000", {})])
        async with running(reader.run()):
            assert await taken.get() < most


async def test_a_message_whose_end_does_not_come_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("picker_fleet.endpoints.zmtp._ANSWER_S", 0.2)
    ended = asyncio.Event()

    async def publish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(PUBLISHER_GREETING)
        writer.write(b"\x01\x01a" + b"\x00\x09half")
        with contextlib.suppress(ConnectionError):
            while await reader.read(100):
                pass
        ended.set()
        writer.close()

    async with await asyncio.start_server(publish, "127.0.0.1", 0) as engine:
        reader = KvEventReader(engine.sockets[0].getsockname()[1], Listener())
        reader.set_targets([Endpoint("127.0.0.1:8000", {})])
        async with running(reader.run()), asyncio.timeout(20):
            await ended.wait()


@pytest.mark.parametrize("is_command", [False, True])
async def test_an_engine_that_floods_its_reader_is_read_slowly(
    monkeypatch: pytest.MonkeyPatch, is_command: bool
) -> None:
    monkeypatch.setattr("picker_fleet.endpoints.zmtp._BYTES_A_S", 1_000_000)
    listener, body = Listener(), b"\x07UNKNOWN" + bytes(100_000)

    def message(number: int) -> bytes:
        text = msgspec.msgpack.encode([1.0, [] if is_command else [{"type": "?", "data": body}], None])
        command = b"\x06%s%s" % (len(body).to_bytes(8), body) if is_command else b""
        return b"%s\x01\x08%s\x02%s%s" % (command, number.to_bytes(8), len(text).to_bytes(8), text)

    async def publish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(PUBLISHER_GREETING + b"".join(map(message, range(6))))
        with contextlib.suppress(ConnectionError):
            while await reader.read(1000):
                pass
        writer.close()

    async with await asyncio.start_server(publish, "127.0.0.1", 0) as engine:
        reader = KvEventReader(engine.sockets[0].getsockname()[1], listener)
        reader.set_targets([Endpoint("127.0.0.1:8000", {})])
        async with running(reader.run()):
            began_s = time.monotonic()
            await until(lambda: listener.changes >= 6)
    assert time.monotonic() - began_s >= 0.5


async def test_a_reader_of_many_engines_logs_the_silent_engines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader = KvEventReader(1, Listener())
    reader.set_targets([Endpoint(f"127.0.{n // 250}.{n % 250 + 1}:8000", {}) for n in range(400)])
    async with running(reader.run()):
        await until(lambda: len(caplog.messages) >= 400)
    assert {each.partition(": ")[2] for each in caplog.messages} == {"no answer on port 1"}


def request(number: int, text: bytes) -> InferenceRequest:
    plain = InferenceRequest(
        str(number), "llama", "llama", False, "f", Band.DEFAULT, 1.0, Workload("w", 3), 1.0, 30.0, None
    )
    return plain._replace(prefix=block_hashes("llama", text), body_bytes=len(text))


async def test_the_events_that_one_replica_reads_correct_the_prefix_index_of_another(tmp_path: Path) -> None:
    """The prompt has eight and a half blocks in the index and 34 in the engine, four for each block of the
    index. The engine removes the last seven of its blocks: two whole blocks of the prompt."""
    prompt, ids = b"x" * (8 * BLOCK_BYTES + BLOCK_BYTES // 2), tokens(34)
    names = list(range(1, 35))
    async with publishing() as engine, serving() as server:
        with redis_server(tmp_path) as valkey:
            url, clock = valkey.url, asyncio.get_running_loop().time
            reads, places = (RouteStream(url, stream="routes", replica=name) for name in ("reads", "places"))
            follower, placer = (TokenPrefixes(each, Scraping(), clock) for each in (reads, places))
            for each in (reads, places):
                each.share()
            address = server.address
            server.answer = answered(json.dumps({"count": len(ids), "tokens": ids}).encode())
            async with running(reads.run(), places.run(), placer.run()), reading(engine, follower, address):
                await engine.publish(batch(stored(names, ids)))
                await until(lambda: places.index.followed(address) == SIZE)
                asked = request(1, prompt)
                places.add_route(address, asked.prefix)
                await until(lambda: reads.index.match(asked.prefix) == {address: 8})

                placer.placed(asked, (address,), b"/v1/completions", lambda: b'{"prompt": "x"}')
                await until(lambda: len(follower._by_link) == 8)
                assert server.requests[0].startswith("POST /tokenize ")
                await engine.publish(batch(*(removed(name) for name in reversed(names[27:]))))
                await until(lambda: reads.index.match(asked.prefix) == {address: 6})
                await until(lambda: places.index.match(asked.prefix) == {address: 6})
                await engine.publish(batch(stored(names[27:], ids[27 * SIZE :], names[26])))
                await until(lambda: places.index.match(asked.prefix) == {address: 8})

                placer.placed(asked, (address,), b"/v1/completions", lambda: b"{}")
                assert placer._waiting.empty(), "nothing new"
                await engine.publish(batch(CLEARED))
                await until(lambda: places.index.match(asked.prefix) == {})


@pytest.mark.parametrize(
    "answer",
    [
        answered(b"{}"),
        answered(b"", status="404 Not Found"),
        answered(b'{"tokens": [%s]}' % b",".join([b"0"] * 40_000)),
        b"no HTTP\r\n\r\n",
    ],
)
async def test_an_engine_that_does_not_tokenize_is_asked_once_a_second(answer: bytes) -> None:
    now_s = 0.0
    routes = RouteStream("redis://127.0.0.1:1/0", stream="unused", replica="r", clock=lambda: now_s)
    placer = TokenPrefixes(routes, Scraping(), lambda: now_s)
    async with serving() as server, running(placer.run()):
        server.answer = answer
        routes.index.follow(server.address, SIZE)
        for number in range(20):
            placer.placed(
                request(number, b"%03d" % number * 200), (server.address,), b"/v1/completions", lambda: b"{}"
            )
        await until(lambda: placer._waiting.empty() and placer._is_paused(server.address))
        assert len(server.requests) <= token_prefixes._WORKERS
        assert not routes._completions


async def test_a_split_prompt_is_tokenized_by_the_stage_whose_events_are_read() -> None:
    routes = RouteStream("redis://127.0.0.1:1/0", stream="unused", replica="r")
    placer, asked = TokenPrefixes(routes, Scraping(), lambda: 0.0), request(1, b"x" * BLOCK_BYTES)
    routes.index.follow("10.0.0.2:8000", SIZE)
    placer.placed(asked, ("10.0.0.1:8000", "10.0.0.2:8000"), b"/v1/completions", lambda: b"{}")
    assert placer._waiting.get_nowait().address == "10.0.0.2:8000"
