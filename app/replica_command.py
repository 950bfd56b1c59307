"""`picker serve`: one replica in this process."""

import argparse
import gc
import json
import os
from dataclasses import asdict
from pathlib import Path

import uvloop

from app.config import load
from app.replica import Bound, new_incarnation, serve
from app.telemetry import logs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="configuration (YAML)")
    levels = ("DEBUG", "INFO", "WARNING", "ERROR")
    parser.add_argument("--log-level", choices=levels, help="in place of the configuration's")


def run(args: argparse.Namespace) -> int:
    """Exit code 0 after a drain. Prints one JSON line once the listeners are bound."""
    settings = load(args.config, os.environ)
    replica = new_incarnation()
    level = args.log_level or settings.logging.level
    logs.setup(level, style=settings.logging.format, replica=replica, pool=settings.pool)
    # Collecting seldom is worth a few per cent, since requests leave few cycles.
    gc.set_threshold(10_000, 20, 20)
    uvloop.run(serve(settings, replica, _report))
    return 0


def _report(bound: Bound) -> None:
    print(json.dumps({"ready": True, **asdict(bound)}), flush=True)
