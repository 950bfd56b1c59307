"""Searches all orders in which replicas may lose Redis and resync while one request runs and ends.

The replicas are the product's `Admission` with journal, tombstones and resync. The class `Pool` answers
replicas' calls at once; it models `lua/tombstone.lua`, `renew.lua`, `settle.lua` and `admit.lua` for one
request. A test replays the calls in `Pool.asked` on a server. The clock stands still, so that access-log
entries never become too old: correctness must not depend on the entries' age.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, NamedTuple, cast

from admission_bench import PULSE, admission_over
from script_fleet import ask, ended

from picker_fleet.admission.admission import Admission
from picker_fleet.admission.failover import FailoverState
from picker_fleet.domain.request import Alive, Endpoint, Outcome
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.state.connection import PauseDetector
from picker_fleet.state.replies import Placed, SettleReply
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics

REQUEST, ENDPOINT = "x", "10.0.0.1:8000"
NOW_S = 1000.0
_ANY_TIME_S = 1e6  # a replica accepts access-log entries of any age
_UNSENT, _RUNS, _UNREAD, _OVER = "unsent", "runs", "unread", "over"


class Done(asyncio.Future[Any]):
    """A future that is already done and runs an added callback at once."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self.set_result(answer)

    def add_done_callback(self, then: Callable[[Any], object], **_: Any) -> None:
        then(self)


class Pool:
    """A model of the shared state in Redis. The list `asked` records all calls with their answers."""

    def __init__(self) -> None:
        self.counted: dict[str, bool] = {}  # running request -> whether the request was restored
        self.tombstones: set[str] = set()
        self.connection_epoch, self.life = 1, 1
        self.fault, self.asked_s, self.heard_s = None, None, 0.0
        self.asked: list[tuple[str, tuple[Any, ...], object]] = []  # each call's script, arguments, answer

    @property
    def epoch(self) -> str:
        return str(self.life)

    def lose(self) -> None:
        self.counted, self.tombstones = {}, set()
        self.life += 1
        self._answer("lose", (), "")

    def admit(
        self, request: Any, attempt: int, candidates: str, age_s: float = 0.0, prefill: str = ""
    ) -> Done:
        self.counted.setdefault(request.id, False)
        return self._answer("admit", (request.id,), Placed((ENDPOINT,)))

    def tombstone(self, request_id: str, ago_s: float = 0.0) -> Done:
        self.tombstones.add(request_id)
        reply = "back" if self.counted.get(request_id) else "stored"
        return self._answer("tombstone", (request_id,), reply)

    def now_ms(self) -> int:
        return 0

    def renew(
        self, request_id: str, attempt: int | None, served: str, accounting_token: str, ago_s: float = 0.0
    ) -> Done:
        args = request_id, "" if attempt is None else attempt, served, accounting_token
        if request_id in self.counted:
            return self._answer("renew", args, "renewed")
        if not accounting_token or request_id in self.tombstones:
            return self._answer("renew", args, "unknown")
        self.counted[request_id] = True
        return self._answer("renew", args, "restored")

    def settle(self, request_id: str, outcome: Outcome, *_: float | None, **how: bool) -> Done:
        known = self.counted.pop(request_id, None) is not None
        reply = SettleReply("settled" if known else "unknown")
        return self._answer("settle", (request_id, outcome.value), reply)

    def unsent_ends(self) -> list[str]:
        return []

    def _answer(self, script: str, args: tuple[Any, ...], answer: object) -> Done:
        self.asked.append((script, args, answer))
        return Done(answer)


class Step(NamedTuple):
    what: str
    who: int = 0


class State(NamedTuple):
    """The complete, hashable state of a `World`, which determines all further steps."""

    request: str
    signs: int
    outs: tuple[int, ...]
    reported: tuple[bool, ...]  # whether each resyncing replica has reported its completions
    counted: tuple[tuple[str, bool], ...]
    tombstones: frozenset[str]
    life: int
    said: tuple[Any, ...]
    gates: tuple[Any, ...]


