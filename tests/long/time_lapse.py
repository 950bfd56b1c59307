"""Simulates a week of a fleet with quiet days, light load, and bursts whose requests queue.

Whole replicas run in this process on a clock that jumps to the next event (tests/fleet/time_lapse.py). All
intervals are 12 times the defaults, so a week has as many heartbeats and sweeps as half a day by default.
"""

import argparse
import asyncio
import logging
import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import redis
from redis_servers import redis_server
from time_lapse import BOUND, HOUR_S, SERVICE_S, Fleet, at_rest, fleet, light_load, time_lapse

from long.findings import Findings
from picker_fleet.admission import failover
from picker_fleet.endpoints import pacing
from picker_fleet.state import connection
from picker_tools.local_fleet.parts import MODES

_QUARTER_S = 6 * HOUR_S
_SLOWER = 12
_INTERVALS: dict[str, Any] = {
    "leases": {
        "inflight": "180s", "access_log_interval": "60s", "replica_silence": "60s", "adoption_grace": "36s",
        "heartbeat": "12s",
    },
    "request_queue_controller": {"expiry_cleanup_interval": "12s"},
    "redis": {"silence": "12s"},
    "scraping": {"interval": "60s"},
}  # fmt: skip
_FIXED = (connection, "TICK_S"), (failover, "_TICK_S"), (pacing, "PROBE_S"), (pacing, "REST_PROBE_S")
_SLACK_BYTES = 4 * 1024 * 1024


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 3])


def run(options: argparse.Namespace, findings: Findings) -> None:
    failures: list[str] = []

    class Failures(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info or record.levelno >= logging.ERROR:
                failures.append(record.getMessage())

    logging.getLogger().addHandler(Failures())
    for mode in options.modes:
        for replicas in options.replicas:
            seen = _live(mode, replicas, options.days)
            findings.check(f"{mode}, {replicas} replicas: memory is flat", seen.is_flat, seen.text)
            findings.check(
                f"{mode}, {replicas} replicas: no failure is logged", not failures, "; ".join(failures)
            )
            failures.clear()


class _Memory:
    """Memory of Valkey and of this process, read at the end of each quarter of a day."""

    def __init__(self) -> None:
        self._used: list[tuple[int, int]] = []

    def note(self, client: redis.Redis) -> None:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        self._used.append((int(client.info("memory")["used_memory"]), pages * os.sysconf("SC_PAGE_SIZE")))

    @property
    def growth(self) -> list[int]:
        """Bytes by which Valkey and this process have grown since the first quarter of the run."""
        first, last = self._used[len(self._used) // 4], self._used[-1]
        return [after - before for before, after in zip(first, last, strict=True)]

    @property
    def is_flat(self) -> bool:
        return max(self.growth) < _SLACK_BYTES

    @property
    def text(self) -> str:
        valkey, python = (grown / 1024 for grown in self.growth)
        return f"Valkey {valkey:+.0f} KiB, the replicas' process {python:+.0f} KiB since the first quarter"


def _live(mode: str, replicas: int, days: float) -> _Memory:
    memory = _Memory()
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patched,
        redis_server(Path(folder)) as valkey,
        time_lapse(valkey.url, patched) as lapse,
        redis.Redis.from_url(valkey.url) as client,
    ):
        for module, name in _FIXED:
            patched.setattr(module, name, _SLOWER * getattr(module, name))

        async def life() -> None:
            async with fleet(valkey.url, mode, replicas, _INTERVALS) as some:
                for quarter in range(math.ceil(4 * days)):
                    await _quarter_of_a_day(some, is_quiet=quarter // 4 % 2 == 1)
                    await at_rest(some, client)
                    memory.note(client)

        lapse.run_until_complete(asyncio.wait_for(life(), 8 * days * _QUARTER_S))
    return memory


async def _quarter_of_a_day(some: Fleet, *, is_quiet: bool) -> None:
    if is_quiet:
        await some.ask(SERVICE_S)
        await asyncio.sleep(_QUARTER_S)
        return
    await some.burst(10 * BOUND, SERVICE_S)
    await some.burst(BOUND, 400.0)  # requests that run longer than a lease
    await light_load(some, HOUR_S, every_s=20.0)
    await asyncio.sleep(4 * HOUR_S)
