"""Make the run, audit its log, write bench/results/upheaval.md; exit with what `picker audit` says."""

import argparse
import asyncio
import subprocess
import sys
import time
from pathlib import Path

from bench.lifecycle.server import server
from bench.overhead.surroundings import look
from bench.upheaval.configuration import POOL
from bench.upheaval.fleet import Deeds, Upheaval
from picker_tools.local_fleet.network import LOOPBACK

_RESULTS = Path(__file__).parents[1] / "results"
_AUDIT_S = 1800.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.upheaval")
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    here = look(sys.argv[1:])
    with server() as it:
        began = time.monotonic()
        deeds = asyncio.run(_made(it.port, options.seed, options.replicas, options.requests))
        lasted_s = time.monotonic() - began
        url = f"redis://{LOOPBACK}:{it.port}/0"
        audit = subprocess.run(
            [sys.executable, "-m", "picker_fleet.cli", "audit", "--redis", url, "--pool", POOL],
            capture_output=True,
            text=True,
            check=False,
            timeout=_AUDIT_S,
        )
    command = " ".join(["python -m bench.upheaval", *sys.argv[1:]])
    page = _page(command, here.date, options.replicas, lasted_s, deeds, audit)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "upheaval.md").write_text(page, encoding="utf-8")
    print(page, audit.stderr)
    return audit.returncode


async def _made(port: int, seed: int, replicas: int, requests: int) -> Deeds:
    upheaval = Upheaval(port, seed, replicas)
    await upheaval.run(requests)
    return upheaval.deeds


def _page(
    command: str,
    date: str,
    replicas: int,
    lasted_s: float,
    deeds: Deeds,
    audit: subprocess.CompletedProcess[str],
) -> str:
    counted = sorted(deeds.events.items(), key=lambda item: -item[1])
    return "\n".join(
        [
            "# A fleet in upheaval, and the audit of its log", "",
            f"`{command}`, {date}: {replicas} replicas, {lasted_s:.0f} s, until nothing was left.", "",
            f"- replicas killed (SIGKILL) and replaced: {deeds.kills}; their requests brought to another:"
            f" {deeds.brought_again}, the rest left to lapse",
            f"- live changes: {deeds.changes}; pauses: {deeds.pauses}; evictions by the operator:"
            f" {deeds.evictions}",
            f"- entries of the log: {sum(deeds.events.values())}", "",
            "| event | times |", "| --- | --- |",
            *(f"| {event} | {times} |" for event, times in counted), "",
            f"`picker audit` exits with {audit.returncode}:", "",
            "```", audit.stdout.rstrip(), "```", "",
        ]
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
