"""The two sides of a replica, with and without the shared state, and its way from one to the other (G8;
docs/without-redis.md).

    SHARED ──(the breaker opens)──> LOCAL ──(it closes)──> RETURNING ──(all replicas have told)──> SHARED
                                      ^                        │
                                      └──(it opens again)──────┘

LOCAL spends what its purse holds. RETURNING tells the shared state what runs, and needs both its purse and
the shared state for each new request. Ends are told then, and again at the end of it: another replica may
have brought back meanwhile what it had not heard the end of.
"""

import asyncio
import enum
import logging
from collections.abc import Callable, Mapping
from typing import Any

from app.admission.borrowing import ASK_S, Borrower, Peers
from app.admission.breaker import Breaker
from app.admission.fleetmates import Fleetmates
from app.admission.homecoming import tell_what_runs
from app.admission.local import LocalGate
from app.admission.local_pick import LocalPicker
from app.admission.local_rules import rules_of
from app.admission.outbox import Outbox
from app.admission.shared import SharedGate
from app.admission.tuning import Effective
from app.endpoints.snapshot import SnapshotCell
from app.errors import StateUnavailable, WritesRefused
from app.request import Completion
from app.scheduling.chooser import LeastLoaded
from app.state.store import Pulse, Store
from app.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
_PROBE_S = 0.2
_FULL = 1.04  # a timer may come a millisecond early; looks at the full half budget find silence in three
_LONGEST_RETURN_S = 3.5  # for replicas that do not come back at all
_NEWCOMER_S = 3.0  # a replica younger than this may not be known to the others yet
# Between looks while nothing is asked and all is well. Whoever looks much later has slept (waking.py).
_SELDOM_S = 0.2


class Mode(enum.Enum):
    SHARED = "shared"
    LOCAL = "local"
    RETURNING = "returning"


