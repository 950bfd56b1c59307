"""Stop and continue replicas and Valkey at random under load; then write bench/results/pulses.md.

`make pulses` makes all runs; `make pulses ARGS='calm 1 2'` those alone, and keeps the others of
bench/results/pulses.json. Exits with 0 if no run has a fault.
"""

import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from statistics import mean

from pulse_runs import Run, faults_of_all, page, pulses

from bench.rig.machine import describe_machine
from bench.rig.page import options_parser, percentile, write_page
from bench.soak import Fleet, running_fleet
from picker_tools.load.client_history import ClientRequest, closed_loop

_CALM = "calm"
_SEEDS = range(1, 11)
_CLIENTS, _TOKENS = 24, 16
_WARM_S, _REST_S, _LOOK_S = 3.0, 2.0, 0.1
_OPTIONS = ("--replicas", "2", "--endpoints", "2", "--sim-ttft", "150", "--sim-itl", "2")
_CONFIG = {
    "request_queue_controller": {"watermark_per_backend": 6},
    "fair_request_queue": {"flow_capacity": 500},
}


def main() -> int:
    parser = options_parser("make pulses")
    parser.add_argument("runs", nargs="*", default=[_CALM, *map(str, _SEEDS)], metavar="calm|SEED")
    parser.add_argument("--seconds", type=float, default=40.0)
    options = parser.parse_args()
    here = describe_machine("bench.pulses", sys.argv[1:])
    kept = options.out / "pulses.json"
    found: dict[str, Run] = {}
    with contextlib.suppress(FileNotFoundError):
        found = {name: Run(**run) for name, run in json.loads(kept.read_text(encoding="utf-8")).items()}
    for name in options.runs:
        found[name] = asyncio.run(_run(None if name == _CALM else int(name), options.seconds))
        print(name, found[name], flush=True)
        kept.write_text(json.dumps({name: asdict(run) for name, run in found.items()}, indent=1) + "\n")
    calm, seeds = found.get(_CALM), {int(name): run for name, run in found.items() if name != _CALM}
    if calm is None or not seeds:
        return 0
    about = (
        f"`make pulses`, {here.date}: two replicas, two simulators, Envoy in `lean`, a Valkey;\n"
        f"{_CLIENTS} clients that ask again at once, {options.seconds:g} s a run. Replicas and Valkey are\n"
        "stopped (SIGSTOP) for 50 to 600 ms, each after a pause of 0.1 to 1.5 s since its last stop ended."
    )
    write_page(options.out / "pulses.md", page(about, seeds, calm))
    return 1 if faults_of_all(seeds, calm) else 0


async def _run(seed: int | None, lasts_s: float) -> Run:
    """One run on a fleet of its own; without a `seed` nothing is stopped."""
    async with running_fleet(_CONFIG, _OPTIONS) as fleet:
        async with closed_loop(fleet.url, clients=_CLIENTS, make_request=_make_request):
            await asyncio.sleep(_WARM_S)
        before = await _departures(fleet)
        highest: list[int] = []
        processes = {f"replica {n}": process for n, process in enumerate(fleet.replicas)}
        processes["valkey"] = fleet.process("server")
        async with contextlib.AsyncExitStack() as stack:
            looking = asyncio.create_task(_look(fleet, highest))
            began_s = time.monotonic()
            async with closed_loop(fleet.url, clients=_CLIENTS, make_request=_make_request) as load:
                stopped_s: Mapping[str, float] = {"nobody": 0.0}
                if seed is not None:
                    stopped_s = await stack.enter_async_context(pulses(seed, processes))
                await asyncio.sleep(lasts_s)
                await stack.aclose()
            looking.cancel()
            await asyncio.wait((looking,))
        await asyncio.sleep(_REST_S)
        left_over = await fleet.drift()
        departures = await _departures(fleet) - before
    within = [record for record in load.history if record.done_s < began_s + lasts_s]
    waited_s = [record.took_s for record in load.history]
    return Run(
        lasted_s=lasts_s,
        served=sum(record.served for record in within),
        failed=len(load.failed),
        median_s=percentile(waited_s, 0.5),
        p99_s=percentile(waited_s, 0.99),
        longest_s=max(waited_s),
        most_at_engines=max(highest),
        left_over=left_over,
        departures=departures,
        stopped_s=mean(stopped_s.values()),
    )


async def _look(fleet: Fleet, highest: list[int]) -> None:
    while True:
        highest.append(await fleet.at_model_servers())
        await asyncio.sleep(_LOOK_S)


async def _departures(fleet: Fleet) -> int:
    """How often replicas have left the shared queue."""
    return int(await fleet.counted("epp_failover_transitions_total", to="local"))


def _make_request(dice: random.Random, number: int) -> ClientRequest:
    return ClientRequest(f"request {number} ", _TOKENS, streamed=number % 2 == 0)


if __name__ == "__main__":
    sys.exit(main())
