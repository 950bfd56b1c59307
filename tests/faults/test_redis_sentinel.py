"""An operator makes Sentinels replace the primary. (cases/test_case_failover.py kills a primary.)"""

import asyncio
from pathlib import Path

from fault_load import JOINED, UPPER, loaded, rests_within_a_lease, serve
from redis_servers import LOOPBACK, PATIENT_MS, REPLACED_S, wait
from redis_watched import SERVICE, watched
from script_fleet import ask, running, until


async def test_counts_return_to_zero_after_a_manual_sentinel_failover(tmp_path: Path, pool: str) -> None:
    with watched(tmp_path, silence_ms=PATIENT_MS) as redis:
        async with running(redis.url, pool, "a", "b", joined=JOINED, listening=True) as it:
            async with loaded(it) as load:
                await load.served_more(50)
                former = redis.primary()
                # The Sentinels promote the Redis replica; the former primary keeps running.
                await asyncio.to_thread(redis.sentinels[0].ask, "SENTINEL", "FAILOVER", SERVICE)
                await asyncio.to_thread(wait, lambda: redis.primary() is not former, "a change", REPLACED_S)
                await load.served_more(100)
            assert load.highest <= 2 * UPPER
            await rests_within_a_lease(it)
            assert redis.primary().ask("EXISTS", it.keys.pool) == 1


async def test_replicas_leave_a_running_primary_once_sentinels_name_another(
    tmp_path: Path, pool: str
) -> None:
    with watched(tmp_path, silence_ms=PATIENT_MS) as redis:
        async with running(redis.url, pool, "a", "b", joined=JOINED, listening=True, checked=False) as it:
            await serve(it, 20)
            former, other = redis.primary(), redis.replica()
            # The former primary is not demoted: this server accepts writes and keeps its connections.
            other.ask("REPLICAOF", "NO", "ONE")
            for sentinel in redis.sentinels:
                sentinel.ask("SENTINEL", "REMOVE", SERVICE)
                sentinel.ask("SENTINEL", "MONITOR", SERVICE, LOOPBACK, other.port, 2)

            def calls() -> dict[int, str]:
                return {
                    each.port: each.info("commandstats").get("cmdstat_fcall", "").split(",")[0]
                    for each in redis.servers
                }

            async def is_left() -> bool:
                before = await asyncio.to_thread(calls)
                await asyncio.sleep(1.5)  # the time of three heartbeats of each replica
                after = await asyncio.to_thread(calls)
                return before[former.port] == after[former.port] and before[other.port] != after[other.port]

            await until(is_left, 5.0)
            assert former.info("replication")["role"] == "master"
            for replica in it.replicas:
                assert (await replica.gate.admit(ask(replica.name), stream_owned=False)).endpoints
