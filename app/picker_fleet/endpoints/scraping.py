"""Divides scraping among the fleet: one replica reads an endpoint's metrics page, and publishes the reading.

Endpoints are assigned by rendezvous hashing (Thaler and Ravishankar, 1998): every replica hashes each pair of
endpoint and replica, and the replica with the greatest hash scrapes the endpoint. No table is shared:
replicas that agree on the live replicas agree on the assignment. When a replica leaves, only its endpoints
move, evenly to the others; when a replica joins, only the endpoints that the new replica gets move.

Every message goes to all replicas, so a message's cost grows with their number. In a large fleet only some
replicas scrape and publish (`scrapers_wanted`); otherwise the total cost would grow with the square of the
number of replicas (docs/decisions.md, 24).
"""

import asyncio
import contextlib
import hashlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from picker_fleet.background import keep
from picker_fleet.domain.errors import StateUnavailable
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.scraping import Scraping
from picker_fleet.endpoints.kv_events import KvEventReader
from picker_fleet.endpoints.metrics_channel import MetricsChannel
from picker_fleet.endpoints.pacing import IntervalPolicy
from picker_fleet.endpoints.readings import EndpointMetrics, MetricsCache
from picker_fleet.endpoints.scraper import Meter, Scraper
from picker_fleet.endpoints.snapshot import SnapshotCell


def assigned_replica(address: str, replicas: Sequence[str]) -> str:
    """The replica that scrapes the endpoint `address`; `replicas` may be in any order, but not empty."""
    # The length keeps different pairs (address, replica) from having the same joined text.
    prefix = f"{len(address)}:{address}"
    return max(replicas, key=lambda replica: (_hash(prefix + replica), replica))


def _hash(text: str) -> bytes:
    # Python's `hash` differs between processes.
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


class Assignment:
    """Assigns to each of `replicas` the endpoints that it scrapes. Hashes only new endpoints, for speed."""

    def __init__(self, replicas: Sequence[str]) -> None:
        self.replicas = replicas
        self._owners: dict[str, str] = {}

    def of(self, replica: str, addresses: Iterable[str]) -> frozenset[str]:
        """The subset of `addresses` assigned to `replica`; empty if `replica` is not one of the replicas."""
        if replica not in self.replicas:
            return frozenset()
        former, self._owners = self._owners, {}
        for address in addresses:
            self._owners[address] = former.get(address) or assigned_replica(address, self.replicas)
        return frozenset(address for address, owner in self._owners.items() if owner == replica)


def scrapers_wanted(endpoints: int) -> int:
    """The number of replicas that should scrape `endpoints` endpoints, if the fleet is large enough."""
    return min(_MOST_SCRAPERS, max(_LEAST_SCRAPERS, math.ceil(endpoints / _ENDPOINTS_A_SCRAPER)))


class Scrapers:
    """Selects the live replicas that scrape: the first present replicas, in an order that all replicas share.

    A killed replica counts as live for `replica_silence`, too long to leave its endpoints unread. Scrapers
    publish on the metrics channel several times per heartbeat; a scraper that has been silent for `silence_s`
    while others published is left out until its membership lapses or it publishes. If no replica publishes,
    the cause is a silent Redis, and no replica is left out. Times are in seconds of one monotonic clock."""

    def __init__(self, replica: str, silence_s: float) -> None:
        self._replica = replica
        self._silence_s = silence_s
        self._seen_s: dict[str, float] = {}
        self._newest_s = -math.inf

    def on_subscribed(self, now_s: float) -> None:
        """Let the silence of all replicas begin now: a new subscription may have missed messages."""
        for replica in self._seen_s:
            self._seen_s[replica] = now_s

    def seen(self, replica: str, now_s: float) -> None:
        self._seen_s[replica] = self._newest_s = now_s

    def among(self, live: Sequence[str], count: int, now_s: float) -> tuple[str, ...]:
        """At most `count` of the `live` replicas, ordered by name. This replica always counts as present.

        If `live` is empty, the pool is unknown, and the result is this replica alone.
        """
        if not live:
            return (self._replica,)
        there: list[str] = []
        expected: set[str] = set()
        for replica in sorted(live, key=_hash):
            if len(there) == count:
                break
            expected.add(replica)
            self._seen_s.setdefault(replica, now_s)  # the silence of a new replica starts now
            if self._is_there(replica):
                there.append(replica)
        for other in self._seen_s.keys() - expected:
            del self._seen_s[other]  # this replica has left the fleet, or does not scrape
        return tuple(sorted(there))

    def _is_there(self, replica: str) -> bool:
        return replica == self._replica or self._newest_s - self._seen_s[replica] <= self._silence_s


_log = logging.getLogger(__name__)
_LOOKS_A_HEARTBEAT = 5
_SILENT_LOOKS = 3  # a scraper publishes at each look; after so many missed looks it counts as silent
# A replica spends 1 % of a core on scraping (endpoints/scraper.py), enough for about 16 endpoints whose pages
# take their servers 8 ms each.
_ENDPOINTS_A_SCRAPER = 16
_LEAST_SCRAPERS = 8
_MOST_SCRAPERS = 64


