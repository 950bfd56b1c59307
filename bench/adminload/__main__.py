"""Measures and writes bench/results/admin.md; exit 1 if a limit is not met."""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from app.fleet.probe import until
from app.state.scripts import NAMES
from bench.adminload.decide import Decider
from bench.adminload.scene import Bound, Filler, endpoints, replica
from bench.lifecycle.server import Server, server
from bench.overhead.surroundings import look

_RESULTS = Path(__file__).parents[1] / "results"
_LISTENERS = 5
_READY_S = 30.0
_READ_MS = 50.0
_SCRIPT_US = 5000
_RATIO = 1.1


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    measured: str
    limit: str
    met: bool


async def _reads(at: Bound, rounds: int) -> list[Row]:
    """Each call's median and longest time, one after the other."""
    rows = []
    async with httpx.AsyncClient(base_url=at.admin, timeout=30, trust_env=False) as http:
        deep = await _json(http, "/api/v1/queue?limit=500&cursor=" + await _deep(http))
        some = deep["requests"][0]
        for path in (
            "state", "flows", "flows?limit=500", f"flows/{some['flow']}", "queue", "queue?limit=500",
            f"queue?flow={some['flow']}", "queue?limit=500&cursor=" + await _deep(http), "inflight",
            "workloads", "workloads?limit=500", f"workloads/{some['workload']}", "endpoints", "replicas",
            f"requests/{some['id']}", "config",
        ):  # fmt: skip
            took_ms = []
            for _ in range(rounds):
                begun = time.perf_counter()
                await _json(http, f"/api/v1/{path}")
                took_ms.append((time.perf_counter() - begun) * 1000)
            shown = path.partition("&cursor")[0] + (", deep in the queue" if "cursor" in path else "")
            shown = shown.replace(some["id"], "{id}")
            name = f"`GET {shown}`"
            rows.append(
                Row(
                    name,
                    f"{median(took_ms):.1f} ms, longest {max(took_ms):.1f} ms",
                    f"longest {_READ_MS:g} ms",
                    max(took_ms) <= _READ_MS,
                )
            )
            print(rows[-1], flush=True)
    return rows


async def _deep(http: httpx.AsyncClient) -> str:
    """A cursor that 2000 requests stand before."""
    cursor = ""
    for _ in range(4):
        cursor = (await _json(http, f"/api/v1/queue?limit=500{cursor and '&cursor=' + cursor}"))["cursor"]
    return cursor


async def _json(http: httpx.AsyncClient, path: str) -> Any:
    response = await http.get(path)
    if response.status_code != 200:
        raise RuntimeError(f"{path}: {response.status_code} {response.text}")
    return response.json()


async def _done(is_so: bool) -> bool | None:
    return is_so or None


@contextlib.asynccontextmanager
async def _listening(at: Bound) -> AsyncIterator[list[int]]:
    """Five clients of the event stream; the value counts the bytes each has read."""
    read = [0] * _LISTENERS

    async def listen(number: int, http: httpx.AsyncClient) -> None:
        async with http.stream("GET", f"{at.admin}/api/v1/events") as response:
            async for chunk in response.aiter_raw():
                read[number] += len(chunk)

    async with httpx.AsyncClient(timeout=30, trust_env=False) as http, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(listen(number, http)) for number in range(_LISTENERS)]
        try:
            if await until(lambda: _done(all(read)), within_s=_READY_S) is None:
                raise RuntimeError("no events come")
            yield read
        finally:
            for each in running:
                each.cancel()