class Crossing:
    """Watches the shared state and changes sides; `SturdyGate` works on the side it is on. One event loop."""

    def __init__(
        self,
        store: Store,
        shared: SharedGate,
        *,
        replica: str,
        metrics: Metrics,
        endpoints: SnapshotCell,
        chooser: LeastLoaded,
        budget_s: float,
        report_s: float,
        effective: Callable[[], Effective],
        load: Callable[[], Mapping[str, int]],
        poke: Callable[[], None],
        glance: Callable[[], None],
        via: Peers,
    ) -> None:
        self._store, self._shared = store, shared
        self._metrics = metrics
        self._look_s = budget_s / 2 * _FULL
        self._soon_s = min(self._look_s, _SELDOM_S)
        self._report_s = report_s
        self._effective, self._fleet_load, self._poke = effective, load, poke
        self._glance = glance
        self._loop = asyncio.get_running_loop()
        self._breaker = Breaker(budget_s)
        self._mates = Fleetmates(replica)
        self._local = LocalGate(metrics)
        self._borrower = Borrower(
            self._local, via, peers=self._mates.others, active=lambda: self._mode is not Mode.SHARED
        )
        self._mode = Mode.SHARED
        self._outbox = Outbox()
        self._picker = LocalPicker(chooser, endpoints, self._loop.time)
        self._pulse: Pulse | None = None  # the last one while all was well
        self._pulse_s = 0.0
        self.newcomer_s = _NEWCOMER_S
        self._joined_s = 0.0
        self._gained = 0.0  # what was placed through the shared state since that pulse
        self._regained = 0.0  # by ends since Redis answers again, which it has heard, too
        self._prepaid = 0.0  # by those who wait in the shared queue, too, on the way back
        self._busy = False
        self._unanswered: dict[str, tuple[Completion, str]] = {}  # ends it has not confirmed, with tickets
        self._bound = self._share = 0.0
        self._let_go = 0  # requests, since the shared state was lost
        self._left_s = self._back_s = self._probed_s = 0.0
        self._told = False
        self._changed = asyncio.Event()
        self._ticking: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None  # while decisions wait

    @property
    def mode(self) -> Mode:
        return self._mode

    @property
    def degraded(self) -> bool:
        """Whether this replica's part of the state is not all in the shared one. What others are told."""
        return self._mode is Mode.LOCAL or (self._mode is Mode.RETURNING and not self._told)

    def beat(self, pulse: Pulse, took_s: float) -> None:
        """A heartbeat has come back."""
        now_s = self._loop.time()
        if self._mode is not Mode.LOCAL and pulse.born != "0":
            self._joined_s = self._joined_s or now_s
            self._pulse, self._pulse_s, self._gained = pulse, now_s, 0.0
        if not self._breaker.closed:
            self._breaker.probed(now_s, took_s)
            self._changed.set()

    def missed(self) -> None:
        """A heartbeat has not come back."""
        self._breaker.probed(self._loop.time(), None)

    def asking(self, asking: bool) -> None:
        """Decisions begin to wait for the shared state, or none waits any more."""
        _stop(self._looking)
        self._looking = self._loop.call_later(self._look_s, self._look_on) if asking else None

    def peers(self, about: Mapping[str, Mapping[str, Any]]) -> None:
        """Who is live, and what each says of itself: `degraded`, and `grpc`, where it is asked for places."""
        self._mates.heard(about, shared=self._mode is Mode.SHARED)

    async def lend(self, least: float, most: float) -> float:
        """What another replica may have of this one's places."""
        return 0.0 if self._mode is Mode.SHARED else await self._local.lend(least, most, ASK_S)

    async def run(self) -> None:
        """Watch, probe, borrow and return until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(), name="redis-watch")
            tasks.create_task(self._borrower.run(), name="borrower")

    async def _watch(self) -> None:
        self._tick_in(0)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._changed.wait()
                    self._changed.clear()
                    if self._mode is Mode.LOCAL and self._breaker.closed:
                        self._mode, self._told, self._back_s = Mode.RETURNING, False, self._loop.time()
                        self._regained = 0.0
                        tasks.create_task(self._tell_what_runs(self._back_s), name="tell-what-runs")
                    if self._mode is Mode.RETURNING and self._all_told():
                        self._finish()
        finally:
            _stop(self._ticking)
            _stop(self._looking)

    def _tick(self) -> None:
        # A timer's callback and no task: it comes many times a second and nearly always finds nothing. Waking
        # for it is most of its cost, so that it comes seldom where there is nothing to find.
        well = self._mode is Mode.SHARED and self._store.fault is None
        self._tick_in(_SELDOM_S if well else self._soon_s)
        self._look()
        if self._mode is not Mode.SHARED:
            self._changed.set()

    def _tick_in(self, seconds: float) -> None:
        _stop(self._ticking)
        self._ticking = self._loop.call_later(seconds, self._tick)

    def _look_on(self) -> None:
        self._looking = self._loop.call_later(self._look_s, self._look_on)
        self._look()

    def _look(self) -> None:
        if self._pulse is None:
            return  # never joined: Redis is still being reached for the first time
        now_s = self._loop.time()
        self._shared.waking.look()
        if not self._waking():
            self._breaker.look(
                now_s,
                asked_s=self._store.asked_s,
                heard_s=self._store.heard_s,
                down=self._store.fault is not None,
            )
        if self._mode is not Mode.LOCAL and not self._breaker.closed:
            self._go_local(self._store.fault or "silence")
        if now_s - self._probed_s < _PROBE_S:
            return
        if self._mode is not Mode.SHARED:
            self._probed_s = now_s
            self._poke()
        elif self._busy:
            # What is known of the stock is never much older than what this replica has done to it.
            self._probed_s, self._busy = now_s, False
            self._glance()

    def _waking(self) -> bool:
        """Whether this process has just slept while the state was shared; else it goes by its purse."""
        return self._mode is Mode.SHARED and self._shared.waking.now

    def _lose(self, why: str) -> None:
        if self._mode is Mode.LOCAL or self._pulse is None or self._waking():
            return
        self._breaker.fail(self._loop.time())
        self._go_local(why)

    def _go_local(self, why: str) -> None:
        if self._pulse is None:
            return  # never joined: nothing is known that could be gone by
        if self._mode is Mode.SHARED:
            self._open_purse()
        elif self._pulse_s > self._back_s:
            # Others may be back already. What it has heard end since is free in the shared state, too.
            part = self._mates.part(self._pulse, whole=self._whole())
            self._local.keep(max(part - self._gained, 0.0) - self._prepaid)
        else:
            self._local.keep(self._local.free - self._regained)
        self._mode, self._told = Mode.LOCAL, False
        self._tick_in(self._soon_s)
        self._metrics.degraded(True)
        _log.warning("the shared state is away (%s): admitting within this replica's share", why)
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

    async def _tell_what_runs(self, back_s: float) -> None:
        """The shared state answers again, since `back_s`."""
        try:
            running = await tell_what_runs(self._store, self._outbox, self._report_s)
        except (StateUnavailable, WritesRefused):
            if self._back_s == back_s:
                self._lose("it went again")
            return
        if self._mode is not Mode.RETURNING or self._back_s != back_s:
            return  # it went again meanwhile, and may have come back once more
        self._shared.renew_held()
        for completion in self._outbox.ends():
            self._shared.tell_end(completion)
        self._told = True
        self._poke()
        _log.info("the shared state is back; told it of %d requests in flight", running)

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
        for completion in self._outbox.take_ended():
            self._shared.tell_end(completion)
        self._local.release_all()
        self._metrics.degraded(False)
        _log.info("shared operation again, after %.1f s", self._loop.time() - self._left_s)
        self._poke()


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
