"""Whole fleets on Redis as it is run in production: watched by Sentinels, as a Cluster, with TLS and ACL."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fleet_load import PATIENT, Answer, at_rest, complete, shared
from redis_servers import LOOPBACK, REPLACED_S, certificate, clustered, debian, running, watched
from whole_fleet import AS_BY_DEFAULT

import app

LEASE_S = 15.0
CONFIG = {
    **AS_BY_DEFAULT, "fair_request_queue": {"flow_capacity": 1000}, "decision_log": {"enabled": True},
}  # fmt: skip
LOADED = ("--sim-ttft", "20", "--sim-itl", "2")
POOL = "default"


async def keep_asking(here: Any, fail: Callable[[], Awaitable[None]]) -> list[Answer]:
    """Ask through Envoy from 40 clients; `fail` when the first have their answers; go on until each client
    has been served after it. A request that hangs is a TimeoutError."""
    answers: list[Answer] = []
    failed = asyncio.Event()

    async def client(number: int, http: Any) -> None:
        turn, served = 0, False
        while not served:
            before = failed.is_set()
            async with asyncio.timeout(60):
                answer = await complete(http, f"prompt {number} {turn}", 5)
            answers.append(answer)
            turn += 1
            served = before and answer.whole
            if not answer.whole:
                await asyncio.sleep(0.1)

    async def begun() -> bool:
        return len(answers) >= 40

    async def break_it() -> None:
        await here.eventually(begun, within_s=60, what="the first answers")
        await fail()
        failed.set()

    async with here.client(**PATIENT) as http, asyncio.TaskGroup() as tasks:
        for number in range(40):
            tasks.create_task(client(number, http))
        tasks.create_task(break_it())
    return answers


async def settled(here: Any, answers: list[Answer]) -> None:
    """Nobody saw anything but an answer or `come again`, and within a lease all counts are exactly 0."""
    odd = [answer for answer in answers if not answer.whole and answer.status != 503]
    assert odd == []
    await at_rest(here, within_s=LEASE_S + 5)
    state = await shared(here)
    assert state["stock"] == 0


async def test_a_sentinels_failover_is_survived(fleet: Any, tmp_path: Path) -> None:
    # Given a fleet on a watched Redis
    with watched(tmp_path) as redis:
        here = fleet("--redis", redis.url, *LOADED, config=CONFIG)

        async def kill() -> None:
            former = redis.primary()
            await asyncio.to_thread(former.kill)

            async def replaced() -> bool:
                return (await asyncio.to_thread(redis.primary)).port != former.port

            await here.eventually(replaced, within_s=REPLACED_S, what="another primary")

        # When its primary dies under load
        answers = await keep_asking(here, kill)
        # Then every client is served in the end
        await settled(here, answers)
        here.stop()


async def test_the_death_of_a_slots_owner_is_survived(fleet: Any, tmp_path: Path) -> None:
    # Given a fleet on a Cluster
    with clustered(tmp_path) as redis:
        here = fleet("--redis", redis.url, *LOADED, config=CONFIG)

        async def kill() -> None:
            owner = redis.owner(POOL)
            assert owner is not None
            await asyncio.to_thread(owner.kill)

            async def replaced() -> bool:
                return await asyncio.to_thread(redis.owner, POOL, but=[owner]) is not None

            await here.eventually(replaced, within_s=REPLACED_S, what="another owner")

        # When the owner of its pool's slot dies under load
        answers = await keep_asking(here, kill)
        # Then every client is served in the end
        await settled(here, answers)
        here.stop()


async def test_a_fleet_of_the_least_rights_serves_over_tls(fleet: Any, tmp_path: Path) -> None:
    # Given a Redis that speaks TLS only, and a user who may do what docs/redis.md says
    page = (Path(app.__file__).parent.parent / "docs/redis.md").read_text()
    rules = next(line for line in page.splitlines() if line.startswith("user picker on")).split()[4:]
    files = certificate(tmp_path / "certificate")
    with running(debian("redis-server"), tmp_path / "redis", tls=files) as server:
        server.ask("ACL", "SETUSER", "picker", "on", ">secret", *rules)
        options = "&".join(f"ssl_{name}={files}/{file}.pem" for name, file in FILES)
        url = f"rediss://picker:secret@{LOOPBACK}:{server.port}/0?{options}"
        scorers = [{"name": name} for name in ("prefix-affinity", "latency", "queue-depth")]
        here = fleet("--redis", url, *LOADED, config={**CONFIG, "scheduling": {"scorers": scorers}})
        # When clients ask
        async with here.client(**PATIENT) as http:
            answers = await asyncio.gather(*(complete(http, f"prompt {i}", 5) for i in range(60)))
        # Then each is served, and nothing was denied
        assert [answer for answer in answers if not answer.whole] == []

        async def rests() -> bool:
            state = await shared(here)
            return not any([state["stock"], state["queued"], state["leases"], *state["in_flight"].values()])

        await here.eventually(rests, what="rest")
        assert server.ask("EXISTS", "epp:{default}:routes", "epp:{default}:metrics") == 2
        assert server.ask("ACL", "LOG") == []
        here.stop()


FILES = (("ca_certs", "cert"), ("certfile", "cert"), ("keyfile", "key"))
