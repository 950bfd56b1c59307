"""One scraping replica as a process: `python -m bench.scraping.replica URL NAME LIVE INTERVAL_S ADDRESSES`.

LIVE and ADDRESSES are comma-separated. It runs until SIGTERM, on the event loop that replicas run on.
"""

import asyncio
import sys
from collections.abc import Mapping

import uvloop

from picker_fleet.endpoints.metrics_page import VLLM
from picker_fleet.endpoints.scraping import ScrapingTask
from picker_fleet.endpoints.snapshot import Endpoint, Snapshot, SnapshotCell
from picker_fleet.sections import Scraping

HEARTBEAT_S = 1.0


class Unmetered:
    def scraped(self, address: str, seconds: float) -> None: ...

    def probed(self, address: str) -> None: ...

    def scrape_failed(self, address: str, kind: str, seconds: float) -> None: ...

    def scrape_published(self, readings: int, seconds: float) -> None: ...

    def scrape_unpublished(self, readings: int) -> None: ...

    def scrape_ages(self, owned: int, ages_s: Mapping[str, float]) -> None: ...


async def scrape(url: str, name: str, live: list[str], interval_s: float, addresses: list[str]) -> None:
    cell = SnapshotCell()
    cell.publish(Snapshot("1", tuple(Endpoint(address) for address in addresses)))
    task = ScrapingTask(
        url,
        "bench",
        name,
        scraping=Scraping(interval=interval_s),
        engine=VLLM,
        heartbeat_s=HEARTBEAT_S,
        picked_by=lambda: True,
        busy=lambda: True,
        live=lambda: live,
        endpoints=cell,
        meter=Unmetered(),
    )
    await task.run()


if __name__ == "__main__":
    _url, _name, _live, _interval_s, _addresses = sys.argv[1:]
    work = scrape(_url, _name, _live.split(","), float(_interval_s), _addresses.split(","))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)
