"""Attack a whole fleet for ten minutes and write bench/results/hostile.md: `make hostile`.

Exits with 0 if there is no fault.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

from hostile_fleet import ClientTimes, HostileReport, attack_fleet, limit_mib

from bench.rig.machine import Machine, describe_machine
from bench.rig.page import options_parser, percentile, write_page

_MOST = 1.5  # times the calm p99 that the p99 under attack may be


def main() -> int:
    parser = options_parser("make hostile")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--calm-minutes", type=float, default=2.0)
    parser.add_argument("--per-s", type=float, default=15.0, help="honest requests (default: %(default)s)")
    options = parser.parse_args()
    here = describe_machine("bench.hostile", sys.argv[1:])
    times = {"calm_s": options.calm_minutes * 60, "hostile_s": options.minutes * 60}
    report = asyncio.run(attack_fleet(replicas=3, simulators=4, per_s=options.per_s, **times))
    ratio = percentile(report.hostile.last_s, 0.99) / percentile(report.calm.last_s, 0.99)
    faults = report.faults() + [f"p99 is {ratio:.2f} times the calm one"] * (ratio > _MOST)
    write_page(options.out / "hostile.md", page(report, ratio, faults, here, options))
    return 1 if faults else 0


def page(
    report: HostileReport, ratio: float, faults: Sequence[str], here: Machine, options: argparse.Namespace
) -> str:
    """The results as Markdown. `ratio`: p99 under attack by that in calm."""
    verdict = "Everything held." if not faults else "Not held: " + "; ".join(faults[:10]) + "."
    outcomes = "\n".join(
        f"| {name} | {sum(each.values())} | {', '.join(f'{what}: {n}' for what, n in sorted(each.items()))} |"
        for name, each in report.outcomes.items()
    )
    memory = "\n".join(
        f"| {name} | {peak:.0f} | {limit_mib(name)} |"
        for name, peak in report.peaks_mib.items()
        if limit_mib(name) is not None
    )
    left = ", ".join(f"{name} is {count:g}" for name, count in report.left.items())
    return f"""# All attacks at once

{here.date}, `make hostile`: {options.minutes:g} minutes of every attack of
[security.md](../../docs/security.md) at once, on three replicas, four simulators, two hostile model servers,
Valkey, and Envoy with flows by API key; beside them {options.per_s:g} honest requests a second. Fleet,
attackers and honest clients share one machine of {here.cores} cores, whose load average was
{here.load:.1f} before. {verdict}

| honest clients | requests | failed | p50, s | p99, s | p99.9, s |
|---|---|---|---|---|---|
{_row("calm, before and after", report.calm)}
{_row("under attack", report.hostile)}

p99 under attack is {ratio:.2f} times the calm one; {_MOST} are allowed. At rest, {left}.

| attack | attempts | how they ended |
|---|---|---|
{outcomes}

`ended` is a connection that the fleet closed, `held` one that it had not closed after 20 s, `left` one that
the attacker closed, `under way` what had not ended with the run, `taken` a stream of access logs
that was read to its end; nothing of it was believed.

| process | most memory, MiB | its limit |
|---|---|---|
{memory}
"""


def _row(name: str, seen: ClientTimes) -> str:
    times = " | ".join(f"{percentile(seen.last_s, share):.3f}" for share in (0.5, 0.99, 0.999))
    return f"| {name} | {len(seen.last_s) + len(seen.failed)} | {len(seen.failed)} | {times} |"


if __name__ == "__main__":
    sys.exit(main())
