"""The child processes of the large-pool benchmark.

`python -m bench.large_pool.child servers PORT COUNT [PAGE]` runs model servers at COUNT addresses on port
PORT in one process, with the metrics page in the file PAGE, and prints a line once all servers listen.
`python -m bench.large_pool.child replica serve …` runs `picker serve` without scraping.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import uvloop

from bench.rig.http import ModelServer
from picker_fleet import cli
from picker_fleet.endpoints.scraping import ScrapingTask
from picker_tools.local_fleet.network import until

_READY_S = 120.0
_PAGE = b"""vllm:num_requests_running{model_name="llama"} 1.0
vllm:num_requests_waiting{model_name="llama"} 0.0
vllm:kv_cache_usage_perc{model_name="llama"} 0.25
"""


def address(number: int) -> str:
    """The loopback address of server `number`."""
    return f"127.1.{number // 250}.{number % 250 + 1}"


class _Server(ModelServer):
    """A model server that answers every request at once, with a completion or the metrics page."""

    page = _PAGE

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)


async def _serve(port: str, count: str) -> None:
    loop = asyncio.get_running_loop()
    for number in range(int(count)):
        await loop.create_server(_Server, address(number), port, backlog=16)
    print("listening", flush=True)
    await asyncio.Event().wait()


async def start_servers(seat: Any, count: int, *page: str) -> None:
    """Start a process with `count` listening model servers in `seat` (tests/kubernetes/seat.py)."""
    command = [sys.executable, "-m", "bench.large_pool.child", "servers", str(seat.port), str(count), *page]
    seat.spawn("servers", command)
    log = seat.folder / "servers.log"

    async def listening() -> bool:
        return "listening" in log.read_text()

    assert await until(listening, within_s=_READY_S), log.read_text()


async def _no_scraping(_: ScrapingTask) -> None:
    await asyncio.Event().wait()


def main() -> int:
    what, *arguments = sys.argv[1:]
    if what == "servers":
        for page in arguments[2:]:
            _Server.page = Path(page).read_bytes()
        uvloop.run(_serve(*arguments[:2]))
        return 0
    ScrapingTask.run = _no_scraping  # type: ignore[method-assign]
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
