"""Admission for tests, over a store that can become unavailable."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any, cast

from background import running, until
from choosers import chooser_of
from local_requests import ask
from metrics_page import samples
from scripted_store import ScriptedStore, answered

from picker_fleet.admission.admission import Admission
from picker_fleet.admission.failover import FailoverState, FailoverTimes
from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import StateUnavailable
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.request import Completion, Endpoint, InferenceRequest, Outcome, Placement
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.state.connection import FailureDetector, PauseDetector
from picker_fleet.state.replies import AnyVerdict, HeartbeatReply, Placed
from picker_fleet.state.store import Store, parse_verdict
from picker_fleet.telemetry.metrics import Metrics

E1, E2 = "10.0.0.1:8000", "10.0.0.2:8000"
PULSE = HeartbeatReply("life", True, True, 2, "c", "e", 4.0, 0, 10.0, 9.0, 2, "", False)
FULL = replace(PULSE, stock=10.0)
QUEUED = parse_verdict("queued 30000")


class FickleStore(ScriptedStore):
    """A store with faults, where `away` fails admissions, `silent` leaves admissions unanswered, `deaf` fails
    renewals."""

    def __init__(self) -> None:
        super().__init__()
        self.away = self.silent = self.deaf = False
        self.ages_s: list[float] = []
        self.unsent: list[str] = []
        self.admitting = [Placed((E1,))]

    def admit(
        self, request: InferenceRequest, attempt: int, candidates: str, age_s: float = 0.0, prefill: str = ""
    ) -> asyncio.Future[AnyVerdict]:
        self.ages_s.append(age_s)
        if self.silent:
            return asyncio.get_running_loop().create_future()
        if self.away:
            return answered(StateUnavailable("away"))
        return super().admit(request, attempt, candidates, age_s, prefill)

    def renew(self, *call: Any, **options: Any) -> asyncio.Future[Any]:
        renewed = super().renew(*call, **options)
        return answered(StateUnavailable("away")) if self.deaf else renewed

    def unsent_ends(self) -> list[str]:
        return self.unsent


class NoPeers:
    """A peer client whose calls get no answer."""

    async def no_answer(self, *_: object) -> None: ...

    ask = count = ended_before = ended = redis_use = close = no_answer


def admission_over(
    store: Store,
    metrics: Metrics,
    cell: SnapshotCell,
    *,
    replica: str = "a",
    config: Mapping[str, Any] | None = None,
    wait_s: float = 2.0,
    **options: Any,
) -> Admission:
    """A replica's admission, built as in `picker serve` but not running. `options` replace arguments."""
    fleet = KnownFleet(parse(config or {}))
    fleet.in_flight = {E1: 3, E2: 1}
    parts: dict[str, Any] = {
        "chooser": chooser_of(cell),
        "keys": Keyring(),
        "failure_detector": FailureDetector(1.0, 8.0),
        "pause_detector": PauseDetector(),
        "heartbeat_now": lambda **_: None,
        "peer_client": NoPeers(),
    }
    times = FailoverTimes(report_s=0.0, newcomer_s=0.0, peers_wait_s=wait_s, max_resync_s=wait_s)
    return Admission(
        store, replica=replica, fleet=fleet, metrics=metrics, endpoints=cell, times=times, **(parts | options)
    )


