"""Runs fairness scenarios, one after the other, with replica processes on one Valkey."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import cast

from redis.asyncio import Redis

from bench.fairness.scenarios import Job, Scenario, assign_replicas, configured
from bench.rig.child import Child, ChildFailed
from bench.rig.server import server
from picker_fleet.state.keys import Keys
from picker_tools.audit.log import Entry
from picker_tools.local_fleet.network import LOOPBACK

_ANSWERS_S = 60.0
_RUN_S = 120.0
_LOOK_S = 0.1
_CHUNK = 5000


class RunFailed(Exception):
    """A run failed; the message says why."""


class Fleet:
    """The replica processes; each call of `run` uses as many processes as its argument `replicas` says."""

    def __init__(self, port: int, redis: Redis, replicas: Sequence[Child]) -> None:
        self._url = f"redis://{LOOPBACK}:{port}/0"
        self._redis = redis
        self._replicas = replicas

    async def run(
        self, scenario: Scenario, seed: int, replicas: int, *, separate: bool = False
    ) -> list[Entry]:
        """Run a scenario; if `separate`, with a pool for each replica. Returns all decision logs by time.

        Raises:
            RunFailed: raised if a replica reports an error or the run takes too long.
        """
        await self._redis.flushall()
        pools = [f"bench-{number}" if separate else "bench" for number in range(replicas)]
        used = self._replicas[:replicas]
        try:
            for replica, job in zip(used, self._jobs(scenario, seed, pools), strict=True):
                replica.send(job.written())
            await asyncio.gather(*(replica.expect("ready", _ANSWERS_S) for replica in used))
            for replica in used:
                replica.send("go")
            async with asyncio.TaskGroup() as tasks:
                for replica in used:  # read the replicas' replies from the start, to notice failures
                    tasks.create_task(replica.expect("done", _RUN_S + _ANSWERS_S))
                async with asyncio.timeout(_RUN_S):
                    entries = await self._follow(sorted(set(pools)), scenario.grants)
                for replica in used:
                    replica.send("stop")
        except (ChildFailed, TimeoutError, ExceptionGroup) as fault:
            cause = fault.exceptions[0] if isinstance(fault, ExceptionGroup) else fault
            why = str(cause) or "timeout"
            raise RunFailed(f"{scenario.name}, {replicas} replicas, seed {seed}: {why}") from None
        return entries

    def _jobs(self, scenario: Scenario, seed: int, pools: Sequence[str]) -> list[Job]:
        assigned = assign_replicas(len(scenario.sources), len(pools))
        jobs = []
        for number, pool in enumerate(pools):
            parts = tuple(
                source.part(through.index(number), len(through))
                for source, through in zip(scenario.sources, assigned, strict=True)
                if number in through
            )
            config = configured(scenario.config, self._url, pool, len(set(pools)))
            jobs.append(Job(f"replica-{number}", config, parts, scenario.service_ms, str(seed)))
        return jobs

    async def _follow(self, pools: Sequence[str], grants: int) -> list[Entry]:
        """Read the pools' decision logs until `grants` requests have been dispatched from the queue."""
        last = dict.fromkeys(pools, "-")
        found: list[Entry] = []
        granted = 0
        while granted < grants:
            await asyncio.sleep(_LOOK_S)
            for pool in pools:
                answer = await self._redis.xrange(Keys.of(pool).log, min=last[pool], count=_CHUNK)
                read = cast(list[tuple[str, dict[str, str]]], answer)  # `decode_responses` yields str
                if read:
                    last[pool] = f"({read[-1][0]}"
                entries = [Entry.parse(fields) for _, fields in read]
                granted += sum(entry.event == "granted" for entry in entries)
                found += entries
        # Do not sort the entries of a single pool: the log's order is right even if the clock jumps.
        return found if len(pools) == 1 else sorted(found, key=lambda entry: entry.time_us)


@contextlib.asynccontextmanager
async def running(replicas: int) -> AsyncIterator[Fleet]:
    """Run a Valkey and `replicas` replica processes until the block ends."""
    with server() as it:
        redis = Redis(host=LOOPBACK, port=it.port, decode_responses=True, socket_timeout=_ANSWERS_S)
        started: list[Child] = []
        try:
            for number in range(replicas):
                started.append(await Child.started(f"replica-{number}", "bench.fairness.replica"))
            yield Fleet(it.port, redis, started)
        finally:
            await asyncio.gather(*(replica.end() for replica in started))
            await redis.aclose()
