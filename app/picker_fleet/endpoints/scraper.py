"""Fetches the metrics pages of this replica's endpoints, each at its own interval (pacing.py).

scraping.py assigns the endpoints. Probes detect servers that have stopped answering: a probe requests a path
that costs the server little. The scraper marks no endpoint; fleet/endpoint_health.py does.
"""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from picker_fleet.background import keep
from picker_fleet.domain.engines import ENGINES, Engine
from picker_fleet.domain.errors import MALFORMED, StateUnavailable
from picker_fleet.domain.request import Endpoint
from picker_fleet.domain.scraping import Scraping
from picker_fleet.endpoints.metrics_channel import MetricsChannel
from picker_fleet.endpoints.metrics_page import BadPage, PageReader
from picker_fleet.endpoints.pacing import IntervalPolicy, ScrapeCost, pause_s
from picker_fleet.endpoints.page_fetch import Access, Connection, Exchange, FetchError, Page, Place, place_of
from picker_fleet.endpoints.readings import ASLEEP, EndpointMetrics, MetricsCache

_HEALTH_S = 1.0  # maximum seconds between probes, even if pages are read more often
_SELDOM_S = 5.0  # seconds between requests for a health path that is expensive for the server
T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

_UNREACHED = 2  # after this many connect timeouts in a row the endpoint counts as unreachable
# After this many requests in a row without a byte of response, the server's process hangs while its kernel
# accepts connections. vLLM serves its page from the event loop that also receives requests and streams
# tokens; a burst of arrivals blocks this loop for a second or two, so one silent request proves nothing.
# Three silent requests, each on its own connection, with growing pauses, mean that the event loop has not run
# for 3.5 s. An overloaded server can take longer (half a minute has been reported of vLLM), but then all its
# tokens are late, too, and new requests should go elsewhere until it answers again.
_SILENT = 3
SILENCE = "no page within"  # a reading's `fault` begins with this if the server did not answer in time
_DEADLINE_S = 1.0
_RETRY_S = 0.05  # first pause after a fault, in seconds; the pause then doubles
_SUSPECTED_S = 3.0  # seconds for which one call of `Scraper.suspect` has effect
_LATE_S = 0.5  # a timeout noticed this many seconds after its deadline means that this replica was paused
# After a server has closed an idle connection and answered a probe, ignore further closes for this long.
_HABIT_S = 10.0
_BODY_S = 0.25  # limit of the seconds for the body of a probe's response
_MOST_BODY_BYTES = 64 * 1024
_NO_ANSWER = ("connection", "timeout", "silent")
# Statuses of a probe by which a server, or a proxy before it, says that it takes no requests.
_UNREADY = (500, 502, 503, 504)
_MODELS_S = 10.0  # seconds between requests for the list of an engine's adapters
_MOST_IDLE, _MOST_IDLE_CHARACTERS = 256, 256  # maximum idle adapters per engine, characters of a name
_MOST_NAMES = 100  # maximum engine names in the cache
_MOST_ASIDE_BYTES = 256 * 1024  # largest response, in bytes, from a path other than the page's
_log = logging.getLogger(__name__)


class Meter(Protocol):
    """Receives the metrics about scraping; no method blocks."""

    def scraped(self, address: str, seconds: float, reading: EndpointMetrics) -> None:
        """Count a successful scrape, its duration and its reading."""

    def probed(self, address: str, status: int, ready: bool) -> None:
        """Count an answered probe: its HTTP `status` (0: not HTTP), and whether the server takes requests."""

    def scrape_failed(self, address: str, kind: str, seconds: float) -> None:
        """Count a failed scrape or probe; `kind` is timeout, silent, connection, status or page."""

    def scrape_published(self, readings: int, seconds: float) -> None:
        """Count a batch of readings that was published to the fleet."""

    def scrape_unpublished(self, readings: int) -> None:
        """Count a batch that Redis did not accept; its readings go with the next batch."""

    def scrape_ages(self, owned: int, ages_s: Callable[[], Mapping[str, float]]) -> None:
        """Set the number of endpoints that this replica scrapes, and the age of each known reading."""


