"""The fault proxy itself: what it does to bytes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from proxy import LOOPBACK, frame_end, proxy
from script_fleet import until

VALUES = (
    b"+OK\r\n", b"-ERR no\r\n", b":-12\r\n", b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b"$0\r\n\r\n",
    b"$4\r\n\r\n*1\r\n", b"*3\r\n$7\r\nmessage\r\n*2\r\n:1\r\n*0\r\n$2\r\nab\r\n",
)  # fmt: skip


def test_values_are_separated_wherever_the_data_is_cut() -> None:
    whole = b"".join(VALUES)
    bounds = [sum(map(len, VALUES[: number + 1])) for number in range(len(VALUES))]
    for cut in range(len(whole) + 1):
        ends, at = [], 0
        while (end := frame_end(whole[:cut], at)) > 0:
            ends.append(end)
            at = end
        assert ends == [bound for bound in bounds if bound <= cut]


@asynccontextmanager
async def echoing() -> AsyncIterator[tuple[int, list[bytes]]]:
    """An echo server; yields its port and what it has received."""
    received: list[bytes] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            received.append(data)
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(echo, LOOPBACK, 0) as server:
        yield server.sockets[0].getsockname()[1], received


async def test_each_fault_of_the_proxy_has_its_effect() -> None:
    async with echoing() as (port, received), proxy(port) as between:
        reader, writer = await asyncio.open_connection(LOOPBACK, between.port)

        async def echoed(text: bytes) -> bytes:
            writer.write(text)
            return await reader.readexactly(len(text))

        # Without a fault everything passes.
        assert await echoed(b"one") == b"one"
        # Stalled: data arrives after the stall.
        between.stalled = True
        late = asyncio.create_task(echoed(b"two"))
        await asyncio.sleep(0.05)
        assert not late.done()
        between.stalled = False
        assert await late == b"two"
        # Delayed: never earlier.
        between.delay_s = 0.05
        began = asyncio.get_running_loop().time()
        assert await echoed(b"three") == b"three"
        assert asyncio.get_running_loop().time() - began >= 0.05
        between.delay_s = 0.0
        # A reply is lost: the server has the request, and the client's connection is cut.
        between.lose_replies = 1
        writer.write(b"four")
        with suppress(ConnectionResetError):
            assert await reader.read(10) == b""
        writer.close()
        assert received[-1] == b"four"
        assert (between.lost, between.lose_replies) == (1, 0)
        await until(lambda: between.open == 0)
        # Vanished: nothing arrives, and nothing is closed.
        reader, writer = await asyncio.open_connection(LOOPBACK, between.port)
        assert await echoed(b"five") == b"five"
        between.vanished = True
        silent = asyncio.create_task(echoed(b"six"))
        await asyncio.sleep(0.05)
        assert not silent.done()
        assert (received[-1], between.open) == (b"five", 1)
        between.cut()
        await until(silent.done)
        assert silent.exception() is not None
        writer.close()
        between.vanished = False
        before = between.open
        # Stranded: the open connections vanish, and new ones work.
        reader, writer = old = await asyncio.open_connection(LOOPBACK, between.port)
        assert await echoed(b"seven") == b"seven"
        between.strand()
        reader, writer = await asyncio.open_connection(LOOPBACK, between.port)
        old[1].write(b"lost")
        assert await echoed(b"eight") == b"eight"
        assert b"lost" not in received
        assert between.open == before + 2
        old[1].close()
        writer.close()


async def test_script_replies_are_lost_only_after_the_spared_ones() -> None:
    call, ping = b"*2\r\n$5\r\nFCALL\r\n$1\r\nx\r\n", b"*1\r\n$4\r\nPING\r\n"
    async with echoing() as (port, received), proxy(port) as between:
        reader, writer = await asyncio.open_connection(LOOPBACK, between.port)
        # The third script reply is to be lost.
        between.lose_script_replies, between.spared = 1, 2
        # Scripts and other commands alternate: the first two scripts are answered, and every other command.
        for command in (ping, call, ping, call, ping):
            writer.write(command)
            assert await reader.readexactly(len(command)) == command
        # The third script has run, and its connection is cut.
        writer.write(call)
        with suppress(ConnectionError):
            assert await reader.read(100) == b""
        assert received.count(call) == 3
        assert (between.lost, between.lose_script_replies) == (1, 0)
        writer.close()
