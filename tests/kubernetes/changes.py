"""Changes of a cluster under load, and how long each takes until clients see it.

What is measured is what the model servers see, so that any picker can be measured: a pod is out once its
server is asked for nothing more. `bench/seat.py` runs the same beside the Go picker.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from api_server import NAMESPACE, ApiServer
from seat import READY_S, Load, Seat

HOSTS = ("127.0.0.61", "127.0.0.62", "127.0.0.63")
OTHER_HOST = "127.0.0.64"
APP, OTHER_APP = {"app": "llm"}, {"app": "next"}
_QUIET_S = 1.5  # a server that is asked for nothing for so long is out
_LOOK_S = 0.02


@dataclass(slots=True)
class Found:
    """Seconds from each change until it was in force, and every answer that was an error."""

    seconds: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


async def started(cluster: ApiServer, seat: Seat) -> None:
    """Model servers as ready pods, and one more of another selector."""
    for number, host in enumerate(HOSTS, 1):
        await seat.start_model(host)
        cluster.put_pod(f"p{number}", host, APP)
    await seat.start_model(OTHER_HOST)
    cluster.put_pod("q", OTHER_HOST, OTHER_APP)


async def change_everything(cluster: ApiServer, seat: Seat, away_s: float) -> Found:
    """Pods turn unready, come back and are deleted; the API server is killed for `away_s`, and again while
    all versions expire; the pool is edited."""
    found = Found()
    first, second, _ = HOSTS

    async def call(change: Callable[[], None]) -> float:
        """When `change` began."""
        began_s = time.monotonic()
        await asyncio.to_thread(change)
        return began_s

    async with loaded(seat, found) as load:
        await load.progress()
        began_s = await call(lambda: cluster.set_ready("p1", first, ready=False))
        found.seconds["an unready pod is out"] = await until_out(seat, load, first) - began_s
        began_s = await call(lambda: cluster.set_ready("p1", first, ready=True))
        found.seconds["a ready pod is in"] = await until_in(seat, first) - began_s
        began_s = await call(lambda: cluster.delete_pod("p2", grace_s=30))
        found.seconds["a deleted pod is out"] = await until_out(seat, load, second) - began_s
        seat.kill_model(second)
        await call(lambda: cluster.delete_pod("p2", grace_s=0))

        await asyncio.to_thread(cluster.kill_api)
        await load.progress(100)
        await asyncio.sleep(away_s)
        await asyncio.to_thread(cluster.start_api)  # it is ready
        began_s = await call(lambda: cluster.set_ready("p1", first, ready=False))
        seconds = await until_out(seat, load, first) - began_s
        found.seconds["a change is seen after the API server came back"] = seconds
        await call(lambda: cluster.set_ready("p1", first, ready=True))
        await until_in(seat, first)

        for number in range(20):  # versions that no watch has seen
            name = f"unrelated-{number}"
            about = {"name": name, "namespace": NAMESPACE}
            cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": about})
        await asyncio.to_thread(cluster.kill_api)
        await asyncio.to_thread(cluster.compact)
        await asyncio.to_thread(cluster.start_api)
        began_s = await call(lambda: cluster.set_ready("p1", first, ready=False))
        seconds = await until_out(seat, load, first) - began_s
        found.seconds["a change is seen though the watch had expired"] = seconds
        await call(lambda: cluster.set_ready("p1", first, ready=True))
        await until_in(seat, first)

        began_s = await call(lambda: cluster.put_pool("llm", [seat.port], OTHER_APP))
        former = [until_out(seat, load, each) for each in HOSTS if each != second]
        at_s = max(await asyncio.gather(until_in(seat, OTHER_HOST), *former))
        found.seconds["an edited pool is in force"] = at_s - began_s
        await load.progress()
    began_s = await call(lambda: cluster.put_pool("llm", [seat.port], {"app": "nobody"}))
    await seat.until_answered(503)
    found.seconds["a pool that selects nothing is refused"] = time.monotonic() - began_s
    return found


@contextlib.asynccontextmanager
async def loaded(seat: Seat, found: Found) -> AsyncIterator[Load]:
    async with seat.load() as load:
        yield load
    found.errors += load.errors


async def until_out(seat: Seat, load: Load, host: str) -> float:
    """When a server ended its last request, by the clock of `time.monotonic`; others serve meanwhile."""
    last, last_s, end_s = await seat.received(host), time.monotonic(), time.monotonic() + READY_S
    served = load.served.total()
    while time.monotonic() < last_s + _QUIET_S or load.served.total() < served + 50:
        assert time.monotonic() < end_s, f"{host} is still asked; errors: {load.errors[:3]}"
        await asyncio.sleep(_LOOK_S)
        if (now := await seat.received(host)) != last:
            last, last_s, served = now, time.monotonic(), load.served.total()
    return last_s


async def until_in(seat: Seat, host: str) -> float:
    """When a server has ended a request more."""
    before, end_s = await seat.received(host), time.monotonic() + READY_S
    while await seat.received(host) == before:
        assert time.monotonic() < end_s, f"{host} is asked for nothing"
        await asyncio.sleep(_LOOK_S)
    return time.monotonic()
