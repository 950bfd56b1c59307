"""The scraper of metrics pages over real sockets: scrapes, published readings, probes, faults of servers."""

import asyncio
import contextlib
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from background import running, until
from choosers import fleet_with
from page_server import PAGE, PageServer, answered, serving

from picker_fleet.domain.errors import StateUnavailable
from picker_fleet.domain.request import METRICS_PORT, Endpoint
from picker_fleet.domain.scraping import Scraping
from picker_fleet.endpoints.pacing import IntervalPolicy, pause_s
from picker_fleet.endpoints.readings import EndpointMetrics, MetricsCache
from picker_fleet.endpoints.scraper import Scraper

INTERVAL_S = 0.02
READING = fleet_with("queue-depth")  # a fleet whose scorer needs metrics pages


class Bench:
    """Three page servers, and counts of the readings, probes and faults that a scraper reports."""

    def __init__(self, servers: list[PageServer]) -> None:
        self.servers, self.server = servers, servers[0]
        self.batches: list[Mapping[str, EndpointMetrics]] = []
        self.newest: dict[str, EndpointMetrics] = {}
        self.worked: Counter[str] = Counter()
        self.probed_at: Counter[str] = Counter()
        self.unready: Counter[str] = Counter()  # counts scrapes and probes that found the server unready
        self.failed: Counter[tuple[str, str]] = Counter()
        self.refused = self.refusals = 0  # counts of refused readings and batches
        self.refusing = False

    async def publish(self, batch: Mapping[str, EndpointMetrics], suspects: Sequence[str]) -> None:
        if self.refusing:
            raise StateUnavailable("not now")
        self.batches.append(batch)
        self.newest.update(batch)

    def scraped(self, address: str, seconds: float, reading: EndpointMetrics) -> None:
        self.worked[address] += 1
        self.unready[address] += bool(reading.unready)

    def probed(self, address: str, status: int, ready: bool) -> None:
        self.probed_at[address] += 1
        self.unready[address] += not ready

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
        self, addresses: Iterable[str] | None = None, *, engine: str = "vllm", **more: Any
    ) -> AsyncIterator[Scraper]:
        """Run a scraper of `addresses`, by default of the first server, with more parameters `more`."""
        defaults = {
            "pacing": IntervalPolicy(INTERVAL_S, READING), "vary": random.random, "speak_s": 60.0,
            "deadline_s": 20, "late_s": 0.5,
            "readings": MetricsCache(None, asyncio.get_running_loop().time),
        }  # fmt: skip
        scraping = Scraping(engine=engine, stale_after=1.0)
        scraper = Scraper(scraping, channel=self, meter=self, **(defaults | more))  # type: ignore[arg-type]
        scraper.speaks = True
        scraper.set_targets(map(Endpoint, [self.server.address] if addresses is None else addresses))
        async with running(scraper.run()):
            yield scraper


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        yield Bench([await stack.enter_async_context(serving()) for _ in range(3)])


async def test_every_owned_endpoint_is_scraped_repeatedly_over_one_connection(bench: Bench) -> None:
    addresses = [server.address for server in bench.servers]
    async with bench.scraping(addresses):
        await until(lambda: all(bench.worked[address] >= 4 for address in addresses))
    for server in bench.servers:
        metrics = bench.newest[server.address]
        assert (metrics.waiting, metrics.running, metrics.fault) == (3.0, 2.0, None)
        assert server.connections == 1
    assert not bench.failed


async def test_readings_are_published_only_at_the_publish_interval(bench: Bench) -> None:
    class Rare(IntervalPolicy):
        def publish_s(self, shown_s: float) -> float:
            return 60.0

    async with bench.scraping(pacing=Rare(INTERVAL_S, READING)):
        await until(lambda: bool(bench.batches))
        await until(lambda: len(bench.server.requests) >= 10)
        assert len(bench.batches) == 1


