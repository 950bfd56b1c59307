"""The gate that goes on without the shared state (G8; docs/without-redis.md).

    SHARED ──(the breaker opens)──> LOCAL ──(it closes)──> RETURNING ──(all replicas have told)──> SHARED
                                      ^                        │
                                      └──(it opens again)──────┘

LOCAL spends what its purse holds. RETURNING tells the shared state what runs, and needs both its purse and
the shared state for each new request. Ends are told then, and again at the end of it: another replica may
have brought back meanwhile what it had not heard the end of.
"""

import asyncio
import contextlib
import enum
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.admission import ticket
from app.admission.borrowing import ASK_S, Borrower, Peers
from app.admission.breaker import Breaker
from app.admission.local import LocalGate
from app.admission.local_pick import LocalPicker
from app.admission.local_rules import rules_of
from app.admission.outbox import Outbox, Placed
from app.admission.purse import share
from app.admission.shared import SharedGate
from app.admission.tuning import Effective
from app.endpoints.snapshot import SnapshotCell
from app.errors import StateUnavailable
from app.request import Alive, Completion, InferenceRequest, Placement
from app.scheduling.chooser import LeastLoaded
from app.state.store import Pulse, Store
from app.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)
_PROBE_S = 0.2
_TELL_AT_ONCE = 512  # requests; the link sends 64 a call
_JITTER_S = 0.1  # replicas that come back together do not all begin at once
_SPREAD_S = 0.5  # within which replicas that come back together have all told what has ended
_REPORT_SLACK_S = 1.0  # by which the access log may be late with a sign of life
_LONGEST_RETURN_S = 3.5  # for replicas that do not come back at all
_NEWCOMER_S = 3.0  # a replica younger than this may not be known to the others yet


class Mode(enum.Enum):
    SHARED = "shared"
    LOCAL = "local"
    RETURNING = "returning"


