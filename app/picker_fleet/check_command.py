"""`picker check FILE`: is this configuration usable, and what does it amount to?"""

import argparse
import os
import sys
from pathlib import Path

from picker_fleet.config import Discovery, Settings, load
from picker_fleet.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the configuration to validate")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 and a summary on stdout, or 2 and one fault a line on stderr.

    `PICKER_…` variables overlay the file here as they would for a replica.
    """
    try:
        settings = load(args.file, os.environ)
    except ConfigError as fault:
        print(fault, file=sys.stderr)
        return 2
    print(f"{args.file}: valid")
    print("\n".join(_summary(settings)))
    return 0


def _summary(settings: Settings) -> list[str]:
    bounds = settings.request_queue_controller
    queue = settings.fair_request_queue
    return [
        f"  pool: {settings.pool}",
        f"  endpoints: {_endpoints(settings.discovery)}",
        f"  bounds per backend: lower {bounds.lower_per_backend:g}, watermark "
        f"{bounds.watermark_per_backend:g}, upper {bounds.upper_per_backend:g} {bounds.unit}",
        f"  queue: {queue.total_capacity} requests, {queue.flow_capacity} a flow, {queue.queue_ttl:g} s each",
    ]


def _endpoints(discovery: Discovery) -> str:
    if discovery.file is not None:
        return f"file {discovery.file}"
    if discovery.dns is not None:
        return f"dns {discovery.dns.name}, port {discovery.dns.port}"
    return f"static, {len(discovery.static)} listed" if discovery.static else "none"
