"""What a request costs beside a constant picker (`make bench`): writes a page, its figures as JSON, a
picture.
"""

import argparse
import asyncio
import dataclasses
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.overhead import cases, figures, measure, report
from bench.overhead.cases import Plan
from bench.overhead.measure import Memory, SetupResult
from bench.rig.load import Driver, WrongAnswer
from bench.rig.machine import Machine, describe_machine
from picker_fleet.errors import PickerError

_QUICK_ROUNDS, _FULL_ROUNDS = 3, 5
_INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    """Exit code 0 whatever the figures are, 1 if the measurement failed."""
    args = _parser().parse_args(arguments)
    rounds = args.rounds or (_QUICK_ROUNDS if args.quick else _FULL_ROUNDS)
    plan = cases.quick(rounds) if args.quick else cases.full(rounds)
    options = [f"--{name}" for name in ("quick", "memory") if getattr(args, name)]
    options += [f"--rounds {rounds}"] if args.rounds else []
    if args.memory:
        plan = Plan((), rounds, memory_requests=cases.MEMORY_REQUESTS)
    machine = describe_machine("bench.overhead", options)
    try:
        results, memory = asyncio.run(_measure(plan))
    except (PickerError, WrongAnswer) as fault:
        print(fault, file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return _INTERRUPTED
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / "-".join(["overhead", *(name for name in ("quick", "memory") if getattr(args, name))])
    _write(stem, machine, plan, results, memory)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer cases and rounds: about two minutes")
    add("--memory", action="store_true", help="only the memory of a replica over 100 000 requests")
    add("--rounds", type=int, choices=range(1, 101), metavar="N", help="of each case (default: 5; quick: 3)")
    add("--out", type=Path, default=Path("bench/results"), metavar="DIR", help="default: %(default)s")
    return parser


async def _measure(plan: Plan) -> tuple[list[SetupResult], Memory | None]:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with Driver.started() as driver:
        results = await measure.run(plan, driver, _log)
        memory = await measure.run_memory(plan, driver, _log) if plan.memory_requests else None
    return results, memory


def _write(
    stem: Path,
    machine: Machine,
    plan: Plan,
    results: list[SetupResult],
    memory: Memory | None,
) -> None:
    targets = figures.targets(results, memory)
    page = report.markdown(machine, plan.rounds, results, memory, targets)
    stem.with_suffix(".md").write_text(page, encoding="utf-8")
    tree = {
        "surroundings": dataclasses.asdict(machine),
        "rounds": plan.rounds,
        "targets": [{**dataclasses.asdict(target), "met": target.met} for target in targets],
        "rigs": [_plain(result) for result in results],
        "memory": dataclasses.asdict(memory) if memory is not None else None,
    }
    stem.with_suffix(".json").write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    report.draw(results, memory, stem.with_suffix(".png"))
    for target in targets:
        measured = target.measured.median
        print(f"{'met   ' if target.met else 'MISSED'} {measured:5.2f} (≤ {target.limit:g})  {target.what}")
    print(f"written: {stem}.md, .json, .png")


def _plain(result: SetupResult) -> dict[str, Any]:
    """Every reading of every round."""
    return {
        "mode": result.setup.mode,
        "replicas": result.setup.replicas,
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


def _log(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