class SturdyGate:
    """`app.admission.gate.Gate`: the shared one while it can be had, else this replica's own. One event loop.

    `effective` gives the configuration in force, `load` the fleet's requests by endpoint as last heard of,
    `poke` makes the heartbeat come now, which is the probe; `glance` as well, but only for its own reply.
    """

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
        self._replica = replica
        self._metrics = metrics
        self._budget_s = budget_s
        self._report_s = report_s
        self._effective, self._fleet_load, self._poke = effective, load, poke
        self._glance = glance
        self._loop = asyncio.get_running_loop()
        self._breaker = Breaker(budget_s)
        self._local = LocalGate(metrics)
        self._borrower = Borrower(
            self._local, via, peers=self._others, active=lambda: self._mode is not Mode.SHARED
        )
        self._mode = Mode.SHARED
        self._outbox = Outbox()
        self._picker = LocalPicker(chooser, endpoints, self._loop.time)
        self._pulse: Pulse | None = None  # the last one while all was well
        self._pulse_s = 0.0
        self.newcomer_s = _NEWCOMER_S
        self._live: tuple[str, ...] = ()
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
        self._peers: Mapping[str, Mapping[str, Any]] = {}  # what the live replicas say of themselves
        self._addresses: dict[str, str] = {}
        self._changed = asyncio.Event()

    @property
    def mode(self) -> Mode:
        return self._mode

    @property
    def degraded(self) -> bool:
        """Whether this replica's part of the state is not all in the shared one. What others are told."""
        return self._mode is Mode.LOCAL or (self._mode is Mode.RETURNING and not self._told)

    def status(self) -> dict[str, Any] | None:
        """What it is like without the shared state; None while there is one.

        `in_flight` counts requests let go here whose end was not heard here; others may have heard it.
        """
        if self._mode is Mode.SHARED:
            return None
        return {
            "mode": self._mode.value,
            "since_s": round(self._loop.time() - self._left_s, 3),
            "bound": self._bound,
            "share": self._share,
            "free": self._local.free,
            "let_go": self._let_go,
            "in_flight": len(self._outbox),
            "queued": self._local.waiting,
            "queue_length": self._local.lengths(),
        }

    async def admit(self, request: InferenceRequest, *, held: bool, age_s: float = 0.0) -> Placement:
        arrived_s = self._loop.time() - age_s
        while True:
            if self._mode is Mode.SHARED:
                try:
                    age_s = self._loop.time() - arrived_s
                    placement = await self._shared.admit(request, held=held, age_s=age_s)
                except StateUnavailable:
                    self._lose("a decision could not be had")
                    if self._mode is Mode.SHARED:
                        raise  # nothing is known that could be gone by
                    continue
                self._gained += self._cost(request)
                self._busy = True
                return placement
            placed = await self._admit_alone(request, arrived_s, held)
            if placed is not None:
                return placed

    async def _admit_alone(self, request: InferenceRequest, arrived_s: float, held: bool) -> Placement | None:
        cost = self._local.cost_of(self._cost(request))
        if not await self._local.admit(request, cost, arrived_s):
            return None
        try:
            if self._mode is not Mode.LOCAL:
                self._prepaid += cost
                try:
                    age_s = self._loop.time() - arrived_s
                    placement = await self._shared.admit(request, held=held, age_s=age_s)
                finally:
                    self._prepaid -= cost
                self._gained += cost
            else:
                fallbacks = self._effective().settings.scheduling.fallbacks
                picked = self._picker.pick(request, most=1 + fallbacks)
                placement = self._shared.placed_elsewhere(request, picked, held=held)
        except StateUnavailable:
            self._local.earn(cost)
            self._lose("a decision could not be had")
            return None
        except BaseException:
            self._local.earn(cost)
            raise
        if self._mode is not Mode.SHARED:  # it may have come back just now
            endpoint = placement.endpoints[0]
            now_s = self._loop.time()
            self._outbox.placed(
                request.id, Placed(placement.attempt, placement.ticket, endpoint, cost, now_s)
            )
            self._picker.began(endpoint)
            self._let_go += 1
        return placement

    async def route(self, subset: tuple[str, ...] | None) -> Placement:
        return await self._shared.route(subset)

    async def confirm(self, request_id: str, placement: Placement, age_s: float) -> bool:
        mode, lease_s = self._mode, self._effective().settings.leases.inflight
        # Without the shared state: nobody else has it while its lease cannot have run out, nor where this
        # replica's own purse has paid for it.
        own = age_s < lease_s or bool(self._outbox.endpoint_of(request_id))
        if mode is Mode.LOCAL:
            return own
        try:
            if mode is Mode.SHARED or not own:
                return await self._shared.confirm(request_id, placement, age_s)
            await self._store.renew(request_id, placement.attempt, "", placement.ticket)
        except StateUnavailable:
            self._lose("a place could not be confirmed")
            if self._mode is Mode.SHARED:
                raise
        return own

    def withdraw(self, request_id: str, placement: Placement) -> None:
        if self._mode is not Mode.SHARED:
            self._picker.ended(self._outbox.endpoint_of(request_id))
            self._local.earn(self._outbox.withdrawn(request_id))
        self._shared.withdraw(request_id, placement)

    def settle(self, completion: Completion) -> None:
        note = completion.ticket or self._shared.held_ticket(completion.id)
        if self._mode is Mode.SHARED:
            self._busy = True
            self._unanswered[completion.id] = completion, note
            answer = self._shared.settle(completion)
            answer.add_done_callback(lambda _: self._unanswered.pop(completion.id, None))
            return
        if self._mode is Mode.RETURNING:
            self._shared.settle(completion)
        if not (note or self._outbox.knows(completion.id)):
            return  # the end of one that was never placed: Envoy tells of refused ones, too
        self._picker.ended(self._outbox.endpoint_of(completion.id) or ticket.endpoint_of(note))
        if completion.failed:
            self._picker.failed(completion.failed)
        freed = self._outbox.ended(completion, note)
        if self._mode is Mode.LOCAL:
            self._shared.ended(completion)
            if freed is not None:
                self._metrics.completed(completion, ticket.model_of(note))
        if freed is not None:
            freed = self._local.cost_of(freed)
            self._regained += freed
            self._local.earn(freed)

    def renew(self, alive: Alive) -> None:
        if self._mode is not Mode.SHARED:
            self._outbox.alive(alive)
        if self._mode is not Mode.LOCAL:
            self._shared.renew(alive)

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

    def peers(self, about: Mapping[str, Mapping[str, Any]]) -> None:
        """Who is live, and what each says of itself: `degraded`, and `grpc`, where it is asked for places."""
        self._peers = about
        if self._mode is Mode.SHARED:
            self._live = tuple(sorted(about))
        for name, said in about.items():
            if name != self._replica and said.get("grpc"):
                self._addresses[name] = str(said["grpc"])

    def _others(self) -> Mapping[str, str]:
        return {name: self._addresses[name] for name in self._live if name in self._addresses}

    async def lend(self, least: float, most: float) -> float:
        """What another replica may have of this one's places."""
        return 0.0 if self._mode is Mode.SHARED else await self._local.lend(least, most, ASK_S)

    async def run(self) -> None:
        """Watch, probe, borrow and return until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(), name="redis-watch")
            tasks.create_task(self._borrower.run(), name="borrower")

    async def _watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._budget_s / 2):
                        await self._changed.wait()
                self._changed.clear()
                self._look()
                if self._mode is Mode.LOCAL and self._breaker.closed:
                    self._mode, self._told, self._back_s = Mode.RETURNING, False, self._loop.time()
                    self._regained = 0.0
                    tasks.create_task(self._tell_what_runs(self._back_s), name="tell-what-runs")
                if self._mode is Mode.RETURNING and self._all_told():
                    self._finish()

    def _look(self) -> None:
        if self._pulse is None:
            return  # never joined: Redis is still being reached for the first time
        now_s = self._loop.time()
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

    def _lose(self, why: str) -> None:
        if self._mode is Mode.LOCAL or self._pulse is None:
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
            self._local.keep(max(self._part(self._pulse) - self._gained, 0.0) - self._prepaid)
        else:
            self._local.keep(self._local.free - self._regained)
        self._mode, self._told = Mode.LOCAL, False
        self._metrics.degraded(True)
        _log.warning("the shared state is away (%s): admitting within this replica's share", why)
        self._shared.give_up()

    def _open_purse(self) -> None:
        pulse = self._pulse
        assert pulse is not None
        self._left_s, self._let_go = self._loop.time(), 0
        part = self._part(pulse)
        if self._left_s - self._joined_s < self.newcomer_s:
            part = 0.0  # others may count without it
        live = self._count(pulse)
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

    def _count(self, pulse: Pulse) -> int:
        """How many replicas the bound is shared by."""
        return max(len(self._live), pulse.live, 1)

    def _part(self, pulse: Pulse) -> float:
        """This replica's part of what was free at `pulse`."""
        live = self._count(pulse)
        rank = self._live.index(self._replica) if self._replica in self._live else live
        whole = self._effective().settings.request_queue_controller.unit == "requests"
        return share(pulse.upper - pulse.stock, live=live, rank=rank, whole=whole)

    async def _tell_what_runs(self, back_s: float) -> None:
        """The shared state answers again, since `back_s`: tell it what is over and what runs, in batches."""
        await asyncio.sleep(random.random() * _JITTER_S)
        try:
            await self._tell([(end.id,) for end in self._outbox.ends()], self._store.bury)
            await asyncio.sleep(_SPREAD_S)
            running = self._outbox.in_flight(self._loop.time() - self._report_s - _REPORT_SLACK_S)
            await self._tell(running, self._store.renew)
        except StateUnavailable:
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
        _log.info("the shared state is back; told it of %d requests in flight", len(running))

    async def _tell(self, items: Sequence[Any], how: Callable[..., asyncio.Future[str]]) -> None:
        for at in range(0, len(items), _TELL_AT_ONCE):
            await asyncio.gather(*(how(*each) for each in items[at : at + _TELL_AT_ONCE]))

    def _all_told(self) -> bool:
        """Whether nothing that runs can be missing in the shared state any more."""
        now_s = self._loop.time()
        if not self._told:
            return False
        if now_s - self._back_s >= _LONGEST_RETURN_S:
            return True
        if now_s - self._left_s < self._report_s:
            return False  # what ran before may not have given a sign of life yet
        return all(name in self._peers and not self._peers[name].get("degraded") for name in self._live)

    def _finish(self) -> None:
        self._mode = Mode.SHARED
        for completion in self._outbox.take_ended():
            self._shared.tell_end(completion)
        self._local.release_all()
        self._metrics.degraded(False)
        _log.info("shared operation again, after %.1f s", self._loop.time() - self._left_s)
        self._poke()

    def _cost(self, request: InferenceRequest) -> float:
        return request.cost + self._shared.answer_tokens if request.learn else request.cost
