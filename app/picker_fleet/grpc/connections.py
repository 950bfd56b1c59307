"""The connections of a port: how many may be open, and which one may work next.

`Turns` divides the event loop's time by start-time fair queueing (Goyal, Vin and Cheng, 1996).
A step of the loop does a limited amount of work, in units of about 5 µs. Connections with work wait in the
order of their tags: a tag is the virtual time at which the connection has used its share. So a connection
with little work goes first, however much work other connections have.

Trusted connections go before untrusted ones (strangers). All strangers together get a limited part of the
loop's time: if they flood the picker, they take no CPU from the gateway, which may share the machine.
Strangers save up unused time for a second, so a gateway's first request after a pause does not wait.
"""

import asyncio
import heapq
import itertools
import logging
from collections import Counter, OrderedDict, deque
from typing import Any, Final, Generic, Protocol, TypeVar

_TURNS_A_STEP: Final = 4  # a connection's turn takes at most a quarter of a step's work
_CANCEL_WORK: Final = 10  # units of work for cancelling a task
_TICK_S: Final = 0.005  # seconds until untrusted connections that have used up their work get more

_log = logging.getLogger(__name__)


class Addressed(Protocol):
    """A connection with the address of its peer, '' if it is unknown."""

    address: str

    def abort(self) -> None: ...


class ByAddress(Counter[str]):
    """How many connections each address has."""

    def remove(self, address: str) -> None:
        """Count one connection of `address` less. Forget an address without connections."""
        self[address] -= 1
        if not self[address]:
            del self[address]


Connection = TypeVar("Connection", bound=Addressed)


class Connections(Generic[Connection]):
    """The connections of `port`, at most `limit`; `all` has each of them.

    At the limit, a new connection replaces an idle one: the oldest that was never busy, or else the one that
    has been idle for longest. One address gets at most three quarters of the limit, since requests without
    end keep connections busy.
    """

    def __init__(self, port: str, limit: int) -> None:
        self._port, self._limit = port, limit
        self.all: set[Connection] = set()
        self._by_address = ByAddress()
        self._unused: OrderedDict[Connection, None] = OrderedDict()
        self._idle: OrderedDict[Connection, None] = OrderedDict()

    @property
    def full(self) -> str:
        """The reason why new connections are refused; '' while they are accepted."""
        if len(self.all) < self._limit or self._unused or self._idle:
            return ""
        return f"all {self._limit} connections of the {self._port} are taken"

    def add(self, connection: Connection) -> bool:
        """Add a new connection; at a limit, abort an idle one first; return False if none is idle."""
        address, share = connection.address, self._limit - self._limit // 4
        has_share = address != "" and self._by_address[address] >= share
        if has_share or len(self.all) >= self._limit:
            taken = share if has_share else self._limit
            _log.warning(
                "all %d connections of the %s are taken: idle ones are closed",
                taken,
                self._port,
                extra={"peer": address},
            )
            idle = itertools.chain(self._unused, self._idle)
            spare = next((each for each in idle if not has_share or each.address == address), None)
            if spare is None:
                return False
            self.remove(spare)
            spare.abort()
        self.all.add(connection)
        self._by_address[address] += 1
        self._unused[connection] = None
        return True

    def remove(self, connection: Connection) -> None:
        """Remove a connection, if it is there, since it has ended."""
        if connection in self.all:
            self.all.remove(connection)
            self._by_address.remove(connection.address)
            self.busy(connection)

    def busy(self, connection: Connection) -> None:
        """Keep a connection, since it has a request."""
        self._unused.pop(connection, None)
        self._idle.pop(connection, None)

    def idle(self, connection: Connection) -> None:
        """Let a new connection replace this one, since it has no request any more."""
        if connection in self.all:
            self._idle[connection] = None


