"""Requests that live their whole lives at a queue of a given size: admit, wait, grant, place, settle."""

import json
import random
from collections import deque
from dataclasses import dataclass
from typing import Any

import hiredis

from bench.lifecycle.server import Server
from picker_fleet.state.schema import pack_arrival

BATCH = 16  # requests a call
IN_FLIGHT = 4 * BATCH
_FILL = 64
_KEY = "epp:{bench}:pool"
_NEVER_MS = 10_000_000
_GRACE_MS = 60_000
_OWNER = "x2k4p-9f3c1a7e"  # as long as the id of a replica in Kubernetes
SETTINGS: dict[str, Any] = {
    "upper_per": 0, "lower_per": 0, "total_capacity": 10**9, "flow_capacity": 10**9, "lease_ms": _NEVER_MS,
    "silence_ms": _NEVER_MS, "fallbacks": 2, "log_max": 0, "window_ms": 60_000, "ema_alpha": 0.2,
    "band_policy": "strict", "band_weights": [70, 20, 10], "fairness": "weighted-fair", "ordering": "fcfs",
    "overload": "preempt", "guard_share": 0.1, "starvation_ms": 0, "weights": {}, "paused": 0,
    "wait_signal": "request", "wait_weight": 0.4, "criticality_weight": 0.4, "rate_weight": 0.2,
    "wait_cap_ms": 60_000, "rate_cap": 100, "default_answer": 256, "answer_alpha": 0.2,
    "live_weight": 0.5,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """How much the shared state holds while a life is measured."""

    queued: int = 1000
    flows: int = 10
    workloads: int = 10
    endpoints: int = 4
    ordering: str = "fcfs"
    wait_signal: str = "request"

    @property
    def large(self) -> bool:
        """To fill it takes thousands of calls."""
        return self.queued >= 100_000


class Lives:
    """A steady state of one size on one server; `watched`: what each call took to get there is kept;
    `placed`: what is granted gets its place before it ends.
    """

    def __init__(
        self, server: Server, size: Size, seed: int, *, watched: bool = False, placed: bool = True
    ) -> None:
        self._server = server
        self._placed = placed
        self._size = size
        self._random = random.Random(seed)
        self._born = self._swept = 0
        self._running: deque[str] = deque()
        self.tape: list[bytes] | None = None  # while it is a list, commands are also written to it
        # While it is a dict, what each command (its hash) took of the server's CPU, in microseconds
        self.took_us: dict[int, float] | None = {} if watched else None
        server.forget()
        for replica in (_OWNER, "silent"):
            self._call("heartbeat", replica, "{}", _NEVER_MS)
        per = IN_FLIGHT / size.endpoints
        settings = {**SETTINGS, "ordering": size.ordering, "upper_per": per, "lower_per": per}
        settings["wait_signal"] = size.wait_signal
        hosts = [x for i in range(size.endpoints) for x in (f"10.0.{i // 256}.{i % 256}:8000", _ABOUT)]
        self._call("publish", _OWNER, "c", "e", json.dumps(settings), *hosts)
        self.empty_bytes = server.memory_bytes()
        self._place(self.admit(IN_FLIGHT, _FILL))
        self.admit(size.queued, _FILL)

    def live(self, lives: int) -> None:
        """`lives` requests more: as many arrive as end, so that the queue keeps its length."""
        for _ in range(lives // BATCH):
            self.admit(BATCH, BATCH)
            ending = [self._running.popleft() for _ in range(BATCH)]
            reply = self._call("settle", _OWNER, *(x for id in ending for x in (id, "completed", "", "")))
            self._place([item.split()[1].decode() for item in reply[1]])

    def sweep(self, most: int | None = None) -> None:
        """Sweep until nothing is left to do, or `most` times."""
        more, self._swept = True, 0
        while more and (most is None or most > 0):
            most = None if most is None else most - 1
            self._swept += 1  # no two calls alike: the slow log is searched by what was called
            more = bool(self._call("sweep", _OWNER, 0, _GRACE_MS, _NEVER_MS + self._swept, _NEVER_MS)[7])

    def tune(self, **settings: Any) -> None:
        self._call("tune", _OWNER, json.dumps(settings), "{}")

    def bound(self, stock: float) -> None:
        """Let so many be in flight."""
        self.tune(upper_per=stock / self._size.endpoints, lower_per=stock / self._size.endpoints)

    def silence(self, silence_ms: int) -> None:
        """Whoever has been silent for so long is gone; the one that calls here is not."""
        self._call("heartbeat", _OWNER, "{}", silence_ms)
        self.tune(silence_ms=silence_ms)

    def registry_bytes(self) -> int:
        """What the workloads' registry takes."""
        key = _KEY.replace("pool", "workloads")
        return int(self._server.client.memory_usage(key, samples=0) or 0)

    def queued(self) -> int:
        return int(self._call("state", _NEVER_MS)[3])

    def touch(self, calls: int) -> None:
        """`calls` that do nothing by themselves, but serve what now fits."""
        for at in range(calls):
            self._call("settle", _OWNER, f"nobody-{at}", "completed", "", "")

    def drain(self) -> None:
        """Let everything that waits or runs end."""
        while self._running:
            ending = [self._running.popleft() for _ in range(min(BATCH, len(self._running)))]
            reply = self._call("settle", _OWNER, *(x for id in ending for x in (id, "completed", "", "")))
            self._place([item.split()[1].decode() for item in reply[1]])

    def admit(
        self, count: int, batch: int, *, band: int = 1, ttl_ms: int = _NEVER_MS, owner: str = _OWNER
    ) -> list[str]:
        """Admit `count`; the ones that were placed at once."""
        placed: list[str] = []
        for at in range(0, count, batch):
            args: list[Any] = []
            ids = []
            for _ in range(min(batch, count - at)):
                self._born += 1
                # As long as the ids that Envoy makes
                id = f"{self._random.getrandbits(64):016x}-{self._born:019d}"
                flow = f"tenant-{self._random.randrange(self._size.flows)}"
                workload = f"workload-{self._random.randrange(self._size.workloads)}"
                args.append(
                    pack_arrival((id, "1", flow, workload, "llama", "*"), (band, 1, 1, ttl_ms, 0, 3, 0, 0))
                )
                ids.append(id)
            replies = self._call("admit", owner, *args)[4:]
            placed += [id for id, reply in zip(ids, replies, strict=True) if reply.startswith(b"placed")]
        return placed

    def _place(self, ids: list[str]) -> None:
        for at in range(0, len(ids) if self._placed else 0, BATCH):
            self._call("place", _OWNER, *(x for id in ids[at : at + BATCH] for x in (id, 1, "*")))
        self._running.extend(ids)

    def _call(self, name: str, *args: Any) -> Any:
        command = ("FCALL", self._server.library.function(name), 1, _KEY, *args)
        if self.tape is not None:
            self.tape.append(hiredis.pack_command(command))
        before = 0.0 if self.took_us is None else self._server.cpu_us()
        answer = self._server.client.execute_command(*command)
        if self.took_us is not None:
            self.took_us[hash(hiredis.pack_command(command))] = self._server.cpu_us() - before
        return answer


_ABOUT = '{"labels":{},"draining":false}'
