"""The scraper against real sockets: what it fetches, what it hands over, and what it does about faults."""

import asyncio
import contextlib
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from background import running, until
from page_server import PAGE, PageServer, answered, serving

from picker_fleet.endpoints.readings import EndpointMetrics
from picker_fleet.endpoints.scraper import IntervalPolicy, Scraper, pause_s
from picker_fleet.errors import StateUnavailable
from picker_fleet.sections import VLLM

INTERVAL_S = 0.02


class Outcome:
    """Takes what a scraper hands over, and counts."""

    def __init__(self) -> None:
        self.batches: list[Mapping[str, EndpointMetrics]] = []
        self.newest: dict[str, EndpointMetrics] = {}
        self.worked: Counter[str] = Counter()
        self.probed_at: Counter[str] = Counter()
        self.failed: Counter[tuple[str, str]] = Counter()
        self.refused = self.refusals = 0  # readings, and batches
        self.refusing = False

    async def publish(self, batch: Mapping[str, EndpointMetrics]) -> None:
        if self.refusing:
            raise StateUnavailable("not now")
        self.batches.append(batch)
        self.newest.update(batch)

    def scraped(self, address: str, seconds: float) -> None:
        self.worked[address] += 1

    def probed(self, address: str) -> None:
        self.probed_at[address] += 1

    def scrape_failed(self, address: str, kind: str, seconds: float) -> None:
        self.failed[address, kind] += 1

    def scrape_published(self, readings: int, seconds: float) -> None:
        pass

    def scrape_unpublished(self, readings: int) -> None:
        self.refused += readings
        self.refusals += 1

    def scrape_ages(self, owned: int, ages_s: Callable[[], Mapping[str, float]]) -> None:
        pass


@asynccontextmanager
async def scraping(
    outcome: Outcome,
    *addresses: str,
    deadline_s: float = 20,
    late_s: float = 0.5,
    publish_s: float = INTERVAL_S,
    speak_s: float = 60,
    pacing: IntervalPolicy | None = None,
    vary: Callable[[], float] = random.random,
) -> AsyncIterator[Scraper]:
    scraper = Scraper(
        VLLM,
        pacing=pacing or IntervalPolicy(INTERVAL_S, lambda: True),
        vary=vary,
        publish=outcome.publish,
        publish_s=lambda: publish_s,
        speak_s=speak_s,
        meter=outcome,
        deadline_s=deadline_s,
        late_s=late_s,
    )
    scraper.set_targets(addresses)
    async with running(scraper.run()):
        yield scraper


@pytest.fixture
async def servers() -> AsyncIterator[list[PageServer]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving()) for _ in range(3)]


@pytest.fixture
def outcome() -> Outcome:
    return Outcome()


async def test_every_owned_endpoint_is_read_again_and_again(
    servers: list[PageServer], outcome: Outcome
) -> None:
    addresses = [server.address for server in servers]
    async with scraping(outcome, *addresses):
        await until(lambda: all(outcome.worked[address] >= 4 for address in addresses))
    for server in servers:
        metrics = outcome.newest[server.address]
        assert (metrics.waiting, metrics.running, metrics.fault) == (3.0, 2.0, None)
        assert server.connections == 1
    assert not outcome.failed


async def test_what_is_only_for_show_is_handed_over_seldom_and_then_the_newest(
    servers: list[PageServer], outcome: Outcome
) -> None:
    async with scraping(outcome, servers[0].address, publish_s=60):
        await until(lambda: bool(outcome.batches))
        await until(lambda: len(servers[0].requests) >= 10)
        assert len(outcome.batches) == 1


async def test_a_scraper_without_readings_publishes_empty_batches(outcome: Outcome) -> None:
    async with scraping(outcome, speak_s=INTERVAL_S):
        await until(lambda: len(outcome.batches) >= 2)
        outcome.refusing = True
        await until(lambda: outcome.refusals >= 2)
        outcome.refusing = False
        count = len(outcome.batches)
        await until(lambda: len(outcome.batches) > count)
    assert not any(outcome.batches)


