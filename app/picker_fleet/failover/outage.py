"""The two sides of a replica, with and without the shared state, and its way from one to the other (G8;
docs/without-redis.md).

| state | event | next | what is done |
|---|---|---|---|
| SHARED | AWAY | LOCAL | the purse is opened; who waits goes over |
| LOCAL | ANSWERS | RETURNING | Redis is told what has ended and, once others have told that too, what runs |
| RETURNING | AWAY | LOCAL | the purse keeps no more than its part |
| RETURNING | ALL_TOLD | SHARED | who waits joins the common queue |

AWAY: Redis refuses, its silence is proven (state/silence.py), or a decision failed. ANSWERS: enough
heartbeats in a row came back. ALL_TOLD: every replica that was live has told it, or 3.5 s have passed.
Any other event changes nothing. LOCAL spends what its purse holds. RETURNING needs both its purse and the
shared state for each new request. Ends are told then, and again at the end of it: another replica may have
brought back meanwhile what it had not heard the end of.
"""

import asyncio
import enum
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from picker_fleet.admission.shared_gate import SharedGate
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.errors import StateUnavailable, WritesRefused
from picker_fleet.failover.journal import Outbox, bring
from picker_fleet.failover.local_gate import LocalGate
from picker_fleet.failover.local_picker import LocalPicker
from picker_fleet.failover.local_queue import rules_of
from picker_fleet.failover.peers import ASK_S, Borrower, Fleetmates, Peers
from picker_fleet.failover.tombstones import Tombstones
from picker_fleet.live_config import EffectiveConfig
from picker_fleet.request import Completion
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.state.silence import Silence
from picker_fleet.state.store import Pulse, Store
from picker_fleet.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
_JITTER_S = 0.1  # replicas that come back together do not all begin at once
_TICK_S = 0.2  # also between heartbeats, while not shared or busy
_LONGEST_RETURN_S = 3.5  # for replicas that do not come back at all
_NEWCOMER_S = 3.0  # a replica younger than this may not be known to the others yet


class Mode(enum.Enum):
    SHARED = "shared"
    LOCAL = "local"
    RETURNING = "returning"


class Event(enum.Enum):
    AWAY = "away"
    ANSWERS = "answers"
    ALL_TOLD = "all-told"


_NEXT: Mapping[tuple[Mode, Event], Mode] = {
    (Mode.SHARED, Event.AWAY): Mode.LOCAL,
    (Mode.LOCAL, Event.ANSWERS): Mode.RETURNING,
    (Mode.RETURNING, Event.AWAY): Mode.LOCAL,
    (Mode.RETURNING, Event.ALL_TOLD): Mode.SHARED,
}


