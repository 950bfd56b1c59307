"""Replicas that come and go, and whoever kills, changes and follows them."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

from redis.asyncio import Redis

from bench.fairness.job import Job
from bench.rig.child import Child
from bench.upheaval.configuration import POOL, change, configuration
from picker_fleet.state.awake import AwakeClock
from picker_fleet.state.keys import Keys
from picker_fleet.state.silence import Silence
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics
from picker_tools.local_fleet.network import LOOPBACK

_READY_S = 30.0
_ENDS_S = 60.0
_KILL_EVERY_S = (2.0, 5.0)
_CHANGE_EVERY_S = (0.2, 1.0)
_PAUSE_S = 0.3
_ADOPTED = 0.8  # of what a dead replica held: the rest has lost its client too
_CHUNK = 2000
_LOOK_S = 0.05
_CALL_S = 5.0
_RECORDS = f"epp:{{{POOL}}}:requests"
_ENDS = frozenset(
    ("expired", "abandoned", "cancelled", "withdrawn", "refused", "preempted", "evicted", "completed",
     "client_gone", "upstream_failed", "reclaimed")
)  # fmt: skip


@dataclass(slots=True)
class Deeds:
    """What was done to the fleet, and what its log says happened, by event."""

    kills: int = 0
    brought_again: int = 0
    changes: int = 0
    pauses: int = 0
    evictions: int = 0
    events: Counter[str] = field(default_factory=Counter)


class Upheaval:
    """A run. When `run` has returned, its decision log is complete."""

    def __init__(self, port: int, seed: int, replicas: int) -> None:
        self._url = f"redis://{LOOPBACK}:{port}/0"
        self._redis = Redis(host=LOOPBACK, port=port, decode_responses=True, socket_timeout=_CALL_S)
        self._dice = random.Random(seed)
        self._size = replicas
        self._names = (f"replica-{number}" for number in range(1_000_000))
        self._children: list[Child] = []
        self._open: dict[str, str] = {}  # request -> owner, as far as the log has been read
        self._last = "-"
        self._over = False
        self.deeds = Deeds()
        self._store = Store(
            self._url, pool=POOL, replica="operator", silence=Silence(_CALL_S, _CALL_S),
            awake=AwakeClock(), connect_timeout_s=_CALL_S, metrics=Metrics(),
            on_news=lambda what, request_id: None, on_dequeued=lambda tried, done: None,
            on_adopted=lambda: None, on_away=lambda cause, why: None,
        )  # fmt: skip

    async def run(self, requests: int) -> None:
        """Until so many have been let in, then until the fleet is at rest."""
        try:
            for _ in range(self._size):
                self._children.append(await self._started())
            async with asyncio.TaskGroup() as tasks:
                deeds = [
                    tasks.create_task(deed)
                    for deed in (self._store.run(), self._kill(), self._change(), self._evict())
                ]
                while self._arrived() < requests:
                    await self._read()
                self._over = True  # a kill finishes: who was started in its place has to be told the end
                for deed in deeds[2:]:
                    deed.cancel()
                await asyncio.wait(deeds[1:])
                await self._store.tune({"paused": None}, {})
                await self._end()
                deeds[0].cancel()
        finally:
            await asyncio.gather(*(child.kill() for child in self._children))
            await self._redis.aclose()

    async def _started(self) -> Child:
        child = await Child.started(next(self._names), "bench.upheaval.replica")
        child.say(Job(child.name, configuration(self._url), (), (0.0, 0.0), child.name).written())
        await child.hear("ready", _READY_S)
        return child

    def _arrived(self) -> int:
        events = self.deeds.events
        return events["queued"] + events["bypassed"]

    async def _read(self) -> None:
        answer = await self._redis.xrange(Keys.of(POOL).log, min=self._last, count=_CHUNK)
        if len(answer) < _CHUNK:
            await asyncio.sleep(_LOOK_S)
        for at, entry in answer:
            self._last = f"({at}"
            event, request = entry["event"], entry["request"]
            self.deeds.events[event] += 1
            if event in _ENDS:
                self._open.pop(request, None)
            elif request:
                self._open[request] = entry["owner"]

    async def _end(self) -> None:
        """Let all that asks finish, and leases and graces run out, until nothing is left."""
        for child in self._children:
            child.say("end")
        async with asyncio.TaskGroup() as tasks:
            for child in self._children:
                tasks.create_task(child.hear("done", _ENDS_S))
        try:
            async with asyncio.timeout(_ENDS_S):
                while self._open or await self._redis.hlen(_RECORDS):
                    await self._read()
        except TimeoutError:
            left = await self._redis.hkeys(_RECORDS)
            raise RuntimeError(
                f"never at rest: {len(self._open)} open by the log, {list(self._open.items())[:5]};"
                f" {len(left)} by the records, {left[:5]}"
            ) from None
        await self._read()

    async def _kill(self) -> None:
        while True:
            await asyncio.sleep(self._dice.uniform(*_KILL_EVERY_S))
            if self._over:
                return
            dead = self._children.pop(self._dice.randrange(len(self._children)))
            await dead.kill()
            self.deeds.kills += 1
            held = [request for request, owner in self._open.items() if owner == dead.name]
            for request in held:
                if self._dice.random() < _ADOPTED:
                    self._dice.choice(self._children).say(f"adopt {request}")
                    self.deeds.brought_again += 1
            self._children.append(await self._started())

    async def _change(self) -> None:
        while True:
            await asyncio.sleep(self._dice.uniform(*_CHANGE_EVERY_S))
            if self._dice.random() < 0.1:
                await self._store.tune({"paused": 1}, {})
                await asyncio.sleep(_PAUSE_S)
                await self._store.tune({"paused": None}, {})
                self.deeds.pauses += 1
            else:
                await self._store.tune(change(self._dice), {})
                self.deeds.changes += 1

    async def _evict(self) -> None:
        while True:
            await asyncio.sleep(self._dice.uniform(0.1, 0.5))
            if self._open:
                request = self._dice.choice(list(self._open))
                self.deeds.evictions += await self._store.evict(request) == "evicted"
