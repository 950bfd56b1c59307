"""A pool under load loses each kind of key: service and counts recover in seconds; a metric counts losses."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator

import pytest
from metrics_page import samples
from script_fleet import Fleet, OpenFleet, Replica, addresses, ask, config, ended, until
from test_schema import documented, matching

from picker_fleet.admission.admission import Admission
from picker_fleet.domain.errors import RequestError
from picker_fleet.domain.request import Alive, Endpoint, Placement

ENDPOINTS, EACH, CLIENTS = 4, 2, 16
DRAINED = addresses(ENDPOINTS)[-1]
BOUND = (ENDPOINTS - 1) * EACH
# Prefill endpoints have as many places as the decode endpoints in use, so both stages fill up together.
PREFILLERS = ("10.0.1.1:8000", "10.0.1.2:8000", "10.0.1.3:8000")
STAGES = (
    *map(Endpoint, addresses(ENDPOINTS)),
    *(Endpoint(each, prefills=True, decodes=False) for each in PREFILLERS),
)
LIMITED = "f0"
CONFIG = config(
    EACH,
    "200ms",
    request_queue_controller={
        "expiry_cleanup_interval": "200ms",
        "watermark_per_backend": EACH,
        "lower_bound_per_backend": EACH,
        "upper_bound_per_backend": EACH,
    },
    fair_request_queue={"ordering": "workload-aware"},
)
SERVICE_S = 5.0
KEYS = [name for name, kind in documented().items() if kind != "channel"]
# The fleet detects the loss of keys in FOUND, because counts or operators depend on them; others are hints.
FOUND = {
    "pool", "requests", "inflight", "timers", "queue:BAND:FLOWQUEUE", "line:BAND:FLOWQUEUE<31>WORKLOAD",
    "flows:BAND", "limits", "load", "prefill_load", "prefills", "endpoints", "marks", "replicas",
    "replica_info",
}  # fmt: skip
HINTS = tuple(name for name in KEYS if name not in FOUND)


class Load:
    """Clients that send a request after each answer, and an access log of the running requests."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.running: dict[str, Placement] = {}
        self.prefills: dict[str, str] = {}  # running request -> the endpoint that computes its prompt
        self.served = Counter[int]()  # client's number -> requests served
        self.failed = self.peak = self.waiting = 0
        self.paused = False  # while this is True, no request ends

    @contextlib.asynccontextmanager
    async def on(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._client(number)) for number in range(CLIENTS)]
        log = asyncio.create_task(self._access_log())
        try:
            yield
        finally:
            self.paused = False
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            log.cancel()

    async def _client(self, number: int) -> None:
        limit = 2 if number % 4 == 0 else 0
        for turn in range(1_000_000):
            name = f"{number}-{turn}"
            workload = f"w{number % 3}" if number % 2 else ""
            gate = self._gate_of(name)
            request = ask(name, flow=f"f{number % 4}", workload=workload, limit=limit, ttl_s=60.0)
            self.waiting += 1
            try:
                placement = await gate.admit(request, stream_owned=False)
            except RequestError:
                self.failed += 1
                await asyncio.sleep(0.02)
                continue
            finally:
                self.waiting -= 1
            self.running[name] = placement
            if placement.prefillers:
                self.prefills[name] = placement.prefillers[0]
            self.peak = max(self.peak, len(self.running))
            try:
                await asyncio.sleep(random.uniform(0.02, 0.06))
                while self.paused:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                if number % 2:
                    gate.prefilled(name)
                    await asyncio.sleep(0.01)
            finally:
                gate.settle(ended(name))
                del self.running[name]
                self.prefills.pop(name, None)
            self.served[number] += 1

    def _gate_of(self, name: str) -> Admission:
        """The admission gate of the replica that gets the client's requests and their access-log entries."""
        return self.fleet.replicas[int(name.split("-")[0]) % len(self.fleet.replicas)].gate

    async def _access_log(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for name, placement in list(self.running.items()):
                self._gate_of(name).renew(Alive(name, placement.endpoints[0], placement.accounting_token))

    async def pause_with(self, name: str) -> list[str]:
        """Let no further request end; return the pool's keys of the schema's pattern `name`. If no request
        happens to use a wanted key, let requests end, and pause again."""
        gone: list[str] = []
        for _ in range(20 if name in FOUND else 1):
            self.paused = True
            await until(self.counts_are_right)
            prefix = self.fleet.keys.prefix
            keys = [each async for each in self.fleet.redis.scan_iter(prefix + "*", count=1000)]
            gone = [each for each in keys if matching(each.removeprefix(prefix)) == [name]]
            if gone:
                break
            self.paused = False
            await self.until_served()
        return gone

    async def until_served(self) -> None:
        """Wait until each client has had two further requests served, without a failure in between."""
        failed, before = self.failed, self.served.copy()

        def are_served() -> bool:
            nonlocal failed, before
            if self.failed > failed:
                failed, before = self.failed, self.served.copy()
            return all(self.served[number] >= before[number] + 2 for number in range(CLIENTS))

        await until(are_served, SERVICE_S)

    async def prefills_are_right(self) -> bool:
        found = (await self.fleet.state()).prefill_in_flight
        return {each: n for each, n in found.items() if n} == Counter(self.prefills.values())

    async def counts_are_right(self) -> bool:
        state = await self.fleet.state()
        by_endpoint = [placement.endpoints[0] for placement in self.running.values()]
        loads = {address: load for address, load in state.in_flight.items() if load}
        limited = await self.fleet.redis.hget(self.fleet.keys.prefix + "limits", LIMITED)
        return (
            (state.stock, state.queued, state.ready_backends)
            == (len(self.running), self.waiting, ENDPOINTS - 1)
            and loads == {address: by_endpoint.count(address) for address in by_endpoint}
            and int(limited or 0) == sum(int(name.split("-")[0]) % 4 == 0 for name in self.running)
        )


@pytest.mark.parametrize(
    "names", [*((name,) for name in sorted(FOUND)), HINTS], ids=[*sorted(FOUND), "hints"]
)
async def test_a_pools_service_and_counts_recover_after_redis_loses_a_key(
    fleet: OpenFleet, names: tuple[str, ...], splitting: None
) -> None:
    opened = fleet("a", "b", endpoints=STAGES, listening=True, joined=CONFIG, checked=False)
    async with opened as (it, a, b):
        await a.store.mark_endpoint(DRAINED, "drained", True)
        await until(lambda: [drained(r) for r in (a, b)] == [[DRAINED]] * 2)
        load = Load(it)
        async with load.on():
            await load.until_served()
            for name in names:
                gone = await load.pause_with(name)
                assert gone or name not in FOUND
                if not gone:
                    continue  # no client uses a key of this pattern
                await it.redis.delete(*gone)
                if name in FOUND:
                    await until(lambda: is_told(a, b), SERVICE_S)
                await until(load.counts_are_right)
                if name != "requests":  # a restored request no longer has a prefill
                    await until(load.prefills_are_right)
                load.paused = False
                await load.until_served()
                # Requests with lost records are not counted until the access log reports these requests. A
                # drained endpoint with a lost mark takes requests until a replica sets the mark again.
                most = {"requests": 2 * BOUND, "marks": BOUND + EACH}.get(name, BOUND)
                assert load.peak <= most, name
                assert [drained(r) for r in (a, b)] == [[DRAINED]] * 2
        await until(it.at_rest)


def drained(replica: Replica) -> list[str]:
    return [each.address for each in replica.cell.current.endpoints if each.drained]


def is_told(*replicas: Replica) -> bool:
    return any(samples(each.metrics)["epp_redis_keys_lost_total",] for each in replicas)