class Crossing:
    """Watches the shared state and changes sides; `FailoverGate` works on its side. One event loop."""

    def __init__(
        self,
        store: Store,
        shared: SharedGate,
        *,
        replica: str,
        metrics: Metrics,
        endpoints: SnapshotCell,
        chooser: EndpointChooser,
        silence: Silence,
        report_s: float,
        effective: Callable[[], EffectiveConfig],
        load: Callable[[], Mapping[str, int]],
        heartbeat_now: Callable[..., None],
        via: Peers,
    ) -> None:
        self._store, self._shared = store, shared
        self._metrics = metrics
        self._report_s = report_s
        self._effective, self._fleet_load, self._heartbeat_now = effective, load, heartbeat_now
        self._loop = asyncio.get_running_loop()
        self._silence = silence
        self._mates = Fleetmates(replica)
        self._local = LocalGate(metrics)
        self._borrower = Borrower(
            self._local, via, peers=self._mates.others, active=lambda: self._mode is not Mode.SHARED
        )
        self._mode = Mode.SHARED
        self._outbox = Outbox(self._loop.time)
        self._tombstones = Tombstones(
            store,
            replica,
            report_s=report_s,
            may_tell=lambda: self._mode is not Mode.LOCAL,
            may_free=lambda: self._mode is Mode.SHARED or self._told,
            heartbeat_now=heartbeat_now,
            clock=self._loop.time,
        )
        self._picker = LocalPicker(chooser, endpoints, self._loop.time)
        self._pulse: Pulse | None = None  # the last one while all was well
        self._pulse_s = 0.0
        self.newcomer_s = _NEWCOMER_S
        self._joined_s = 0.0
        self._gained = 0.0  # what was placed through the shared state since that pulse
        self._regained = 0.0  # by ends since Redis answers again, which it has heard, too
        self._prepaid = 0.0  # by those who wait in the shared queue, too, on the way back
        self._busy = False
        self._unanswered: dict[
            str, tuple[Completion, str]
        ] = {}  # ends it has not confirmed, with accounting tokens
        self._bound = self._share = 0.0
        self._let_go = 0  # requests, since the shared state was lost
        self._left_s = self._back_s = 0.0
        self._beats = 0  # heartbeats in a row that came back
        self._told = False
        self._telling: asyncio.Task[None] | None = None
        metrics.failover(self._mode.value)

    @property
    def mode(self) -> Mode:
        return self._mode

    @property
    def degraded(self) -> bool:
        """Whether this replica's part of the state is not all in the shared one."""
        return self._mode is Mode.LOCAL or (self._mode is Mode.RETURNING and not self._told)

    def says(self) -> Mapping[str, object]:
        """What the other replicas are told of this one with its heartbeat."""
        return {"degraded": self.degraded, **self._tombstones.says()}

    def beat(self, pulse: Pulse, took_s: float) -> None:
        """A heartbeat has come back."""
        now_s = self._loop.time()
        if self._mode is not Mode.LOCAL and pulse.born != "0":
            self._joined_s = self._joined_s or now_s
            self._pulse, self._pulse_s, self._gained = pulse, now_s, 0.0
        self._beats += 1
        if self._mode is Mode.LOCAL and self._beats >= self._silence.beats:
            self._go(Event.ANSWERS, "answers")

    def missed(self) -> None:
        """A heartbeat has not come back."""
        self._beats = 0

    def away(self, cause: str, why: str) -> None:
        """The shared state cannot be had: `cause` is for the metrics, `why` for the log."""
        self._beats = 0
        if self._pulse is None:
            return  # never joined: nothing is known that could be gone by
        if self._mode is not Mode.LOCAL:
            _log.warning("the shared state is away (%s): admitting within this replica's share", why)
        self._go(Event.AWAY, cause)

    def peers(self, about: Mapping[str, Mapping[str, Any]]) -> None:
        """Who is live, and what each says of itself: `degraded`, `grpc` (where it is asked for places), and
        what `Tombstones.says` gives."""
        self._mates.heard(about, shared=self._mode is Mode.SHARED)
        self._tombstones.peers(about)

    async def lend(self, least: float, most: float) -> float:
        """What another replica may have of this one's places."""
        return 0.0 if self._mode is Mode.SHARED else await self._local.lend(least, most, ASK_S)

    async def run(self) -> None:
        """Watch, probe, borrow and return until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(), name="redis-watch")
            tasks.create_task(self._borrower.run(), name="borrower")
            tasks.create_task(self._tombstones.run(), name="tombstones")

    async def _watch(self) -> None:
        try:
            while True:
                await asyncio.sleep(_TICK_S)
                self._tick()
        finally:
            if self._telling is not None:
                self._telling.cancel()

    def _tick(self) -> None:
        self._shared.drop_expired()
        if self._mode is not Mode.SHARED:
            self._heartbeat_now()
        elif self._busy:
            # What is known of the stock is never much older than what this replica has done to it.
            self._busy = False
            self._heartbeat_now(full=False)
        if self._mode is Mode.RETURNING and self._all_told():
            self._go(Event.ALL_TOLD, "all-told")

    def _go(self, event: Event, cause: str) -> None:
        """Change sides as the table says."""
        before, after = self._mode, _NEXT.get((self._mode, event))
        if after is None:
            return
        if after is Mode.LOCAL:
            self._leave(before)
        elif after is Mode.RETURNING:
            self._begin_return()
            self._telling = asyncio.create_task(self._tell_what_runs(self._back_s), name="tell-what-runs")
        else:
            self._finish()
        self._metrics.failover(after.value, cause)

    def _leave(self, before: Mode) -> None:
        now_s = self._loop.time()
        self._silence.left(now_s)
        if before is Mode.SHARED:
            self._open_purse()
        elif self._pulse_s > self._back_s:
            assert self._pulse is not None
            # Others may be back already. What it has heard end since is free in the shared state, too.
            part = self._mates.part(self._pulse, whole=self._whole())
            self._local.keep(max(part - self._gained, 0.0) - self._prepaid)
        else:
            self._local.keep(self._local.free - self._regained)
        self._mode, self._told = Mode.LOCAL, False
        self._metrics.degraded(True)
        self._shared.give_up()

    def _open_purse(self) -> None:
        pulse = self._pulse
        assert pulse is not None
        self._left_s, self._let_go = self._loop.time(), 0
        part = self._mates.part(pulse, whole=self._whole())
        if self._left_s - self._joined_s < self.newcomer_s:
            part = 0.0  # others may count without it
        live = self._mates.count(pulse)
        self._bound, self._share = pulse.upper, pulse.upper / live
        self._picker.begin(self._fleet_load())
        rules = rules_of(self._effective(), live)
        # Who waits in the shared queue since an outage before has paid then, and is paid back now.
        free = max(part - self._gained, 0.0) - self._prepaid
        self._local.open(free, pulse.upper, rules, paused=pulse.paused)
        for request_id in self._store.unsent_ends():
            if request_id in self._unanswered:
                freed = self._outbox.ended(*self._unanswered[request_id])
                self._local.earn(self._local.cost_of(freed or 0.0))

    def _whole(self) -> bool:
        return self._effective().settings.request_queue_controller.unit == "requests"

    def _begin_return(self) -> None:
        self._mode, self._told, self._back_s = Mode.RETURNING, False, self._loop.time()
        self._regained = 0.0
        self._tombstones.begin_return()

    async def _tell_what_runs(self, back_s: float) -> None:
        """The shared state answers again, since `back_s`."""
        try:
            running = await tell_what_runs(
                self._store,
                self._outbox,
                self._tombstones,
                self._others_told,
                self._report_s,
                self._loop.time,
            )
        except (StateUnavailable, WritesRefused):
            if self._back_s == back_s:
                self.away("failed", "it went again")
            return
        if self._mode is not Mode.RETURNING or self._back_s != back_s:
            return  # it went again meanwhile, and may have come back once more
        self._note_told()
        _log.info("the shared state is back; told it of %d requests in flight", running)

    def _note_told(self) -> None:
        """All that runs has been told: what has ended may be given back."""
        self._shared.renew_owned_streams()
        for completion in self._outbox.ends():
            self._shared.tell_end(completion)
        self._told = True
        self._tombstones.free()
        self._heartbeat_now()

    async def _others_told(self) -> None:
        """Wait until the others have told of the ends they heard while this replica heard none of them."""
        self._heartbeat_now()
        await self._tombstones.others_told(self._mates.live)

    def _all_told(self) -> bool:
        """Whether nothing that runs can be missing in the shared state any more."""
        now_s = self._loop.time()
        if not self._told:
            return False
        if now_s - self._back_s >= _LONGEST_RETURN_S:
            return True
        if now_s - self._left_s < self._report_s:
            return False  # what ran before may not have given a sign of life yet
        return self._mates.all_back()

    def _finish(self) -> None:
        self._mode = Mode.SHARED
        self._silence.returned(self._loop.time())
        for completion in self._outbox.take_ended():
            self._shared.tell_end(completion)
        self._local.release_all()
        self._metrics.degraded(False)
        _log.info("shared operation again, after %.1f s", self._loop.time() - self._left_s)
        self._heartbeat_now()


async def tell_what_runs(
    store: Store,
    outbox: Outbox,
    tombstones: Tombstones,
    others_told: Callable[[], Awaitable[None]],
    report_s: float,
    clock: Callable[[], float],
) -> int:
    """Tell it of the ends in `tombstones` and, when the other replicas have told theirs, of the requests that
    run by `outbox`; how many those are.

    `report_s` is how often the access log gives a sign of life.

    Raises:
        StateUnavailable: it has gone again.
        WritesRefused: it takes no writes for now.
    """
    await asyncio.sleep(random.random() * _JITTER_S)
    await tombstones.tell()
    await others_told()
    return await bring(store, outbox, report_s, clock)
