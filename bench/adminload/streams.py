"""Dashboards on other machines, a process: `python -m bench.adminload.streams PRIORITY COUNT URL...`.

As bench.adminload.pages, word for word, but nothing is drawn: of each page there is its event stream, which
is all but a call in 15 s of what it asks the fleet for while it is open. So what a browser takes from a
machine that it shares with the fleet is not counted to the fleet.
"""

import asyncio
import itertools
import json
import sys
import time

import httpx

from bench.adminload.priority import take

_PATIENCE_S = 120.0


class _Stream:
    """The event stream of one page, followed until it is closed. `told_ms` is when each snapshot came."""

    def __init__(self, url: str) -> None:
        self._first = asyncio.Event()
        self._task = asyncio.create_task(self._follow(url))
        self.told_ms: list[float] = []

    async def opened(self) -> None:
        first = asyncio.create_task(self._first.wait())
        await asyncio.wait([first, self._task], timeout=_PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        if not self._first.is_set():
            raise RuntimeError("the fleet told a stream nothing") from self._fault()

    async def closed(self) -> list[float]:
        """Milliseconds from each snapshot to the next one."""
        if self._task.done():
            raise RuntimeError("the fleet ended a stream") from self._fault()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return [later - former for former, later in itertools.pairwise(self.told_ms)]

    def _fault(self) -> BaseException | None:
        return self._task.exception() if self._task.done() else None

    async def _follow(self, url: str) -> None:
        async with (
            httpx.AsyncClient(timeout=_PATIENCE_S, trust_env=False) as http,
            http.stream("GET", f"{url}api/v1/events") as told,
        ):
            told.raise_for_status()
            async for line in told.aiter_lines():
                if line == "event: snapshot":
                    self.told_ms.append(time.perf_counter() * 1000)
                    self._first.set()


async def _main(count: int, urls: list[str]) -> None:
    streams: list[_Stream] = []
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if line == "open":
            streams = [_Stream(urls[each % len(urls)]) for each in range(count)]
            for stream in streams:
                await stream.opened()
            print("open", flush=True)
        else:
            print(json.dumps([await stream.closed() for stream in streams]), flush=True)


if __name__ == "__main__":
    take(sys.argv[1])
    asyncio.run(_main(int(sys.argv[2]), sys.argv[3:]))
