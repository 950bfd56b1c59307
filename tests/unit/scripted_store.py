"""A store with scripted replies, which records its calls."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from picker_fleet.domain.request import Endpoint, InferenceRequest, Outcome
from picker_fleet.fleet.live_config import merged
from picker_fleet.state.pool_state import FoundLimit, PoolState
from picker_fleet.state.replies import (
    AnyVerdict,
    EvictReply,
    HeartbeatReply,
    LiveConfig,
    Notification,
    SettleReply,
    SweepReply,
    Verdict,
)

POOL = PoolState(
    born_us=1, now_us=2, stock=0.0, lower=0.0, upper=0.0, ready_backends=2, queued=0, queue_length={},
    queue_bytes={}, active_flows=0, virtual_times={}, leases=0, dispatched_total=0, ended_total=0,
    guard_dispatches_total=0, guard_credit=0.0, overdue=0, drain_rate=0.0, retry_after_s=1, paused=False,
    tuned_version="", endpoint_refusals={}, replicas=("r",), in_flight={}, limits={}, amounts={},
    about={}, prompt_lines={},
)  # fmt: skip


class ScriptedStore:
    """The lists `admitting` and `placing` hold the next verdicts, in order; the last verdict repeats.

    The store keeps live changes as the Lua scripts do. The value of `epoch` is '0' until the first
    publication.
    """

    replica = "r"

    def __init__(self) -> None:
        self.connection_epoch = 1
        self.found: dict[str, FoundLimit] = {}
        self.admitting: list[AnyVerdict] = []
        self.placing: list[AnyVerdict] = []
        self.placed = asyncio.Event()  # each call of the method `place` sets this event
        self.placement = asyncio.Event()  # while this event is cleared, calls of `place` wait
        self.placement.set()
        self.admitted: list[tuple[InferenceRequest, int]] = []
        self.settled: list[tuple[str, float | None, int | None]] = []
        self.cancelled: list[tuple[str, str]] = []
        self.tombstones: list[str] = []
        self.answering = True  # whether calls of the method `settle` get an answer
        self.renewing = "renewed"
        self.alive: list[tuple[str, str]] = []  # request id and accounting token of each renewal
        self.evicting = "evicted"
        self.top_ups: list[tuple[str, str, str, float]] = []
        self.marks: list[tuple[str, str, bool]] = []
        self.epoch, self.version = "0", ""
        self.heartbeats: list[str] = []  # each heartbeat's replica info
        self.was_known = True  # whether the next heartbeat's reply says that the replica was known
        self.published: list[dict[str, object]] = []
        self.pool = POOL
        self.overrides: dict[str, Any] = {}
        self.changes: dict[str, Any] = {}
        self.tunings = 0
        self.noted: list[str] = []  # records of operators' changes, newest first
        self.meanwhile: tuple[dict[str, Any], dict[str, Any]] | None = None  # a peer makes this change first

    def admit(
        self, request: InferenceRequest, attempt: int, candidates: str, age_s: float = 0.0, prefill: str = ""
    ) -> asyncio.Future[AnyVerdict]:
        self.admitted.append((request, attempt))
        return answered(self.admitting.pop(0) if len(self.admitting) > 1 else self.admitting[0])

    def place(
        self, request_id: str, attempt: int, candidates: str, prefill: str = ""
    ) -> asyncio.Future[AnyVerdict]:
        self.placed.set()
        return answers(self._placed())

    async def _placed(self) -> AnyVerdict:
        await self.placement.wait()
        return self.placing.pop(0) if len(self.placing) > 1 else self.placing[0]

    def settle(
        self, request_id: str, _: Outcome, actual: float | None = None, answer_tokens: int | None = None,
        _prompt_size: int | None = None, **_more: bool,
    ) -> asyncio.Future[Any]:  # fmt: skip
        self.settled.append((request_id, actual, answer_tokens))
        return (
            answered(SettleReply("settled", "m"))
            if self.answering
            else asyncio.get_running_loop().create_future()
        )

    def tombstone(self, request_id: str, ago_s: float = 0.0) -> asyncio.Future[Any]:
        self.tombstones.append(request_id)
        return answered("stored")

    def now_ms(self) -> int:
        return 0

    def report_client_gone(self, request_id: str) -> asyncio.Future[Any]:
        return answered("unknown")

    def cancel(self, request_id: str, attempt: int, why: str) -> asyncio.Future[Any]:
        self.cancelled.append((request_id, why))
        return answered("ended")

    def expire(self, request_id: str, attempt: int) -> asyncio.Future[Any]:
        self.cancelled.append((request_id, "expired"))
        return answered(Verdict.EXPIRED)

    async def note_change(self, text: str) -> None:
        self.noted.insert(0, text)

    async def operator_changes(self) -> list[str]:
        return self.noted

    async def notifications(self) -> list[Notification]:
        return []

    def return_grant(self, request_id: str) -> asyncio.Future[Any]:
        self.cancelled.append((request_id, "unclaimed"))
        return answered("ended")

    def renew(
        self, request_id: str, attempt: int | None, served: str, accounting_token: str, ago_s: float = 0.0
    ) -> asyncio.Future[Any]:
        self.alive.append((request_id, accounting_token))
        return answered(self.renewing)

    async def heartbeat(self, about: str, silence_s: float) -> HeartbeatReply:
        self.heartbeats.append(about)
        was_known, self.was_known = self.was_known, True
        figures = (0.0, 0, 1.0, 1.0, 1)
        paused = "paused" in self.overrides
        return HeartbeatReply(self.epoch, was_known, True, 1, "c", "e", *figures, self.version, paused)

    async def publish(self, settings: Mapping[str, object], *_: object, **_versions: str) -> None:
        self.published.append(dict(settings))
        if self.epoch == "0":
            self.epoch = f"life-{len(self.published)}"

    async def set_live_config(self, overrides: Mapping[str, Any], note: Mapping[str, Any]) -> str:
        if self.epoch == "0":
            return ""
        if self.meanwhile is not None:
            others, self.meanwhile = self.meanwhile, None
            await self.set_live_config(*others)
        self.tunings += 1
        self.overrides = merged(self.overrides, overrides)
        self.changes = merged(self.changes, note)
        self.version = str(int(self.version or 0) + 1)
        return self.version

    async def top_up_tenant(self, path: str, unit: str, per: str, amount: float) -> float:
        self.top_ups.append((path, unit, per, amount))
        return 0.0

    async def found_limits(self) -> dict[str, FoundLimit]:
        return self.found

    async def set_limits(self, found: dict[str, FoundLimit]) -> None:
        self.found = found

    async def live_config(self) -> LiveConfig:
        return LiveConfig(self.version, dict(self.overrides), dict(self.changes))

    def mark_endpoint(self, address: str, what: str, on: bool) -> asyncio.Future[Any]:
        self.marks.append((address, what, on))
        return answered("marked" if address == "10.0.0.1:8000" else "unknown")

    async def evict(self, request_id: str) -> EvictReply:
        return self.evicting

    async def endpoints(self) -> tuple[Endpoint, ...]:
        return (Endpoint("10.0.0.1:8000"),)

    async def state(self, silence_s: float) -> PoolState:
        return self.pool

    async def sweep(self, **_limits: float) -> SweepReply:
        return SweepReply(False, 0, 0, False)

    def lose(self) -> None:
        """Forget everything, as Redis does after FLUSHALL."""
        self.epoch, self.version, self.overrides, self.changes = "0", "", {}, {}


def answered(outcome: Any) -> asyncio.Future[Any]:
    """A completed future with the result `outcome`, or with the exception `outcome`."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
    return answer


def answers(work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    """A future of the result of `work`, like the store's futures: unlike a task, a caller can complete the
    future."""
    answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def done(task: asyncio.Task[Any]) -> None:
        if answer.done() or task.cancelled():
            return
        if (fault := task.exception()) is not None:
            answer.set_exception(fault)
        else:
            answer.set_result(task.result())

    asyncio.ensure_future(work).add_done_callback(done)
    return answer