class Bench:
    """The admission of replica `a`, whose peer is replica `b`, after one answered heartbeat. If the argument
    `away` is true, Redis admits nothing. A resync waits up to `wait_s` seconds for replica `b`."""

    def __init__(
        self,
        pulse: HeartbeatReply | None = PULSE,
        config: Mapping[str, Any] | None = None,
        away: bool = False,
        **options: Any,
    ) -> None:
        self.now_s = 100.0  # time of the pause detector's clock, in seconds
        self.store, self.metrics, self.cell = FickleStore(), Metrics(), SnapshotCell()
        self.store.away = away
        self.cell.publish(Snapshot("1", (Endpoint(E1), Endpoint(E2))))
        store = cast(Store, self.store)
        self.pause_detector = PauseDetector(lambda: self.now_s, lambda: 0.0)
        self.pause_detector.tick()
        self.pokes = 0
        self.gate = admission_over(
            store, self.metrics, self.cell, config=config, pause_detector=self.pause_detector,
            heartbeat_now=self._poked, **options,
        )  # fmt: skip
        if pulse is not None:
            self.tell_peers()
            self.gate.failover.heartbeat_answered(pulse)

    async def place(self, request_id: str = "r", *, stream_owned: bool = False, **changes: Any) -> Placement:
        return await self.gate.admit(ask(request_id, **changes), stream_owned=stream_owned)

    def start(self, request_id: str = "r", **changes: Any) -> asyncio.Task[Placement]:
        """Start a task that calls `place`, for a request that will wait."""
        return asyncio.create_task(self.place(request_id, **changes))

    async def wait_here(self, request_id: str = "r", **changes: Any) -> asyncio.Task[Placement]:
        """Start a request, and return once it waits in the local queue."""
        queued, task = self.queued, self.start(request_id, **changes)
        await until(lambda: self.queued == queued + 1)
        return task

    async def wait_in_redis(self, request_id: str = "r") -> asyncio.Task[Placement]:
        """Start a request, and return once it waits in the shared queue."""
        self.store.admitting = [QUEUED]
        waiting, task = self.gate.queue.waiting, self.start(request_id)
        await until(lambda: self.gate.queue.waiting == waiting + 1)
        return task

    def counted(self, name: str, label: str) -> dict[str, float]:
        """The samples above 0 of the metric family `name`, by the value of the label `label`."""
        found = {key[1:]: n for key, n in samples(self.metrics).items() if key[0] == name and n}
        return {dict(part.split("=") for part in labels)[label]: n for labels, n in found.items()}

    @property
    def waits(self) -> dict[str, float]:
        """The number of ended waits in the queue, by the label `success`."""
        return self.counted("epp_queue_latency_seconds_count", "success")

    def stand_still(self) -> None:
        """Pause the process for 10 s, as between SIGSTOP and SIGCONT."""
        self.now_s += 10.0
        assert self.pause_detector.resumed_recently

    def _poked(self, *, full: bool = True) -> None:
        self.pokes += full

    def tell_peers(self, answered: Sequence[str] | None = None, **degraded: bool) -> None:
        """Report to the gate which of the live replicas `a` and `b` are degraded. `answered` lists the
        resyncs for which both replicas have published the ends of requests; None: all resyncs."""
        told = [f"a:{number}" for number in range(99)] if answered is None else answered
        about = {
            name: {"degraded": degraded.get(name, False), "grpc": name, "answered": told}
            for name in ("a", "b")
        }
        self.gate.failover.update_peers(about)

    def end(self, request_id: str, placement: Placement | None = None, **changes: Any) -> None:
        token = placement.accounting_token if placement is not None else ""
        end = Completion(request_id, Outcome.COMPLETED, 200, E1, 1, 1, 0.1, 0.1, accounting_token=token)
        self.gate.settle(end._replace(**changes))

    def lose_redis(self) -> None:
        self.gate.failover.redis_lost("silence", "no answer in time")

    @property
    def queued(self) -> int:
        """The number of requests in the local queue."""
        status = self.gate.failover.status()
        return status.queued if status is not None else 0

    def answer_heartbeats(self, pulse: HeartbeatReply = PULSE) -> None:
        """Answer heartbeats until the replica leaves the failover state LOCAL."""
        for _ in range(100):
            if self.gate.failover.state is FailoverState.LOCAL:
                self.gate.failover.heartbeat_answered(pulse)
        assert self.gate.failover.state is not FailoverState.LOCAL

    @property
    def free(self) -> float:
        status = self.gate.failover.status()
        assert status is not None
        return status.free


def watched(bench: Bench) -> AbstractAsyncContextManager[None]:
    return running(bench.gate.failover.run())


@asynccontextmanager
async def returned(bench: Bench) -> AsyncIterator[None]:
    """Let Redis answer again, and run the block once the replica has resynced."""
    async with watched(bench):
        bench.store.away = False
        bench.answer_heartbeats()
        await until(lambda: not bench.gate.failover.degraded)
        yield


@asynccontextmanager
async def resyncing(bench: Bench) -> AsyncIterator[None]:
    """Run the block in the failover state RESYNCING: replica `a` has resynced, replica `b` has not."""
    bench.tell_peers(b=True)
    async with returned(bench):
        assert bench.gate.failover.state is FailoverState.RESYNCING
        yield
