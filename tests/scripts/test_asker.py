"""CommandClient sends plain Redis commands: it orders replies, raises errors, replaces connections."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from script_fleet import until

from picker_fleet.domain.errors import StateUnavailable
from picker_fleet.state.subscriptions import CommandClient

DEADLINE_S = 5.0


@pytest.fixture
async def asker(valkey_url: str, pool: str) -> AsyncIterator[CommandClient]:
    asker = CommandClient(valkey_url, pool, deadline_s=DEADLINE_S)
    yield asker
    await asker.close()


async def test_concurrent_callers_of_redis_commands_get_their_own_replies(asker: CommandClient) -> None:
    asked = [[("ECHO", str(number)), ("ECHO", f"{number} again")] for number in range(50)]
    answers = await asyncio.gather(*map(asker.execute, asked))
    assert answers == [[reply.encode() for _, reply in commands] for commands in asked]


async def test_an_error_reply_is_raised_and_leaves_no_reply_to_the_next_caller(asker: CommandClient) -> None:
    await asker.execute([("SET", "a", 1)])
    with pytest.raises(StateUnavailable, match="WRONGTYPE"):
        await asker.execute([("GET", "a"), ("HGETALL", "a"), ("GET", "a")])
    assert await asker.execute([("ECHO", "next")]) == [b"next"]


async def test_a_closed_connection_to_redis_is_replaced(asker: CommandClient, valkey_url: str) -> None:
    known = (await asker.execute([("CLIENT", "ID")]))[0]
    async with Redis.from_url(valkey_url) as redis:
        await redis.client_kill_filter(_id=known)
    # The next call may fail because the old connection is closed; the second call uses a new connection.
    try:
        again = await asker.execute([("CLIENT", "ID")])
    except StateUnavailable:
        again = await asker.execute([("CLIENT", "ID")])
    assert again[0] > known


async def test_a_cancelled_caller_leaves_no_reply_to_the_next(asker: CommandClient, valkey_url: str) -> None:
    slow = asyncio.create_task(asker.execute([("BLPOP", "nothing", 0)]))
    async with Redis.from_url(valkey_url) as redis:

        async def asked() -> bool:
            return bool((await redis.info("clients"))["blocked_clients"])

        await until(asked)
    slow.cancel()
    assert await asker.execute([("ECHO", "next")]) == [b"next"]
    with pytest.raises(asyncio.CancelledError):
        await slow


async def test_a_connection_to_a_non_primary_is_replaced(asker: CommandClient, valkey_url: str) -> None:
    known = (await asker.execute([("CLIENT", "ID")]))[0]
    async with Redis.from_url(valkey_url) as redis:
        await redis.replicaof("127.0.0.1", "1")
        try:
            # A refused write raises the server's error and closes the connection.
            with pytest.raises(StateUnavailable, match="READONLY"):
                await asker.execute([("SET", "a", 1)])
            assert (await asker.execute([("CLIENT", "ID")]))[0] > known
        finally:
            await redis.replicaof("NO", "ONE")
