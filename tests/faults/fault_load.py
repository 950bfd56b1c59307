"""Clients that admit and settle requests at the replicas' gates while a test injects faults."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from redis.exceptions import RedisError
from script_fleet import Fleet, Replica, ask, ended, until

from picker_fleet.domain.errors import StateUnavailable

LEASE_S = 3.0
HEARTBEAT_S = 0.5
SWEEP_S = 0.5  # `request_queue_controller.expiry_cleanup_interval`: a sweep ends expired leases
JOINED = {
    "leases": {
        "inflight": f"{LEASE_S:g}s", "access_log_interval": "1s", "replica_silence": "2s",
        "heartbeat": f"{HEARTBEAT_S:g}s",
    },
    "request_queue_controller": {
        "upper_bound_per_backend": 4, "watermark_per_backend": 4, "lower_bound_per_backend": 4,
        "expiry_cleanup_interval": f"{SWEEP_S:g}s"
    },
    "fair_request_queue": {"flow_capacity": 1000},
    "decision_log": {"enabled": True},
}  # fmt: skip
UPPER = 4  # upper bound of requests in flight on one endpoint
MACHINE_S = 9.0  # extra seconds to wait, because the test machine is busy
HANGS_S = 30.0  # a request without a decision after this time counts as hung
_SERVICE_S = 0.02
_PAUSE_S = 0.05
_NUMBERS = itertools.count(1)


@dataclass(slots=True)
class Load:
    """Counts of the clients' requests. `running` (placed, not settled), the peak `highest` of `running`."""

    running: int = 0
    highest: int = 0
    served: int = 0
    refused: int = 0
    placed: list[str] = field(default_factory=list)

    async def request(self, replica: Replica, request_id: str, service_s: float) -> None:
        """Admit a request, settle it after `service_s`. TimeoutError if admission takes over HANGS_S."""
        try:
            async with asyncio.timeout(HANGS_S):
                await replica.gate.admit(ask(request_id), stream_owned=True)
        except StateUnavailable:
            self.refused += 1
            await asyncio.sleep(_PAUSE_S)
            return
        self.placed.append(request_id)
        self.running += 1
        self.highest = max(self.highest, self.running)
        await asyncio.sleep(service_s)
        self.running -= 1
        self.served += 1
        replica.gate.settle(ended(request_id))

    async def served_more(self, count: int) -> None:
        """Wait until `count` further requests have been served."""
        goal = self.served + count
        await until(lambda: self.served >= goal)


@asynccontextmanager
async def loaded(fleet: Fleet, *, clients: int = 16, service_s: float = _SERVICE_S) -> AsyncIterator[Load]:
    """Run a closed loop of clients, spread over the replicas. When the block ends, clients finish."""
    load, stopping = Load(), asyncio.Event()

    async def client(replica: Replica) -> None:
        while not stopping.is_set():
            await load.request(replica, f"r{next(_NUMBERS)}", service_s)

    async with asyncio.TaskGroup() as tasks:
        for number in range(clients):
            tasks.create_task(client(fleet.replicas[number % len(fleet.replicas)]))
        try:
            yield load
        finally:
            stopping.set()


async def serve(fleet: Fleet, count: int) -> Load:
    """Serve at least `count` requests; assert that none is refused; wait until no request is counted."""
    async with loaded(fleet) as load:
        await load.served_more(count)
    assert load.refused == 0
    await rests_within_a_lease(fleet)
    return load


async def admit_all(replica: Replica, *request_ids: str) -> None:
    """Place requests whose clients wait on streams of `replica`."""
    for request_id in request_ids:
        await replica.gate.admit(ask(request_id), stream_owned=True)


def settle_all(replica: Replica, *request_ids: str) -> None:
    for request_id in request_ids:
        replica.gate.settle(ended(request_id))


async def rests_within_a_lease(fleet: Fleet) -> None:
    """Wait until all counts of requests are 0. Fails after the time of a lease, a sweep and MACHINE_S."""
    await until(lambda: _rests(fleet), LEASE_S + SWEEP_S + MACHINE_S)


async def _rests(fleet: Fleet) -> bool:
    """Whether every count of requests is 0; false while Redis is unavailable."""
    try:
        return await fleet.at_rest()
    except (StateUnavailable, RedisError):
        return False