class Line:
    """Connections that wait for a turn, and their virtual time `now`: the tag of the latest turn."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting: list[tuple[float, int, Worker]] = []


class Worker(Protocol):
    """A connection as `Turns` sees it. Only `Turns` writes `tag`, `line` and `queued`."""

    tag: float  # the virtual time at which the connection has used its share
    line: Line | None  # the line whose virtual time `tag` is
    queued: bool

    @property
    def trusted(self) -> bool: ...

    def work(self, most: int) -> tuple[int, bool]:
        """Do about `most` units of work. Returns the units of work done, and whether work is left."""


class Turns:
    """Gives connections turns to work: at most about `step_work` units of work in one step of the event loop,
    and `strangers_work` units a second for all untrusted connections (strangers), saved up for one second."""

    def __init__(self, step_work: int, strangers_work: int) -> None:
        self._step_work = self._left = step_work
        self._strangers_work = strangers_work
        self._strangers_left = self._strangers_most = float(max(step_work, strangers_work))
        self._trusted, self._strangers = Line(), Line()
        self._numbers = itertools.count()  # arrival numbers: they order workers with equal tags
        self._cancelled: deque[asyncio.Task[Any]] = deque()
        self._loop = asyncio.get_running_loop()
        self._renewed_s = self._loop.time()
        self._renewing = self._ticking = False

    def ask(self, worker: Worker) -> None:
        """Give a connection with new work a turn: now, or later if the step's work is used up or a connection
        with a lower tag waits."""
        if worker.queued:
            return
        line, tag = self._place(worker)
        if self._may_work(line) and not (line.waiting and line.waiting[0][0] < tag):
            self._turn(line, worker, tag)
        else:
            self._wait(line, tag, worker)

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task in this step of the event loop, or in a later step if this step's work is used up."""
        if self._left > 0 and not self._cancelled:
            self._left -= _CANCEL_WORK
            task.cancel()
        else:
            self._cancelled.append(task)
        self._renew_soon()

    def _place(self, worker: Worker) -> tuple[Line, float]:
        """The line in which a connection waits, which depends on whether it is trusted, and its tag there."""
        line = self._trusted if worker.trusted else self._strangers
        if worker.line is not line:
            worker.line, worker.tag = line, line.now
        return line, max(worker.tag, line.now)

    def _may_work(self, line: Line) -> bool:
        return self._left > 0 and (line is self._trusted or self._strangers_left > 0)

    def _turn(self, line: Line, worker: Worker, tag: float) -> None:
        line.now = tag
        done, has_more = worker.work(min(self._left, self._step_work // _TURNS_A_STEP))
        self._left -= done
        if line is self._strangers:
            self._strangers_left -= done
        worker.tag = tag + done
        if has_more:
            self._wait(*self._place(worker), worker)
        elif 2 * self._left < self._step_work:
            self._renew_soon()

    def _wait(self, line: Line, tag: float, worker: Worker) -> None:
        worker.queued = True
        heapq.heappush(line.waiting, (tag, next(self._numbers), worker))
        if not self._ticking or line is self._trusted:
            self._renew_soon()

    def _renew_soon(self) -> None:
        if not self._renewing:
            self._renewing = True
            self._loop.call_soon(self._renew)

    def _renew(self) -> None:
        """Begin a step of the event loop: continue with work that earlier steps have left."""
        self._renewing = False
        now_s = self._loop.time()
        more = (now_s - self._renewed_s) * self._strangers_work
        self._strangers_left = min(self._strangers_left + more, self._strangers_most)
        self._renewed_s, self._left = now_s, self._step_work
        while self._cancelled and 2 * self._left > self._step_work:
            self._left -= _CANCEL_WORK
            self._cancelled.popleft().cancel()
        for line in (self._trusted, self._strangers):
            while line.waiting and self._may_work(line):
                tag, _, worker = heapq.heappop(line.waiting)
                worker.queued = False
                self._turn(line, worker, tag)
        if self._cancelled or self._trusted.waiting or (self._strangers.waiting and self._strangers_left > 0):
            self._renew_soon()
        elif self._strangers.waiting and not self._ticking:
            self._ticking = True
            self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._renew_soon()
