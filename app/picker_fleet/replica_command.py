"""`picker serve`: one replica in this process."""

import argparse
import contextlib
import ctypes
import gc
import json
import os
from dataclasses import asdict
from pathlib import Path

import uvloop

from picker_fleet.config import load
from picker_fleet.replica import Bound, new_incarnation, serve
from picker_fleet.telemetry import logs

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGE_BLOCK_BYTES = 512 * 1024  # larger than what honest requests are made of, smaller than what hurts
_KEPT_BYTES = 8 * 1024 * 1024  # of free memory at the heap's end


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
    _give_large_blocks_back()
    uvloop.run(serve(settings, replica, _report))
    return 0


def _give_large_blocks_back() -> None:
    """Have the C library give large blocks back to the system as soon as they are free.

    By itself glibc keeps blocks of up to 32 MiB once it has seen such, in the heap of whichever thread asked:
    a replica that holds 120 MiB of bodies then has up to 280 MiB more than one that holds none, and with
    this 130 MiB.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library has another heap
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        # Which else is 128 KiB from now on: each large prompt would take its memory from the system anew, and
        # one of 400 KB cost 40 % more CPU.
        library.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _report(bound: Bound) -> None:
    print(json.dumps({"ready": True, **asdict(bound)}), flush=True)
