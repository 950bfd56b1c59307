"""`python -m bench.scraping`: how much a fleet scrapes, and what that costs. It takes a minute and a half."""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import uvloop

from bench.scraping import measure, table
from bench.scraping.measure import Fleet, Rate
from bench.scraping.pages import serving
from picker_fleet.errors import PickerError
from picker_tools.simulator.engine import Limits, Load
from picker_tools.simulator.metrics import Page, Tally

_ENDPOINTS, _CONTROL_ENDPOINTS = 100, 20
_BIG_PAGE = Path(__file__).parents[2] / "tests" / "data" / "vllm.prom"
_TIMES = 400


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 whatever the figures are; 1 if they could not be had."""
    parser = argparse.ArgumentParser(prog="python -m bench.scraping", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=6.0, help="of each measurement (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results"), metavar="DIR")
    args = parser.parse_args(arguments)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            text = runner.run(_measured(args.seconds))
    except PickerError as fault:
        print(fault, file=sys.stderr)
        return 1
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "scraping.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


async def _measured(for_s: float) -> str:
    small, big = _simulator_page(), _BIG_PAGE.read_bytes()
    rates: list[Rate] = []
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        async with serving(_ENDPOINTS) as pages, measure.redis(folder) as (url, valkey):

            async def of(count: int, endpoints: int, page: bytes, shared: bool) -> tuple[Rate, float]:
                pages.serve(page)
                fleet = Fleet(url, count, pages.addresses[:endpoints], shared=shared)
                print(f"{count} replicas, {endpoints} endpoints, {len(page)} bytes", file=sys.stderr)
                async with fleet.running(sys.executable, folder, pages):
                    found = await measure.rate(
                        fleet, valkey, pages, shared=shared, of_bytes=len(page), for_s=for_s
                    )
                    lost = count == 4 and shared and page is small
                    return found, await measure.hand_over_s(fleet, pages) if lost else 0.0

            gap_s = 0.0
            for count in (1, 2, 4, 8):
                found, gap = await of(count, _ENDPOINTS, small, True)
                rates.append(found)
                gap_s = max(gap_s, gap)
            rates.append((await of(4, _ENDPOINTS, big, True))[0])
            control = (await of(4, _CONTROL_ENDPOINTS, small, False))[0]
            costs = {}
            for page in (small, big):
                pages.serve(page)
                costs[len(page)] = await measure.costs(pages, _TIMES)
    return table.markdown(rates, control, costs, gap_s)


def _simulator_page() -> bytes:
    load = Load(
        running=3, waiting=2, kv_usage=0.4, preemptions=0, running_adapters=("a", "b"), waiting_adapters=()
    )
    return Page("llama", Limits(), has_loras=True).render(load, Tally(), time.time())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
