"""A real replica (`picker serve`) whose Redis user may not load the Lua library (docs/redis.md, ACL)."""

import asyncio
from pathlib import Path

from extproc_client import parts
from own_replica import Replica, served
from redis_servers import LOOPBACK, Server, documented_user, redis_server
from script_fleet import until

from picker_fleet.cli import main


def url(server: Server, user: str) -> str:
    return f"redis://{user}:secret@{LOOPBACK}:{server.port}/0"


async def until_said(replica: Replica, page: str, words: str) -> None:
    """Wait until the `redis` component of this admin page contains `words`."""

    async def is_said() -> bool:
        found = (await replica.admin.get(page)).json()  # the answer may also be an error for too many calls
        return words in found.get("components", {}).get("redis", "")

    await until(is_said)


async def degraded(replica: Replica) -> bool | None:
    """Whether the state says that the replica works without Redis. None if the API answers with an error."""
    found: bool | None = (await replica.admin.get("/api/v1/state")).json().get("degraded")
    return found


async def test_a_replica_that_may_not_load_the_library_reports_it_and_serves_once_another_user_loads_it(
    tmp_path: Path,
) -> None:
    users: list[str] = []
    for name in ("picker", "loader"):
        users += ("--user", name, "on", ">secret", *documented_user(name).split())
    log = tmp_path / "log"
    with (
        redis_server(
            tmp_path / "valkey", *users, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"
        ) as server,
        log.open("wb") as lines,
    ):
        async with served(url(server, "picker"), tmp_path, stderr=lines) as replica:
            # Without the library, the replica says which command loads it, and refuses every stream.
            await until_said(replica, "/readyz", "picker functions load")
            assert await replica.hands_on()
            await until(lambda: "picker functions load" in log.read_text())
            assert await asyncio.to_thread(main, ["functions", "load", "--redis", url(server, "loader")]) == 0
            await replica.ready()
            # The replica also warns that Redis's eviction policy can lose keys.
            await until_said(replica, "/healthz", "allkeys-lru evicts keys")
            assert "allkeys-lru evicts keys" in log.read_text()
            # Redis restarts without the library: the replica admits locally until the library is loaded.
            server.kill()
            await asyncio.to_thread(server.revive)
            await until_said(replica, "/healthz", "picker functions load")
            await until(lambda: degraded(replica))
            assert parts([await replica.decide()]) == ["request_headers"]
            assert await asyncio.to_thread(main, ["functions", "load", "--redis", url(server, "loader")]) == 0

            async def is_back() -> bool:
                return await degraded(replica) is False

            await until(is_back)
