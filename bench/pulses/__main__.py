"""Stop and continue replicas and Valkey at random under load; then bench/results/pulses.md. Exits with 0 if
every run is as it should be.

`python -m bench.pulses` makes all runs; `python -m bench.pulses calm 1 2` those alone, beside what
bench/results/pulses.json has of the others.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean

from bench.overhead.surroundings import look
from bench.pulses.stops import pulses
from bench.pulses.verdict import Run, page, verdict
from bench.soak.fleet import Fleet, running
from bench.witness.asking import Wish
from bench.witness.load import loaded

_RESULTS = Path(__file__).parents[1] / "results"
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
    parser = argparse.ArgumentParser(prog="python -m bench.pulses")
    parser.add_argument("runs", nargs="*", default=[_CALM, *map(str, _SEEDS)], metavar="calm|SEED")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    here = look(sys.argv[1:])
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
        f"`python -m bench.pulses`, {here.date}: two replicas, two simulators, Envoy in `lean`, a Valkey;\n"
        f"{_CLIENTS} clients that ask again at once, {options.seconds:g} s a run. Replicas and Valkey are\n"
        "stopped (SIGSTOP) for 50 to 600 ms, each after a pause of 0.1 to 1.5 s since its last stop ended."
    )
    text = page(about, seeds, calm)
    (options.out / "pulses.md").write_text(text, encoding="utf-8")
    print(text)
    return 1 if verdict(seeds, calm) else 0


async def _run(seed: int | None, lasts_s: float) -> Run:
    """One run on a fleet of its own; without a `seed` nothing is stopped."""
    async with running(_CONFIG, _OPTIONS) as fleet:
        async with loaded(fleet.url, clients=_CLIENTS, wish=_wish):
            await asyncio.sleep(_WARM_S)
        before = await _departures(fleet)
        highest: list[int] = []
        victims = {f"replica {n}": process for n, process in enumerate(fleet.replicas)} | {
            "valkey": fleet.redis
        }
        async with contextlib.AsyncExitStack() as stack:
            looking = asyncio.create_task(_look(fleet, highest))
            began_s = time.monotonic()
            async with loaded(fleet.url, clients=_CLIENTS, wish=_wish) as load:
                stopped_s: Mapping[str, float] = {"nobody": 0.0}
                if seed is not None:
                    stopped_s = await stack.enter_async_context(pulses(seed, victims))
                await asyncio.sleep(lasts_s)
                await stack.aclose()
            looking.cancel()
            await asyncio.wait((looking,))
        await asyncio.sleep(_REST_S)
        left_over = await fleet.drift()
        departures = await _departures(fleet) - before
    within = [asked for asked in load.history if asked.done_s < began_s + lasts_s]
    waited_s = sorted(asked.took_s for asked in load.history)
    return Run(
        lasted_s=lasts_s,
        served=sum(asked.served for asked in within),
        failed=len(load.failed),
        median_s=_quantile(waited_s, 0.5),
        p99_s=_quantile(waited_s, 0.99),
        longest_s=waited_s[-1],
        engaged=max(highest),
        left_over=left_over,
        departures=departures,
        stopped_s=mean(stopped_s.values()),
    )


async def _look(fleet: Fleet, highest: list[int]) -> None:
    while True:
        highest.append(await fleet.engaged())
        await asyncio.sleep(_LOOK_S)


async def _departures(fleet: Fleet) -> int:
    """How often replicas have left the shared queue."""
    lines = [line for n in range(len(fleet.replicas)) for line in (await fleet.page(n)).splitlines()]
    name = "epp_failover_transitions_total{"
    return int(
        sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and 'to="local"' in line)
    )


def _wish(dice: random.Random, number: int) -> Wish:
    return Wish(f"request {number} ", _TOKENS, streamed=number % 2 == 0)


def _quantile(of: Sequence[float], share: float) -> float:
    return of[min(int(share * len(of)), len(of) - 1)]


if __name__ == "__main__":
    sys.exit(main())
