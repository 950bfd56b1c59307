"""Runs requests from admission to settlement while the queue keeps its size, and the queue's upkeep."""

import json
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import hiredis

from bench.rig.server import NEVER_MS, ScriptPool, Server, arrival, granted_ids, request_id
from picker_fleet.state.batching import MAX_BATCH
from picker_fleet.state.store import PACKED_USAGE

BATCH = 16  # requests in each script call
_IN_FLIGHT = 4 * BATCH
_PLENTY = 100_000
_FILL = 64
_GRACE_MS = 60_000
OWNER = "x2k4p-9f3c1a7e"  # this id has the length of a replica's id in Kubernetes


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the shared state while requests are measured. `batch`: requests per call. If `queued` is 0,
    the bounds have room for every request. If `limited`, flows are tenants on three levels with four limits.
    """

    queued: int = 1000
    flows: int = 10
    workloads: int = 10
    endpoints: int = 4
    ordering: str = "fcfs"
    batch: int = BATCH
    limited: bool = False

    @property
    def large(self) -> bool:
        """Whether filling the queue takes thousands of calls."""
        return self.queued >= 100_000


class Workload(ScriptPool):
    """Fills one server's queue to `size`, and then runs requests that keep this size.

    `watched`: whether to time each call that fills the queue. `placed`: whether grants also place requests.
    """

    def __init__(
        self, server: Server, size: Size, seed: int, *, watched: bool = False, placed: bool = True
    ) -> None:
        super().__init__(server, "bench", OWNER)
        self._placed = placed
        self._size = size
        self._random = random.Random(seed)
        self._made = self._swept = 0
        self._running: deque[str] = deque()
        # Hash of a command → server CPU in µs; None: do not record.
        self.took_us: dict[int, float] | None = {} if watched else None
        server.forget()
        for replica in (OWNER, "silent"):
            self.call("heartbeat", replica, "{}", NEVER_MS)
        tenants = {"tenants": {"separator": "/"}} if size.limited else {}
        self.publish(
            size.endpoints, _IN_FLIGHT if size.queued else _PLENTY, ordering=size.ordering, **tenants
        )
        if size.limited:
            self.call("set_tenants", OWNER, "tenants", *four_limits("acme", "acme/search", "acme/search/*"))
        self.empty_bytes = server.memory_bytes()
        self._running.extend(self.admit(_IN_FLIGHT, _FILL))
        self.admit(size.queued, _FILL)

    def run(self, requests: int) -> None:
        """Admit and settle `requests` more requests, so that the queue keeps its length."""
        batch = self._size.batch
        for _ in range(requests // batch):
            self._running.extend(self.admit(batch, batch))
            ending = [self._running.popleft() for _ in range(batch)]
            self._go_on(self.settle(ending, USAGE if self._size.limited else b"")[1])

    def sweep(self, most: int | None = None) -> None:
        """Call the script `sweep` until it finds nothing more to do, but at most `most` times."""
        more, self._swept = True, 0
        while more and (most is None or most > 0):
            most = None if most is None else most - 1
            self._swept += 1  # this argument makes each call unique: the slow log identifies calls by command
            more = bool(self.call("sweep", OWNER, 0, _GRACE_MS, NEVER_MS + self._swept, NEVER_MS)[7])

    def change_settings(self, **settings: Any) -> None:
        self.call("tune", OWNER, json.dumps(settings), "{}")

    def set_bound(self, stock: float) -> None:
        """Set the upper and lower bound to `stock` requests."""
        self.change_settings(upper_per=stock / self._size.endpoints, lower_per=stock / self._size.endpoints)

    def expire_silent(self, silence_ms: int) -> None:
        """Send this replica's heartbeat, then make replicas without heartbeat silent after `silence_ms`."""
        self.call("heartbeat", OWNER, "{}", silence_ms)
        self.change_settings(silence_ms=silence_ms)

    def registry_bytes(self) -> int:
        """Bytes of memory of the workload registry."""
        return int(self.server.client.memory_usage(self.key.replace("pool", "workloads"), samples=0) or 0)

    def queued(self) -> int:
        return int(self.call("state", NEVER_MS)[3])

    def call_idle(self, calls: int) -> None:
        """Settle an unknown request `calls` times: each call only dispatches requests within the bound."""
        for at in range(calls):
            self.settle([f"nobody-{at}"])

    def drain(self) -> None:
        """Settle requests until none runs or waits."""
        while self._running:
            ending = [self._running.popleft() for _ in range(min(BATCH, len(self._running)))]
            self._go_on(self.settle(ending)[1])

    def admit(
        self, count: int, batch: int, *, priority: int = 0, ttl_ms: int = NEVER_MS, owner: str = OWNER
    ) -> list[str]:
        """Admit `count` requests. Returns the ids of requests that were placed at once."""
        placed: list[str] = []
        for at in range(0, count, batch):
            args: list[Any] = []
            ids = []
            for _ in range(min(batch, count - at)):
                self._made += 1
                id = request_id(self._random, self._made)
                flow = f"acme/search/{self._random.randrange(self._size.flows)}"
                workload = f"workload-{self._random.randrange(self._size.workloads)}"
                candidates = "*" if self._placed else _FIRST
                numbers = {"ttl_ms": ttl_ms, "priority": priority, "prompt_tokens": 100, "answer_tokens": 50}
                args.append(arrival(id, flow, workload=workload, candidates=candidates, **numbers))
                ids.append(id)
            replies = self.call("admit", owner, *args)[4:]
            placed += [id for id, reply in zip(ids, replies, strict=True) if reply.startswith(b"placed")]
        return placed

    def _go_on(self, grants: Sequence[bytes]) -> None:
        """Acknowledge a call's grants if the grants placed requests, and record that the requests run."""
        ids = granted_ids(grants)
        for at in range(0, len(ids) if self._placed else 0, BATCH):
            self.acknowledge(ids[at : at + BATCH])
        self._running.extend(ids)

    def execute(self, command: Sequence[Any]) -> Any:
        if self.took_us is None:
            return super().execute(command)
        before = self.server.cpu_us()
        answer = super().execute(command)
        self.took_us[hash(hiredis.pack_command(tuple(command)))] = self.server.cpu_us() - before
        return answer


