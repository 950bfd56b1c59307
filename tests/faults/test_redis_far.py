"""Redis with a long round trip: messages are sent without waiting for earlier replies, and in order."""

import asyncio
import re

from fault_load import HANGS_S
from proxy import Proxy
from redis_servers import Server
from script_fleet import Fleet, until

from picker_fleet.state.store import name_of


def _forgotten(server: Server) -> int:
    """Script calls that failed since CONFIG RESETSTAT; every call fails while the library is missing."""
    found = re.search(r"failed_calls=(\d+)", server.info("commandstats").get("cmdstat_fcall", ""))
    return int(found[1]) if found else 0


async def _logged(fleet: Fleet, count: int) -> bool:
    return len(await fleet.log()) >= count


async def test_no_call_waits_for_the_answer_to_the_one_before(patient: Fleet, between: Proxy) -> None:
    (a,) = patient.replicas
    # The proxy holds back the server's replies.
    between.hold(True)
    calls: list[asyncio.Future[object]] = []
    for number in range(1, 5):
        # Each call is sent while all earlier ones are unanswered.
        calls.append(asyncio.ensure_future(a.admit(f"r{number}")))
        await until(lambda number=number: _logged(patient, number))
    assert not any(call.done() for call in calls)
    # The connection breaks with all calls in flight: each is answered once, over a new connection.
    between.cut()
    between.hold(False)
    async with asyncio.timeout(HANGS_S):
        verdicts = await asyncio.gather(*calls)
    assert [name_of(verdict) for verdict in verdicts] == ["placed"] * 4
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
    # Cancel the second message's request after that message was sent.
    between.pass_one()
    await first
    end = a.store.cancel("second", 1, "cancelled")
    between.hold(False)
    await asyncio.gather(second, end)
    # The cancel takes effect last, though the admission was sent twice.
    await a.settle("first")
    assert await patient.at_rest()
    assert (await patient.ledger()).ends == {"cancelled": 1, "completed": 1}