async def test_a_scraper_without_readings_publishes_empty_batches(bench: Bench) -> None:
    async with bench.scraping([], speak_s=INTERVAL_S):
        await until(lambda: len(bench.batches) >= 2)
        bench.refusing = True
        await until(lambda: bench.refusals >= 2)
        bench.refusing = False
        count = len(bench.batches)
        await until(lambda: len(bench.batches) > count)
    assert not any(bench.batches)


async def test_a_slow_endpoint_does_not_delay_scrapes_of_other_endpoints(bench: Bench) -> None:
    slow, *others = bench.servers
    slow.act = slow.hang
    async with bench.scraping(server.address for server in bench.servers):
        await until(lambda: len(slow.requests) == 1)
        seen = Counter(bench.worked)
        await until(lambda: all(bench.worked[other.address] >= seen[other.address] + 5 for other in others))
        assert len(slow.requests) == 1
        assert slow.address not in bench.newest


async def test_a_hanging_server_times_out_twice_and_then_counts_as_silent(bench: Bench) -> None:
    server = bench.server
    server.act = server.hang
    async with bench.scraping(deadline_s=0.05):
        await until(lambda: server.address in bench.newest)
        assert bench.newest[server.address].fault == "no page within 0.05 s"
        await until(lambda: bench.failed[server.address, "silent"] >= 1)
        assert bench.failed[server.address, "timeout"] >= 2
        server.release()
        await until(lambda: bench.worked[server.address] >= 1)
    assert bench.newest[server.address].failures == 0


