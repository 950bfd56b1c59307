"""Fleets of scraping replicas under measurement, and the cost of one scrape against its alternatives."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from bench.scraping.pages import Pages
from bench.scraping.replica import HEARTBEAT_S
from picker_fleet.endpoints import metrics_page
from picker_fleet.endpoints.metrics_client import Connection
from picker_fleet.endpoints.metrics_page import VLLM
from picker_tools.local_fleet.parts import Valkey
from picker_tools.local_fleet.processes import Child

INTERVAL_S = 0.1
_START_S = 30.0


@dataclass(frozen=True, slots=True)
class Rate:
    """What a fleet did: scrapes a second of an endpoint, mean and highest; CPU in cores."""

    replicas: int
    endpoints: int
    page_bytes: int
    shared: bool
    mean: float
    highest: float
    cores: float
    redis_cores: float


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU of one scrape, µs: the fetch, then the reading."""

    how: str
    fetch_us: float
    read_us: float


@asynccontextmanager
async def redis(folder: Path) -> AsyncIterator[tuple[str, Child]]:
    """A Valkey of its own: its URL and process."""
    valkey = Valkey(folder)
    child = await Child.start(valkey.name, valkey.command(), folder / "valkey.log")
    try:
        yield await valkey.ready(child), child
    finally:
        await child.stop(10)


class Fleet:
    """`count` replicas that share `addresses`, or scrape them all each; running inside `running`."""

    def __init__(self, url: str, count: int, addresses: Sequence[str], *, shared: bool) -> None:
        self.names = [f"replica-{number}" for number in range(count)]
        self.children: dict[str, Child] = {}
        self._url = url
        self._addresses = addresses
        self._shared = shared

    @asynccontextmanager
    async def running(self, python: str, folder: Path, pages: Pages) -> AsyncIterator["Fleet"]:
        try:
            for name in self.names:
                live = ",".join(self.names) if self._shared else name
                words = (self._url, name, live, str(INTERVAL_S), ",".join(self._addresses))
                command = (python, "-m", "bench.scraping.replica", *words)
                self.children[name] = await Child.start(name, command, folder / f"{name}.log")
            await self._all_scraped(pages)
            yield self
        finally:
            for child in self.children.values():
                await child.stop(5)

    async def _all_scraped(self, pages: Pages) -> None:
        """Wait until everyone runs and every page is asked for, and then for shares to settle."""
        pages.begin()
        async with asyncio.timeout(_START_S):
            while True:
                if all(pages.counts[address] for address in self._addresses):
                    break
                for child in self.children.values():
                    child.check()
                await asyncio.sleep(0.05)
        await asyncio.sleep(2 * HEARTBEAT_S + 0.15 * len(self.names))

    def cpu_s(self) -> float:
        return sum(_cpu_s(child) for child in self.children.values())


async def rate(
    fleet: Fleet, valkey: Child, pages: Pages, *, shared: bool, of_bytes: int, for_s: float
) -> Rate:
    """Let a running fleet scrape for `for_s` seconds."""
    pages.begin()
    began_s, cpu_s, redis_s = time.monotonic(), fleet.cpu_s(), _cpu_s(valkey)
    await asyncio.sleep(for_s)
    elapsed_s = time.monotonic() - began_s
    counts = [count for count in pages.counts.values() if count]
    return Rate(
        replicas=len(fleet.names),
        endpoints=len(counts),
        page_bytes=of_bytes,
        shared=shared,
        mean=sum(counts) / len(counts) / elapsed_s,
        highest=max(counts) / elapsed_s,
        cores=(fleet.cpu_s() - cpu_s) / elapsed_s,
        redis_cores=(_cpu_s(valkey) - redis_s) / elapsed_s,
    )


async def hand_over_s(fleet: Fleet, pages: Pages) -> float:
    """SIGKILL one of a running fleet; the longest time that an endpoint then went without a scrape."""
    pages.begin()
    fleet.children[fleet.names[0]].kill()
    await asyncio.sleep(4 * HEARTBEAT_S)
    return pages.longest_gap_s()


async def costs(pages: Pages, times: int) -> list[Cost]:
    """One scrape as it is done here, and as general libraries do it, of the page that `pages` serve now."""
    address = pages.addresses[0]
    connection = Connection(address, "/metrics")
    async with httpx.AsyncClient() as client:

        async def general() -> bytes:
            return (await client.get(f"http://{address}/metrics")).content

        text = await connection.fetch()
        here = Cost(
            "picker_fleet.endpoints",
            await _fetching_us(connection.fetch, times),
            _reading_us(lambda: metrics_page.read(text, VLLM, 0), times),
        )
        there = Cost(
            "httpx, prometheus-client",
            await _fetching_us(general, times),
            _reading_us(lambda: list(text_string_to_metric_families(text.decode())), max(5, times // 20)),
        )
    connection.close()
    return [here, there]


async def _fetching_us(fetch: Callable[[], Awaitable[bytes]], times: int) -> float:
    """Includes the server's half, the same for all: it runs in this process."""
    await fetch()
    began_s = time.process_time()
    for _ in range(times):
        await fetch()
    return (time.process_time() - began_s) / times * 1e6


def _reading_us(read: Callable[[], object], times: int) -> float:
    began_s = time.process_time()
    for _ in range(times):
        read()
    return (time.process_time() - began_s) / times * 1e6


def _cpu_s(child: Child) -> float:
    used = psutil.Process(child.pid).cpu_times()
    return used.user + used.system
