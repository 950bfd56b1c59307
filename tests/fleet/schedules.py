"""Runs whole replicas and their clients under random faults, and checks docs/guarantees.md.

A seed determines a schedule: faults, each with its time, duration and replica, whether the endpoints' limits
are configured or found by the fleet, and further parts of the configuration (schedule_faults.py). The
replicas and their Valkey run on a simulated clock that skips idle time (time_lapse.py), so a schedule takes
seconds even on a busy machine. The function `failure` runs one schedule; `smallest` removes every fault that
the failure does not need.
"""

import asyncio
import collections
import contextlib
import contextvars
import math
import random
import secrets
import signal
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import check_client
import pytest
from extproc_client import body, converse, headers, response_body, response_headers
from page_server import PageServer, answered, serving
from proxy import Proxy, proxy
from redis_servers import Server, redis_server
from schedule_faults import (
    APART,
    CAP,
    CHANGES,
    EXTRAS,
    FIRST_SEED,
    HARMLESS,
    KINDS,
    LEASE_S,
    LOSING_WRITES,
    PARALLEL,
    RATES,
    SETTINGS,
    TOKENS,
    Fault,
    listed,
)
from time_lapse import (
    NO_LOAD,
    PROCESS,
    TimeLapseLoop,
    at_rest,
    checked,
    entry_of,
    message_of,
    noted_pools,
    time_lapse,
)
from whole_fleet import assert_no_violation, exact_bounds

from picker_fleet import serve
from picker_fleet.admission import budget_transfer
from picker_fleet.domain.allowlist import FAIRNESS_ID
from picker_fleet.domain.config import parse
from picker_fleet.ingress.ext_proc import accesslog
from picker_fleet.ingress.ext_proc.exchange import Exchange
from picker_fleet.pool import Pool
from picker_fleet.state import connection

REPLICAS, ENDPOINTS, BOUND = 3, 2, 6
BATCH = 3  # requests that a model server runs at once, by its metrics page
REPORT_S, SILENCE_S, TTL_S = 3.0, 3.0, 30.0
_CLIENTS, _FLOWS = 12, 3
_BEGIN_S, _END_S, _REST_S = 8.0, 40.0, 60.0  # first fault; last fault; limit for counts to reach 0
_ANSWERED_S = TTL_S + 1.0  # a request is answered within this time (G5)
_RUN_S = 400.0
_CONFIG: dict[str, Any] = {
    "fair_request_queue": {"queue_ttl": TTL_S, "claim_share": 1.0},
    "leases": {"inflight": LEASE_S, "access_log_interval": REPORT_S, "replica_silence": SILENCE_S},
    "decision_log": {"enabled": True, "max_entries": 1_000_000},
    "extproc": {"drain_grace": "0s", "listen": "127.0.0.1:0", "trusted_headers": [FAIRNESS_ID[0]]},
    "admin": {"listen": "127.0.0.1:0"},
}
_ADMITTED = {b"granted", b"bypassed"}
_OF_CHECK = {460: 500, 463: 503, 464: 504}  # Envoy's response mappers (docs/protocol.md)
_RECENT = 100  # about the number of decision-log entries of a few seconds


class Schedule(NamedTuple):
    seed: int
    mode: str
    faults: tuple[Fault, ...]
    adaptive: bool = False  # whether the fleet finds the endpoints' limits
    extras: tuple[str, ...] = ()  # names from schedule_faults.EXTRAS

    @classmethod
    def of(cls, seed: int) -> "Schedule":
        dice = random.Random(seed)

        def fault(kinds: Sequence[str]) -> Fault:
            at_s, kind = round(dice.uniform(_BEGIN_S, _END_S), 2), dice.choice(kinds)
            replica, lasts_s = dice.randrange(REPLICAS), dice.choice((0.3, 1.5, 5.0)) * dice.uniform(0.6, 1.4)
            if kind == "stop" and seed >= FIRST_SEED:
                lasts_s *= 3.0  # other replicas return to Redis before this one continues
            return Fault(at_s, kind, replica, round(lasts_s, 2))

        kinds = dice.sample(sorted(KINDS), dice.randint(1, 3))
        faults = [fault(kinds) for _ in range(dice.randint(1, 6))]
        mode, extras = dice.choice(("lean", "lean", "standard")), ()
        if seed >= FIRST_SEED:
            mode = dice.choice(("lean", "standard", "http"))
            extras = tuple(dice.sample(EXTRAS, dice.randint(1, 3)))
            faults += [fault([each]) for each in extras if each in CHANGES for _ in range(2)]
        return cls(seed, mode, tuple(sorted(faults)), adaptive=seed % 2 == 1, extras=extras)

    @property
    def kinds(self) -> set[str]:
        return {fault.kind for fault in self.faults}

    @property
    def outages(self) -> int:
        """The most outages that the faults may cause; the fault `cut` cuts connections three times."""
        return sum(3 if each.kind == "cut" else 1 for each in self.faults if each.kind not in HARMLESS)

    @property
    def cost(self) -> float:
        """The cost of each request, in the unit of the stock."""
        return TOKENS if "tokens" in self.extras else 1.0

    @property
    def bounds(self) -> dict[str, Any]:
        """The settings `request_queue_controller`. The fleet begins with the least limit."""
        unit = {"unit": "tokens" if "tokens" in self.extras else "requests"}
        if self.adaptive:
            least = int(self.cost)
            return {"mode": "adaptive", "min_per_backend": least, "initial_per_backend": least, **unit}
        return {**exact_bounds(self.cost * BOUND / ENDPOINTS), **unit}


