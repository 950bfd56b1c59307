"""Background tasks of a replica fail at each of their awaits in turn; the replica keeps serving."""

import asyncio
import logging
import types
from collections import defaultdict
from collections.abc import Coroutine, Generator
from typing import Any

import pytest
from metrics_page import samples
from redis_servers import Server
from time_lapse import BOUND, SERVICE_S, fleet, time_lapse

from picker_fleet import background

Place = tuple[str, int]


class Injected(Exception):
    """The exception that `Injector` raises in background tasks."""


class Injector:
    """A task factory: each task of `background.keep` fails once at every line of picker_fleet that awaits."""

    def __init__(self) -> None:
        self.places: dict[str, set[Place]] = defaultdict(set)
        self.active = False

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        if getattr(coroutine, "cr_code", None) is background.keep.__code__:
            coroutine = self._drive(coroutine)
        return asyncio.Task(coroutine, loop=loop, **options)

    async def _drive(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await self._steps(coroutine)

    @types.coroutine
    def _steps(self, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        assert isinstance(coroutine, types.CoroutineType)
        step = coroutine.send, None
        while True:
            call, value = step
            try:
                awaited = call(value)
            except StopIteration as end:
                return end.value
            name, place = _waits_at(coroutine)
            if self.active and place is not None and place not in self.places[name]:
                self.places[name].add(place)
                if awaited is not None:
                    awaited._asyncio_future_blocking = False
                step = coroutine.throw, Injected(f"{name} at {place}")
                continue
            try:
                step = coroutine.send, (yield awaited)
            except BaseException as fault:
                step = coroutine.throw, fault


def _waits_at(coroutine: Any) -> tuple[str, Place | None]:
    """The name of the innermost task of `background.keep`, and the picker_fleet line where that task awaits.

    The line is None in the pause after a failure, and where asyncio would not clean up after an exception: in
    a TaskGroup that waits for its tasks, and while a connection is made.
    """
    name, place, each = "", None, coroutine
    while isinstance(each, types.CoroutineType):
        code, frame = each.cr_code, each.cr_frame
        if "TaskGroup" in code.co_qualname or code.co_name == "create_connection":
            return name, None
        if code is background.keep.__code__:
            name, place = frame.f_locals["task"], None
        elif "picker_fleet" in code.co_filename:
            place = code.co_filename, frame.f_lineno
        each = each.cr_await
    return name, place


def test_a_background_task_that_fails_at_any_await_is_run_again(
    valkey: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    injector = Injector()

    async def life() -> None:
        asyncio.get_running_loop().set_task_factory(injector)
        injector.active = True
        async with fleet(valkey.url, "http", 1, {}) as some:
            for _ in range(5):
                for _ in range(4):
                    await some.burst(2 * BOUND, SERVICE_S)
                    await asyncio.sleep(20.0)
                lapse.server.cut_others()
            injector.active = False
            await some.burst(2 * BOUND, SERVICE_S)
            pool = some.replicas[0].pool
            await asyncio.sleep(60.0)
            state = await pool.store.state(60.0)
            assert (state.stock, state.queued, state.leases) == (0, 0, 0)
            failures = samples(pool.metrics)
        assert injector.places.keys() >= {
            "heartbeat", "sweep", "renewal", "notifications", "redis-monitor", "redis-connection", "wake-ups",
            "discovery", "failover-watch", "tombstones", "scraper", "scrape", "metrics-channel",
            "scraping-assignment", "checks", "keepalive", "uploads",
            "readiness",
        }  # fmt: skip
        for name, places in injector.places.items():
            assert failures["epp_background_failures_total", f"task={name}"] == len(places), name

    with time_lapse(valkey.url, monkeypatch) as lapse:
        lapse.run_until_complete(asyncio.wait_for(life(), 3600.0))
    logged = [record for record in caplog.records if record.name == background.__name__]
    tracebacks = [record for record in logged if record.exc_info and record.levelno == logging.ERROR]
    assert len(tracebacks) == sum(map(len, injector.places.values()))
