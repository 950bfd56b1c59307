"""A Redis with a long round trip: messages do not wait for each other, and keep their order."""

import asyncio
import re

from fault_load import HANGS_S
from proxy import Proxy
from redis_servers import Server
from script_fleet import Fleet, until


def _forgotten(server: Server) -> int:
    """Script calls that failed since the statistics were reset, as all do without a library."""
    found = re.search(r"failed_calls=(\d+)", server.info("commandstats").get("cmdstat_fcall", ""))
    return int(found[1]) if found else 0


async def _logged(fleet: Fleet, count: int) -> bool:
    return len(await fleet.log()) >= count


async def test_no_call_waits_for_the_answer_to_the_one_before(patient: Fleet, between: Proxy) -> None:
    (a,) = patient.replicas
    # The server's answers are held back.
    between.hold(True)
    calls: list[asyncio.Future[object]] = []
    for number in range(1, 5):
        # Each call is sent though none is answered.
        calls.append(asyncio.ensure_future(a.admit(f"r{number}")))
        await until(lambda number=number: _logged(patient, number))
    assert not any(call.done() for call in calls)
    # The connection is lost with all of them: each is answered over a new one, and once.
    between.cut()
    between.hold(False)
    async with asyncio.timeout(HANGS_S):
        verdicts = await asyncio.gather(*calls)
    assert [verdict.status for verdict in verdicts] == ["placed"] * 4
    assert await patient.counts() == (4, 0, [4])
    await a.settle("r1", "r2", "r3", "r4")
    assert await patient.at_rest()
    assert (await patient.ledger()).ends == {"completed": 4}


async def test_an_end_stands_though_the_message_before_it_was_forgotten(
    patient: Fleet, between: Proxy, redis7: Server
) -> None:
    (a,) = patient.replicas
    redis7.ask("CONFIG", "RESETSTAT")
    # The server loses the library between two messages in flight.
    between.hold(True)
    first = asyncio.ensure_future(a.admit("first"))
    await until(lambda: _logged(patient, 1))
    await patient.redis.function_flush()
    second = asyncio.ensure_future(a.admit("second"))
    await until(lambda: _forgotten(redis7) == 1)
    # The end of the second message's request is sent behind it.
    between.pass_one()
    await first
    end = a.store.cancel("second", 1, "cancelled")
    between.hold(False)
    await asyncio.gather(second, end)
    # The end takes effect last, though the request was sent twice.
    await a.settle("first")
    assert await patient.at_rest()
    assert (await patient.ledger()).ends == {"cancelled": 1, "completed": 1}