async def test_an_endpoint_that_never_completes_a_connection_is_a_connection_fault(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as others:
        for _ in range(8):
            other = others.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        address = f"127.0.0.1:{full.getsockname()[1]}"
        async with bench.scraping([address], deadline_s=0.05):
            await until(lambda: bench.failed[address, "connection"] >= 1)
        assert bench.failed[address, "timeout"] == 1


async def test_a_server_that_sometimes_times_out_does_not_count_as_silent(bench: Bench) -> None:
    slow, endless, _ = bench.servers

    async def seldom(writer: asyncio.StreamWriter) -> None:
        if len(slow.requests) % 3:
            await slow.hang(writer)
        else:
            writer.write(slow.answer)

    async def begun(writer: asyncio.StreamWriter) -> None:
        writer.write(endless.answer[:-10])
        await endless.hang(writer)

    slow.act, endless.act = seldom, begun
    async with bench.scraping([slow.address, endless.address], deadline_s=0.25):
        await until(lambda: bench.failed[slow.address, "timeout"] >= 4)
        await until(lambda: bench.failed[endless.address, "timeout"] >= 4)
    assert not [kind for _, kind in bench.failed if kind == "silent"]


async def test_a_paused_replica_counts_no_endpoint_as_silent(bench: Bench) -> None:
    server = bench.server
    server.act = server.hang
    async with bench.scraping(deadline_s=0.05, late_s=-0.05):
        await until(lambda: bench.failed[server.address, "timeout"] >= 4)
    assert not bench.failed[server.address, "silent"]


async def test_a_malformed_metrics_page_is_a_fault_until_a_valid_page_comes(bench: Bench) -> None:
    # test_scraping_page.py covers all malformed pages.
    server = bench.server
    server.answer = answered(b"vllm:num_requests_waiting x\n")
    async with bench.scraping():
        await until(lambda: bench.failed[server.address, "page"] >= 2)
        await until(lambda: bench.newest[server.address].failures >= 2)
        metrics = bench.newest[server.address]
        assert "vllm:num_requests_waiting has the value b'x'" in (metrics.fault or "")
        assert metrics.waiting is None
        server.answer = answered(PAGE)
        await until(lambda: bench.newest[server.address].fault is None)
        metrics = bench.newest[server.address]
        assert (metrics.failures, metrics.waiting) == (0, 3.0)


async def test_readings_that_could_not_be_published_are_published_later(bench: Bench) -> None:
    failing, good, dropped = bench.servers
    failing.answer = answered(b"", status="500 Oops")
    bench.refusing = True
    async with bench.scraping(server.address for server in bench.servers) as scraper:
        everyone = {server.address for server in bench.servers}
        await until(lambda: bench.failed[failing.address, "status"] >= 1)
        await until(lambda: all(bench.worked[one] for one in everyone - {failing.address}))
        await until(lambda: bench.refused >= 6)
        scraper.set_targets(map(Endpoint, everyone - {dropped.address}))
        bench.refusing = False
        await until(lambda: bool(bench.batches))
        assert bench.batches[0].keys() == {failing.address, good.address}
        assert bench.batches[0][failing.address].fault == "answered 500"


async def test_a_server_is_probed_between_rare_scrapes(bench: Bench) -> None:
    # If no scorer uses metrics pages, the scrape interval is 5 s.
    server = bench.server
    unused = IntervalPolicy(None, fleet_with())
    async with bench.scraping(deadline_s=0.05, pacing=unused) as scraper:
        await until(lambda: server.address in bench.newest)
        first = bench.newest[server.address]
        assert (first.interval_ms, first.before_ms) == (5000, None)
        await until(lambda: sum("GET /health " in asked for asked in server.requests) >= 2)
        assert sum("GET /metrics " in asked for asked in server.requests) == 1
        # A suspected server is scraped soon; the new reading repeats the previous scrape's time and load.
        scraper.suspect([server.address])
        await until(lambda: bench.newest[server.address].before_ms is not None)
        second = bench.newest[server.address]
        assert (second.before_ms, second.before_load) == (first.scraped_ms, 5.0)
        server.act = server.hang
        await until(lambda: bench.failed[server.address, "silent"] >= 1)
        server.release()
        await until(lambda: bench.newest[server.address].failures == 0)


class Seldom(IntervalPolicy):
    """An interval policy without probes between two scrapes."""

    def tick_s(self, interval_s: float, targets: int) -> float:
        return interval_s


@pytest.mark.parametrize("stops", [True, False])
async def test_a_server_that_closes_its_connection_is_checked_at_once(bench: Bench, stops: bool) -> None:
    server, told_to_end = bench.server, asyncio.Event()

    async def answer_and_end(writer: asyncio.StreamWriter) -> None:
        writer.write(server.answer)
        await writer.drain()
        await told_to_end.wait()
        if stops:
            server.stop()
        writer.close()

    server.act = answer_and_end
    # The next scrape is due in a minute.
    async with bench.scraping(pacing=Seldom(60.0, READING), vary=lambda: 0.0):
        await until(lambda: bench.worked[server.address] == 1)
        told_to_end.set()
        if stops:
            await until(lambda: bench.failed[server.address, "connection"] >= 1)
        else:  # a restarted server has lost its prefix cache, which only the page shows
            await until(lambda: bench.worked[server.address] >= 2)


async def test_a_server_that_closes_each_connection_is_scraped_no_more_often(bench: Bench) -> None:
    server, clock = bench.server, asyncio.get_running_loop().time
    server.act = server.cut(server.answer)
    async with bench.scraping(pacing=IntervalPolicy(0.05, READING)):
        await until(lambda: bench.worked[server.address] >= 1)
        first, began_s = bench.worked[server.address], clock()
        await until(lambda: bench.worked[server.address] >= first + 21)  # the second scrape comes at once
        assert clock() - began_s >= 20 * 0.04
    assert not bench.failed


async def test_a_server_that_closes_idle_connections_is_never_reported_down(bench: Bench) -> None:
    server, loop = bench.server, asyncio.get_running_loop()

    async def answer_and_end_soon(writer: asyncio.StreamWriter) -> None:
        writer.write(server.answer)
        loop.call_later(INTERVAL_S, writer.close)  # close the connection when the next scrape is due

    server.act = answer_and_end_soon
    async with bench.scraping():
        await until(lambda: bench.worked[server.address] >= 40)
    assert not bench.failed


async def test_an_endless_health_page_counts_as_an_answer(bench: Bench) -> None:
    server = bench.server

    async def stream(writer: asyncio.StreamWriter) -> None:
        if "GET /health " not in server.requests[-1]:
            writer.write(server.answer)
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: well\n\n")
        await server.hang(writer)

    server.act = stream
    async with bench.scraping(pacing=IntervalPolicy(None, fleet_with())):
        await until(lambda: bench.probed_at[server.address] >= 2)
        server.release()
    assert not bench.failed


async def test_a_server_whose_metrics_page_fails_is_still_probed(bench: Bench) -> None:
    server = bench.server
    server.answer = answered(b"", status="404 Not Found")
    async with bench.scraping():
        await until(lambda: bench.failed[server.address, "status"] >= 3)
        await until(lambda: bench.probed_at[server.address] >= 20)
        assert bench.failed[server.address, "status"] < 20
    assert {kind for _, kind in bench.failed} == {"status"}


async def test_a_metrics_page_on_another_port_does_not_show_whether_the_server_is_down(bench: Bench) -> None:
    server, metrics, _ = bench.servers
    port = metrics.address.rpartition(":")[2]
    async with bench.scraping([]) as scraper:
        scraper.set_targets([Endpoint(server.address, {METRICS_PORT: port})])
        await until(lambda: bench.worked[server.address] >= 1)
        assert not any("GET /metrics" in request for request in server.requests)
        metrics.stop()
        metrics.act = metrics.cut(b"")
        await until(lambda: bench.failed[server.address, "page"] >= 2)
        assert not bench.failed[server.address, "connection"]
        server.stop()
        server.act = server.cut(b"")
        await until(lambda: bench.failed[server.address, "connection"] >= 2)


def test_the_pause_after_failed_scrapes_doubles_up_to_five_seconds_and_varies() -> None:
    pauses_s = [pause_s(failures, 0.1, 0.0) for failures in (1, 2, 5, 6, 10_000)]
    assert pauses_s == pytest.approx([0.2, 0.4, 3.2, 5.0, 5.0])
    assert pause_s(1, 0.1, 1.0) == pytest.approx(0.15)


def at_paths(server: PageServer, **answers: str) -> None:
    """Let `server` answer only the paths in `answers` (`_` for `/` and `.`); each answer begins with a
    status."""
    found = {path: text.partition(" ") for path, text in answers.items()}

    async def act(writer: asyncio.StreamWriter) -> None:
        path = server.requests[-1].split()[1].strip("/").replace("/", "_").replace(".", "_")
        status, _, text = found.get(path, ("404", "", ""))
        writer.write(answered(text.encode(), status=f"{status} X"))

    server.act = act


VLLM_LINES = "200 vllm:num_requests_waiting 3\nvllm:num_requests_running 2\n"
AWAKE, ASLEEP = (f'vllm:engine_sleep_state{{sleep_state="awake"}} {value}\n' for value in (1, 0))


async def test_each_engine_of_a_pool_is_found_from_its_page_or_its_label(bench: Bench) -> None:
    found, labelled, changing = bench.servers
    at_paths(
        found, metrics="200 []\n", prometheus_metrics="200 trtllm_num_requests_waiting 7\n", health="200"
    )
    at_paths(labelled, metrics="200 sglang:num_queue_reqs 5\nvllm:num_requests_waiting 1\n", ping="200")
    at_paths(changing, metrics=VLLM_LINES, health="200")
    async with bench.scraping([], engine="auto") as scraper:
        scraper.set_targets(
            [
                Endpoint(found.address),
                Endpoint(labelled.address, labels={"llm-d.ai/engine-type": "sglang"}),
                Endpoint(changing.address, labels={"llm-d.ai/engine-type": "no such engine"}),
            ]
        )
        await until(lambda: len(bench.newest) == 3)
        waiting = [bench.newest[server.address].waiting for server in bench.servers]
        assert (waiting, bench.failed) == ([7.0, 5.0, 3.0], {})
        # A server of another engine takes over the address.
        at_paths(changing, metrics="200 tgi_queue_size 9\n", health="200")
        await until(lambda: bench.newest[changing.address].waiting == 9.0)


@pytest.mark.parametrize(
    ("unready", "why"),
    [
        ({"metrics": f"{VLLM_LINES}{ASLEEP}", "health": "200"}, "asleep"),
        ({"metrics": VLLM_LINES, "health": "200", "is_sleeping": '200 {"is_sleeping": true}'}, "asleep"),
        ({"metrics": VLLM_LINES, "health": "503"}, "GET /health answered 503"),
    ],
)
async def test_an_engine_that_sleeps_or_fails_its_health_check_is_unready_until_it_recovers(
    bench: Bench, unready: dict[str, str], why: str
) -> None:
    server = bench.server
    at_paths(server, **unready)
    # Scrapes are rare, but a probe notices the end of the sleep soon.
    async with bench.scraping(pacing=IntervalPolicy(None, fleet_with())):
        await until(lambda: server.address in bench.newest and bench.newest[server.address].unready == why)
        await until(lambda: bench.unready[server.address] >= 2)
        at_paths(server, **{"is_sleeping": '200 {"is_sleeping": false}', **unready, "health": "200"} | {
            "metrics": f"{VLLM_LINES}{AWAKE}"})  # fmt: skip
        await until(lambda: bench.newest[server.address].unready is None)
        probes = bench.probed_at[server.address]
        await until(lambda: bench.probed_at[server.address] > probes)
        bench.unready.clear()
        await until(lambda: bench.probed_at[server.address] > probes + 1)
        assert not bench.unready.total()
        assert not bench.failed


@pytest.mark.parametrize("answer", [b'{"data": [{"id": "\xff"}]}', b'{"x":' + b"[" * 100_000, b"{"])
async def test_a_malformed_list_of_adapters_does_not_end_the_scraping(bench: Bench, answer: bytes) -> None:
    server = bench.server
    info = 'max_lora="2",running_lora_adapters="{}",waiting_lora_adapters=""'
    page = f"{VLLM_LINES.removeprefix('200 ')}vllm:lora_requests_info{{{{{info}}}}} 1\n"

    async def act(writer: asyncio.StreamWriter) -> None:
        text = page.format("" if bench.worked.total() > 1 else "a").encode()
        writer.write(answered(answer if "GET /v1/models " in server.requests[-1] else text))

    server.act = act
    async with bench.scraping():
        await until(lambda: any("GET /v1/models " in request for request in server.requests))
        before = bench.worked.total()
        await until(lambda: bench.worked.total() > before + 3)
    assert bench.newest[server.address].idle_adapters == {"a"}
    assert server.connections == 1


async def test_an_idle_adapter_counts_as_loaded_until_its_slot_is_needed_or_the_engine_drops_it(
    bench: Bench,
) -> None:
    server, models = bench.server, '200 {"data": [{"id": "base"}, {"id": "b"}, {"id": "d"}]}'

    def runs(*names: str) -> str:
        listed = ",".join(names)
        info = f'max_lora="2",running_lora_adapters="{listed}",waiting_lora_adapters=""'
        return f"{VLLM_LINES}{AWAKE}vllm:lora_requests_info{{{info}}} 1\n"

    async def known(active: str, idle: str) -> None:
        def is_known() -> bool:
            reading = bench.newest.get(server.address)
            return reading is not None and (reading.active_adapters, reading.idle_adapters) == (
                frozenset(active), frozenset(idle)
            )  # fmt: skip

        await until(is_known)

    async with bench.scraping():
        for running, idle in (("ab", ""), ("", "ab"), ("c", "b"), ("bd", ""), ("", "bd"), ("e", "d")):
            at_paths(server, metrics=runs(*running), health="200", v1_models="404")
            await known(running, idle)
    # A replica that takes over an endpoint starts from the last reading of the former replica.
    bench.newest.clear()
    last = EndpointMetrics(0, active_adapters=frozenset("c"), idle_adapters=frozenset("d"))
    at_paths(server, metrics=runs(), health="200", v1_models=models)
    readings = MetricsCache(None, asyncio.get_running_loop().time)
    readings.update({server.address: last})
    async with bench.scraping(readings=readings):
        await known("", "d")
