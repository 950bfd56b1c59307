"""One replica scrapes each endpoint, and all replicas get the readings, through a real Valkey."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial

import pytest
import pytest_asyncio
from choosers import fleet_with
from redis.asyncio import Redis
from script_fleet import until, until_is

from picker_fleet.domain.request import Endpoint
from picker_fleet.domain.scraping import Scraping
from picker_fleet.endpoints.readings import EndpointMetrics, MetricsCache
from picker_fleet.endpoints.scraping import ScrapingTask
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell
from picker_fleet.state.keys import Keys
from picker_fleet.telemetry.metrics import Metrics
from picker_tools.local_fleet.parts import SimOptions, Simulator
from picker_tools.local_fleet.processes import Child

INTERVAL_S = 0.05
HEARTBEAT_S = 6.0  # so a scraper counts as gone only after 3.6 s of silence; a busy machine stalls for less


class Meter(Metrics):
    """Counts one replica's scrapes by endpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.scrapes: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.targets = 0
        self.ages_s: Callable[[], Mapping[str, float]] = dict

    def scraped(self, address: str, seconds: float, reading: EndpointMetrics) -> None:
        self.scrapes[address] += 1

    def scrape_failed(self, address: str, kind: str, seconds: float) -> None:
        self.faults[kind] += 1

    def scrape_ages(self, owned: int, ages_s: Callable[[], Mapping[str, float]]) -> None:
        self.targets, self.ages_s = owned, ages_s


class Replica:
    """One scraping replica of the test's fleet, in this process."""

    def __init__(self, url: str, pool: str, name: str, endpoints: SnapshotCell, live: list[str]) -> None:
        self.name = name
        self.meter = Meter()
        fleet = fleet_with("queue-depth")
        fleet.live = live
        self.readings = MetricsCache(10.0, asyncio.get_running_loop().time)
        self.task = ScrapingTask(
            url, pool, name, scraping=Scraping(interval=INTERVAL_S, stale_after=10.0),
            heartbeat_s=HEARTBEAT_S, fleet=fleet, endpoints=endpoints, readings=self.readings,
            meter=self.meter,
        )  # fmt: skip
        self.running = asyncio.create_task(self.task.run())

    def knows(self, addresses: Sequence[str]) -> bool:
        """Whether the replica has fresh readings of exactly these endpoints."""
        snapshot = self.readings.snapshot()
        return snapshot.keys() == set(addresses) and all(one.known for one in snapshot.values())

    async def stop(self) -> None:
        self.running.cancel()
        await asyncio.wait((self.running,), timeout=10)
        assert self.running.cancelled()


OpenScraping = Callable[..., AbstractAsyncContextManager["ScrapingFleet"]]


class ScrapingFleet:
    def __init__(self, url: str, pool: str, addresses: list[str], names: Sequence[str]) -> None:
        self.url = url
        self.key = Keys.of(pool).prefix + "metrics"
        self.live = list(names)
        self._cell = SnapshotCell()
        self.list(addresses)
        self.replicas = {name: Replica(url, pool, name, self._cell, self.live) for name in names}

    def list(self, addresses: list[str]) -> None:
        """Set the pool's endpoints."""
        self.addresses = addresses
        self._cell.publish(listed(addresses))

    async def settled(self) -> None:
        """Wait until every replica has readings of all endpoints and no endpoint is scraped twice."""
        await until(lambda: all(one.knows(self.addresses) for one in self.replicas.values()))
        await self.divided()

    async def divided(self) -> None:
        """Wait until each endpoint has exactly one replica that scrapes it."""
        await until(lambda: sum(one.meter.targets for one in self.replicas.values()) == len(self.addresses))

    async def scrapers(self, times: int) -> dict[str, set[str]]:
        """Endpoint -> the replicas that scrape it, observed over at least `times` further scrapes."""
        for replica in self.replicas.values():
            replica.meter.scrapes.clear()

        def total() -> Counter[str]:
            return sum((one.meter.scrapes for one in self.replicas.values()), Counter[str]())

        await until(lambda: all(total()[address] >= times for address in self.addresses))
        return {
            address: {name for name, one in self.replicas.items() if one.meter.scrapes[address]}
            for address in self.addresses
        }

    async def until_stored(self, redis: Redis) -> None:
        """Wait until Redis has readings of exactly the pool's endpoints."""
        await until_is(lambda: self._stored(redis), set(self.addresses))

    async def _stored(self, redis: Redis) -> set[str]:
        return {name.decode() for name in await redis.hkeys(self.key)}


