"""A promoted Redis replica lacks the last writes of the old primary, because replication is asynchronous.

The tests simulate this on one server: one transaction restores an earlier state of the pool and closes every
connection. The epoch of the shared state does not change: replicas notice only that they must reconnect.
"""

import asyncio
from collections.abc import Callable

from fault_load import JOINED, LEASE_S, UPPER, admit_all, loaded, rests_within_a_lease, settle_all
from redis_servers import Server
from script_fleet import Fleet, running, until

KEY = "fair_request_queue.flow_capacity"


def snapshot_of(server: Server, fleet: Fleet) -> Callable[[], None]:
    """Save the fleet's pool. Returns a function that restores the saved pool and closes every connection."""
    saved = server.save(fleet.keys.prefix.replace("{", "\\{") + "*")

    def restore() -> None:
        with server.client() as client, client.pipeline(transaction=True) as both:
            both.eval(*saved)
            both.execute_command("CLIENT", "KILL", "TYPE", "normal")
            both.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            both.execute()

    return restore


async def test_replicas_repeat_writes_that_the_new_primary_lacks(redis7: Server, pool: str) -> None:
    async with running(redis7.url, pool, "a", "b", joined=JOINED, listening=True) as it:
        a, b = it.replicas
        async with asyncio.TaskGroup() as tasks:
            # Four requests are in flight, and one request waits.
            await admit_all(a, *(f"runs{number}" for number in range(UPPER)))
            waits = tasks.create_task(admit_all(b, "waits"))
            await it.until_queued(1)
            restore = snapshot_of(redis7, it)
            # After the snapshot one request ends, the waiting request is placed, and a third request arrives.
            settle_all(a, "runs0")
            await waits
            lost = tasks.create_task(admit_all(a, "lost"))
            await it.until_queued(1)
            restore()
            # Replicas queue the lost request again and report the running requests; the bound holds.
            async with asyncio.timeout(LEASE_S + 5):
                await it.until_queued(2)
                assert not lost.done()
                settle_all(a, *(f"runs{number}" for number in range(1, UPPER)))
                await lost
        settle_all(b, "waits")
        settle_all(a, "lost")
        await rests_within_a_lease(it)


async def test_running_requests_are_counted_again_after_a_failover_lost_them(
    redis7: Server, pool: str
) -> None:
    async with running(redis7.url, pool, "a", "b", joined=JOINED, listening=True) as it:
        a, b = it.replicas
        restore = snapshot_of(redis7, it)
        # Requests fill the pool; the restored state has no record of these requests.
        old = [f"old{number}" for number in range(UPPER)]
        await admit_all(a, *old)
        restore()
        # More requests arrive than the bound allows.
        new = [f"new{number}" for number in range(3 * UPPER)]
        more = [asyncio.create_task(admit_all(b, name)) for name in new]
        await until(lambda: _counts(it, 3 * UPPER + UPPER))
        # Every running request is counted, and at most twice as many as the bound are in flight.
        placed = [task for task in more if task.done()]
        assert len(placed) <= UPPER
        assert (await it.counts())[0] == UPPER + len(placed)
        # Every waiting request is eventually served.
        settle_all(a, *old)
        for name, task in zip(new, more, strict=True):
            await task
            settle_all(b, name)
        await rests_within_a_lease(it)


async def test_after_lost_writes_at_most_twice_the_bound_is_admitted(redis7: Server, pool: str) -> None:
    async with running(redis7.url, pool, "a", "b", "c", joined=JOINED, listening=True) as it:
        async with loaded(it, clients=40) as load:
            for _ in range(3):
                await load.served_more(50)
                restore = snapshot_of(redis7, it)
                await load.served_more(30)
                # Lose the last writes to Redis.
                restore()
        # The restored state may lack running requests until the next heartbeat reports these requests.
        assert load.highest <= 2 * UPPER
        await rests_within_a_lease(it)


async def test_operators_changes_that_the_restored_state_lacks_are_made_again(
    redis7: Server, pool: str
) -> None:
    how = {"endpoints": 3, "joined": JOINED, "listening": True, "checked": False}
    async with running(redis7.url, pool, "a", "b", **how) as it:
        a, b = it.replicas
        first, second, _ = (each.address for each in a.cell.current.endpoints)

        def seen(changes: dict[str, object], drained: str) -> bool:
            return all(
                each.membership is not None
                and each.membership.live_config.changes == changes
                and [one.address for one in each.cell.current.endpoints if one.drained] == [drained]
                for each in it.replicas
            )

        # The snapshot has a pause, a lower capacity and a drained endpoint.
        await a.store.set_live_config({"paused": 1, "flow_capacity": 9}, {"paused": True, KEY: 9})
        await a.store.mark_endpoint(first, "drained", True)
        await until(lambda: seen({"paused": True, KEY: 9}, first))
        restore = snapshot_of(redis7, it)
        # Afterwards the operator resumes, drains another endpoint, and raises the capacity.
        await b.store.set_live_config({"paused": None, "flow_capacity": 99}, {"paused": None, KEY: 99})
        await b.store.mark_endpoint(first, "drained", False)
        await b.store.mark_endpoint(second, "drained", True)
        await until(lambda: seen({KEY: 99}, second))
        restore()

        # The replicas make the operator's changes again in Redis.
        async def made_again() -> bool:
            live, marks = await a.store.live_config(), await a.store.marks()
            return live.overrides == {"flow_capacity": 99} and marks == {("drained", second)}

        await until(made_again)
        await until(lambda: seen({KEY: 99}, second))


async def _counts(fleet: Fleet, count: int) -> bool:
    """Whether exactly `count` requests are in flight or queued."""
    stock, queued, _ = await fleet.counts()
    return stock + queued == count
