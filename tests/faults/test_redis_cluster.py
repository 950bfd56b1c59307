"""A Redis Cluster stores pools in different slots, and a primary hands its slots over to its replica.

tests/faults/cases/test_case_failover.py kills a primary.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest
from fault_load import JOINED, UPPER, loaded, rests_within_a_lease, serve
from redis_clustered import Cluster, clustered
from redis_servers import PATIENT_MS, REPLACED_S, wait
from script_fleet import running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with clustered(tmp_path_factory.mktemp("cluster"), silence_ms=PATIENT_MS) as it:
        yield it


async def test_each_pool_is_stored_on_the_primary_that_owns_its_slot(cluster: Cluster) -> None:
    # Each primary owns one of the pools; the URL of each fleet names the same single node.
    pools = await asyncio.to_thread(cluster.pools)
    url = f"redis+cluster://127.0.0.1:{cluster.servers[4].port}"
    async with AsyncExitStack() as stack:
        fleets = [
            await stack.enter_async_context(running(url, pool, "a", "b", joined=JOINED, listening=True))
            for pool in pools
        ]
        for fleet in fleets:
            assert (await serve(fleet, 50)).highest == UPPER
        # Each pool is stored on the owner of its slot, and each owner has exactly one library.
        for pool, fleet in zip(pools, fleets, strict=True):
            owner = await asyncio.to_thread(cluster.owner, pool)
            assert owner is not None
            assert owner.ask("EXISTS", fleet.keys.pool) == 1
            assert len(owner.ask("FUNCTION", "LIST")) == 1


async def test_a_cluster_failover_by_an_operator_refuses_no_request(cluster: Cluster, pool: str) -> None:
    async with running(cluster.url, pool, "a", "b", joined=JOINED, listening=True) as it:
        async with loaded(it) as load:
            await load.served_more(100)
            owner = cluster.owner(pool)
            assert owner is not None
            heir = next(server for server in cluster.servers if server.follows(owner.port))
            # The owner's replica takes over the slot (CLUSTER FAILOVER), and the former owner answers MOVED.
            await asyncio.to_thread(heir.ask, "CLUSTER", "FAILOVER")
            await asyncio.to_thread(
                wait, lambda: cluster.owner(pool) not in (None, owner), "another owner", REPLACED_S
            )
            await load.served_more(200)
        # No request is refused, and no more requests run than the bound allows.
        assert load.refused == 0
        assert load.highest == UPPER
        await rests_within_a_lease(it)
