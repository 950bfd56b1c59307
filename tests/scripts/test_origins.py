"""A replica notes which endpoint stores an id's state; all replicas find it (admission/origins.py)."""

import asyncio
import time
from collections import Counter

import pytest
from script_fleet import OpenFleet, Replica, addresses, ask, ended, until

from picker_fleet.admission.origins import FIND_S, Origins
from picker_fleet.domain.request import Endpoint
from picker_fleet.endpoints.snapshot import Snapshot
from picker_fleet.state.accounting_token import Keyring

E1, E2 = addresses(2)
MOST = 100_000
FILL = """
for n = 0, ARGV[1] - 1 do
  redis.call('ZADD', KEYS[1], ARGV[2] - n, 'r' .. n)
  redis.call('HSET', KEYS[2], 'r' .. n, ARGV[3])
end
"""


def origins(replica: Replica) -> Origins:
    return Origins(replica.store, replica.keys, time.monotonic)


async def test_every_replica_finds_the_endpoint_that_was_noted_last_for_an_id(fleet: OpenFleet) -> None:
    async with fleet("a", "b", endpoints=2) as (it, a, b):
        one, other = origins(a), origins(b)
        one.note(("resp_1", "conv_1", "", "x\x1fy", "x" * 257), E2)
        assert await one.find(("resp_1",)) == E2
        assert await other.find(("?", "conv_1")) == E2
        # A model server that was restarted may use the same ids again.
        other.note(("resp_1",), E1)
        # Replica b sends its note ahead of its own question, and replica a asks afterwards.
        assert [await each.find(("resp_1",)) for each in (other, one)] == [E1, E1]
        assert await it.redis.hgetall(it.keys.origins) == {"resp_1": E1, "conv_1": E2}
        assert await it.redis.zcard(it.keys.prefix + "origin_times") == 2


async def test_a_search_for_an_id_waits_a_short_time_for_a_late_note(fleet: OpenFleet) -> None:
    async with fleet("a", "b") as (_, a, b):
        finding = asyncio.create_task(origins(b).find(("resp_1",)))
        await asyncio.sleep(0.02)
        origins(a).note(("resp_1",), E1)
        assert await finding == E1
        began_s = time.monotonic()
        assert await origins(b).find(("resp_2",)) == ""
        assert await origins(b).find(("resp_2",), 0.01) == ""
        assert time.monotonic() - began_s < 10 * FIND_S  # 10 times as long, for a busy machine
        # A replica does not ask Redis for strings that cannot be ids.
        assert await origins(b).find(("", "x" * 300)) == ""


async def test_the_sweep_bounds_the_age_and_number_of_ids(fleet: OpenFleet) -> None:
    async with fleet("a") as (it, a):
        times = it.keys.prefix + "origin_times"
        now_ms = int(await it.now_ms())
        ages_ms = {"old": 86_400_001, "young": 86_000_000}
        await it.redis.zadd(times, {name: now_ms - age_ms for name, age_ms in ages_ms.items()})
        await it.redis.hset(it.keys.origins, mapping=dict.fromkeys(ages_ms, E1))
        await it.redis.eval(FILL, 2, times, it.keys.origins, MOST, now_ms, E1)
        await a.sweep()
        assert (await it.redis.zcard(times), await it.redis.hlen(it.keys.origins)) == (MOST, MOST)
        assert await it.redis.hmget(it.keys.origins, "old", "young", "r0") == [None, None, E1]
        await it.redis.delete(times)
        await a.sweep()
        assert not await it.has("origins")


async def test_reads_of_stored_state_go_to_another_endpoint_only_if_its_endpoint_is_down(
    fleet: OpenFleet,
) -> None:
    async with fleet("a", endpoints=2) as (_, a):
        # Reads of stored state also go to a draining endpoint, because no other endpoint has this state.
        for endpoints in ((E1, E2), (E1, Endpoint(E2, draining=True))):
            await a.publish(*endpoints)
            assert a.route(None, origin=E2) == (E2, E1)
        await a.publish(E1, Endpoint(E2, down=True))
        assert a.route(None, origin=E2) == (E1,)
        assert a.route((E1,), origin=E2) == (E1,)


async def test_requests_with_stored_state_go_to_another_endpoint_only_if_its_endpoint_is_down(
    fleet: OpenFleet,
) -> None:
    async with fleet("a", listening=True, endpoints=2) as (it, a):

        async def admitted(name: str) -> tuple[str, ...]:
            request = ask(name, origin=E1, ttl_s=60.0)
            return (await a.gate.admit(request, stream_owned=False)).endpoints

        one = Endpoint(E1, max_inflight=1)
        await a.publish(one, E2, upper_per=9)
        assert await admitted("first") == (E1,)
        second, third = (asyncio.create_task(admitted(name)) for name in ("second", "third"))
        await it.until_queued(2)
        a.gate.settle(ended("first"))
        assert await second == (E1,)
        await it.until_queued(1)
        await a.store.mark_endpoint(E1, "down", True)
        a.cell.publish(Snapshot("down", (Endpoint(E1, max_inflight=1, down=True), Endpoint(E2))))
        await a.sweep()
        assert await third == (E2,)
        await it.ends(a, "second", "third")


async def test_a_flood_of_unknown_ids_is_looked_up_once_each() -> None:
    asked: Counter[str] = Counter()

    class Empty:
        fault = None

        async def origins(self, ids: list[str]) -> list[None]:
            asked.update(ids)
            return [None for _ in ids]

    store = Origins(Empty(), Keyring(), time.monotonic)  # type: ignore[arg-type]
    await asyncio.gather(*(store.find((f"resp_{number}",)) for number in range(300)))
    assert len(asked) == 300
    assert 0 < sum(count > 1 for count in asked.values()) <= 100
    await store.find(("resp_next",))
    assert asked["resp_next"] > 1


async def test_without_redis_a_replica_finds_the_ids_that_it_has_noted_itself() -> None:
    told: list[tuple[str, str]] = []

    class Away:
        fault = "away"

        def note_origin(self, state_id: str, endpoint: str) -> asyncio.Future[str]:
            told.append((state_id, endpoint))
            return asyncio.get_running_loop().create_future()

    kept = Origins(Away(), Keyring(), time.monotonic)  # type: ignore[arg-type]
    kept.note(("resp_1",), E1)
    assert await kept.find(("resp_2", "resp_1")) == E1
    assert await kept.find(("resp_2",)) == ""
    assert told == [("resp_1", E1)]  # the note is kept until Redis accepts the note


@pytest.mark.parametrize("lost", ["origins", "origin_times"])
async def test_if_either_key_of_stored_ids_is_lost_a_sweep_deletes_both(fleet: OpenFleet, lost: str) -> None:
    async with fleet("a") as (it, a):
        origins(a).note(("resp_1",), E1)
        await until(lambda: it.redis.hlen(it.keys.origins))
        await it.redis.delete(it.keys.prefix + lost)
        await a.sweep()
        assert not await it.has("origins")
        assert not await it.has("origin_times")