class Scraper:
    """Scrapes a set of endpoints, which `set_targets` changes, at the intervals of `pacing`. One event loop.

    Each endpoint has a task and a connection of its own, so a slow endpoint delays no other, and its own
    phase, so that scrapes spread over time. The scraper probes an endpoint between pages, so that it detects
    a hanging server even if the page is read seldom or fails, and once when the server closes an idle
    connection. A request times out after `deadline_s`; a timeout noticed more than `late_s` later means that
    this replica was paused. After each failure the pause before the next request to the endpoint, or for its
    page, doubles, up to 5 s.

    Readings go to `readings`, and in batches to `channel`. If Redis does not accept a batch, its readings go
    with the next batch, except those that a newer reading replaces. While `speaks` is True, an empty batch is
    sent after `speak_s` without readings, as a sign of life of this replica.
    """

    def __init__(
        self,
        scraping: Scraping,
        *,
        pacing: IntervalPolicy,
        readings: MetricsCache,
        channel: MetricsChannel,
        speak_s: float,
        meter: Meter,
        deadline_s: float = _DEADLINE_S,
        late_s: float = _LATE_S,
        vary: Callable[[], float] = random.random,
    ) -> None:
        self._scraping, self._access = scraping, Access(scraping)
        self._clock = asyncio.get_running_loop().time
        self._engines: dict[str, tuple[Engine, ...]] = {}  # engine name in a label -> candidate engines
        self._pacing = pacing
        self._suspects: dict[str, float] = {}  # endpoint's address -> until when its page is read more often
        self._deadline_s, self._late_s = deadline_s, late_s
        self._readings, self._channel, self._speak_s = readings, channel, speak_s
        self._shown_s = min(speak_s, (scraping.stale_after or math.inf) / 2)
        self.speaks = False
        self._unsent_suspects: Sequence[str] = ()  # suspect endpoints to report with the next batch
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
        """Scrape exactly `endpoints` from now on; drop requests in flight to other endpoints."""
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
                    "a label of %s names an unknown engine %r; known: %s", endpoint.address, named[:60], known
                )
            if len(self._engines) >= _MOST_NAMES:
                self._engines.clear()
            self._engines[named] = found
        return found

    def suspect(self, addresses: Sequence[str], *, notify: bool = False) -> None:
        """Read the pages of `addresses` more often for a while: requests in flight there may have ended
        unreported. With `notify`, other replicas read the pages of the `addresses` that they scrape."""
        if notify:
            self._unsent_suspects = tuple(addresses)
        until_s = self._clock() + _SUSPECTED_S
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
        """Start a task for each new target, and cancel the tasks of former targets."""
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
        target = _Target(place, self._access, self._readings.last_read(place.address))
        _, tick_s = self._pace(target)
        due_s = self._clock() + self._vary() * tick_s
        by_habit_until_s = -math.inf
        try:
            while True:
                if self._clock() < by_habit_until_s:
                    target.server.lost.clear()
                    await asyncio.sleep(due_s - self._clock())
                    woken = False
                else:
                    woken = await _until(due_s, target.server.lost)
                if woken:
                    target.paged_s = -math.inf  # the server may have restarted: read its page now
                interval_s, tick_s = self._pace(target)
                await self._look(target, interval_s, tick_s)
                now_s = self._clock()
                if target.missed:
                    due_s = now_s + pause_s(target.missed, min(tick_s, _RETRY_S), self._vary())
                elif woken:
                    due_s, by_habit_until_s = now_s + tick_s, now_s + max(_HABIT_S, tick_s)
                else:
                    # Skip the ticks that passed during a slow response.
                    due_s += tick_s * max(1, -((due_s - now_s) // tick_s))
        finally:
            target.close()

    def _pace(self, target: "_Target") -> tuple[float, float]:
        """Seconds between an endpoint's pages, and between requests (probes or pages) to the endpoint."""
        suspect = target.asleep or self._clock() < self._suspects.get(target.address, 0.0)
        interval_s = self._pacing.interval_s(target.cost, len(self._targets), suspect=suspect)
        return interval_s, self._pacing.tick_s(interval_s, len(self._targets))

    async def _look(self, target: "_Target", interval_s: float, tick_s: float) -> None:
        """Scrape the page if it is due, otherwise probe the server; queue the new reading, if any, to be
        published."""
        now_s = self._clock()
        failures, last = target.failures, target.last
        unready = last.unready if last is not None else None
        due_s = target.paged_s + (target.pause_s or interval_s)
        is_due = not target.missed and now_s >= due_s - tick_s / 2
        if target.paged_s > -math.inf and now_s - target.probed_s >= _HEALTH_S:
            is_due = False  # probe now: pages do not show whether the server takes requests
        reading = await (self._scrape(target, interval_s) if is_due else self._probe(target))
        if is_due:
            bad = reading is not None and reading.failures
            target.bad_pages = target.bad_pages + 1 if bad else 0
            target.pause_s = pause_s(target.bad_pages, min(tick_s, _RETRY_S), self._vary()) if bad else 0.0
        if reading is None:
            if target.unready == unready:
                return
            reading = last or EndpointMetrics(scraped_ms=int(now_s * 1000))
        reading = replace(reading, unready=target.unready)
        if failures == 0 and reading.failures:
            _log.warning("scraping %s fails: %s", target.address, reading.fault)
        elif failures and not reading.failures:
            _log.info("scraping %s works again", target.address)
        elif reading.remark and (last is None or not last.remark):
            _log.warning("parts of the metrics page of %s cannot be read: %s", target.address, reading.remark)
        if reading.unready and not unready:
            _log.warning("endpoint %s takes no requests: %s", target.address, reading.unready)
        elif unready and not reading.unready:
            _log.info("endpoint %s takes requests again", target.address)
        target.last = reading
        self._pending[target.address] = reading
        self._any_pending.set()

    async def _scrape(self, target: "_Target", interval_s: float) -> EndpointMetrics:
        # The reading gets the time of the request: the page's metrics are not older than that.
        started_s = target.paged_s = self._clock()
        started_ms = int(started_s * 1000)

        async def read_page() -> EndpointMetrics:
            """Read the candidate pages until one has the series of a candidate engine."""
            fault: FetchError | BadPage | None = None
            for page in target.pages:
                reader = PageReader(target.engines)
                try:
                    asked_s = self._clock()
                    await page.read(reader.feed)
                    answered_s = self._clock() - asked_s - reader.cpu_s
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
            # The page does not show whether the engine sleeps. Do not ask again after an unusable answer.
            sleep = await self._ask_aside(target, target.engine.sleep_path, _Sleep)
            target.asks_sleep, target.asleep = sleep is not None, sleep is not None and sleep.is_sleeping
        metrics = target.with_idle_adapters(metrics)
        if (
            metrics.idle_adapters
            and target.engine.models_path
            and self._clock() - target.models_s >= _MODELS_S
        ):
            target.models_s = self._clock()
            models = await self._ask_aside(target, target.engine.models_path, _Models)
            if models is not None:
                target.keep_adapters({model.id for model in models.data})
                metrics = target.with_idle_adapters(metrics)
        metrics = replace(metrics, unready=target.unready)
        self._meter.scraped(target.address, self._clock() - started_s, metrics)
        last = target.last
        metrics = replace(metrics, interval_ms=round(interval_s * 1000))
        if last is None or last.load is None:
            return metrics
        return replace(metrics, before_ms=last.scraped_ms, before_load=last.load)

    async def _probe(self, target: "_Target") -> EndpointMetrics | None:
        """Probe the server. Returns None if the server answered, otherwise a reading with the fault."""
        started_s = target.probed_s = self._clock()

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
                return 0  # the response is not HTTP, but the server runs

        status = await self._ask(target, target.server, started_s, ask)
        if isinstance(status, EndpointMetrics):
            return status
        if target.missed and target.bad_pages <= 1:
            target.pause_s, target.paged_s = 0.0, -math.inf  # the server answers again: read its page now
        target.missed = 0
        target.cost.add_probe(self._clock() - started_s)
        self._meter.probed(target.address, status, target.unready is None)
        return None

    async def _ask_aside(self, target: "_Target", path: str, kind: type[S]) -> S | None:
        """Get the JSON at `path`, decoded as `kind`; None if the request fails or the JSON does not fit."""
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
        except (TimeoutError, FetchError, *MALFORMED):
            return None

    async def _ask(
        self,
        target: "_Target",
        connection: Connection,
        started_s: float,
        question: Callable[[], Awaitable[T]],
    ) -> T | EndpointMetrics:
        """The result of `question`; if there is none by the deadline, a reading with the endpoint's fault."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await question()
        except TimeoutError:
            # Connecting to a vanished host times out. A pause of this replica may also cause a timeout.
            if self._clock() - started_s > self._deadline_s + self._late_s:
                connection.unanswered = 0  # this replica was paused and could not read a response
            kind = "silent" if connection.unanswered >= _SILENT else "timeout"
            kind = "connection" if connection.unreached >= _UNREACHED else kind
            why = f"{SILENCE} {self._deadline_s:g} s"
        except FetchError as fault:
            kind, why = fault.kind, str(fault)
        except BadPage as fault:
            kind, why = "page", str(fault)
        if connection is not target.server:
            kind = "page"  # the page has its own port, whose faults do not concern the server
        if kind in _NO_ANSWER:
            target.missed += 1
        if kind == "connection":
            target.keep_adapters(())  # the engine may have restarted
        self._meter.scrape_failed(target.address, kind, self._clock() - started_s)
        return EndpointMetrics(scraped_ms=int(started_s * 1000), fault=why, failures=target.failures + 1)

    async def _publish_forever(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._speak_s):
                    await self._any_pending.wait()
            self._any_pending.clear()
            batch, self._pending = self._pending, {}
            started_s = self._clock()
            await self._hand_over(batch)
            await asyncio.sleep(max(0.0, started_s + self._pacing.publish_s(self._shown_s) - self._clock()))

    async def _hand_over(self, batch: Mapping[str, EndpointMetrics]) -> None:
        started_s = self._clock()
        self._readings.update(batch)
        suspects, self._unsent_suspects = self._unsent_suspects, ()
        try:
            if batch or suspects or self.speaks:
                await self._channel.publish(batch, suspects)
        except StateUnavailable:
            self._meter.scrape_unpublished(len(batch))
            kept = {address: metrics for address, metrics in batch.items() if address in self._targets}
            self._pending = {**kept, **self._pending}
            if kept:
                self._any_pending.set()
        else:
            self._meter.scrape_published(len(batch), self._clock() - started_s)


class _Sleep(msgspec.Struct):
    is_sleeping: bool


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Target:
    """The scraping state of one endpoint. `_page` is None until a page has been read, and so is `_engine` if
    several engines are possible."""

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
        self.asks_sleep = False  # ask the engine whether it sleeps, since its page does not show that
        self.refusal: str | None = None  # the last probe's answer, if it refuses requests
        # Adapters that were loaded and may still be loaded, in the order of their last use.
        loaded = last_read.active_adapters | last_read.idle_adapters if last_read is not None else ()
        self._loaded = dict.fromkeys(sorted(loaded))
        self.models_s = -math.inf  # time of the last request for the engine's models
        self.cost = ScrapeCost()
        self.last: EndpointMetrics | None = None  # the newest reading
        # Times of the last requests to the endpoint: for its page, as a probe, and for its health path.
        self.paged_s = self.probed_s = self.health_s = -math.inf
        self.pause_s = 0.0  # seconds before the next page, after a failed page
        self.bad_pages = 0  # failed reads of the page in a row
        self.missed = 0  # requests in a row to which the server sent no answer

    @property
    def failures(self) -> int:
        return self.last.failures if self.last is not None else 0

    @property
    def unready(self) -> str | None:
        """Why the endpoint takes no requests although it answers; None if it takes requests."""
        return ASLEEP if self.asleep else self.refusal

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines that the endpoint may run; only its engine once that is known."""
        return self._candidates if self._engine is None else (self._engine,)

    @property
    def pages(self) -> Sequence[Page]:
        """The candidate paths of the page; only the page's path once that is known."""
        return self._all_pages if self._page is None else (self._page,)

    @property
    def engine(self) -> Engine:
        """The engine, or the first candidate while the engine is unknown."""
        return self.engines[0]

    def found(self, page: Page, reader: PageReader) -> None:
        """Record `page` as the endpoint's page, which `reader` has read."""
        if self._page is None:
            self._page, self._engine = page, reader.engine
            self.asks_sleep = bool(self.engine.sleep_path)
        self.asks_sleep = self.asks_sleep and not reader.tells_sleep

    def lost(self) -> None:
        """Forget page and engine: the page cannot be read, so the endpoint may run another engine now."""
        self._page = None
        self._engine = self._candidates[0] if len(self._candidates) == 1 else None

    def keep_adapters(self, names: Collection[str]) -> None:
        """Forget the adapters that are not in `names`."""
        self._loaded = {name: None for name in self._loaded if name in names}

    def with_idle_adapters(self, metrics: EndpointMetrics) -> EndpointMetrics:
        """`metrics` with idle adapters added: loaded earlier and without requests now, the most recently
        used, as many as the slots that adapters with requests leave free."""
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
        return replace(metrics, idle_adapters=frozenset(kept) - metrics.active_adapters)

    def close(self) -> None:
        self.server.close()
        self.paged.close()


async def _pass_over(answer: Exchange) -> None:
    """Read and discard a short body, so that the connection can be kept; stop reading a long or late body."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_BODY_S):
            bytes_left = _MOST_BODY_BYTES
            async for part in answer.parts():
                bytes_left -= len(part)
                if bytes_left < 0:
                    return


async def _until(due_s: float, lost: asyncio.Event) -> bool:
    """Wait until `due_s` of the loop's clock, or until `lost` is set. Returns True if `lost` was set."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(due_s):
            await lost.wait()
            lost.clear()
            return True
    return False
