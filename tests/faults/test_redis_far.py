"""While Redis's replies are delayed, replicas send further calls in order, without waiting for replies."""

import asyncio
import re

from fault_load import HANGS_S
from proxy import Proxy
from redis_servers import Server
from script_fleet import Fleet, until

from picker_fleet.state.replies import name_of
from picker_fleet.state.scripts import load_library


def _forgotten(server: Server) -> int:
    """Script calls that failed since CONFIG RESETSTAT because the function library was missing."""
    found = re.search(r"failed_calls=(\d+)", server.info("commandstats").get("cmdstat_fcall", ""))
    return int(found[1]) if found else 0


async def _logged(fleet: Fleet, count: int) -> bool:
    return len(await fleet.log()) >= count


async def test_calls_are_sent_before_earlier_calls_are_answered(patient: Fleet, between: Proxy) -> None:
    (a,) = patient.replicas
    # The proxy holds back the server's replies.
    between.hold(True)
    calls: list[asyncio.Future[object]] = []
    for number in range(1, 5):
        # The replica sends each call while no earlier call has been answered.
        calls.append(asyncio.ensure_future(a.admit(f"r{number}")))
        await until(lambda number=number: _logged(patient, number))
    assert not any(call.done() for call in calls)
    # The connection breaks with all calls in flight: the replica repeats the calls on a new connection.
    between.cut()
    between.hold(False)
    async with asyncio.timeout(HANGS_S):
        verdicts = await asyncio.gather(*calls)
    assert [name_of(verdict) for verdict in verdicts] == ["placed"] * 4
    assert await patient.counts() == (4, 0, [4])
    await a.settle("r1", "r2", "r3", "r4")
    assert await patient.at_rest()
    assert (await patient.ledger()).ends == {"completed": 4}


async def test_a_cancel_takes_effect_after_an_admission_that_was_sent_twice(
    patient: Fleet, between: Proxy, redis7: Server
) -> None:
    (a,) = patient.replicas
    redis7.ask("CONFIG", "RESETSTAT")
    # Redis lacks the function library for the second message only.
    between.hold(True)
    first = asyncio.ensure_future(a.admit("first"))
    await until(lambda: _logged(patient, 1))
    await patient.redis.function_flush()
    second = asyncio.ensure_future(a.admit("second"))
    await until(lambda: _forgotten(redis7) == 1)
    await patient.redis.function_load(load_library().source)
    # The replica has sent the admission of the request `second`, and then sends the cancel of this request.
    between.pass_one()
    await first
    end = a.store.cancel("second", 1, "cancelled")
    await until(lambda: len(a.store._client._in_flight) == 2)
    between.hold(False)
    await asyncio.gather(second, end)
    # The replica repeats the failed admission, and the cancel still takes effect after the admission.
    await a.settle("first")
    assert await patient.at_rest()
    assert (await patient.ledger()).ends == {"cancelled": 1, "completed": 1}