def listed(addresses: Sequence[str]) -> Snapshot:
    return Snapshot(",".join(addresses), tuple(Endpoint(one) for one in addresses))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def simulators(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[str]]:
    """Run four simulators (`picker sim`); yield their addresses."""
    folder = tmp_path_factory.mktemp("simulators")
    simulators = [Simulator(number, SimOptions(), ["base", "sql", "chat"]) for number in range(4)]
    async with AsyncExitStack() as running:
        for each in simulators:
            child = await Child.start(each.name, each.command(), folder / f"{each.name}.log")
            running.push_async_callback(child.stop, 10)
            await each.ready(child)
        yield [each.address for each in simulators]


@asynccontextmanager
async def running(url: str, pool: str, addresses: list[str]) -> AsyncIterator[ScrapingFleet]:
    fleet = ScrapingFleet(url, pool, addresses, ("one", "two", "three"))
    try:
        yield fleet
    finally:
        for replica in fleet.replicas.values():
            await replica.stop()


@pytest.fixture
def scraping(valkey_url: str, pool: str, simulators: list[str]) -> OpenScraping:
    """Opens a fleet of three scrapers."""
    return partial(running, valkey_url, pool, simulators)


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_each_endpoint_is_scraped_by_one_replica_and_known_to_all(scraping: OpenScraping) -> None:
    async with scraping() as fleet:
        await fleet.settled()
        started_s = time.monotonic()
        scrapers = await fleet.scrapers(20)
        elapsed_s = time.monotonic() - started_s
        # One replica scraped each endpoint, at most as often as the interval allows. The only errors may be
        # timeouts, if the whole machine stalled.
        assert {address: len(names) for address, names in scrapers.items()} == dict.fromkeys(
            fleet.addresses, 1
        )
        for address, (name,) in scrapers.items():
            assert fleet.replicas[name].meter.scrapes[address] / elapsed_s <= 1.2 / INTERVAL_S
        assert all(one.meter.faults.keys() <= {"timeout"} for one in fleet.replicas.values())
        for replica in fleet.replicas.values():
            for reading in replica.readings.snapshot().values():
                assert (reading.metrics.waiting, reading.metrics.running) == (0.0, 0.0)
                assert reading.metrics.kv_utilisation == 0.0
                assert reading.metrics.max_adapters == 2
            await until(lambda meter=replica.meter: meter.ages_s().keys() == set(fleet.addresses))


async def test_endpoints_of_a_silent_replica_are_scraped_by_the_others(scraping: OpenScraping) -> None:
    async with scraping() as fleet:
        await fleet.settled()
        scrapers = await fleet.scrapers(3)
        lost_name = next(iter(scrapers[fleet.addresses[0]]))
        # A replica that scrapes an endpoint stops without notice, and at first counts as live.
        await fleet.replicas.pop(lost_name).stop()
        assert lost_name in fleet.live
        # The other replicas take over the endpoints of the stopped replica, and keep their own endpoints.
        await fleet.divided()
        after = await fleet.scrapers(5)
        for address, names in scrapers.items():
            assert len(after[address]) == 1
            assert after[address] == names or names == {lost_name}


async def test_removed_endpoints_are_forgotten_and_new_ones_are_scraped(scraping: OpenScraping) -> None:
    async with scraping() as fleet, Redis.from_url(fleet.url) as redis:
        known = fleet.addresses
        fleet.list(known[:3])
        await fleet.settled()
        fleet.list(known[1:])
        await fleet.settled()
        await fleet.until_stored(redis)


async def test_readings_deleted_from_redis_are_stored_again(scraping: OpenScraping) -> None:
    async with scraping() as fleet, Redis.from_url(fleet.url) as redis:
        await fleet.settled()
        await redis.delete(fleet.key)
        await fleet.until_stored(redis)


async def test_without_redis_each_replica_has_its_own_readings(pool: str, simulators: list[str]) -> None:
    async with running("redis://127.0.0.1:1/0", pool, simulators) as fleet:

        def known() -> list[str]:
            boards = [one.readings.snapshot() for one in fleet.replicas.values()]
            return sorted(address for board in boards for address, one in board.items() if one.known)

        await until(lambda: known() == sorted(simulators))


async def test_a_scraping_task_can_be_cancelled_at_any_moment(
    valkey_url: str, pool: str, simulators: list[str]
) -> None:
    # Replicas are stopped at different moments, mostly while connecting to Redis.
    cell = SnapshotCell()
    cell.publish(listed(simulators))
    for turns in (*range(40), *range(40, 400, 20)):
        replica = Replica(valkey_url, pool, "one", cell, ["one"])
        for _ in range(turns):
            await asyncio.sleep(0)
        await replica.stop()