async def _decisions(at: Bound, rounds: int, seconds: float) -> list[Row]:
    """Latencies with listeners and without, in turns, each round against its neighbour."""
    decider = Decider(at.grpc)
    quiet: list[list[float]] = []
    heard: list[list[float]] = []

    async def measure(into: list[list[float]]) -> None:
        decider.latencies_ms = []
        await decider.run(seconds)
        into.append(sorted(decider.latencies_ms))

    try:
        await decider.run(seconds)  # warm
        for turn in range(rounds):
            for listeners in (False, True) if turn % 2 else (True, False):
                if listeners:
                    async with _listening(at):
                        await measure(heard)
                else:
                    await measure(quiet)
    finally:
        await decider.close()
    rows = []
    for name, share in (("median", 0.5), ("99th percentile", 0.99)):
        without = [each[int(len(each) * share)] for each in quiet]
        among = [each[int(len(each) * share)] for each in heard]
        ratio = median(a / b for a, b in zip(among, without, strict=True))
        limited = name == "median"
        rows.append(
            Row(
                f"decision latency, {name}: {_LISTENERS} listeners against none",
                f"{median(among):.2f} ms against {median(without):.2f} ms: {ratio:.3f}",
                f"{_RATIO:g}" if limited else "",
                ratio <= _RATIO or not limited,
            )
        )
        print(rows[-1], flush=True)
    return rows


def _scripts(it: Server) -> list[Row]:
    """The longest call of each reading script, by Valkey's slow log."""
    names = {it.library.function(name): name for name in _reading_scripts()}
    longest: dict[str, list[int]] = {}
    for entry in it.client.slowlog_get(100_000):
        words = entry["command"].split()
        name = names.get(words[1].decode()) if len(words) > 1 else None
        if name:
            longest.setdefault(name, []).append(entry["duration"])
    rows = []
    for name, took in sorted(longest.items()):
        took.sort()
        p99 = took[int(len(took) * 0.99)]
        rows.append(
            Row(
                f"script `{name}`, {len(took)} calls",
                f"median {took[len(took) // 2]} us, 99th percentile {p99} us, longest {took[-1]} us",
                f"longest {_SCRIPT_US} us",
                took[-1] <= _SCRIPT_US,
            )
        )
    return rows


def _reading_scripts() -> list[str]:
    return [name for name in NAMES if name == "state" or name.startswith("view_")]


async def _measure(it: Server, options: argparse.Namespace) -> list[Row]:
    filler = Filler(it)
    async with endpoints() as addresses, replica(it.port, addresses) as at:
        async with httpx.AsyncClient(base_url=at.admin, timeout=30, trust_env=False) as http:

            async def ready() -> bool | None:
                state = await _json(http, "/api/v1/state")
                return True if state["ready_backends"] == len(addresses) else None

            if await until(ready, within_s=_READY_S) is None:
                raise RuntimeError("the replica does not see its endpoints")
        await asyncio.to_thread(filler.fill, options.queued, 1000, 10_000)
        print(f"{options.queued} wait", flush=True)
        it.client.config_set("slowlog-log-slower-than", 0)
        it.client.slowlog_reset()
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(filler.keep_alive())
            rows = await _reads(at, options.rounds)
            rows += await asyncio.to_thread(_scripts, it)
            it.client.config_set("slowlog-log-slower-than", 1_000_000)
            filler.release()
            rows += await _decisions(at, options.turns, options.seconds)
            beating.cancel()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.adminload")
    parser.add_argument("--queued", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=50, help="times each call is made")
    parser.add_argument("--turns", type=int, default=9, help="of decisions with and without listeners")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    here = look([])
    with server() as it:
        rows = asyncio.run(_measure(it, options))
    lines = [
        "# What the admin API costs", "",
        f"`python -m bench.adminload`, {here.date}, {here.cores} cores, load {here.load:.2f} before."
        f" One replica as a process, a Valkey of its own, {options.queued} queued requests of 1000 flows and"
        f" 10 000 workloads, 192 in flight. Each call {options.rounds} times, one after the other, as a"
        " client measures it. Scripts by the server's own slow log, which counts the time that other"
        " processes take the core away, too. Decisions: ext_proc streams, 16 at a time for 8 slots, in"
        f" {options.turns} turns of {options.seconds:g} s each with and without listeners of `events`;"
        " ratios are of neighbouring turns, their median.", "",
        "| what | measured | limit | met |", "|---|---|---|---|",
        *(f"| {row.what} | {row.measured} | {row.limit} | {_met(row)} |" for row in rows),
    ]  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "admin.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines[4:]))
    return 0 if all(row.met for row in rows) else 1


def _met(row: Row) -> str:
    return "" if not row.limit else "yes" if row.met else "**no**"


if __name__ == "__main__":
    sys.exit(main())
