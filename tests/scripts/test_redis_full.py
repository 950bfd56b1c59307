"""A Redis server that is out of memory refuses new requests and still serves admitted requests."""

import asyncio
from typing import Any

import pytest
from redis_servers import Server
from script_fleet import Fleet, ask, asked, ended, running, until

from picker_fleet.admission.failover import FailoverState
from picker_fleet.domain.errors import ExpiredTtl, WritesRefused

ROOM = 400_000  # bytes of memory left for waiting requests


class Clients:
    """Clients whose requests each have their own flow with a long name, to fill the server's memory."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        (a,) = fleet.replicas
        self.replica, self.gate = a, a.gate
        a.fails_over()
        self.running: list[str] = []
        self.tasks: list[asyncio.Task[Any]] = []

    async def ask(self, name: str, **about: Any) -> None:
        await self.gate.admit(ask(name, flow=f"{name} {'x' * 2000}", **about), stream_owned=False)
        self.running.append(name)

    async def fill(self) -> WritesRefused:
        """Send requests until one is refused; all earlier requests are in flight or wait."""
        while True:
            queued = await self.fleet.queued()
            task = asyncio.create_task(self.ask(f"r{len(self.tasks)}", workload=f"w{len(self.tasks)}"))

            async def answered(before: int = queued, task: asyncio.Task[Any] = task) -> bool:
                return task.done() or await self.fleet.queued() > before

            await until(answered)
            if task.done() and isinstance(refused := task.exception(), WritesRefused):
                return refused
            self.tasks.append(task)

    async def serve(self) -> None:
        """End requests until none is in flight or waiting."""
        while self.running or self.replica.gate.queue.waiting:
            for name in self.running:
                await self.replica.store.renew(name, None, "", "")
                self.gate.settle(ended(name))
            self.running.clear()
            await self.replica.beat()
            await asyncio.sleep(0)


async def test_a_full_redis_refuses_new_requests_and_serves_admitted_ones(server: Server, pool: str) -> None:
    async with running(server.url, pool, "a", upper_per=2, listening=True, log_max=0) as it:
        clients = Clients(it)
        a, gate = clients.replica, clients.gate
        gate.failover.update_peers({"a": {"degraded": False}})
        gate.failover.heartbeat_answered(await a.beat())
        await clients.ask("runs first")
        base = (await it.redis.info("memory"))["used_memory"]
        await it.redis.config_set("maxmemory", base + ROOM)
        refused = await clients.fill()
        assert (refused.status, refused.retry_after_s) == (503, 1)
        waiting = a.gate.queue.waiting
        assert waiting > 20
        # From now on the server has no memory left at all.
        await it.redis.config_set("maxmemory", 1)
        await a.beat()
        assert (await a.sweep()).ran
        for on in (True, False):
            assert await a.store.mark_endpoint("10.0.0.1:8000", "down", on) == "marked"
        await a.store.set_live_config({"paused": None}, {"paused": None})
        clients.tasks[-1].cancel()
        await until(lambda: a.gate.queue.waiting == waiting - 1)
        await asyncio.wait_for(clients.serve(), 60)
        *served, _ = clients.tasks
        await asyncio.gather(*served)
        await until(it.at_rest)
        # New requests are still refused, by a replica that still uses the shared state.
        with pytest.raises(WritesRefused):
            await clients.ask("new")
        assert gate.failover.state is FailoverState.SHARED
        await it.redis.config_set("maxmemory", 0)
        await clients.ask("new")
        await clients.serve()
        await until(it.at_rest)


async def test_a_request_that_waits_in_a_full_redis_expires_at_its_ttl(server: Server, pool: str) -> None:
    async with running(server.url, pool, "a", upper_per=1, listening=True) as (it, a):
        await a.gate.admit(ask("runs"), stream_owned=False)
        waits = asked(a, "waits", ttl_s=0.2)
        await until(lambda: a.gate.queue.waiting == 1 or waits.done())
        await it.redis.config_set("maxmemory", 1)
        with pytest.raises(ExpiredTtl):
            await waits
        await it.ends(a, "runs")
        await it.redis.config_set("maxmemory", 0)
