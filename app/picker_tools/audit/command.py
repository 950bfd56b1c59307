"""`picker audit`: did the fleet keep its promises? Replays the decision log and checks G1 to G6."""

import argparse
import json
import sys

from rich.console import Console

from picker_fleet.config import Redis
from picker_tools.audit.auditor import Auditor
from picker_tools.audit.entry import EntryError
from picker_tools.audit.page import show
from picker_tools.audit.report import Report
from picker_tools.audit.stream import LogStream, LogUnreadable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--redis", metavar="URL", default=Redis().url, help="where the log is (%(default)s)")
    parser.add_argument("--pool", metavar="NAME", default="default", help="whose log (%(default)s)")
    parser.add_argument("--json", action="store_true", help="the report as JSON")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 and a table on stdout, 1 and the violations below it, or 2 if there is no log to read."""
    try:
        report = audited(args.redis, args.pool)
    except (LogUnreadable, EntryError) as fault:
        print(fault, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        show(report, Console())
    return 1 if report.violations else 0


def audited(url: str, pool: str) -> Report:
    """The verdict on all of the log that the Redis at `url` has of `pool` now.

    Raises:
        LogUnreadable: there is none, or Redis does not answer.
        EntryError: an entry cannot be read.
    """
    with LogStream(url, pool) as log:
        auditor = Auditor(log.settings_throughout())
        for page in log.pages():
            first = page.entries[0].get("seq", "")
            if page.trimmed and auditor.last_seq is not None and first != str(auditor.last_seq + 1):
                auditor.skip(f"entries up to {first} were trimmed while the log was read")
            for entry in page.entries:
                auditor.take(entry)
        report = auditor.report()
    if not report.entries:
        raise LogUnreadable(f"pool {pool!r} has no decision log (decision_log.enabled)")
    return report