class Node:
    """A replica simulated as a process: tasks in its context stop and die together."""

    def __init__(self, name: str, between: Proxy) -> None:
        self.name, self.between = name, between
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, name)
        self.context.run(_NODE.set, self)
        self.bound: asyncio.Future[serve.Bound] = asyncio.get_running_loop().create_future()
        self.dead, self.stopped = asyncio.Event(), 0
        self.pool: Pool

    def start(self, tree: dict[str, Any]) -> None:
        whole = {**tree, "redis": {"url": self.between.url}}
        self._serving = self.task(serve.serve(parse(whole), self.name, self.bound.set_result))

    async def ready(self) -> None:
        await self.bound
        self.log = accesslog.Collector([self.pool.account])
        self.services = self.pool.services()

    def task(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        return asyncio.create_task(work, context=self.context)

    async def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run `work` in this simulated process; raise ConnectionError if the process dies first."""
        doing, dying = self.task(work), asyncio.create_task(self.dead.wait())
        try:
            await asyncio.wait((doing, dying), return_when=asyncio.FIRST_COMPLETED)
            if self.dead.is_set():
                raise ConnectionError(f"{self.name} died")
            return await doing
        finally:
            doing.cancel()
            dying.cancel()

    async def kill(self) -> None:
        """Simulate SIGKILL: nothing that the replica still does reaches Redis."""
        self.dead.set()
        self.between.refusing = self.between.vanished = True
        self.between.cut()
        self._serving.cancel()
        await asyncio.wait((self._serving,))


_NODE: contextvars.ContextVar[Node | None] = contextvars.ContextVar("_NODE", default=None)


@dataclass(slots=True)
class Record:
    """One client's view of its request. The field `answers` is empty if the client has left."""

    id: str
    flow: str
    asked_s: float
    honest: bool = True
    answers: list[int] = field(default_factory=list)
    answered_s: float = 0.0
    tries: int = 1
    model: str = "llama"


class Answer(NamedTuple):
    """A replica's answer: its status, its text, and Envoy's access-log entry of a request that goes on."""

    status: int
    text: str
    entry: Any

    @classmethod
    def of(cls, request_id: str, answers: Sequence[Any]) -> "Answer":
        if answers[-1].HasField("immediate_response"):
            return cls(answers[-1].immediate_response.status.code, "", None)
        return cls(200, "".join(map(str, answers)), entry_of(request_id, answers))


class Running(NamedTuple):
    """A request at its model server. `node`: the replica that placed it; `seq` and `bound`: the number of its
    admission in the decision log, and the bound then in force."""

    began_s: float
    page: PageServer
    seq: int
    bound: float
    flow: str
    node: Node


class World:
    """The simulated replicas, their Redis and their clients. `at_rest` takes a World as a `Fleet`."""

    def __init__(
        self,
        schedule: Schedule,
        loop: TimeLapseLoop,
        valkey: Server,
        pages: Sequence[PageServer],
    ) -> None:
        """`pages` are the endpoints' metrics pages: the endpoints that decode at the start, one that a change
        may add, and two that prefill."""
        self.schedule, self.loop, self.valkey, self.pages = schedule, loop, valkey, pages[: ENDPOINTS + 1]
        self._prefill = pages[ENDPOINTS + 1 :]
        for page in pages:
            page.requests = collections.deque(maxlen=1)
            page.answer = answered(NO_LOAD)
        self.dice = random.Random(schedule.seed)
        self.nodes: list[Node] = []
        self.history: list[Record] = []
        self.running: dict[str, Running] = {}  # by request id
        self.unseen: set[str] = set()
        self._apart = False
        self._last_bound = 0.0
        self.wrong: list[str] = []
        self.added = 0  # endpoints
        self._started = 0
        self._stack = contextlib.AsyncExitStack()
        self._show()

    @property
    def replicas(self) -> Sequence[Node]:
        return self.nodes

    @property
    def tree(self) -> dict[str, Any]:
        """The configuration with the endpoints of this moment."""
        schedule, count = self.schedule, min(max(ENDPOINTS + self.added, 1), len(self.pages))
        own = {
            "request_queue_controller": schedule.bounds,
            "discovery": {"static": listed(self.pages[:count], self._prefill, schedule.extras)},
            "http": {"listen": "127.0.0.1:0" if schedule.mode == "http" else None},
        }
        return (
            _CONFIG
            | {key: each for name in schedule.extras for key, each in SETTINGS.get(name, {}).items()}
            | own
        )

    async def started(self) -> Node:
        """Start a replica. Envoy sends no request to a replica before that replica has joined the pool."""
        self._started += 1
        between = await self._stack.enter_async_context(proxy(self.valkey.port))
        node = Node(f"replica-{self._started}", between)
        node.start(self.tree)
        await node.ready()
        await node.pool.membership.known()
        return node

    @contextlib.asynccontextmanager
    async def alive(self) -> AsyncIterator[None]:
        async with self._stack:
            self.nodes = [await self.started() for _ in range(REPLICAS)]
            try:
                yield
            finally:
                for node in self.nodes:
                    await node.kill()

    def at(self, address: str) -> Node | None:
        return next(
            (each for each in self.nodes if each.bound.done() and each.bound.result().grpc == address), None
        )

    def any_node(self) -> Node:
        """A random replica not known to be dead or cut off, as Envoy would choose."""
        alive = [each for each in self.nodes if not each.dead.is_set()]
        return self.dice.choice([each for each in alive if not each.pool.admission.is_cut_off] or alive)

    # Clients.

    async def clients(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for number in range(_CLIENTS):
                tasks.create_task(self._client(number))

    async def _client(self, number: int) -> None:
        dice = random.Random(f"{self.schedule.seed} {number}")
        extras = self.schedule.extras
        flow = f"acme/flow-{number % _FLOWS}" if "tenants" in extras else f"flow-{number % _FLOWS}"
        model = "batch" if "bands" in extras and number % 4 == 3 else "llama"
        count = 0
        while self.loop.time() < _END_S + 5:
            count += 1
            record = Record(f"{number}.{count}", flow, self.loop.time(), model=model)
            await self.ask(
                record,
                seconds=dice.choice((0.3, 1.0, 1.0, 3.0, 3.0, 20.0)) * dice.uniform(0.8, 1.2),
                leaves_s=dice.uniform(0.0, 1.0) if dice.random() < 0.1 else None,
            )
            await asyncio.sleep(dice.uniform(0.0, 0.4) if record.answers == [200] else 0.5)

    async def ask(
        self, record: Record, seconds: float, leaves_s: float | None = None, said: bytes = b""
    ) -> None:
        """Send one request; whenever its replica dies before the answer, Envoy retries at another."""
        self.history.append(record)
        while True:
            node = self.any_node()
            exchange = Exchange(node.pool.context)
            try:
                async with asyncio.timeout(leaves_s):
                    answer = await node.do(self._decided(node, exchange, record, said))
            except ConnectionError:
                record.tries += 1
                continue
            except TimeoutError:
                node.task(self._close(exchange))
                return
            break
        record.answered_s = self.loop.time()
        record.answers.append(answer.status)
        if answer.status != 200:
            exchange.close()
            return
        if record.honest:
            self._begin(record, answer.text, node)
        if self.schedule.mode == "standard":
            await self._streams(node, exchange, record, seconds)
        else:
            exchange.close()
            await self._logs(answer.entry, record, seconds)

    async def ask_hostile(self, request_id: str, leaves_s: float, said: bytes) -> None:
        record = Record(request_id, "hostile", self.loop.time(), honest=False)
        await self.ask(record, 0.5, leaves_s=leaves_s, said=said)

    async def _decided(self, node: Node, exchange: Exchange, record: Record, said: bytes) -> Answer:
        named = {"x-request-id": record.id, FAIRNESS_ID[0]: record.flow}
        asked = f'{{"model": "{record.model}", "prompt": "{record.id:>8}", "max_tokens": 10}}'
        prompt = said or asked.encode()
        if self.schedule.mode != "http":
            answers = await converse(exchange, headers(self.schedule.mode, named), body(prompt))
            return Answer.of(record.id, answers)
        reply, entry = await checked(node.bound.result().http, prompt, named)
        return Answer(_OF_CHECK.get(reply.status, reply.status), str(reply.headers), entry)

    async def _close(self, exchange: Exchange) -> None:
        exchange.close()

    async def _streams(self, node: Node, exchange: Exchange, record: Record, seconds: float) -> None:
        """The replica owns the response stream until its end; if the replica dies, the stream ends."""
        try:
            await self._until_dead(node, seconds)
            self._end(record.id)
            await node.do(converse(exchange, response_headers(200), response_body(b"{}", ended=True)))
            await node.do(self._close(exchange))
        except ConnectionError:
            self._end(record.id)

    async def _until_dead(self, node: Node, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await node.dead.wait()
                raise ConnectionError

    async def _logs(self, entry: Any, record: Record, seconds: float) -> None:
        """Send the request's access-log entries as Envoy does: each entry to any replica."""
        while seconds > REPORT_S:
            await asyncio.sleep(REPORT_S)
            seconds -= REPORT_S
            self.report(entry, "DownstreamPeriodic")
        await asyncio.sleep(seconds)
        self._end(record.id)
        entry.response.response_code.value = 200
        if record.id[0] in "13" and self.schedule.mode == "lean":
            # The client speaks HTTP/2 and reads the answer late.
            common = entry.common_properties
            token = common.metadata.filter_metadata["picker"]["token"]
            entry.response.response_headers[accesslog.PLACED_HEADER] = f"{record.id} ={token}"
            common.custom_tags[accesslog.TTFT_TAG] = "1"
            common.time_to_last_upstream_rx_byte.FromMilliseconds(1)
            self.report(entry, "UpstreamEnd")
            await asyncio.sleep(1.0)
            common.duration.FromMilliseconds(1001)
            entry.protocol_version = "HTTP2"
        node = self.any_node()
        self.report(entry, "DownstreamEnd", node)
        if "hostile" in self.schedule.kinds:
            self.report(entry, "DownstreamEnd", node)

    def report(self, entry: Any, kind: str, node: Node | None = None) -> None:
        entry.common_properties.access_log_type = kind
        data = message_of(entry)
        node = node or self.any_node()

        async def received() -> None:
            node.log.on_message(data)

        node.task(received())

    def _begin(self, record: Record, text: str, node: Node) -> None:
        if record.id in self.running:
            raise AssertionError(f"G6: {record.id} runs twice")
        picked = min(self.pages, key=lambda page: text.find(page.address) % 2**32)  # fallbacks come later
        admission = self._admission_of(record.id)
        self.running[record.id] = Running(self.loop.time(), picked, *admission, record.flow, node)
        self._show()
        seen = [each for name, each in self.running.items() if name not in self.unseen]
        stock = len(seen) * self.schedule.cost
        if seen and stock > (most := self._most_running(seen)):
            raise AssertionError(f"G1, G8: stock {stock:g} at {self.loop.time():.2f} s, bound {most:g}")
        if self.schedule.kinds <= HARMLESS:
            self._check_limits(seen)

    def _check_limits(self, running: Sequence[Running]) -> None:
        """Check the limits of tenants and endpoints, which hold exactly while no replica loses Redis."""
        extras = self.schedule.extras
        for path, most in PARALLEL.items() if "tenants" in extras else ():
            count = sum(f"{each.flow}/".startswith(f"{path}/") for each in running)
            if count > most:
                raise AssertionError(
                    f"tenants: {path} runs {count} requests at {self.loop.time():.2f} s, limit {most}"
                )
        count = sum(each.page is self.pages[0] for each in running)
        if "caps" in extras and "tokens" not in extras and count > CAP:
            raise AssertionError(f"G1: the first endpoint runs {count} requests, limit {CAP}")

    def _admission_of(self, request_id: str) -> tuple[int, float]:
        """The number of a request's admission in the decision log, and the bound then in force. For a replica
        without Redis: the last number, and the largest of the bounds that the replica may know."""
        if self.loop.server.away:
            return 0, self._last_bound
        with self.valkey.client() as client:
            entries = [fields for _, fields in client.xrevrange("epp:{default}:log", count=_RECENT)]
        self._last_bound = max((float(each[b"upper"]) for each in entries), default=self._last_bound)
        for each in entries:
            if each[b"request"] == request_id.encode() and each[b"event"] in _ADMITTED:
                return int(each[b"seq"]), float(each[b"upper"])
        return int(entries[0][b"seq"]) if entries else 0, self._last_bound

    def _most_running(self, seen: Sequence[Running]) -> float:
        """The bound (G1, G8) at the last admission of the requests `seen`, all of which were in flight then.
        The bound is doubled if a new primary lacks the last writes, and from the time when only some replicas
        use Redis until the bound holds again (docs/redis.md, limits)."""
        bound = max(seen, key=lambda each: each.seq).bound
        live = (each.pool for each in self.nodes if not each.dead.is_set())
        uses = {pool.admission.failover.outage is None for pool in live}
        stock = len(seen) * self.schedule.cost
        self._apart = len(uses) == 2 or (self._apart and (False in uses or stock > bound))
        kinds = self.schedule.kinds
        is_doubled = kinds & LOSING_WRITES or (self._apart and kinds & APART)
        return 2 * max(each.bound for each in seen) if is_doubled else bound

    def _end(self, request_id: str) -> None:
        self.running.pop(request_id, None)
        self._show()

    def _show(self) -> None:
        """Update each model server's metrics page: a batch runs, further requests wait."""
        for page in self.pages:
            count = sum(each.page is page for each in self.running.values())
            figures = {b"running": min(count, BATCH), b"waiting": max(count - BATCH, 0)}
            said = NO_LOAD
            for name, number in figures.items():
                said = said.replace(b'%s{model_name="m"} 0' % name, b'%s{model_name="m"} %d' % (name, number))
            page.answer = answered(said)

    # Faults.

    async def faults(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for fault in self.schedule.faults:
                tasks.create_task(self._fault(fault))

    async def _fault(self, fault: Fault) -> None:
        await asyncio.sleep(max(fault.at_s - self.loop.time(), 0.0))
        if fault.kind not in HARMLESS:
            # A replica that loses Redis does not know the last placements of other replicas (docs/redis.md).
            second_ago_s = self.loop.time() - 1.0
            self.unseen |= {name for name, each in self.running.items() if each.began_s > second_ago_s}
        begin_and_end = (KINDS | CHANGES)[fault.kind](self, self.nodes[fault.replica], fault)
        async with contextlib.aclosing(begin_and_end):
            async for _ in begin_and_end:
                await asyncio.sleep(fault.lasts_s)

    # Checks.

    def check_history(self) -> None:
        """Add to `wrong` every guarantee that the history shows to be broken."""
        undisturbed = self.schedule.kinds <= HARMLESS
        granted = collections.Counter(
            each.flow for each in self.history if each.answers == [200] and each.honest
        )
        for flow, count in granted.items() if "tenants" in self.schedule.extras else ():
            burst, rate = RATES.get(flow, (math.inf, 0.0))
            most = burst + rate * self.loop.time() + self.schedule.outages * (burst + REPLICAS)
            if count > most:
                self.wrong.append(f"tenants: {flow} was granted {count} requests, limit {most:g}")
        for each in self.history:
            if len(each.answers) > 1:
                self.wrong.append(f"G6: {each}: more than one answer")
            if not each.answers or not each.honest:
                continue
            is_tenants = each.flow.startswith("acme/")
            is_limited = each.flow == "acme/flow-0" or (is_tenants and self._has_waited(each))
            if each.answers[0] not in ((200, 429, 503) if is_limited else (200, 503)):
                self.wrong.append(f"G10: {each}: an error answers a valid request")
            if undisturbed and each.answers == [503] and not self._may_expire(each):
                self.wrong.append(f"G7: {each}: refused without cause")
            is_late = each.answered_s - each.asked_s > _ANSWERED_S
            if is_late and each.tries == 1 and "stop" not in self.schedule.kinds:
                self.wrong.append(f"G5: {each}: answered late")

    def _may_expire(self, record: Record) -> bool:
        """Whether the request expired while a replica was silent: the request was queued again with its age,
        and the turn of its flow came too late. If the schedule has `extras`, any request may expire."""
        silent = any(
            fault.kind == "stop"
            and fault.lasts_s > SILENCE_S
            and record.asked_s < fault.at_s + fault.lasts_s
            and fault.at_s < record.answered_s
            for fault in self.schedule.faults
        )
        return (silent or self.schedule.extras != ()) and self._has_waited(record)

    def _has_waited(self, record: Record) -> bool:
        """Whether the request has waited until its deadline, by Redis's clock, which faults may advance."""
        faults = self.schedule.faults
        stepped_s = sum(fault.lasts_s for fault in faults if fault.kind == "clock" and fault.replica)
        return record.answered_s - record.asked_s > TTL_S - stepped_s - 0.01


@contextlib.contextmanager
def _patched(world: list[World]) -> Iterator[pytest.MonkeyPatch]:
    """Within the `with` block each `Node` gets its pool, and replicas call each other without a network."""

    def note(pool: Pool) -> None:
        node = _NODE.get()
        assert node is not None
        node.pool = pool

    class Said:
        def __init__(self, data: bytes) -> None:
            self._data = data

        async def read(self) -> bytes:
            return self._data

    async def send(peers: Any, method: str, address: str, request: bytes) -> bytes:
        node = world[-1].at(address)
        if node is None:
            raise ConnectionError(address)
        async with asyncio.timeout(peers._timeout_s):
            answer: bytes = await node.do(node.services[method](Said(request)))  # type: ignore[operator, arg-type]
            return answer

    with pytest.MonkeyPatch.context() as patched, noted_pools(note):
        patched.setattr(secrets, "token_hex", lambda size: random.randbytes(size).hex())
        patched.setattr(connection.KernelDelay, "read", lambda self: 0.0)  # hides the machine's delays
        patched.setattr(budget_transfer.GrpcPeers, "_send", send)
        patched.setattr(check_client, "PATIENT_S", _RUN_S)
        yield patched


def failure(schedule: Schedule) -> str:
    """Run `schedule`; return which guarantees it breaks and how, or an empty text."""
    worlds: list[World] = []
    random.seed(schedule.seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        redis_server(Path(folder)) as valkey,
        _patched(worlds) as patched,
        time_lapse(valkey.url, patched) as loop,
    ):

        async def life() -> None:
            async with contextlib.AsyncExitStack() as stack:
                pages = [await stack.enter_async_context(serving()) for _ in range(ENDPOINTS + 3)]
                world = World(schedule, loop, valkey, pages)
                worlds.append(world)
                await stack.enter_async_context(world.alive())
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(world.clients())
                    tasks.create_task(world.faults())
                world.check_history()
                with valkey.client() as client:
                    await at_rest(world, client, lasts_s=_REST_S)
                assert_no_violation(valkey.url, str(schedule))

        try:
            loop.run_until_complete(asyncio.wait_for(life(), _RUN_S))
        except Exception as fault:
            causes: Sequence[BaseException] = [fault]
            while isinstance(causes[0], BaseExceptionGroup):
                causes = causes[0].exceptions
            worlds[-1].wrong += [_told(each) for each in causes]
        return "\n".join(worlds[-1].wrong)


def _told(fault: BaseException) -> str:
    """A failure's type and text, or, without a text, the failed assertion."""
    line = traceback.extract_tb(fault.__traceback__)[-1].line
    return f"{type(fault).__name__}: {str(fault) or line}"[:3000]


def smallest(schedule: Schedule, fails: Callable[[Schedule], object] = failure) -> Schedule:
    """The failing `schedule` without the faults that the failure does not need."""
    for fault in schedule.faults:
        fewer = schedule._replace(faults=tuple(each for each in schedule.faults if each is not fault))
        if fails(fewer):
            schedule = fewer
    return schedule


def report(schedule: Schedule) -> str:
    """The result of `failure`, after the smallest failing schedule and the guarantees that it breaks."""
    found = failure(schedule)
    if not found:
        return ""
    least = smallest(schedule)
    return f"{least}\n{failure(least) or 'it fails only with all faults:'}\n{schedule}\n{found}"


def report_of(seed: int) -> str:
    return report(Schedule.of(seed))


def main(arguments: list[str]) -> int:
    """`python schedules.py SEED…` runs each seed's schedule; returns the number that fail. The option
    `--whole` skips the search for the smallest failing schedule."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # KeyboardInterrupt stops Valkey, too
    failed, whole = 0, "--whole" in arguments
    for seed in map(int, filter(str.isdigit, arguments)):
        found = failure(Schedule.of(seed)) if whole else report_of(seed)
        failed += bool(found)
        print(f"{seed}: {found or 'holds'}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