class ScrapingTask:
    """Runs one replica's part of the scraping: fills `readings` with all endpoints' readings. One event loop.

    `endpoints` holds the pool's endpoints. The assignment is computed five times per heartbeat, so that
    others take over the endpoints of a silent replica within one heartbeat. While Redis is unavailable each
    replica goes on scraping its own endpoints. `kv_events` gets the same assignment.
    """

    def __init__(
        self,
        url: str,
        pool: str,
        replica: str,
        *,
        scraping: Scraping,
        heartbeat_s: float,
        fleet: KnownFleet,
        endpoints: SnapshotCell,
        readings: MetricsCache,
        meter: Meter,
        kv_events: KvEventReader | None = None,
    ) -> None:
        self._clock = asyncio.get_running_loop().time
        self._replica, self._fleet, self._endpoints = replica, fleet, endpoints
        self._readings, self._meter, self._kv_events = readings, meter, kv_events
        self._channel = MetricsChannel(url, pool, replica, now_ms=readings.now_ms)
        self._look_s = heartbeat_s / _LOOKS_A_HEARTBEAT
        self._scraper = Scraper(
            scraping,
            pacing=IntervalPolicy(scraping.interval, fleet),
            readings=readings,
            channel=self._channel,
            speak_s=self._look_s,
            meter=meter,
        )
        # Silence is measured up to the newest message of any replica, and noticed within one heartbeat.
        self._scrapers = Scrapers(replica, self._look_s * _SILENT_LOOKS)
        self._assigned_version = ""  # the version of the endpoints that were last assigned
        self._assignment = Assignment(())

    def suspect(self, addresses: Sequence[str]) -> None:
        """Have the replicas that scrape `addresses` read the pages of these endpoints soon: requests in
        flight at these endpoints may have ended because their clients left."""
        self._scraper.suspect(addresses, notify=True)

    async def run(self) -> None:
        """Scrape, publish and subscribe until cancelled. Redis faults are retried, never raised."""
        follow = partial(self._channel.follow, self._on_readings)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(keep("scraper", self._scraper.run), name="scraper")
                tasks.create_task(keep("metrics-channel", follow), name="metrics-channel")
                if self._kv_events is not None:
                    tasks.create_task(keep("kv-events", self._kv_events.run), name="kv-events")
                tasks.create_task(keep("scraping-assignment", self._look_forever), name="scraping-assignment")
        finally:
            with contextlib.suppress(Exception):
                await asyncio.shield(self._channel.close())

    def _on_readings(
        self, sender: str | None, readings: Mapping[str, EndpointMetrics], suspects: Sequence[str]
    ) -> None:
        if sender is None:
            self._scrapers.on_subscribed(self._clock())
        else:
            self._scrapers.seen(sender, self._clock())
        if readings:
            self._readings.update(readings)
        if suspects:
            self._scraper.suspect(suspects)

    async def _look_forever(self) -> None:
        while True:
            version = self._endpoints.current.version
            self._assign()
            await self._forget_gone()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    await self._endpoints.after(version)

    def _assign(self) -> None:
        """Assign the current endpoints to the present replicas, and scrape this replica's endpoints."""
        now_s = self._clock()
        snapshot = self._endpoints.current
        present = self._scrapers.among(self._fleet.live, scrapers_wanted(len(snapshot.endpoints)), now_s)
        if present != self._assignment.replicas:
            self._assignment, self._assigned_version = Assignment(present), ""
            self._scraper.speaks = self._replica in present
        if snapshot.version != self._assigned_version:
            self._assigned_version = snapshot.version
            mine = self._assignment.of(self._replica, (each.address for each in snapshot.endpoints))
            if len(mine) != len(self._scraper.targets):
                _log.info("scraping %d of %d endpoints", len(mine), len(snapshot.endpoints))
            targets = [each for each in snapshot.endpoints if each.address in mine]
            self._scraper.set_targets(targets)
            if self._kv_events is not None:
                self._kv_events.set_targets(targets)
        self._meter.scrape_ages(len(self._scraper.targets), self._readings.ages_s)

    async def _forget_gone(self) -> None:
        """Forget endpoints that have left; their assigned replica also removes their readings from Redis."""
        snapshot = self._endpoints.current
        addresses = frozenset(endpoint.address for endpoint in snapshot.endpoints)
        gone = self._readings.addresses - addresses
        if not snapshot.version or not gone:
            return
        # Forget endpoints only after Redis has removed their readings, so that a Redis fault is retried.
        mine = Assignment(self._assignment.replicas).of(self._replica, gone)
        with contextlib.suppress(StateUnavailable):
            await self._channel.remove(mine)
            self._readings.retain(addresses)
