"""The command `picker audit` replays the decision log and reports each broken promise."""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from picker_fleet.domain.sections import Redis
from picker_tools.audit.auditor import Report, audited
from picker_tools.audit.log import EntryError, LogUnreadable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--redis", metavar="URL", default=Redis().url, help="that has the log (%(default)s)")
    parser.add_argument("--pool", metavar="NAME", default="default", help="of the log (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Print a table of promises, then violations. Exit code 1 with violations, 2 without a log, else 0."""
    try:
        report = audited(args.redis, args.pool)
    except (LogUnreadable, EntryError) as fault:
        print(fault, file=sys.stderr)
        return 2
    show(report, Console())
    return 1 if report.violations else 0


def show(report: Report, console: Console) -> None:
    """Print the table of promises, then each violation with the entries that prove it."""
    table = Table(title=f"{report.entries} entries, {report.first_seq} to {report.last_seq}")
    table.add_column("promise")
    table.add_column("checked", justify="right")
    table.add_column("broken", justify="right")
    table.add_column("what it says")
    for finding in report.findings:
        broken = str(finding.broken) if finding.checked or finding.broken else "-"
        style = "bold red" if finding.broken else ""
        table.add_row(finding.promise, str(finding.checked), broken, finding.title, style=style)
    console.print(table)
    for finding in report.findings:
        for violation in finding.violations:
            _line(console, f"{violation.promise}: {violation.what}", "red")
            for entry in violation.evidence:
                _line(console, f"    {entry}")
        left = finding.broken - len(finding.violations)
        if left:
            _line(console, f"{finding.promise}: and {left} more")
    for remark in report.remarks:
        _line(console, f"note: {remark}")
    if report.open_at_end:
        _line(console, f"note: {report.open_at_end} requests have not ended yet")


def _line(console: Console, text: str, style: str = "") -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
