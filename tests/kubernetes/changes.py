"""Changes pods, pools and the API server under load, and measures how soon each change takes effect.

The times come from the model servers, so that every picker can be measured: a pod is out once its server gets
no further request. `make long ARGS=cluster-changes` measures this picker and the Go picker.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from api_server import ApiServer
from seat import APP, READY_S, Seat

from picker_tools.load.generator import Load

HOSTS = ("127.0.0.61", "127.0.0.62", "127.0.0.63")
OTHER_HOST = "127.0.0.64"
OTHER_APP = {"app": "next"}
_QUIET_S = 1.5  # a server counts as out after this time without a request
_LOOK_S = 0.02


@dataclass(slots=True)
class Found:
    """Seconds from each change until it took effect, and a text for each failed request."""

    seconds: dict[str, float] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)


async def started(cluster: ApiServer, seat: Seat) -> None:
    """Start three ready pods with labels `APP`, and one with `OTHER_APP`, each with a model server."""
    for number, host in enumerate(HOSTS, 1):
        await seat.start_pod(cluster, f"p{number}", host, APP)
    await seat.start_pod(cluster, "q", OTHER_HOST, OTHER_APP)


async def change_everything(cluster: ApiServer, seat: Seat, away_s: float) -> Found:
    """Make a pod unready and ready, delete a pod, kill the API server for `away_s`, expire all watches,
    change the pool's selector, and measure each change."""
    found = Found()
    first, second, third = HOSTS
    unready, ready = (partial(cluster.set_ready, "p1", first, ready=is_ready) for is_ready in (False, True))

    async def measure(what: str, change: Callable[[], None], *seen: Awaitable[float]) -> None:
        """Run `change`, and note the seconds from its start until all of `seen` have happened."""
        began_s = time.monotonic()
        await asyncio.to_thread(change)
        found.seconds[what] = max(await asyncio.gather(*seen)) - began_s

    async with seat.load() as load:
        await load.wait_for_served(50)
        await measure("an unready pod is out", unready, until_out(seat, load, first))
        await measure("a ready pod is in", ready, until_in(seat, first))
        deletion = partial(cluster.delete_pod, "p2", grace_s=30)
        await measure("a deleted pod is out", deletion, until_out(seat, load, second))
        seat.kill_model(second)
        await asyncio.to_thread(cluster.delete_pod, "p2", grace_s=0)

        await asyncio.to_thread(cluster.kill_api)
        await load.wait_for_served(100)
        await asyncio.sleep(away_s)
        await asyncio.to_thread(cluster.start_api)  # returns once the API server is ready
        what = "a change is seen after the API server came back"
        await measure(what, unready, until_out(seat, load, first))
        await asyncio.to_thread(ready)
        await until_in(seat, first)

        for number in range(20):  # resource versions that no watch has seen
            cluster.put("v1", "ConfigMap", f"unrelated-{number}")
        for step in (cluster.kill_api, cluster.compact, cluster.start_api):
            await asyncio.to_thread(step)
        what = "a change is seen after the watch expired"
        await measure(what, unready, until_out(seat, load, first))
        await asyncio.to_thread(ready)
        await until_in(seat, first)

        edit = partial(cluster.put_pool, "llm", [seat.port], OTHER_APP)
        former = [until_out(seat, load, each) for each in (first, third)]
        await measure("an edited pool is in force", edit, until_in(seat, OTHER_HOST), *former)
        await load.wait_for_served(50)
    found.errors = [f"{each.status} {each.fault} {each.reason}" for each in load.unserved]
    began_s = time.monotonic()
    await asyncio.to_thread(cluster.put_pool, "llm", [seat.port], {"app": "nobody"})
    await seat.until_answered(503)
    found.seconds["a pool that selects nothing is refused"] = time.monotonic() - began_s
    return found


async def until_out(seat: Seat, load: Load, host: str) -> float:
    """Wait until the server at `host` gets no further request while others serve. Returns the monotonic time
    at which the server's last request was seen to end."""
    last, last_s, end_s = await seat.received(host), time.monotonic(), time.monotonic() + READY_S
    served = load.served
    while time.monotonic() < last_s + _QUIET_S or load.served < served + 50:
        assert time.monotonic() < end_s, f"{host} still gets requests; errors: {load.unserved[:3]}"
        await asyncio.sleep(_LOOK_S)
        if (now := await seat.received(host)) != last:
            last, last_s, served = now, time.monotonic(), load.served
    return last_s


async def until_in(seat: Seat, host: str) -> float:
    """Wait until the server at `host` has completed one more request. Returns the monotonic time."""
    before, end_s = await seat.received(host), time.monotonic() + READY_S
    while await seat.received(host) == before:
        assert time.monotonic() < end_s, f"{host} gets no request"
        await asyncio.sleep(_LOOK_S)
    return time.monotonic()
