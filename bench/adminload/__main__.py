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
from urllib.parse import urlsplit

import httpx

from app.fleet.probe import until
from app.state.reads import CHUNK
from app.state.rows import BETWEEN
from app.state.scripts import NAMES
from bench.adminload.decide import Decider
from bench.adminload.scene import KEY, Bound, Filler, endpoints, replica
from bench.lifecycle.server import Server, server
from bench.overhead.processes import cpu_ns
from bench.overhead.surroundings import look

_RESULTS = Path(__file__).parents[1] / "results"
_LISTENERS = 5
_READY_S = 30.0
_READ_MS = 50.0
_SCRIPT_US = 5000
_CALLS = 300
_RATIO = 1.1


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    measured: str
    limit: str
    met: bool


async def _reads(it: Server, at: Bound, rounds: int) -> list[Row]:
    """Each call's median and longest time, one after the other, and the CPU of replica and Valkey."""
    rows = []
    async with httpx.AsyncClient(base_url=at.admin, timeout=30, trust_env=False) as http:
        deep = await _json(http, "/api/v1/queue?limit=200&cursor=" + await _deep(http))
        some = deep["requests"][0]
        for path in (
            "state", "flows", "flows?limit=200", f"flows/{some['flow']}", "queue", "queue?limit=200",
            f"queue?flow={some['flow']}", "queue?limit=200&cursor=" + await _deep(http), "inflight",
            "workloads", "workloads?limit=200", f"workloads/{some['workload']}", "endpoints", "replicas",
            f"requests/{some['id']}", "config",
        ):  # fmt: skip
            took_ms = []
            before = cpu_ns([at.pid]), cpu_ns([it.pid])
            for _ in range(rounds):
                begun = time.perf_counter()
                await _json(http, f"/api/v1/{path}")
                took_ms.append((time.perf_counter() - begun) * 1000)
            used = [
                (after - start) / 1e6 / rounds
                for after, start in zip((cpu_ns([at.pid]), cpu_ns([it.pid])), before, strict=True)
            ]
            shown = path.partition("&cursor")[0] + (", deep in the queue" if "cursor" in path else "")
            shown = shown.replace(some["id"], "{id}")
            name = f"`GET {shown}`"
            rows.append(
                Row(
                    name,
                    f"{median(took_ms):.1f} ms, longest {max(took_ms):.1f} ms;"
                    f" CPU {used[0]:.1f} + {used[1]:.1f} ms",
                    f"longest {_READ_MS:g} ms",
                    max(took_ms) <= _READ_MS,
                )
            )
            print(rows[-1], flush=True)
    return rows


async def _deep(http: httpx.AsyncClient) -> str:
    """A cursor that 2000 requests stand before."""
    cursor = ""
    for _ in range(8):
        cursor = (await _json(http, f"/api/v1/queue?limit=200{cursor and '&cursor=' + cursor}"))["cursor"]
    return cursor


async def _json(http: httpx.AsyncClient, path: str) -> Any:
    response = await http.get(path)
    if response.status_code != 200:
        raise RuntimeError(f"{path}: {response.status_code} {response.text}")
    return response.json()


@contextlib.asynccontextmanager
async def _listening(at: Bound) -> AsyncIterator[None]:
    """Five clients of the event stream, in a process of their own."""
    where = urlsplit(at.admin)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.adminload.listener"),
        *(str(where.hostname), str(where.port), str(_LISTENERS)),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_READY_S):
            if await process.stdout.readline() != b"heard\n":
                raise RuntimeError("no events come")
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


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
    """Each reading script: its CPU when it reads as much as it may, and its slow log so far."""
    names = {it.library.function(name): name for name in _reading_scripts()}
    took_us: dict[str, list[int]] = {name: [] for name in names.values()}
    for entry in it.client.slowlog_get(100_000):
        words = entry["command"].split()
        name = names.get(words[1].decode()) if len(words) > 1 else None
        if name:
            took_us[name].append(entry["duration"])
    rows = []
    for name, args in _worst(it).items():
        before = it.cpu_us()
        for _ in range(_CALLS):
            it.client.execute_command("FCALL", it.library.function(name), 1, KEY, *args)
        cpu_us = (it.cpu_us() - before) / _CALLS
        met = cpu_us <= _SCRIPT_US
        rows.append(Row(f"script `{name}`, CPU a call", f"{cpu_us:.0f} us", f"{_SCRIPT_US} us", met))
        if took := sorted(took_us[name]):
            median_us, longest_us = took[len(took) // 2], took[-1]
            rows.append(
                Row(
                    f"script `{name}`, {len(took)} calls",
                    f"median {median_us} us, longest {longest_us} us",
                    f"longest {_SCRIPT_US} us",
                    longest_us <= _SCRIPT_US,
                )
            )
    return rows


def _worst(it: Server) -> dict[str, list[Any]]:
    """Arguments for each reading script that make it read as much as it may."""
    fcall = it.client.execute_command
    _, _, *lanes = fcall("FCALL", it.library.function("view_flows"), 1, KEY, 0, "", "", CHUNK, "")
    names = [row.decode().split(BETWEEN)[1] for row in lanes]
    stretches = [part for name in names for part in (2, name, 0, 0)]
    _, rows = fcall("FCALL", it.library.function("view_queue"), 1, KEY, 2, names[0], 50, 50)
    request = rows[0].decode().split(BETWEEN)
    return {
        "state": [60_000],
        "view_flows": [0, "", "", CHUNK, ""],
        "view_flow": [names[0]],
        "view_queue": stretches,
        "view_inflight": ["", "", CHUNK],
        "view_request": [request[0]],
        "view_workloads": [0, CHUNK],
        "view_workload": [request[5]],
        "view_replicas": [256],
    }


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
            rows = await _reads(it, at, options.rounds)
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
    parser.add_argument("--turns", type=int, default=20, help="of decisions with and without listeners")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each turn")
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
        " client measures it, with the CPU that the replica and Valkey used for one. Scripts by the server's"
        " own slow log, which counts the time for which other processes had the core, too, and by its CPU"
        f" over {_CALLS} calls that read as much as they may."
        " Decisions: ext_proc streams, 16 at a time for 8 slots, in"
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
