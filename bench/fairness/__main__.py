"""`python -m bench.fairness`: measure, write a page and its pictures; exit 1 if a claim does not hold."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.fairness import report, suite
from bench.fairness.fleet import RunFailed, running
from bench.fairness.suite import Claim, Plan, Results, claims
from picker_fleet.errors import PickerError

_RESULTS = Path(__file__).parents[1] / "results"
_INTERRUPTED = 130


def main(arguments: Sequence[str]) -> int:
    args = _parser().parse_args(arguments)
    plan = suite.QUICK if args.quick else suite.FULL
    try:
        results = asyncio.run(_measure(plan))
    except (PickerError, RunFailed) as fault:
        print(fault, file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        return _INTERRUPTED
    checked = claims(results)
    _write(args.out / ("fairness-quick" if args.quick else "fairness"), plan, results, checked)
    return 0 if all(claim.met for claim in checked) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.fairness", description=__doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="1 and 4 replicas, one seed, short runs: about a minute")
    add("--out", type=Path, default=_RESULTS, metavar="DIR", help="default: bench/results")
    return parser


async def _measure(plan: Plan) -> Results:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with running(max(plan.replicas)) as fleet:
        return await suite.measured(plan, fleet, _log)


def _write(stem: Path, plan: Plan, results: Results, checked: Sequence[Claim]) -> None:
    stem.parent.mkdir(parents=True, exist_ok=True)
    pictures = report.draw(plan, results, stem)
    command = "python -m bench.fairness" + (" --quick" if plan is suite.QUICK else "")
    page = report.markdown(command, plan, results, checked, pictures)
    stem.with_name(f"{stem.name}.md").write_text(page, encoding="utf-8")
    for claim in checked:
        verdict = "met   " if claim.met else "MISSED"
        print(f"{verdict} {report.figure(claim.measured):>8} ({claim.sign} {claim.limit:g})  {claim.what}")
    print(f"written: {stem}.md, {', '.join(pictures)}")


def _log(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
