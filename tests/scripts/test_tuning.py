"""Live changes of bounds and scorers: all replicas apply a change, and no waiting request is lost."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from decision_ledger import order_of
from pools import a_pool
from script_fleet import OpenFleet, addresses, ask, until

from picker_fleet.admin.changes import FleetControls
from picker_fleet.domain.request import Endpoint, InferenceRequest
from picker_fleet.pool import Pool
from picker_fleet.state.replies import LiveConfig


async def test_a_raised_bound_dispatches_a_waiting_request_at_once(fleet: OpenFleet) -> None:
    async with fleet("a", "b", full=True) as (it, a, b):
        await a.admit("waits")
        raised = {"upper_per": 2, "lower_per": 2}
        assert await b.store.set_live_config(raised, {"watermark": 2}) == "1"
        assert order_of(await it.log()) == ["waits"]
        # A live change outlives a publication of settings, until an operator reverts the change.
        await a.publish("10.0.0.1:8000", upper_per=1)
        assert (await a.beat()).upper == 2
        assert await a.store.live_config() == LiveConfig("1", raised, {"watermark": 2})
        await a.store.set_live_config(dict.fromkeys(raised), {"watermark": None})
        assert (await b.beat()).upper == 1
        assert await b.store.live_config() == LiveConfig("2")


async def test_once_a_bound_is_raised_a_dispatch_reads_only_the_first_flows(fleet: OpenFleet) -> None:
    async with fleet("a", full=True) as (it, a):
        for i in range(100):
            await a.admit(f"r{i}", flow=f"flow-{i}")
        # After the bounds are raised, each call reads only the first of the waiting flows.
        async with it.redis.monitor() as said:
            await a.store.set_live_config({"upper_per": 3, "lower_per": 3}, {"watermark": 3})
            await it.redis.echo("the end")
            asked = []
            while "the end" not in (command := (await said.next_command())["command"]):
                asked.append(command.split())
        fronts = [words for words in asked if words[0] == "ZRANGE" and ":flows:" in words[1]]
        assert fronts
        assert all(0 <= int(words[3]) < 100 for words in fronts)
        assert order_of(await it.log()) == ["r0", "r1"]


PROMPT = (b"a" * 8, b"b" * 8)


@contextlib.asynccontextmanager
async def replica(url: str, pool: str, name: str) -> AsyncIterator[tuple[Pool, FleetControls]]:
    """A whole replica, except for its listening sockets and its scraping."""
    leases = {"heartbeat": 0.1, "replica_silence": 5}
    whole = a_pool({"redis": {"url": url}, "pool": pool, "leases": leases}, name)
    whole.membership.discovered([Endpoint(address) for address in addresses(3)])
    async with asyncio.TaskGroup() as tasks:
        work = (whole.store.run(), whole.membership.run(), whole.routes.run())
        running = [tasks.create_task(each) for each in work]
        try:
            await whole.membership.known()
            yield whole, FleetControls(whole.store, whole.membership, whole.settings)
        finally:
            for task in running:
                task.cancel()


def prompted(request_id: str) -> InferenceRequest:
    return ask(request_id)._replace(prefix=PROMPT)


async def test_a_scorer_added_live_uses_the_routes_of_all_replicas(valkey_url: str, pool: str) -> None:
    async with replica(valkey_url, pool, "a") as (a, controls), replica(valkey_url, pool, "b") as (b, others):
        # Without scorers the fleet needs no prompt hashes, and picks endpoints by requests in flight alone.
        assert a.chooser.choose(prompted("r1")).candidates == "*"
        assert not b.chooser.needs_prefix_hashes
        # A scorer is added through one replica: every replica uses it within a heartbeat.
        change = {"scheduling": {"scorers": {"prefix-affinity": 9}}}
        assert (await controls.change(change)).changes == change
        await until(lambda: a.chooser.needs_prefix_hashes and b.chooser.needs_prefix_hashes)
        # Without a restart, the other replica knows the routes of the first replica.
        await asyncio.gather(a.routes.caught_up.wait(), b.routes.caught_up.wait())
        placement = await a.admission.admit(prompted("r2"), stream_owned=False)

        has_it = f"{placement.endpoints[0]}=0.9000,"
        await until(lambda: b.chooser.choose(prompted("r3")).candidates.startswith(has_it))
        for number in range(8):
            same = await b.admission.admit(prompted(f"r4-{number}"), stream_owned=False)
            assert same.endpoints[0] == placement.endpoints[0]
            b.admission.withdraw(f"r4-{number}", same)
        # Weight 0 disables the scorer for all replicas.
        await others.change({"scheduling": {"scorers": {"prefix-affinity": 0}}})
        await until(lambda: not (a.chooser.needs_prefix_hashes or b.chooser.needs_prefix_hashes))
        assert b.chooser.choose(prompted("r5")).candidates == "*"
        a.admission.withdraw("r2", placement)
