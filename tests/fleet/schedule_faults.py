"""The faults, configurations and operators' changes that schedules draw (schedules.py).

A schedule whose seed is at least FIRST_SEED also draws some of EXTRAS. An extra is a configuration from
SETTINGS, or a change from CHANGES, which the schedule makes and undoes twice.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from envoy.data.accesslog.v3 import accesslog_pb2
from page_server import PageServer
from whole_fleet import exact_bounds

from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import RequestError
from picker_fleet.endpoints.discovery import endpoints_of
from picker_fleet.endpoints.stages import with_stages
from picker_fleet.pool import Pool

if TYPE_CHECKING:
    from schedules import Node, World


class Fault(NamedTuple):
    at_s: float
    kind: str
    replica: int
    lasts_s: float


Steps = AsyncIterator[None]


async def _kill(world: "World", node: "Node", fault: Fault) -> Steps:
    if not node.dead.is_set() and sum(not each.dead.is_set() for each in world.nodes) > 1:
        await node.kill()
        yield
        node_now = world.nodes.index(node)
        world.nodes[node_now] = await world.started()


async def _stop(world: "World", node: "Node", fault: Fault) -> Steps:
    if not node.stopped and not node.dead.is_set():
        node.stopped = 1
        # Other replicas may return to Redis, which then lacks the requests that this replica has placed
        # without Redis; in a long stop the leases of requests whose streams this replica owns end.
        outage = node.pool.admission.failover.outage
        since_s = 0.0 if fault.lasts_s > LEASE_S / 2 else outage.began_s if outage is not None else math.inf
        own = (name for name, each in world.running.items() if each.node is node and each.began_s >= since_s)
        world.unseen.update(own)
        world.loop.stop_process(node.name)
        try:
            yield
        finally:
            world.loop.continue_process(node.name)
            node.stopped = 0


def _toggled(name: str, on: bool | float, *, everybody: bool = False, cuts: bool = False) -> Any:
    """A fault that sets an attribute of the proxy in front of Redis, for one replica or for all."""

    async def toggle(world: "World", node: "Node", fault: Fault) -> Steps:
        chosen = list(world.nodes) if everybody else [node]
        for each in chosen:
            setattr(each.between, name, on)
            if cuts:
                each.between.cut()
        yield
        for each in chosen:
            if not each.dead.is_set():
                setattr(each.between, name, type(on)())

    return toggle


async def _partition(world: "World", node: "Node", fault: Fault) -> Steps:
    node.between.vanished = True
    yield
    if not node.dead.is_set():
        node.between.strand()  # data dropped during the partition never arrives
        node.between.vanished = False


async def _cut(world: "World", node: "Node", fault: Fault) -> Steps:
    for _ in range(3):
        node.between.cut()
        yield


async def _lose_replies(world: "World", node: "Node", fault: Fault) -> Steps:
    node.between.lose_script_replies += 2
    yield


async def _step_clock(world: "World", node: "Node", fault: Fault) -> Steps:
    world.loop.server.step_s += fault.lasts_s * (1 if fault.replica else -1)
    yield


async def _restart(world: "World", node: "Node", fault: Fault) -> Steps:
    if not world.loop.server.away:
        world.loop.server.close()
        world.valkey.kill()
        yield
        world.valkey.revive()
        world.loop.server.connect()
        world.loop.server.set_clock(world.loop.time())


async def _fail_over(world: "World", node: "Node", fault: Fault) -> Steps:
    """A fault: a new Redis primary, which lacks the last writes, takes over."""
    if world.loop.server.away:
        return
    saved = world.valkey.save("epp:*")
    yield
    if not world.loop.server.away:
        world.valkey.ask("EVAL", *saved)
        world.loop.server.cut_others()


def _refusing(setting: str) -> Any:
    async def refuse(world: "World", node: "Node", fault: Fault) -> Steps:
        server = world.loop.server
        if not server.away and not server.refuses:
            server.refuses = setting
            server.set(setting, 1)
            yield
            server.refuses = ""
            if not server.away:
                server.set(setting, 0)

    return refuse


async def _hostile(world: "World", node: "Node", fault: Fault) -> Steps:
    """A hostile client sends other clients' ids with the same and with different bodies, malformed bodies,
    and access-log entries that end or renew other clients' requests."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(30):
            known = world.dice.choice(world.history).id if world.history else "x"
            said = world.dice.choice((b"", b"{", b"[]", b'{"model": "llama", "prompt": "mine"}'))
            leaves_s = world.dice.uniform(0.0, fault.lasts_s)
            tasks.create_task(world.ask_hostile(known, leaves_s, said))
            entry = accesslog_pb2.HTTPAccessLogEntry(request={"request_id": known})
            world.report(entry, world.dice.choice(("DownstreamEnd", "DownstreamPeriodic")))
    yield


