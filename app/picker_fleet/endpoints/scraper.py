"""Fetches the metrics pages of this replica's endpoints, each at its own interval.

A page is read no more often than its figures are used, and at a cost of at most 1 % of either side. It costs
its server (a real vLLM spends 8 ms of the process that streams its answers) and this replica, so
`scraping.interval: auto` follows both. Whether a server has stopped answering is found by probes: requests
for a path that costs it next to nothing.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import msgspec

from picker_fleet.background import keep
from picker_fleet.endpoints.metrics_page import BadPage, PageReader
from picker_fleet.endpoints.page_fetch import Access, Answer, Connection, FetchError, Page, Place, place_of
from picker_fleet.endpoints.readings import EndpointMetrics
from picker_fleet.errors import StateUnavailable
from picker_fleet.request import Endpoint
from picker_fleet.sections import ENGINES, Engine, Scraping

PROBE_S = 0.2  # between two signs of life of a server
REST_PROBE_S = 0.5  # while no requests are in flight
_USED_S = 0.1  # while requests are placed by figures of the page
_HEALTH_S = 1.0  # between two probes at most
_SELDOM_S = 5.0  # between two looks at a health that costs the server something
_SHOWN_S = 5.0  # while only views and health use them
_SUSPECT_S = 0.1  # while requests in flight at the endpoint have given no sign of life
_LONGEST_S = 30.0
_SHARE = 0.01  # of either side's time, at most
_FETCH_CPU_S = 0.0002  # of this replica for a page, beside reading it
_PROBE_CPU_S = 0.0001
_KEPT = 8


class ScrapeCost:
    """What the last pages of one endpoint cost, in seconds. The least of a few counts: the others waited."""

    def __init__(self) -> None:
        self._pages: deque[float] = deque(maxlen=_KEPT)
        self._probes: deque[float] = deque(maxlen=_KEPT)
        self._read_s: deque[float] = deque(maxlen=_KEPT)

    def add_page(self, answered_s: float, read_s: float) -> None:
        """A page came `answered_s` after it was asked for, and took `read_s` of this replica's CPU to
        read."""
        self._pages.append(answered_s)
        self._read_s.append(read_s)

    def add_probe(self, answered_s: float) -> None:
        self._probes.append(answered_s)

    @property
    def server_s(self) -> float:
        """What a page costs its server: how much later it comes than the answer to a probe; 0 if unknown."""
        if not self._pages:
            return 0.0
        return max(0.0, min(self._pages) - min(self._probes, default=0.0))

    @property
    def own_s(self) -> float:
        """CPU of this replica for one page."""
        return _FETCH_CPU_S + min(self._read_s, default=0.0)


@dataclass(frozen=True, slots=True)
class IntervalPolicy:
    """`fixed_s` is the configured interval, None for `auto`. `used` says whether requests are being placed by
    metrics pages, `busy` whether any are in flight."""

    fixed_s: float | None
    used: Callable[[], bool]
    busy: Callable[[], bool] = lambda: True

    def interval_s(self, cost: ScrapeCost, targets: int, *, suspect: bool = False) -> float:
        """Between two pages of an endpoint, one of `targets` that this replica scrapes; `suspect` if requests
        in flight there have given no sign of life."""
        if self.fixed_s is not None:
            return self.fixed_s
        wanted_s = _USED_S if self.used() else _SHOWN_S
        if suspect:
            wanted_s = min(wanted_s, _SUSPECT_S)
        return min(max(wanted_s, cost.server_s / _SHARE, cost.own_s * targets / _SHARE), _LONGEST_S)

    def tick_s(self, interval_s: float, targets: int) -> float:
        """Between two signs of life of an endpoint whose page is read every `interval_s`."""
        probe_s = PROBE_S if self.busy() else REST_PROBE_S
        return min(interval_s, max(probe_s, _PROBE_CPU_S * targets / _SHARE))


T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
Publish = Callable[[Mapping[str, EndpointMetrics]], Awaitable[None]]

_UNREACHED = 2  # attempts to connect that time out in a row: the endpoint cannot be connected to
# Questions in a row without a byte for an answer: the process stands still, its kernel takes connections.
# vLLM serves its page from the event loop that also takes in requests and hands out tokens; a burst of
# arrivals keeps it for a second or two, so once says nothing. Three, each over a connection of its own and
# with growing pauses between, are three and a half seconds without a turn of that loop. An overloaded server
# can be later than that (half a minute has been reported of vLLM), but then it is as late with everyone's
# tokens, and better left alone until it answers again.
_SILENT = 3
SILENCE = "no page within"  # what the fault of an unanswered question begins with
_LONGEST_PAUSE_S = 5.0
_DEADLINE_S = 1.0
_RETRY_S = 0.05  # the pause after a fault, before it is doubled
_SUSPECTED_S = 3.0  # how long one call of `suspect` holds
_LATE_S = 0.5  # a deadline that is noticed so late was missed by this replica, not by the endpoint
_DOUBLINGS = 30  # far past the longest pause, and no overflow
# A server that has ended its idle connection and answered the look that followed does so by habit.
_HABIT_S = 10.0
_BODY_S = 0.25  # for the body of the answer to a probe
_MOST_BODY_BYTES = 64 * 1024
_NO_ANSWER = ("connection", "timeout", "silent")
_UNREADY = (
    500,
    502,
    503,
    504,
)  # answers to a probe by a server, or a proxy before it, that takes no requests
_MODELS_S = 10.0  # between two looks at which adapters an engine still has
_MOST_IDLE, _MOST_IDLE_CHARACTERS = 256, 256  # adapters that are kept of an engine, and of each one's name
_MOST_NAMES = 100  # of engines in labels
_MOST_ASIDE_BYTES = 256 * 1024  # of an answer that is no page
_log = logging.getLogger(__name__)


class Meter(Protocol):
    """What scraping counts; every method returns at once."""

    def scraped(self, address: str, seconds: float, reading: EndpointMetrics) -> None:
        """A scrape that worked, how long it took and what it found."""

    def probed(self, address: str, status: int, ready: bool) -> None:
        """A probe that was answered, with `status` (0: it was no HTTP); whether the server takes requests."""

    def scrape_failed(self, address: str, kind: str, seconds: float) -> None:
        """A scrape or a probe that did not; `kind` is timeout, silent, connection, status or page."""

    def scrape_published(self, readings: int, seconds: float) -> None:
        """A batch that the fleet knows of now."""

    def scrape_unpublished(self, readings: int) -> None:
        """A batch that Redis did not take; what is newest of it goes with the next one."""

    def scrape_ages(self, owned: int, ages_s: Callable[[], Mapping[str, float]]) -> None:
        """How many endpoints this replica scrapes, and how old what it knows of every endpoint is."""


def pause_s(failures: int, interval_s: float, variation: float) -> float:
    """How long to leave an endpoint alone after `failures` in a row: doubled each time, up to 5 s.

    `variation`, 0 to 1, takes off up to a quarter: what failed together shall not come back together.
    """
    doubled_s = interval_s * 2.0 ** min(failures, _DOUBLINGS)
    return min(doubled_s, _LONGEST_PAUSE_S) * (1 - variation / 4)


class Scraper:
    """Scrapes a set of endpoints, which `set_targets` changes, as often as `pacing` says. One event loop.

    Each endpoint has a task and a connection of its own, so a slow one delays nobody, and a phase of its own,
    so that they do not all go at once. Between two pages it is probed, so that a server that stands still is
    found however seldom its page is read, and however its page fails; and once when it ends an idle
    connection. A question ends after `deadline_s`; if that is noticed more than `late_s` later, this replica
    stood still. After a failure an endpoint, or only its page, is left alone for twice as long as after the
    one before, up to 5 s. Results are handed to `publish`, at most once in `publish_s()`; what it raises
    StateUnavailable for is kept, newest first, and handed over with the next. Where there is nothing for
    `speak_s`, an empty batch is handed over, which says that this replica is there.
    """

    def __init__(
        self,
        scraping: Scraping,
        *,
        pacing: IntervalPolicy,
        publish: Publish,
        publish_s: Callable[[], float],
        speak_s: float,
        meter: Meter,
        deadline_s: float = _DEADLINE_S,
        late_s: float = _LATE_S,
        vary: Callable[[], float] = random.random,
        last_read: Callable[[str], EndpointMetrics | None] = lambda address: None,
    ) -> None:
        self._scraping, self._access = scraping, Access(scraping)
        self._engines: dict[str, tuple[Engine, ...]] = {}  # by the name in labels
        self._last_read = last_read
        self._pacing = pacing
        self._suspects: dict[str, float] = {}  # until when
        self._deadline_s, self._late_s = deadline_s, late_s
        self._publish = publish
        self._publish_s, self._speak_s = publish_s, speak_s
        self._meter = meter
        self._vary = vary
        self._targets: dict[str, Place] = {}
        self._tasks: dict[str, tuple[Place, asyncio.Task[None]]] = {}
        self._group: asyncio.TaskGroup | None = None
        self._pending: dict[str, EndpointMetrics] = {}
        self._any_pending = asyncio.Event()

    @property
    def targets(self) -> frozenset[str]:
        return frozenset(self._targets)

    def set_targets(self, endpoints: Iterable[Endpoint]) -> None:
        """Scrape exactly `endpoints` from now on; what is being fetched from others is dropped."""
        self._targets = {
            each.address: place_of(each, self._engines_of(each), self._scraping) for each in endpoints
        }
        self._run_targets()

    def _engines_of(self, endpoint: Endpoint) -> tuple[Engine, ...]:
        named = self._scraping.engine_named(endpoint.labels)
        found = self._engines.get(named)
        if found is None:
            found = self._scraping.engines(named)
            if named and len(found) > 1:
                known = ", ".join(ENGINES)
                _log.warning(
                    "a label of %s says engine %r, not one of %s", endpoint.address, named[:60], known
                )
            if len(self._engines) >= _MOST_NAMES:
                self._engines.clear()
            self._engines[named] = found
        return found

    def suspect(self, addresses: Iterable[str]) -> None:
        """Read the pages of `addresses` more often for a while: requests there may be gone."""
        until_s = asyncio.get_running_loop().time() + _SUSPECTED_S
        self._suspects = {address: until_s for address in addresses if address in self._targets}

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as self._group:
                self._run_targets()
                await self._publish_forever()
        finally:
            self._group = None
            self._tasks.clear()

    def _run_targets(self) -> None:
        """Have a task for each target, and for nothing else."""
        for address, (place, task) in list(self._tasks.items()):
            if self._targets.get(address) != place:
                del self._tasks[address]
                task.cancel()
                self._pending.pop(address, None)
        if self._group is not None:
            for address in self._targets.keys() - self._tasks.keys():
                place = self._targets[address]
                work = keep("scrape", partial(self._scrape_forever, place))
                self._tasks[address] = place, self._group.create_task(work, name=f"scrape-{address}")

    async def _scrape_forever(self, place: Place) -> None:
        clock = asyncio.get_running_loop().time
        target = _Target(place, self._access, self._last_read(place.address))
        _, tick_s = self._pace(target)
        due_s = clock() + self._vary() * tick_s
        by_habit_until_s = -math.inf
        try:
            while True:
                if clock() < by_habit_until_s:
                    target.server.lost.clear()
                    await asyncio.sleep(due_s - clock())
                    woken = False
                else:
                    woken = await _until(due_s, target.server.lost)
                interval_s, tick_s = self._pace(target)
                await self._look(target, interval_s, tick_s)
                now_s = clock()
                if target.missed:
                    due_s = now_s + pause_s(target.missed, min(tick_s, _RETRY_S), self._vary())
                elif woken:
                    due_s, by_habit_until_s = now_s + tick_s, now_s + max(_HABIT_S, tick_s)
                else:
                    # Slots that a slow answer took are left out, not made up for.
                    due_s += tick_s * max(1, -((due_s - now_s) // tick_s))
        finally:
            target.close()

    def _pace(self, target: "_Target") -> tuple[float, float]:
        """Between two pages of an endpoint, and between two signs of its life, in seconds."""
        suspect = target.asleep or self._suspects.get(target.address, 0.0) > asyncio.get_running_loop().time()
        interval_s = self._pacing.interval_s(target.cost, len(self._targets), suspect=suspect)
        return interval_s, self._pacing.tick_s(interval_s, len(self._targets))

    async def _look(self, target: "_Target", interval_s: float, tick_s: float) -> None:
        """Ask for the page if its time has come, else for a sign of life; hand in the reading, if there is
        one."""
        now_s = asyncio.get_running_loop().time()
        failures, last = target.failures, target.last
        unready = last.unready if last is not None else None
        due_s = target.paged_s + (target.pause_s or interval_s)
        is_due = not target.missed and now_s >= due_s - tick_s / 2
        if target.paged_s > -math.inf and now_s - target.probed_s >= _HEALTH_S:
            is_due = False  # however often its page is read, that does not say whether it takes requests
        reading = await (self._scrape(target, interval_s) if is_due else self._probe(target))
        if is_due:
            bad = reading is not None and reading.failures
            target.bad_pages = target.bad_pages + 1 if bad else 0
            target.pause_s = pause_s(target.bad_pages, min(tick_s, _RETRY_S), self._vary()) if bad else 0.0
        if reading is None:
            if target.unready == unready:
                return
            reading = last or EndpointMetrics(scraped_ms=int(now_s * 1000))
        reading = dataclasses.replace(reading, unready=target.unready)
        if failures == 0 and reading.failures:
            _log.warning("scraping %s fails: %s", target.address, reading.fault)
        elif failures and not reading.failures:
            _log.info("scraping %s works again", target.address)
        elif reading.remark and (last is None or not last.remark):
            _log.warning("the page of %s is read in part: %s", target.address, reading.remark)
        if reading.unready and not unready:
            _log.warning("%s takes no requests: %s", target.address, reading.unready)
        elif unready and not reading.unready:
            _log.info("%s takes requests again", target.address)
        target.last = reading
        self._pending[target.address] = reading
        self._any_pending.set()

    async def _scrape(self, target: "_Target", interval_s: float) -> EndpointMetrics:
        clock = asyncio.get_running_loop().time
        # The page is as old as the question at most.
        started_s = target.paged_s = clock()
        started_ms = int(started_s * 1000)

        async def read_page() -> EndpointMetrics:
            """The first page that can be read, of those that may be the one."""
            fault: FetchError | BadPage | None = None
            for page in target.pages:
                reader = PageReader(target.engines)
                try:
                    asked_s = clock()
                    await page.read(reader.feed)
                    answered_s = clock() - asked_s - reader.cpu_s
                    metrics = reader.result(started_ms)
                except (FetchError, BadPage) as raised:
                    fault = fault or raised
                    if isinstance(raised, FetchError) and raised.kind == "connection":
                        break
                else:
                    target.cost.add_page(answered_s, reader.cpu_s)
                    target.found(page, reader)
                    return metrics
            target.lost()
            assert fault is not None
            raise fault

        metrics = await self._ask(target, target.paged, started_s, read_page)
        if metrics.failures:
            return metrics
        target.asleep = metrics.unready is not None
        if target.asks_sleep:
            await self._ask_sleep(target)
        metrics = target.with_idle_adapters(metrics)
        if metrics.idle_adapters and target.engine.models_path and clock() - target.models_s >= _MODELS_S:
            target.models_s = clock()
            await self._ask_models(target)
            metrics = target.with_idle_adapters(metrics)
        metrics = dataclasses.replace(metrics, unready=target.unready)
        self._meter.scraped(target.address, clock() - started_s, metrics)
        last = target.last
        before = (last.scraped_ms, last.load) if last is not None and last.load is not None else None
        return dataclasses.replace(metrics, interval_ms=round(interval_s * 1000), before=before)

    async def _probe(self, target: "_Target") -> EndpointMetrics | None:
        """None if it was answered."""
        clock = asyncio.get_running_loop().time
        started_s = target.probed_s = clock()

        async def ask() -> int:
            path, engine = target.engine.probe_path, target.engine
            pause_s = _HEALTH_S if target.refusal else _SELDOM_S
            if engine.health_path and started_s - target.health_s >= pause_s:
                path, target.health_s = engine.health_path, started_s
            try:
                with await target.server.ask(path) as answer:
                    if path == (engine.health_path or engine.probe_path):
                        refuses = answer.status in _UNREADY or answer.status == engine.unready
                        target.refusal = f"GET {path} answered {answer.status}" if refuses else None
                    await _pass_over(answer)
                    return answer.status
            except FetchError as fault:
                if fault.kind == "connection":
                    raise
                return 0  # whatever it sends, it runs

        status = await self._ask(target, target.server, started_s, ask)
        if isinstance(status, EndpointMetrics):
            return status
        if target.missed and target.bad_pages <= 1:
            target.pause_s, target.paged_s = 0.0, -math.inf  # the page is not at fault: it is due at once
        target.missed = 0
        target.cost.add_probe(clock() - started_s)
        self._meter.probed(target.address, status, target.unready is None)
        return None

    async def _ask_sleep(self, target: "_Target") -> None:
        """Ask an engine whose page does not say so whether it sleeps; one that does not know is not asked
        again."""
        answer = await self._ask_aside(target, target.engine.sleep_path, _Sleep)
        target.asks_sleep, target.asleep = answer is not None, answer is not None and answer.is_sleeping

    async def _ask_models(self, target: "_Target") -> None:
        """Forget the adapters that an engine no longer has."""
        answer = await self._ask_aside(target, target.engine.models_path, _Models)
        if answer is not None:
            target.keep_adapters({model.id for model in answer.data})

    async def _ask_aside(self, target: "_Target", path: str, kind: type[S]) -> S | None:
        """The JSON at `path`; None if there is none of this `kind`."""
        try:
            header = self._access.header() if target.is_one else b""
            async with asyncio.timeout(self._deadline_s):
                with await target.server.ask(path, header) as answer:
                    body = b""
                    async for part in answer.parts():
                        body += part
                        if len(body) > _MOST_ASIDE_BYTES:
                            return None
            return msgspec.json.decode(body, type=kind) if answer.status == 200 else None
        except (TimeoutError, FetchError, msgspec.DecodeError):
            return None

    async def _ask(
        self,
        target: "_Target",
        connection: Connection,
        started_s: float,
        question: Callable[[], Awaitable[T]],
    ) -> T | EndpointMetrics:
        """What `question` brings within the deadline, else what is wrong with the endpoint."""
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._deadline_s):
                return await question()
        except TimeoutError:
            # A host that is gone refuses nothing. One timeout may be a pause of this replica itself.
            if clock() - started_s > self._deadline_s + self._late_s:
                connection.unanswered = 0  # it could not have read an answer
            kind = "silent" if connection.unanswered >= _SILENT else "timeout"
            kind = "connection" if connection.unreached >= _UNREACHED else kind
            why = f"{SILENCE} {self._deadline_s:g} s"
        except FetchError as fault:
            kind, why = fault.kind, str(fault)
        except BadPage as fault:
            kind, why = "page", str(fault)
        if connection is not target.server:
            kind = "page"  # another port says nothing about the server
        if kind in _NO_ANSWER:
            target.missed += 1
        if kind == "connection":
            target.restarted()
        self._meter.scrape_failed(target.address, kind, clock() - started_s)
        return EndpointMetrics(scraped_ms=int(started_s * 1000), fault=why, failures=target.failures + 1)

    async def _publish_forever(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._speak_s):
                    await self._any_pending.wait()
            self._any_pending.clear()
            batch, self._pending = self._pending, {}
            started_s = clock()
            await self._hand_over(batch)
            await asyncio.sleep(max(0.0, started_s + self._publish_s() - clock()))

    async def _hand_over(self, batch: Mapping[str, EndpointMetrics]) -> None:
        clock = asyncio.get_running_loop().time
        started_s = clock()
        try:
            await self._publish(batch)
        except StateUnavailable:
            self._meter.scrape_unpublished(len(batch))
            kept = {address: metrics for address, metrics in batch.items() if address in self._targets}
            self._pending = {**kept, **self._pending}
            if kept:
                self._any_pending.set()
        else:
            self._meter.scrape_published(len(batch), clock() - started_s)


class _Sleep(msgspec.Struct):
    is_sleeping: bool


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Target:
    """What is known of one endpoint. `engine` and its page are None until a page has told them."""

    def __init__(self, place: Place, access: Access, last_read: EndpointMetrics | None) -> None:
        self.address, self.is_one, self._candidates = place.address, place.is_one, place.engines

        def connection(address: str, scheme: str) -> Connection:
            return Connection(address, tls=access.context if scheme == "https" else None)

        self.server = connection(place.address, place.scheme)
        self.paged = self.server if place.is_one else connection(place.page_address, place.page_scheme)
        self._all_pages = [Page(self.paged, path, access) for path in place.page_paths]
        self._page: Page | None = None
        self._engine: Engine | None = place.engines[0] if len(place.engines) == 1 else None
        self.asleep = False
        self.asks_sleep = False  # the page does not say whether it sleeps
        self.refusal: str | None = None  # what it answered to a probe, if that says that it takes no requests
        # Adapters that were loaded, and perhaps are; the last used ones last.
        loaded = last_read.active_adapters | last_read.idle_adapters if last_read is not None else ()
        self._loaded = dict.fromkeys(sorted(loaded))
        self.models_s = -math.inf  # when it was last asked which models it has
        self.cost = ScrapeCost()
        self.last: EndpointMetrics | None = None  # the newest
        # When its page, a sign of life and its health were last asked for.
        self.paged_s = self.probed_s = self.health_s = -math.inf
        self.pause_s = 0.0  # before the next page, after one that failed
        self.bad_pages = 0  # in a row
        self.missed = 0  # questions that the server has not answered, in a row

    @property
    def failures(self) -> int:
        return self.last.failures if self.last is not None else 0

    @property
    def unready(self) -> str | None:
        """Why it takes no requests although it answers; None if it takes them."""
        return "asleep" if self.asleep else self.refusal

    @property
    def engines(self) -> tuple[Engine, ...]:
        """Those that it may be."""
        return self._candidates if self._engine is None else (self._engine,)

    @property
    def pages(self) -> Sequence[Page]:
        """Those of which one is its page."""
        return self._all_pages if self._page is None else (self._page,)

    @property
    def engine(self) -> Engine:
        """The one that it is, or else the likeliest."""
        return self.engines[0]

    def found(self, page: Page, reader: PageReader) -> None:
        """`page` is its page, and `reader` has read it."""
        if self._page is None:
            self._page, self._engine = page, reader.engine
            self.asks_sleep = bool(self.engine.sleep_path)
        self.asks_sleep = self.asks_sleep and not reader.tells_sleep

    def lost(self) -> None:
        """Its page can no longer be read: it may be another engine now."""
        self._page = None
        self._engine = self._candidates[0] if len(self._candidates) == 1 else None

    def restarted(self) -> None:
        self._loaded.clear()

    def keep_adapters(self, names: Collection[str]) -> None:
        """Forget the adapters that are not in `names`."""
        self._loaded = {name: None for name in self._loaded if name in names}

    def with_idle_adapters(self, metrics: EndpointMetrics) -> EndpointMetrics:
        """`metrics` with the adapters that were loaded before and have no requests now: the last used ones,
        as many as fit beside those that have."""
        for name in sorted(metrics.active_adapters):
            self._loaded.pop(name, None)
            self._loaded[name] = None
        used = metrics.active_adapters | metrics.waiting_adapters
        most = _MOST_IDLE if metrics.max_adapters is None else min(metrics.max_adapters, _MOST_IDLE)
        room = most - len(used)
        kept: list[str] = []
        for name in reversed(self._loaded):
            if name in used:
                kept.append(name)
            elif room > 0 and len(name) <= _MOST_IDLE_CHARACTERS:
                room -= 1
                kept.append(name)
        self._loaded = dict.fromkeys(reversed(kept))
        return dataclasses.replace(metrics, idle_adapters=frozenset(kept) - metrics.active_adapters)

    def close(self) -> None:
        self.server.close()
        self.paged.close()


async def _pass_over(answer: Answer) -> None:
    """Read a short body, so that its connection can be kept. One that is long, or late, is left unread."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_BODY_S):
            bytes_left = _MOST_BODY_BYTES
            async for part in answer.parts():
                bytes_left -= len(part)
                if bytes_left < 0:
                    return


async def _until(due_s: float, lost: asyncio.Event) -> bool:
    """Wait until `due_s` of the loop's clock, or until `lost` is set; then True."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(due_s):
            await lost.wait()
            lost.clear()
            return True
    return False