class World:
    """The `replicas`, each of which may lose Redis up to `outs` times, and one request, which is renewed up
    to `signs` times. With `patient`, a replica restores requests only after each peer has reported its
    completions or has no Redis; without `patient`, this wait may time out at any time. If `unread`, the
    answer may be complete before its client has read it. Redis may lose all data `losses` times. With
    `whole`, a resync is one indivisible step between heartbeats of all replicas.
    """

    def __init__(
        self,
        replicas: int,
        *,
        outs: int,
        signs: int = 1,
        patient: bool = True,
        losses: int = 0,
        whole: bool = False,
        unread: bool = False,
    ) -> None:
        self.pool = Pool()
        self._most_outs, self._most_signs, self._losses = outs, signs, losses
        self.patient, self._whole, self._unread = patient, whole, unread
        self.names = tuple("abcdef"[:replicas])
        self.request, self._signs = _UNSENT, 0
        self._outs, self._reported = [0] * replicas, [False] * replicas
        self._said: list[_Said | None] = [None] * replicas  # last replica info of each replica without Redis
        self._gates = [self._gate(name) for name in self.names]
        for who, gate in enumerate(self._gates):
            self._beat(who)
            gate.failover.heartbeat_answered(PULSE)
        self.accounting_token = _run(self._gates[0].admit(ask(REQUEST), stream_owned=False)).accounting_token
        self.pool.counted.clear()
        self.pool.asked.clear()
        self._start = self.state()

    def _gate(self, name: str) -> Admission:
        cell = SnapshotCell()
        cell.publish(Snapshot("1", (Endpoint(ENDPOINT),)))
        return admission_over(
            cast(Store, self.pool), Metrics(), cell, replica=name, clock=lambda: NOW_S,
            attempts=itertools.repeat(1), pause_detector=PauseDetector(lambda: NOW_S, lambda: 0.0),
        )  # fmt: skip

    # The possible next steps, and the methods that take a step

    def steps(self) -> Iterator[Step]:
        if self.request == _OVER and not self._remembered:
            return
        local = [gate.failover.state is FailoverState.LOCAL for gate in self._gates]
        if self._losses >= self.pool.life:
            yield Step("lose")
        for who, gate in enumerate(self._gates):
            if self.request == _UNSENT:
                if who == 0:  # replicas are interchangeable: `a` starts the request
                    yield Step("start", who)
            elif self.request == _RUNS:
                yield Step("end", who)
                if self._unread:
                    yield Step("answer", who)
                if self._signs < self._most_signs:
                    yield Step("renew", who)
            elif self.request == _UNREAD:
                yield Step("end", who)
            if gate.failover.state is FailoverState.LOCAL:
                yield Step("return" if self._whole else "resync", who)
                continue
            if self._outs[who] < self._most_outs:
                yield Step("leave", who)
            if not self._whole:
                yield Step("beat", who)
            if gate.failover.state is FailoverState.SHARED:
                continue
            if not gate.failover.degraded:
                # A resync before the request exists only leads back to the initial state: skip it.
                if self.request != _UNSENT:
                    yield Step("finish", who)
            elif not self._reported[who]:
                yield Step("report", who)
            elif not self.patient or any(local) or gate.failover.tombstones.peers_answered(self.names):
                yield Step("restore", who)

    def take(self, step: Step) -> None:
        gate, who = self._gates[step.who], step.who
        if step.what == "start":
            if gate.failover.outage is not None:
                gate.failover.outage.gate.release(1.0)  # this search does not limit a replica's budget
            _run(gate.admit(ask(REQUEST), stream_owned=False))
            self.request = _RUNS
        elif step.what == "renew":
            self._signs += 1
            gate.renew(Alive(REQUEST, ENDPOINT, self.accounting_token))
        elif step.what in ("answer", "end"):
            is_read = step.what == "end"
            self.request = _OVER if is_read else _UNREAD
            end = ended(REQUEST)._replace(served=ENDPOINT, accounting_token=self.accounting_token)
            gate.settle(end._replace(is_read=is_read))
        elif step.what == "leave":
            self._outs[who] += 1
            self._said[who] = _Said.of(gate)
            gate.failover.abort_resync() if gate.failover.outage is not None else gate.failover.begin_outage()
        elif step.what == "resync":
            self._reported[who], self._said[who] = False, None
            gate.failover.begin_resync()
        elif step.what == "report":
            _run(gate.failover.tombstones.publish())
            self._reported[who] = True
        elif step.what == "restore":
            _run(gate.failover.outage.restore_running(cast(Store, self.pool), _ANY_TIME_S))
            gate.failover.finish_resync(gate.failover.outage.resync)
        elif step.what == "return":
            for what in ("resync", "report"):
                self.take(Step(what, who))
            self._beat_all()
            self.take(Step("restore", who))
            self._beat_all()
        elif step.what == "finish":
            gate.failover.end_outage()
        elif step.what == "beat":
            self._beat(who)
        else:
            self.pool.lose()

    def _beat_all(self) -> None:
        for who, gate in enumerate(self._gates):
            if gate.failover.state is not FailoverState.LOCAL:
                self._beat(who)

    def _beat(self, who: int) -> None:
        """Replica `who` receives its peers' present info by a heartbeat; they get its info in other steps."""
        about = {
            name: said or _Said.of(gate)
            for name, said, gate in zip(self.names, self._said, self._gates, strict=True)
        }
        gate = self._gates[who]
        gate.failover.update_peers({**about, self.names[who]: _Said()})
        if gate.failover.tombstones.is_due:
            _run(gate.failover.tombstones.answer_peers())

    # The invariants

    @property
    def _remembered(self) -> bool:
        """Whether the pool or a journal still has the request; otherwise nothing counts the request again."""
        return REQUEST in self.pool.counted or any(
            entry.id == REQUEST for gate in self._gates for entry in gate.ledger.journal()
        )

    @property
    def all_back(self) -> bool:
        return all(gate.failover.state is FailoverState.SHARED for gate in self._gates)

    def at_rest(self) -> None:
        """Replicas send heartbeats until no replica's info changes; a running request renews its lease."""
        for _ in range(2):
            self._beat_all()
        if self.request == _RUNS:
            self._gates[0].renew(Alive(REQUEST, ENDPOINT, self.accounting_token))

    def fault(self) -> str:
        """Describe a wrong count of the request in Redis; '' if the count is right."""
        counted, runs = REQUEST in self.pool.counted, self.request == _RUNS
        if counted == runs:
            return ""
        return "a running request is not counted" if runs else "an ended request is counted"

    # Saving and restoring the state

    def state(self, before: State | None = None, who: int = 0) -> State:
        """The present state of this world. `before`: an earlier state, after which only `who` took a step."""
        pool = self.pool
        if before is None:
            gates = tuple(gate.failover.save() for gate in self._gates)
        else:
            gates = (*before.gates[:who], self._gates[who].failover.save(), *before.gates[who + 1 :])
        return State(
            self.request, self._signs, tuple(self._outs), tuple(self._reported), tuple(pool.counted.items()),
            frozenset(pool.tombstones), pool.life, tuple(self._said), gates,
        )  # fmt: skip

    def go_to(self, state: State, since: State | None = None) -> None:
        """Set the world to `state`; if `since`, the present state, is known, restore only the differences."""
        self.request, self._signs = state.request, state.signs
        self._outs, self._reported = list(state.outs), list(state.reported)
        self.pool.counted, self.pool.tombstones = dict(state.counted), set(state.tombstones)
        self.pool.life, self._said = state.life, list(state.said)
        for who, (gate, saved) in enumerate(zip(self._gates, state.gates, strict=True)):
            if since is None or since.gates[who] is not saved:
                gate.failover.restore(saved)

    def restart(self) -> None:
        self.go_to(self._start)
        self.pool.asked.clear()


