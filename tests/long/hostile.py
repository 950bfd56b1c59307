"""Runs every attack of docs/security.md, and checks that honest clients see no fault.

The fleet has three replicas, four simulators, two hostile model servers, Valkey, and an Envoy that sets flows
by API key; attackers and honest clients share its machine (tests/fleet/hostile_fleet.py).
"""

import argparse
import asyncio

from hostile_fleet import ClientTimes, attack_fleet, limit_mib

from bench.rig.report import percentile, table
from long.findings import Findings
from picker_tools.local_fleet.parts import MODES

_MOST = 1.5  # maximum ratio of the p99 under attack to the p99 of the control run


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--calm-minutes", type=float, default=2.0)
    parser.add_argument("--mode", choices=MODES, default="lean")
    parser.add_argument("--only", default="", metavar="TEXT", help="only attacks whose names contain TEXT")
    parser.add_argument("--each", action="store_true", help="one attack after another, --minutes each")
    rate = "divide the attacks' pauses by N; inf: attack without pauses, with half a core"
    parser.add_argument("--rate", type=float, default=1.0, metavar="N", help=rate)
    limit = "Envoy limits each client address to N requests a second; all attackers have one address"
    alone = "Envoy asks no picker, for comparison"
    parser.add_argument("--no-picker", dest="asks", action="store_false", help=alone)
    parser.add_argument("--client-rate", type=int, metavar="N", help=limit)


def run(options: argparse.Namespace, findings: Findings) -> None:
    times = {"calm_s": options.calm_minutes * 60, "hostile_s": options.minutes * 60}
    chosen = {
        name: getattr(options, name) for name in ("mode", "only", "each", "rate", "client_rate", "asks")
    }
    report = asyncio.run(attack_fleet(replicas=3, servers=4, per_s=15.0, **chosen, **times))
    ratio = percentile(report.hostile.last_s, 0.99) / percentile(report.control.last_s, 0.99)
    faults = report.faults()
    findings.check("no honest request fails, memory is within limits", not faults, "; ".join(faults[:10]))
    findings.check(f"honest clients' p99 is at most {_MOST} × control's", ratio <= _MOST, f"{ratio:.2f}")
    control = _row(f"control: other processes use {report.burnt:.1f} cores", report.control)
    clients = [_row("calm", report.calm), _row("under attack", report.hostile), control]
    findings.add(table(["honest clients", "requests", "failed", "p50, s", "p99, s", "p99.9, s"], clients))
    outcomes = [
        [name, str(sum(each.values())), ", ".join(f"{what}: {n}" for what, n in sorted(each.items()))]
        for name, each in report.outcomes.items()
    ]
    findings.add(table(["attack", "attempts", "how they ended"], outcomes))
    memory = [
        [name, f"{peak:.0f}", str(limit)]
        for name, peak in report.peaks_mib.items()
        if (limit := limit_mib(name)) is not None
    ]
    findings.add(table(["process", "most memory, MiB", "its limit"], memory))
    findings.add("At rest, " + ", ".join(f"{name} is {count:g}" for name, count in report.left.items()) + ".")


def _row(name: str, seen: ClientTimes) -> list[str]:
    times = [f"{percentile(seen.last_s, share):.3f}" for share in (0.5, 0.99, 0.999)]
    return [name, str(len(seen.last_s) + len(seen.failed)), str(len(seen.failed)), *times]
