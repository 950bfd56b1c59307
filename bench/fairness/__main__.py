"""`python -m bench.fairness`: measures the queue's fairness; exit status 1 if a claim does not hold."""

import asyncio
import sys
from collections.abc import Sequence

from bench.fairness import suite
from bench.fairness.fleet import RunFailed, running
from bench.fairness.readings import Weights
from bench.fairness.scenarios import WEIGHTS
from bench.fairness.suite import GUARD_SHARE, Claim, Plan, Results
from bench.rig.report import describe_run, options_parser, table, write_page
from picker_fleet.domain.errors import PickerError

_HOW = """\
Each replica is a process (store, gate, membership, wake-ups, as in production) on one Valkey. A replica has
the clients of some flows; with enough replicas no two flows share a replica. Instead of a model server, 4–30
ms pass between placement and settlement. All figures come from the decision log that the scripts write. Upper
and lower bounds are equal (no hysteresis), so that the stock stays at the bound. The seed determines costs,
service times and arrivals, but not how the processes interleave. A claim holds if the worst run meets the
limit. In the control each replica has its own queue and its share of the bounds, as independent pickers have.

- **Trickle.** A bulk flow and a trickle of equal weight arrive at random, together at twice the capacity; the
  bulk's queue holds 200 requests and refuses the rest.
- **Criticality 1.** One flow, workload-aware order. Criticality-5 requests of 40 workloads keep 8 requests in
  flight and about 90 waiting; a criticality-1 workload sends less than the guard's share ({share:g})
  of dispatches. The TTL of 30 s and the wait cap of 60 s are scaled to {ttl:g} s and {cap:g} s; a request is
  overdue at half its TTL.
- **Strict bands.** Critical arrives at random at 0.3 of the capacity, Default at 0.55; Sheddable always
  waits. A dispatch is an inversion if a request of a higher band waits at that moment; the guard's dispatches
  do not count.
- **Tokens.** Two flows of equal weight; the stock counts tokens (20 000). Estimates are the real number times
  a random factor between 0.25 and 4 (log-uniform), and are corrected when a request ends."""

_WEIGHTS = """\
Four flows of weights 1, 2, 4 and 1 are always backlogged; 16 requests are in flight. The last flow spreads
its requests over 50 workload ids; the first flow has the same weight and one id. A share is weight-normalised
service while all flows are backlogged; 1 is fair. G2 is violated if, over any interval in which two flows
were backlogged, their weight-normalised service differs by more than c_f/w_f + c_g/w_g."""

_SPLIT = """\
A fairness id is a flow: a client that may choose several ids has several flows. With 50 fairness ids of
weight 1 in place of one id, the fourth client gets {taken:.1%} of all service; one id is due {due:.1%}. So
the gateway must derive the fairness id from the client's identity; clients may choose their workload ids."""


def _page(command: str, plan: Plan, results: Results, checked: Sequence[Claim]) -> str:
    """The result page as Markdown."""
    claims = (
        [each.what, _figure(each.measured), f"{each.sign} {each.limit:g}", "yes" if each.met else "**no**"]
        for each in checked
    )
    shares = [
        [name, str(replicas), *_weights([run for run in runs if run.replicas == replicas])]
        for name, runs in (("one queue", results.weights), ("one a replica", results.control))
        for replicas in plan.replicas
    ]
    flows = [f"{name} ({weight:g})" for name, weight in WEIGHTS.items()]
    due = WEIGHTS["split"] / sum(WEIGHTS.values())
    parts = [
        "# One queue for the whole fleet: is it fair?",
        f"{describe_run(command)} Seeds {', '.join(map(str, plan.seeds))}.",
        table(["claim", "measured", "limit", "met"], claims),
        "## How it is measured",
        _HOW.format(share=GUARD_SHARE, ttl=plan.ttl_s, cap=2 * plan.ttl_s),
        "## Weights",
        _WEIGHTS,
        table(["queues", "replicas", *flows, "Jain", "min/max", "violations"], shares),
        _SPLIT.format(taken=results.split_part, due=due),
    ]
    return "\n\n".join(parts) + "\n"


def _weights(runs: Sequence[Weights]) -> list[str]:
    """Table cells: ranges of each flow's share, of Jain's index and of min/max; number of violations."""
    found = [[run.shares[name] for run in runs] for name in WEIGHTS]
    found += [[run.jain for run in runs], [run.min_by_max for run in runs]]
    spans = [f"{min(each):.3f}–{max(each):.3f}" for each in found]
    return [*spans, str(sum(run.violations for run in runs))]


def _figure(number: float) -> str:
    return f"{number:g}" if number == int(number) else f"{number:.4f}"


def main() -> int:
    parser = options_parser("python -m bench.fairness", __doc__)
    about = "run about a minute: 1 and 4 replicas, one seed, short runs"
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
    write_page(page, _page(command, plan, results, claims))
    return 0 if all(claim.met for claim in claims) else 1


async def _measure(plan: Plan) -> Results:
    async with running(max(plan.replicas)) as fleet:
        return await suite.measured(plan, fleet)


if __name__ == "__main__":
    sys.exit(main())
