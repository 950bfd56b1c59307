"""The load's HTTP client and its open loop, against good and bad servers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from picker_tools.load.client import Answer, Client, HttpRequest, Kind, answer_of
from picker_tools.load.generator import Arrival, LoadGenerator
from picker_tools.load.scenarios import Conversation, Source

Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter

EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"
PLAIN = b'{"usage": {"completion_tokens": 16}}'
FULL = b"retry-after: 3\r\nx-llm-d-request-dropped-reason: rejected-saturated\r\n"


def chunked(*parts: bytes, end: bool = True) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    return (
        head
        + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
        + (b"0\r\n\r\n" if end else b"")
    )


def whole(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\n%scontent-length: %d\r\n\r\n%s" % (status, more, len(body), body)


@asynccontextmanager
async def serving(answer: Callable[[int], bytes | None]) -> AsyncIterator[tuple[str, list[int]]]:
    """A server whose answer to request `n` (from 0) is `answer(n)`; empty: it hangs up; None: it is silent.

    Gives its URL, and the number of connections as the one entry of a list.
    """
    count, connections = 0, [0]

    async def serve(reader: Reader, writer: Writer) -> None:
        nonlocal count
        connections[0] += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                await reader.readexactly(length)
                reply = answer(count)
                count += 1
                if reply == b"":
                    return
                if reply is not None:
                    writer.write(reply)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections


def ask(streamed: bool) -> HttpRequest:
    return HttpRequest("/v1/completions", (("x-a", "b"),), b'{"model": "llama"}', streamed, 2)


async def sent(client: Client, streamed: bool = True, within_s: float = 10.0) -> Answer:
    asked = ask(streamed)
    exchange = await client.send(asked, within_s=within_s)
    return answer_of(exchange, asked, source="s", number=0, turn=0, due_s=0.0, began=exchange.sent_at)


@pytest.mark.parametrize(
    ("reply", "streamed", "kind", "what"),
    [
        (chunked(EVENT, EVENT, USAGE, DONE), True, Kind.SERVED, "served"),
        (whole(PLAIN), False, Kind.SERVED, "served"),
        (whole(b"{}", b"503 No", FULL), True, Kind.REFUSED, "503 rejected-saturated"),
        (whole(b"{}", b"429 No", FULL), True, Kind.REFUSED, "429 rejected-saturated"),
        (whole(b"{}", b"500 No"), True, Kind.FAILED, "500 without a reason"),
        (chunked(EVENT, EVENT), True, Kind.FAILED, "a stream that ended without [DONE]"),
        (chunked(EVENT, end=False)[:-3] + b"zz", True, Kind.FAILED, "the answer is not HTTP"),
        (b"", True, Kind.FAILED, "the connection was closed without a whole answer"),
    ],
)
async def test_each_answer_has_its_kind_and_outcome(
    reply: bytes, streamed: bool, kind: Kind, what: str
) -> None:
    async with serving(lambda _: reply) as (url, _):
        with Client(url) as client:
            answer = await sent(client, streamed)
    assert answer.kind is kind
    assert answer.outcome.startswith(what)
    if kind is Kind.REFUSED:
        assert answer.retry_after_s == 3
    if kind is Kind.SERVED:
        assert answer.tokens == (2 if streamed else 16)
        assert answer.answers == 1
        assert 0 < (answer.first_s or 0) <= answer.last_s


async def test_a_second_answer_to_one_request_is_counted() -> None:
    async with serving(lambda _: whole(PLAIN) * 2) as (url, _):
        with Client(url) as client:
            answer = await sent(client, streamed=False)
            # The connection is not used again.
            assert answer.kind is Kind.SERVED
            assert client.surplus_answers == 1


async def test_connections_are_reused_unless_broken() -> None:
    # The server hangs up after its second answer.
    replies = [whole(PLAIN), whole(PLAIN), b"", whole(PLAIN)]
    async with serving(lambda number: replies[number]) as (url, connections):
        with Client(url) as client:
            kinds = [(await sent(client, streamed=False)).kind for _ in replies]
    # A failed request is not sent again; the others share connections.
    assert kinds == [Kind.SERVED, Kind.SERVED, Kind.FAILED, Kind.SERVED]
    assert connections == [2]


async def test_a_silent_server_is_a_failure_in_time() -> None:
    async with serving(lambda _: None) as (url, _):
        with Client(url) as client:
            answer = await sent(client, within_s=0.05)
    assert answer.fault == "no whole answer within 0.05 s"
    assert answer.kind is Kind.FAILED


async def test_a_missing_server_is_a_failure() -> None:
    async with serving(lambda _: None) as (url, _):
        pass
    with Client(url) as client:
        assert (await sent(client)).fault.startswith("no connection")
        assert await client.get("/", within_s=1.0) is None


def generator(client: Client, source: Source, duration_s: float = 0.2) -> LoadGenerator:
    return LoadGenerator(client, (source,), model="llama", seed=1, duration_s=duration_s, max_requests=100)


async def test_the_load_does_not_wait_for_answers() -> None:
    # The server is silent; twenty requests are due within 40 ms.
    coming = [Arrival(0.002 * number, 0, number) for number in range(20)]
    all_in = asyncio.Event()
    async with serving(lambda number: all_in.set() if number == 19 else None) as (url, _):
        with Client(url) as client:
            load = generator(client, Source("s", 1, "s"))
            running = asyncio.create_task(load.run(coming))
            # All are sent though none is answered.
            async with asyncio.timeout(10):
                await all_in.wait()
            assert load.counts.open == 20
            # When the load stops, each has left and is counted once.
            load.stop()
            await running
    assert load.counts.ended[Kind.LEFT] == load.counts.sent == len(load.counts.answers) == 20


async def test_a_conversation_goes_on_with_the_answer() -> None:
    # The server serves two turns of five and refuses the third.
    replies = [whole(PLAIN), whole(PLAIN), whole(b"{}", b"503 No", FULL)]
    async with serving(lambda number: replies[number]) as (url, _):
        with Client(url) as client:
            source = Source("s", 1, "s", streamed=0.0, conversation=Conversation(turns=5, think_s=0.001))
            load = generator(client, source, duration_s=2.0)
            await load.run([Arrival(0.0, 0, 0)])
    assert [each.turn for each in load.counts.answers] == [0, 1, 2]
    assert load.counts.ended[Kind.SERVED] == 2
    # Each turn carries more than the one before.
    sizes = [each.prompt_bytes for each in load.counts.answers]
    assert sizes == sorted(sizes)
