"""`python -m bench.overhead`: measure, then write a page, its figures as JSON, and a picture."""

import argparse
import asyncio
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.overhead import cases, measure, memory, plot, table, targets
from bench.overhead.cases import Plan
from bench.overhead.client import WrongAnswer
from bench.overhead.driver import Driver
from bench.overhead.measure import RigResult
from bench.overhead.memory import Memory
from bench.overhead.surroundings import Surroundings, look
from picker_fleet.errors import PickerError

_QUICK_ROUNDS, _FULL_ROUNDS = 3, 5
_INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 whatever the figures are; 1 if they could not be had."""
    args = _parser().parse_args(arguments)
    rounds = args.rounds or (_QUICK_ROUNDS if args.quick else _FULL_ROUNDS)
    plan = cases.quick(rounds) if args.quick else cases.full(rounds)
    options = [f"--{name}" for name in ("quick", "memory") if getattr(args, name)]
    options += [f"--rounds {rounds}"] if args.rounds else []
    if args.memory:
        plan = Plan((), rounds, memory_requests=cases.MEMORY_REQUESTS)
    surroundings = look(options)
    try:
        results, remembered = asyncio.run(_measure(plan))
    except (PickerError, WrongAnswer) as fault:
        print(fault, file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return _INTERRUPTED
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / "-".join(["overhead", *(name for name in ("quick", "memory") if getattr(args, name))])
    _write(stem, surroundings, plan, results, remembered)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer cases and rounds: about two minutes")
    add("--memory", action="store_true", help="only the memory of a replica over 100 000 requests")
    add("--rounds", type=int, choices=range(1, 101), metavar="N", help="of each case (default: 5; quick: 3)")
    add("--out", type=Path, default=Path("bench/results"), metavar="DIR", help="default: %(default)s")
    return parser


async def _measure(plan: Plan) -> tuple[list[RigResult], Memory | None]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with Driver.started() as driver:
        results = await measure.run(plan, driver, _tell)
        remembered = await memory.run(plan, driver, _tell) if plan.memory_requests else None
    return results, remembered


def _write(
    stem: Path,
    surroundings: Surroundings,
    plan: Plan,
    results: list[RigResult],
    remembered: Memory | None,
) -> None:
    judged = targets.judged(results, remembered)
    page = table.markdown(surroundings, plan.rounds, results, remembered, judged)
    stem.with_suffix(".md").write_text(page, encoding="utf-8")
    tree = {
        "surroundings": dataclasses.asdict(surroundings),
        "rounds": plan.rounds,
        "targets": [{**dataclasses.asdict(target), "met": target.met} for target in judged],
        "rigs": [_plain(result) for result in results],
        "memory": dataclasses.asdict(remembered) if remembered is not None else None,
    }
    stem.with_suffix(".json").write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    plot.draw(results, remembered, stem.with_suffix(".png"))
    for target in judged:
        measured = target.measured.median
        print(f"{'met   ' if target.met else 'MISSED'} {measured:5.2f} (≤ {target.limit:g})  {target.what}")
    print(f"written: {stem}.md, .json, .png")


def _plain(result: RigResult) -> dict[str, Any]:
    """Every reading of every round, so that other figures can be made of them."""
    return {
        "mode": result.rig.mode,
        "replicas": result.rig.replicas,
        "bypassed": dict(result.bypassed),
        "idle": {variant: dataclasses.asdict(each) for variant, each in result.idle.items()},
        "paced": {
            variant: {"short_us": short, "long_us": long} for variant, (short, long) in result.paced.items()
        },
        "cases": [
            {
                "prompt": case.prompt,
                "tokens": case.tokens,
                "readings": {
                    variant: [dataclasses.asdict(reading) for reading in each]
                    for variant, each in readings.items()
                },
            }
            for case, readings in result.cases.items()
        ],
    }


def _tell(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
