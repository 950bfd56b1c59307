"""Measures many leaves of tenants: their memory, and the calls for their requests."""

import json
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from bench.lifecycle.workload import BATCH, OWNER, USAGE, four_limits
from bench.rig.server import NEVER_MS, ScriptPool, Server, arrival, granted_ids, request_id

_TEAMS, _KEYS = 10, 100  # teams of an organisation, keys of a team
_ACTIVE, _ROUNDS = 10_000, 1500
_IN_FLIGHT, _ENDPOINTS, _PLENTY = 64, 4, 1e8
_SWEEP_EVERY_S = 1.0


class _Leaves(ScriptPool):
    """A pool whose flows are keys of teams of organisations. `calls_us`: server CPU of each call."""

    def __init__(self, server: Server) -> None:
        super().__init__(server, "leaves", OWNER)
        self.calls_us: list[float] = []
        self._running: deque[str] = deque()
        self._random = random.Random(1)
        self._made, self._swept_s = 0, 0.0
        server.forget()
        self.call("heartbeat", OWNER, "{}", NEVER_MS)
        self.publish(_ENDPOINTS, _PLENTY, tenants={"separator": "/"})
        self.call("set_tenants", OWNER, "tenants", *four_limits("*", "*/*", "*/*/*"))

    def execute(self, command: Sequence[Any]) -> Any:
        before = self.server.cpu_us()
        answer = super().execute(command)
        self.calls_us.append(self.server.cpu_us() - before)
        return answer

    def admit(self, leaves: Sequence[int]) -> None:
        ids, requests = [], []
        for leaf in leaves:
            self._made += 1
            ids.append(request_id(self._random, self._made))
            flow = f"org-{leaf // (_TEAMS * _KEYS)}/team-{leaf // _KEYS % _TEAMS}/key-{leaf % _KEYS}"
            requests.append(arrival(ids[-1], flow, ttl_ms=NEVER_MS, prompt_tokens=100, answer_tokens=50))
        replies = self.call("admit", OWNER, *requests)[4:]
        self._running += [id for id, reply in zip(ids, replies, strict=True) if reply.startswith(b"placed")]

    def end(self, count: int) -> None:
        ids = [self._running.popleft() for _ in range(min(count, len(self._running)))]
        granted = granted_ids(self.settle(ids, USAGE)[1])
        if granted:
            self.acknowledge(granted)
        self._running += granted
        if time.monotonic() - self._swept_s >= _SWEEP_EVERY_S:
            self._swept_s = time.monotonic()
            self.call("sweep", OWNER, 1000, 60_000, 600_000, NEVER_MS)


def measure_leaves(server: Server, known: int) -> tuple[float, list[float]]:
    """Serve a request of each of `known` leaves; then serve 10 000 of them from a queue of 20 000 requests.

    Returns the server's bytes for each known leaf, and the server CPU of each call in µs, in ascending order.
    """
    pool = _Leaves(server)
    empty_bytes = server.memory_bytes()
    order = random.Random(2).sample(range(known), known)
    for batch in _batches(order):
        pool.admit(batch)
        pool.end(BATCH)
    leaf_bytes = (server.memory_bytes() - empty_bytes) / known
    per = _IN_FLIGHT / _ENDPOINTS
    pool.call("tune", OWNER, json.dumps({"upper_per": per, "lower_per": per}), "{}")
    arrivals = random.Random(3).choices(order[:_ACTIVE], k=2 * _ACTIVE + BATCH * _ROUNDS)
    for number, batch in enumerate(_batches(arrivals)):
        pool.admit(batch)
        if number * BATCH >= 2 * _ACTIVE:
            pool.end(BATCH)
    return leaf_bytes, sorted(pool.calls_us)


def _batches(leaves: Sequence[int]) -> Iterator[Sequence[int]]:
    for at in range(0, len(leaves), BATCH):
        yield leaves[at : at + BATCH]