_FIRST = "10.0.0.0:8000"
USAGE = PACKED_USAGE.pack(90, 0, 40)
_TOKENS = '{"unit":"tokens","amount":1e12,"per_ms":60000}'


def four_limits(top: str, middle: str, leaf: str) -> tuple[str, ...]:
    """Arguments of the script `set_tenants`: these nodes get four limits, which no request reaches."""
    return (
        *(top, f'{{"limits":[{_TOKENS}],"max_parallel":1e6}}'),
        *(middle, '{"limits":[{"unit":"requests","amount":1e9,"per_ms":1000}]}'),
        *(leaf, f'{{"limits":[{_TOKENS}]}}'),
    )


_CALLS = 150  # limit for the calls of each kind of upkeep
MANY = 6000  # number of requests that become overdue, expire or lose their lease at once
_PER_CALL = MAX_BATCH
_STARVING_MS, _TTL_MS = 2000, 4000  # longer than the admission of MANY requests takes
_SILENCE_MS = 1000
_MARGIN_S = 0.05
_POLICIES = (
    ("ordering", "edf"),
    ("ordering", "workload-aware"),
    ("fairness", "none"),
    ("fairness", "round-robin"),
)


def upkeep(state: Workload) -> Iterator[str]:
    """Make the rare expensive calls: sweeps, live changes, preemption. Yields each kind of call by name."""
    # Many requests become overdue, then expire.
    started = time.monotonic()
    state.change_settings(starvation_ms=_STARVING_MS)
    state.admit(MANY, _PER_CALL, ttl_ms=_TTL_MS)
    admitted = time.monotonic()
    yield "arrivals"
    _wait_until(admitted + _STARVING_MS / 1000)
    state.sweep(_CALLS)
    yield "a sweep, requests become overdue"
    _wait_until(max(started, admitted) + _TTL_MS / 1000)
    state.sweep(_CALLS)
    yield "a sweep, requests expire"
    state.change_settings(starvation_ms=None)
    # Requests of a higher band arrive at a full queue.
    state.change_settings(total_capacity=state.queued())
    state.admit(_CALLS * _PER_CALL // 3, _PER_CALL, priority=10)
    yield "arrivals that preempt"
    state.change_settings(total_capacity=None)
    state.sweep(_CALLS)
    yield "a sweep, preemptions are forgotten"
    # The bound rises while many requests wait, so each call grants as many as it may; then leases expire.
    state.change_settings(lease_ms=1)
    state.set_bound(MANY)
    state.call_idle(_CALLS)
    yield "grants"
    state.set_bound(0)
    state.sweep(_CALLS)
    yield "a sweep, leases have ended"
    state.change_settings(lease_ms=None)
    # A live change of the policy reorders the waiting requests.
    for name, value in _POLICIES:
        state.change_settings(**{name: value})
        state.sweep(_CALLS)
        yield f"a sweep, after a change to {value}"
    # A replica with many queued requests sends no more heartbeats.
    state.admit(MANY, _PER_CALL, owner="silent")
    state.expire_silent(_SILENCE_MS)
    _wait_until(time.monotonic() + _SILENCE_MS / 1000)
    state.expire_silent(_SILENCE_MS)
    state.sweep(_CALLS)
    yield "a sweep, a replica is silent"


def _wait_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()) + _MARGIN_S)