async def test_a_slow_endpoint_delays_nobody(servers: list[PageServer], outcome: Outcome) -> None:
    slow, *others = servers
    slow.act = slow.hang
    async with scraping(outcome, *(server.address for server in servers)):
        await until(lambda: len(slow.requests) == 1)
        seen = Counter(outcome.worked)
        await until(lambda: all(outcome.worked[other.address] >= seen[other.address] + 5 for other in others))
        assert len(slow.requests) == 1
        assert slow.address not in outcome.newest


async def test_a_process_that_stands_still_is_late_and_silent_after_three_questions(
    servers: list[PageServer], outcome: Outcome
) -> None:
    server = servers[0]
    server.act = server.hang
    async with scraping(outcome, server.address, deadline_s=0.05):
        await until(lambda: server.address in outcome.newest)
        assert outcome.newest[server.address].fault == "no page within 0.05 s"
        await until(lambda: outcome.failed[server.address, "silent"] >= 1)
        assert outcome.failed[server.address, "timeout"] >= 2
        server.release()
        await until(lambda: outcome.worked[server.address] >= 1)
    assert outcome.newest[server.address].failures == 0


async def test_an_endpoint_that_does_not_even_refuse_is_one_that_cannot_be_connected_to(
    outcome: Outcome,
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as others:
        for _ in range(8):
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        address = f"127.0.0.1:{full.getsockname()[1]}"
        async with scraping(outcome, address, deadline_s=0.05):
            await until(lambda: outcome.failed[address, "connection"] >= 1)
        assert outcome.failed[address, "timeout"] == 1


async def test_a_server_that_is_late_now_and_then_is_not_silent(
    servers: list[PageServer], outcome: Outcome
) -> None:
    slow, endless, _ = servers

    async def seldom(writer: asyncio.StreamWriter) -> None:
        if len(slow.requests) % 3:
            await slow.hang(writer)
        else:
            writer.write(slow.answer)

    async def begun(writer: asyncio.StreamWriter) -> None:
        writer.write(endless.answer[:-10])
        await endless.hang(writer)

    slow.act, endless.act = seldom, begun
    async with scraping(outcome, slow.address, endless.address, deadline_s=0.05):
        await until(lambda: outcome.failed[slow.address, "timeout"] >= 4)
        await until(lambda: outcome.failed[endless.address, "timeout"] >= 4)
    assert not [kind for _, kind in outcome.failed if kind == "silent"]


async def test_a_paused_replica_counts_no_endpoint_as_silent(
    servers: list[PageServer], outcome: Outcome
) -> None:
    server = servers[0]
    server.act = server.hang
    async with scraping(outcome, server.address, deadline_s=0.05, late_s=-0.05):
        await until(lambda: outcome.failed[server.address, "timeout"] >= 4)
    assert not outcome.failed[server.address, "silent"]


async def test_a_bad_answer_is_a_fault_until_a_good_one_comes(
    servers: list[PageServer], outcome: Outcome
) -> None:
    # test_scraping_page.py has all bad answers.
    server = servers[0]
    server.answer = answered(b"vllm:num_requests_waiting x\n")
    async with scraping(outcome, server.address):
        await until(lambda: outcome.failed[server.address, "page"] >= 2)
        await until(lambda: outcome.newest[server.address].failures >= 2)
        metrics = outcome.newest[server.address]
        assert "vllm:num_requests_waiting has the value b'x'" in (metrics.fault or "")
        assert metrics.waiting is None
        server.answer = answered(PAGE)
        await until(lambda: outcome.newest[server.address].fault is None)
        assert outcome.newest[server.address].failures == 0
        assert outcome.newest[server.address].waiting == 3.0


async def test_an_endpoint_that_comes_up_is_read(servers: list[PageServer], outcome: Outcome) -> None:
    late = PageServer()
    await late.start()
    port = int(late.address.rpartition(":")[2])
    late.stop()
    async with scraping(outcome, late.address):
        await until(lambda: outcome.failed[late.address, "connection"] >= 1)
        await late.start(port)
        await until(lambda: outcome.worked[late.address] >= 1)
    await until(lambda: late.open == 0)
    late.stop()


async def test_what_is_owned_changes_at_once(servers: list[PageServer], outcome: Outcome) -> None:
    first, second, _ = servers
    first.act = first.hang
    async with scraping(outcome, first.address) as scraper:
        await until(lambda: len(first.requests) == 1)
        scraper.set_targets([second.address])
        assert scraper.targets == {second.address}
        await until(lambda: outcome.worked[second.address] >= 2)
        first.release()
        await until(lambda: first.open == 0)
        assert len(first.requests) == 1
        assert outcome.newest.keys() == {second.address}
        scraper.set_targets([first.address, second.address])
        await until(lambda: outcome.worked[first.address] >= 1)


async def test_what_redis_does_not_take_is_handed_over_later(
    servers: list[PageServer], outcome: Outcome
) -> None:
    failing, good, dropped = servers
    failing.answer = answered(b"", status="500 Oops")
    outcome.refusing = True
    async with scraping(outcome, *(server.address for server in servers)) as scraper:
        everyone = {server.address for server in servers}
        await until(lambda: outcome.failed[failing.address, "status"] >= 1)
        await until(lambda: all(outcome.worked[one] for one in everyone - {failing.address}))
        await until(lambda: outcome.refused >= 6)
        scraper.set_targets(everyone - {dropped.address})
        outcome.refusing = False
        await until(lambda: bool(outcome.batches))
        assert outcome.batches[0].keys() == {failing.address, good.address}
        assert outcome.batches[0][failing.address].fault == "answered 500"


async def test_a_server_whose_page_is_read_seldom_is_probed_meanwhile(
    servers: list[PageServer], outcome: Outcome
) -> None:
    # Pages that nobody picks by are read every 5 s.
    server = servers[0]
    unused = IntervalPolicy(None, lambda: False)
    async with scraping(outcome, server.address, deadline_s=0.05, pacing=unused) as scraper:
        await until(lambda: server.address in outcome.newest)
        first = outcome.newest[server.address]
        assert (first.interval_ms, first.before) == (5000, None)
        await until(lambda: sum("GET /health " in asked for asked in server.requests) >= 2)
        assert sum("GET /metrics " in asked for asked in server.requests) == 1
        # Requests there may be gone: the next page comes soon, and tells of the one before.
        scraper.suspect([server.address])
        await until(lambda: outcome.newest[server.address].before is not None)
        assert outcome.newest[server.address].before == (first.scraped_ms, 5.0)
        server.act = server.hang
        await until(lambda: outcome.failed[server.address, "silent"] >= 1)
        server.release()
        await until(lambda: outcome.newest[server.address].failures == 0)


class Seldom(IntervalPolicy):
    """Without probes between two pages."""

    def tick_s(self, interval_s: float, targets: int) -> float:
        return interval_s


async def test_a_server_that_ends_its_connection_is_looked_at_once(
    servers: list[PageServer], outcome: Outcome
) -> None:
    server = servers[0]
    told_to_end = asyncio.Event()

    async def answer_and_end(writer: asyncio.StreamWriter) -> None:
        writer.write(server.answer)
        await writer.drain()
        await told_to_end.wait()
        server.stop()
        writer.close()

    server.act = answer_and_end
    pacing = Seldom(60.0, lambda: True)
    async with scraping(outcome, server.address, pacing=pacing, vary=lambda: 0.0):
        await until(lambda: outcome.worked[server.address] == 1)
        # Its next page is due in a minute; that it refuses connections is found now.
        told_to_end.set()
        await until(lambda: outcome.failed[server.address, "connection"] >= 1)


@pytest.mark.parametrize(
    ("failures", "variation", "expected_s"),
    [(1, 0.0, 0.2), (2, 0.0, 0.4), (5, 0.0, 3.2), (6, 0.0, 5.0), (10_000, 0.0, 5.0), (1, 1.0, 0.15)],
)
def test_the_pause_after_failures_doubles_up_to_five_seconds(
    failures: int, variation: float, expected_s: float
) -> None:
    assert pause_s(failures, 0.1, variation) == pytest.approx(expected_s)
