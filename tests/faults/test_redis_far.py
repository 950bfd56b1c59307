"""A Redis with a long round trip: messages do not wait for each other, and keep their order."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from proxy import Proxy
from redis_servers import Server
from script_fleet import Fleet, running, until

NEVER_S = 3600.0
PATIENT_S = 30.0


@pytest.fixture
async def far(redis7: Server, between: Proxy, pool: str) -> AsyncIterator[Fleet]:
    """A fleet whose one replica is as far from Redis as `between` says."""
    far = {"a": between.url}
    async with running(redis7.url, pool, "a", through=far, silence_s=PATIENT_S, upper_per=8) as it:
        yield it


async def _logged(fleet: Fleet, count: int) -> bool:
    return len(await fleet.log()) >= count


async def test_no_call_waits_for_the_answer_to_the_one_before(far: Fleet, between: Proxy) -> None:
    (a,) = far.replicas
    # The server's answers are delayed.
    between.delay_s = NEVER_S
    calls: list[asyncio.Future[object]] = []
    for number in range(1, 5):
        # Each call is sent though none is answered.
        calls.append(asyncio.ensure_future(a.admit(f"r{number}")))
        await until(lambda number=number: _logged(far, number))
    assert not any(call.done() for call in calls)
    # The connection is lost with all of them: each is answered over a new one, and once.
    between.delay_s = 0.0
    between.cut()
    async with asyncio.timeout(PATIENT_S):
        verdicts = await asyncio.gather(*calls)
    assert [verdict.status for verdict in verdicts] == ["placed"] * 4
    assert await far.counts() == (4, 0, [4])
    await a.settle("r1", "r2", "r3", "r4")
    assert await far.at_rest()
    assert (await far.ledger()).ends == {"completed": 4}


async def test_an_end_stands_though_the_message_before_it_was_forgotten(far: Fleet, between: Proxy) -> None:
    (a,) = far.replicas
    # The server loses the library between two messages in flight.
    between.delay_s = 4.0
    first = asyncio.ensure_future(a.admit("first"))
    await until(lambda: _logged(far, 1))
    await far.redis.function_flush()
    second = asyncio.ensure_future(a.admit("second"))
    await until(lambda: len(a.store._client._in_flight) > 1)
    # The end of the second message's request is sent behind it.
    await first
    end = a.store.cancel("second", 1, "cancelled")
    await asyncio.gather(second, end)
    # The end takes effect last, though the request was sent twice.
    between.delay_s = 0.0
    await a.settle("first")
    assert await far.at_rest()
    assert (await far.ledger()).ends == {"cancelled": 1, "completed": 1}