def search(world: World) -> tuple[int, str]:
    """Visit every reachable state once. Returns the number of states, and the steps to the first violation of
    an invariant; '' if there is none."""
    world.restart()
    first = world.state()
    reached: dict[State, tuple[State, Step] | None] = {first: None}
    open_states = [first]
    while open_states:
        state = open_states.pop()
        world.go_to(state)
        if world.all_back:
            fault = world.fault() if world.patient and world.pool.life == 1 and world.request == _OVER else ""
            world.at_rest()
            if fault := fault or world.fault():
                return len(reached), f"{_way(reached, state)}: {fault}"
            world.go_to(state)
        for step in list(world.steps()):
            world.take(step)
            after = world.state(None if step.what == "return" else state, step.who)
            if after not in reached:
                reached[after] = state, step
                open_states.append(after)
            world.go_to(state, after)
    return len(reached), ""


def walk(world: World, chance: random.Random, most: int) -> tuple[list[Step], str]:
    """Take random steps until all replicas use Redis again and the request has ended; at most `most` steps.
    Returns the steps taken, and the violated invariant, if any."""
    world.restart()
    taken: list[Step] = []
    while len(taken) < most and not (world.all_back and world.request == _OVER):
        if not (steps := list(world.steps())):
            break
        taken.append(chance.choice(steps))
        world.take(taken[-1])
    if not world.all_back:
        return taken, ""
    world.at_rest()
    return taken, world.fault()


def _way(reached: Mapping[State, tuple[State, Step] | None], state: State) -> str:
    steps: list[str] = []
    while (before := reached[state]) is not None:
        state, step = before
        steps.append(f"{step.what} {'abcdef'[step.who]}")
    return ", ".join(reversed(steps))


class _Said(dict[str, Any]):
    """The immutable info that a replica last sent to its peers."""

    @classmethod
    def of(cls, gate: Admission) -> "_Said":
        fields = gate.failover.heartbeat_fields().items()
        return cls({key: tuple(value) if isinstance(value, list) else value for key, value in fields})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of the coroutine `work`, which must not suspend."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the coroutine has suspended")
