"""Scraping once for the fleet: each endpoint is read by one replica, and every replica knows what it read."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence

from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.errors import StateUnavailable
from picker_fleet.scraping.board import MetricsBoard
from picker_fleet.scraping.engines import Engine
from picker_fleet.scraping.feed import Feed
from picker_fleet.scraping.metrics import EndpointMetrics
from picker_fleet.scraping.ownership import owned
from picker_fleet.scraping.pacing import PROBE_S, Pacing
from picker_fleet.scraping.presence import Presence
from picker_fleet.scraping.scraper import Meter, Scraper
from picker_fleet.sections import Scraping

_log = logging.getLogger(__name__)
_LOOKS_A_HEARTBEAT = 5
_SILENT_LOOKS = 3  # replicas speak once a look, or hardly less


class ScrapingTask:
    """One replica's part in scraping; `board` is what it knows of all endpoints. One event loop.

    `live` names the live replicas, this one among them, and `endpoints` the pool's endpoints. Who scrapes
    what is looked at five times a heartbeat: a replica that falls silent has its endpoints scraped by others
    within one. While Redis is away everyone goes on with what is its own, for its own board.

    `picked_by` says whether requests are placed by what pages tell, `busy` whether any are in flight. Unless
    they are placed by it, the fleet is told no more often than it takes to look at it: each telling wakes
    every replica.
    """

    def __init__(
        self,
        url: str,
        pool: str,
        replica: str,
        *,
        scraping: Scraping,
        engine: Engine,
        heartbeat_s: float,
        picked_by: Callable[[], bool],
        busy: Callable[[], bool],
        live: Callable[[], Sequence[str]],
        endpoints: SnapshotCell,
        meter: Meter,
    ) -> None:
        self._clock = asyncio.get_running_loop().time
        self.board = MetricsBoard(scraping.stale_after, self._clock)
        self._feed = Feed(url, pool, replica, now_ms=self.board.now_ms)
        self._look_s = heartbeat_s / _LOOKS_A_HEARTBEAT
        self._suspects: Sequence[str] = ()  # of which the others are to be told
        soonest_s = scraping.interval or PROBE_S / 2
        shown_s = min(self._look_s, (scraping.stale_after or math.inf) / 2)
        self._scraper = Scraper(
            engine,
            pacing=Pacing(scraping.interval, lambda: picked_by() and busy()),
            publish=self._publish,
            publish_s=lambda: soonest_s if picked_by() else max(soonest_s, shown_s),
            speak_s=self._look_s,
            meter=meter,
        )
        self._replica = replica
        # The next word of others and the next look find the silence, still within a heartbeat.
        self._presence = Presence(replica, self._look_s * _SILENT_LOOKS)
        self._live = live
        self._endpoints = endpoints
        self._meter = meter
        self._shared: tuple[str, tuple[str, ...]] = ("", ())

    def suspect(self, addresses: Sequence[str]) -> None:
        """Have the pages of `addresses` read soon, by whoever reads them: requests there may be gone."""
        self._scraper.suspect(addresses)
        self._suspects = tuple(addresses)

    async def run(self) -> None:
        """Scrape, tell and listen until cancelled. Faults of Redis are waited out, never raised."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._scraper.run(), name="scraper")
                tasks.create_task(self._follow(), name="metrics-feed")
                tasks.create_task(self._look_forever(), name="scraping-shares")
        finally:
            with contextlib.suppress(Exception):
                await asyncio.shield(self._feed.close())

    async def _follow(self) -> None:
        await self._feed.follow(self._hear, on_link=lambda: self._presence.link(self._clock()))

    def _hear(
        self, sender: str | None, readings: Mapping[str, EndpointMetrics], suspects: Sequence[str]
    ) -> None:
        if sender is not None:
            self._presence.heard(sender, self._clock())
        if readings:
            self.board.take(readings)
        if suspects:
            self._scraper.suspect(suspects)

    async def _publish(self, batch: Mapping[str, EndpointMetrics]) -> None:
        self.board.take(batch)
        suspects, self._suspects = self._suspects, ()
        await self._feed.publish(batch, suspects)

    async def _look_forever(self) -> None:
        while True:
            version = self._endpoints.current.version
            self._share()
            await self._forget_gone()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._look_s):
                    await self._endpoints.after(version)

    def _share(self) -> None:
        """Take up what is this replica's to scrape by what it knows now."""
        now_s = self._clock()
        snapshot = self._endpoints.current
        present = self._presence.among(self._live(), now_s)
        if (snapshot.version, present) != self._shared:
            self._shared = snapshot.version, present
            addresses = (endpoint.address for endpoint in snapshot.endpoints)
            mine = owned(addresses, self._replica, present)
            _log.info("scraping %d of %d endpoints", len(mine), len(snapshot.endpoints))
            self._scraper.set_owned(mine)
        ages_s = {address: reading.age_s for address, reading in self.board.snapshot(now_s).items()}
        self._meter.scrape_ages(len(self._scraper.owned), ages_s)

    async def _forget_gone(self) -> None:
        """Forget endpoints that left; whoever would scrape one takes its reading out of Redis too."""
        snapshot, (_, present) = self._endpoints.current, self._shared
        addresses = frozenset(endpoint.address for endpoint in snapshot.endpoints)
        gone = self.board.addresses - addresses
        if not snapshot.version or not gone:
            return
        # Kept on the board until Redis has taken it, so that a fault is tried again.
        mine = owned(gone, self._replica, present)
        with contextlib.suppress(StateUnavailable):
            await self._feed.remove(mine)
            self.board.keep(addresses)
