"""A real replica (`picker serve`) whose pool in Redis has an unknown format."""

import asyncio
from pathlib import Path

import redis
from extproc_client import parts
from own_replica import served
from redis_servers import Server
from script_fleet import until

from picker_fleet.state.keys import Keys

POOL = Keys.of("default").pool


async def test_a_replica_joins_a_pool_of_another_format_only_after_its_keys_are_deleted(
    valkey: Server, tmp_path: Path
) -> None:
    config = {"leases": {"heartbeat": "50ms"}}
    log = tmp_path / "log"
    with redis.Redis.from_url(valkey.url) as client, log.open("wb") as lines:
        client.hset(POOL, mapping={"format": "2", "counters": "packed otherwise"})
        asked = client.info("commandstats")["cmdstat_fcall"]["calls"] if _has_calls(client) else 0
        async with served(valkey.url, tmp_path, config=config, stderr=lines) as replica:

            async def has_asked_often() -> bool:
                return (
                    _has_calls(client) and client.info("commandstats")["cmdstat_fcall"]["calls"] > asked + 10
                )

            await until(has_asked_often)
            unready = await replica.admin.get("/readyz")
            assert unready.status_code == 503
            said = unready.json()["components"]["pool"]
            assert "format 2" in said
            assert "delete the keys epp:{default}:*, or set another pool" in said
            assert await replica.hands_on()
            # The replica logs the reason once and leaves the pool's state unchanged.
            assert log.read_text().count("not joining") == 1
            assert said in log.read_text()
            assert client.keys("*") == [POOL.encode()]
            assert client.hgetall(POOL) == {b"format": b"2", b"counters": b"packed otherwise"}
            await asyncio.to_thread(client.delete, POOL)
            await replica.ready()
            assert parts([await replica.decide()]) == ["request_headers"]
            assert client.hget(POOL, "format") == b"1"


def _has_calls(client: "redis.Redis") -> bool:
    return "cmdstat_fcall" in client.info("commandstats")
