"""Load, pause, read, again; then bench/results/soak.md. Exits with 0 if nothing grew and nothing drifted."""

import argparse
import asyncio
import contextlib
import random
import sys
import time
from pathlib import Path

from bench.overhead.surroundings import Surroundings, look
from bench.soak.fleet import Fleet, Reading, running
from bench.soak.verdict import page, verdict
from bench.witness.asking import Wish
from bench.witness.load import loaded, mixed

_RESULTS = Path(__file__).parents[1] / "results"
_PAUSES = 12  # in a run, however long
_RESTS_S = 20.0  # longer than a lease: what has not ended then never will


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    here = look(sys.argv[1:])
    readings, figures = asyncio.run(_soak(options.minutes * 60, options.clients))
    faults = verdict(readings, figures)
    text = page(_command(here), here.date, readings, figures, faults)
    (options.out / "soak.md").write_text(text, encoding="utf-8")
    print(text)
    return 1 if faults else 0


async def _soak(lasts_s: float, clients: int) -> tuple[list[Reading], dict[str, int]]:
    """Readings, and how many requests were asked, served, left by their clients, failed, finished."""
    readings: list[Reading] = []
    counts = dict.fromkeys(("asked", "served", "left", "failed"), 0)
    async with running() as fleet:
        before, began = await fleet.finished(), time.monotonic()
        for part in range(_PAUSES):
            async with loaded(fleet.url, clients=clients, seed=part, wish=_wish) as load:
                await asyncio.sleep(max(0.0, began + lasts_s * (part + 1) / _PAUSES - time.monotonic()))
            counts["asked"] += len(load.history)
            counts["served"] += load.served
            counts["left"] += sum(asked.left for asked in load.history)
            counts["failed"] += len(load.failed)
            await _rest(fleet)
            readings.append(await fleet.read(time.monotonic() - began, counts["served"]))
            print(readings[-1], flush=True)
        return readings, {**counts, "finished": await fleet.finished() - before}


async def _rest(fleet: Fleet) -> None:
    """Wait until all counts agree, at most for so long; what remains then is told by the reading."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_RESTS_S):
            while await fleet.drift():  # noqa: ASYNC110 - it is asked, and tells nobody
                await asyncio.sleep(0.2)


def _wish(dice: random.Random, number: int) -> Wish:
    """The mixed load, with one client in ten that leaves."""
    wish = mixed(dice, number)
    leaves_s = dice.uniform(0, 0.4) if dice.random() < 0.1 else None
    return Wish(wish.prompt, wish.tokens, wish.streamed, wish.pad_bytes, leaves_s, wish.headers)


def _command(here: Surroundings) -> str:
    return here.command.replace("bench.overhead", "bench.soak")


if __name__ == "__main__":
    sys.exit(main())
