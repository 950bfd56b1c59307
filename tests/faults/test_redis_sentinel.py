"""An operator has the Sentinels replace the primary. (Killed: cases/test_case_failover.py)"""

import asyncio
from pathlib import Path

from fault_load import JOINED, UPPER, loaded, rests_within_a_lease
from redis_servers import PATIENT_MS, REPLACED_S, wait
from redis_watched import SERVICE, watched
from script_fleet import running


async def test_a_primary_made_a_replica_by_an_operator_costs_no_count(tmp_path: Path, pool: str) -> None:
    # A fleet under load on a Redis with Sentinels.
    with watched(tmp_path, silence_ms=PATIENT_MS) as redis:
        async with running(redis.url, pool, "a", "b", joined=JOINED, listening=True) as it:
            async with loaded(it) as load:
                await load.served_more(50)
                former = redis.primary()
                # The Sentinels change the primary, which stays up.
                await asyncio.to_thread(redis.sentinels[0].ask, "SENTINEL", "FAILOVER", SERVICE)
                await asyncio.to_thread(wait, lambda: redis.primary() is not former, "a change", REPLACED_S)
                await load.served_more(100)
            assert load.highest <= 2 * UPPER
            await rests_within_a_lease(it)
            assert redis.primary().ask("EXISTS", it.keys.pool) == 1
