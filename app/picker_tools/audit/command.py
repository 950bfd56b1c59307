"""`picker audit`: did the fleet keep its promises? Replays the decision log and checks G1 to G6."""

import argparse
import sys

from rich.console import Console

from picker_fleet.domain.sections import Redis
from picker_tools.audit.auditor import audited
from picker_tools.audit.log import EntryError, LogUnreadable
from picker_tools.audit.report import show


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--redis", metavar="URL", default=Redis().url, help="where the log is (%(default)s)")
    parser.add_argument("--pool", metavar="NAME", default="default", help="whose log (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 and a table on stdout, 1 and the violations below it, or 2 if there is no log to read."""
    try:
        report = audited(args.redis, args.pool)
    except (LogUnreadable, EntryError) as fault:
        print(fault, file=sys.stderr)
        return 2
    show(report, Console())
    return 1 if report.violations else 0
