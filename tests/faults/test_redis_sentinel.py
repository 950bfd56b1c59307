"""Sentinels replace the primary: the fleet follows, and is right again within a lease."""

import asyncio
from pathlib import Path

from fault_load import JOINED, LEASE_S, UPPER, loaded, rests
from redis_servers import Watched, watched
from script_fleet import running, until


async def test_a_killed_primary_is_followed_by_its_replacement(tmp_path: Path, pool: str) -> None:
    # Given a fleet under load on a watched Redis
    with watched(tmp_path) as redis:
        async with running(redis.url, pool, "a", "b", "c", joined=JOINED, listening=True) as it:
            async with loaded(it) as load:
                await load.served_more(100, until)
                former = redis.primary()
                # When the primary dies
                await asyncio.to_thread(former.kill)
                await until(lambda: _is_replaced(redis, former.port))
                # Then the load goes on through another server
                await load.served_more(200, until)
            # And every request had its answer, and over-admission was no more than what ran when it died
            print(f"highest {load.highest}, served {load.served}, refused {load.refused}")
            assert load.highest <= 2 * UPPER
            # And within a lease all counts are exactly 0
            async with asyncio.timeout(2 * LEASE_S):
                while not await rests(it):
                    await asyncio.sleep(0.05)


async def _is_replaced(redis: Watched, port: int) -> bool:
    return (await asyncio.to_thread(redis.primary)).port != port