KINDS: dict[str, Callable[["World", "Node", Fault], Any]] = {
    "kill": _kill,
    "stop": _stop,
    "hostile": _hostile,
    "slow": _toggled("delay_s", 0.05, everybody=True),
    "cut": _cut,
    "lost replies": _lose_replies,
    "lost wake-ups": _toggled("drop_messages", True),
    "partition": _partition,
    "stall": _toggled("stalled", True),
    "away": _toggled("refusing", True, everybody=True, cuts=True),
    "silent": _toggled("stalled", True, everybody=True),
    "clock": _step_clock,
    "restart": _restart,
    "failover": _fail_over,
    "out of memory": _refusing("maxmemory"),
    "disk full": _refusing("min-replicas-to-write"),
}
LOSING_WRITES = {"restart", "failover"}
APART = {"partition", "stall", "cut", "disk full", "silent", "lost replies"}  # not all replicas may notice

FIRST_SEED = 600
LEASE_S = 12.0
TOKENS = 12.0  # cost of a request with `unit: tokens`: 2 of the prompt, 10 of the answer
CAP = 2  # most requests in flight on the first endpoint, and most prefills on the last
PARALLEL = {"acme": 5, "acme/flow-1": 2}  # maximum of requests in flight by tenant
RATES = {"acme/flow-0": (4, 1.0), "acme/flow-1": (3, 0.5)}  # burst and rate per second, in requests


def _rate(path: str) -> list[dict[str, Any]]:
    burst, rate = RATES[path]
    return [{"requests": int(60 * rate), "per": "1m", "burst": burst}]


_NODES: list[dict[str, Any]] = [
    {"path": "acme", "max_parallel_requests": PARALLEL["acme"]},
    {"path": "acme/flow-0", "over_limit": "reject", "limits": _rate("acme/flow-0")},
    {
        "path": "acme/flow-1",
        "weight": 3.0,
        "limits": _rate("acme/flow-1"),
        "max_parallel_requests": PARALLEL["acme/flow-1"],
    },
    {
        "path": "acme/flow-2",
        "over_limit": "demote",
        "limits": [{"tokens": 600, "per": "1m", "burst": 60}],
        "budget": {"units": 400.0, "period": "day"},
    },
]
SETTINGS: dict[str, dict[str, Any]] = {
    "bands": {"models": [{"name": "llama"}, {"name": "batch", "criticality": "Sheddable"}]},
    "caps": {},
    "stages": {"scheduling": {"stages": {"threshold": 0}}},
    "tenants": {"tenants": {"nodes": _NODES}},
    "tokens": {},
}


def listed(
    decode: Iterable[PageServer], prefill: Iterable[PageServer], extras: Collection[str]
) -> list[dict[str, Any]]:
    """The entries of `discovery.static`."""
    entries: list[dict[str, Any]] = [{"address": each.address} for each in decode]
    if "caps" in extras:
        entries[0]["max_inflight"] = CAP
    if "stages" in extras:
        role = {"llm-d.ai/role": "prefill"}
        entries += [{"address": each.address, "labels": role} for each in prefill]
        entries[-1]["max_inflight"] = CAP
    return entries


async def _until_made(world: "World", change: Callable[[Pool], Any]) -> None:
    """Make an operator's change through any live replica; repeat the change until it succeeds."""
    while True:
        node = world.any_node()
        try:
            async with asyncio.timeout(5.0):
                return await node.do(change(node.pool))
        except (ConnectionError, RequestError, TimeoutError):
            await asyncio.sleep(0.5)


def _operated(change: Callable[["World", Pool, bool], Any]) -> Any:
    async def steps(world: "World", node: "Node", fault: Fault) -> Steps:
        await _until_made(world, lambda pool: change(world, pool, True))
        yield
        await _until_made(world, lambda pool: change(world, pool, False))

    return steps


async def _retune(world: "World", pool: Pool, on: bool) -> None:
    """Lower the bounds, and the limit of a tenant."""
    schedule = world.schedule
    lower = {"max_per_backend": int(2 * schedule.cost)} if schedule.adaptive else exact_bounds(schedule.cost)
    await pool.operated.controls.change({"request_queue_controller": lower if on else dict.fromkeys(lower)})
    if "tenants" in schedule.extras:
        await pool.store.set_tenants("tenant_changes", {"acme": '{"max_parallel": 2}' if on else ""})


async def _scale(world: "World", node: "Node", fault: Fault) -> Steps:
    """Add or remove an endpoint. Each replica discovers the change at its own time."""
    for added in (1, -1) if fault.replica else (-1, 1):
        world.added += added
        settings = parse(world.tree)
        found = with_stages(endpoints_of(settings.discovery.static or ()), settings.scheduling.stages)
        for each in world.nodes:
            await asyncio.sleep(world.dice.uniform(0.0, 0.5))
            if not each.dead.is_set():
                each.context.run(each.pool.membership.discovered, found)
        yield


CHANGES: dict[str, Callable[["World", "Node", Fault], Any]] = {
    "drain": _operated(lambda world, pool, on: pool.operated.controls.drain(world.pages[0].address, on)),
    "pause": _operated(lambda world, pool, on: pool.operated.controls.pause(on)),
    "retune": _operated(_retune),
    "scale": _scale,
}
EXTRAS = sorted({*SETTINGS, *CHANGES})
HARMLESS = {"kill", "stop", "hostile", "slow", "lost wake-ups", *CHANGES}
