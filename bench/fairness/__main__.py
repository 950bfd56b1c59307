"""`python -m bench.fairness`: measure and write a page; exit status 1 if a claim does not hold."""

import asyncio
import sys

from bench.fairness import report, suite
from bench.fairness.fleet import RunFailed, running
from bench.fairness.suite import Plan, Results
from bench.rig.report import options_parser, write_page
from picker_fleet.domain.errors import PickerError


def main() -> int:
    parser = options_parser("python -m bench.fairness", __doc__)
    about = "1 and 4 replicas, one seed, short runs: about a minute"
    parser.add_argument("--quick", action="store_true", help=about)
    options = parser.parse_args()
    plan = suite.QUICK if options.quick else suite.FULL
    try:
        results = asyncio.run(_measure(plan))
    except (PickerError, RunFailed) as fault:
        print(fault, file=sys.stderr)
        return 1
    claims = suite.claims(results)
    command = " ".join(["python -m bench.fairness", *sys.argv[1:]])
    page = options.out / ("fairness-quick.md" if options.quick else "fairness.md")
    write_page(page, report.markdown(command, plan, results, claims))
    return 0 if all(claim.met for claim in claims) else 1


async def _measure(plan: Plan) -> Results:
    async with running(max(plan.replicas)) as fleet:
        return await suite.measured(plan, fleet)


if __name__ == "__main__":
    sys.exit(main())
