"""Measures and writes bench/results/admin.md; exit 1 if a limit is not met."""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from bench.adminload.decide import PAUSE_S, USERS, Decider
from bench.adminload.scene import KEY, REPLICAS, RUNNING, Bound, Filler, endpoints, replica
from bench.adminload.viewers import DASHBOARDS, Viewers, viewers
from bench.lifecycle.server import Server, server
from bench.overhead.processes import cpu_ns
from bench.overhead.surroundings import look
from bench.rig.ending import end
from picker_fleet.state.reads import CHUNK
from picker_fleet.state.rows import BETWEEN
from picker_fleet.state.scripts import NAMES
from picker_fleet.state.survey import CLAIM_MS
from picker_tools.local_fleet.network import until

_RESULTS = Path(__file__).parents[1] / "results"
_READY_S = 120.0
_ENDS_S = 5.0
_READ_MS = 50.0
_SCRIPT_US = 5000
_CALLS = 300
_RATIO = 1.1
_GAP_S, _STALE_S = 1.1, 3.0  # of a page's updates; past the second a page calls itself stale


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    measured: str
    limit: str
    met: bool


async def _reads(it: Server, fleet: Sequence[Bound], rounds: int) -> list[Row]:
    """Each call's median and longest time, one after the other, and the CPU of its replica and Valkey.

    All is asked twice; a call's longest is the shorter of both: what is long only once is the machine. The
    replicas are asked in turn; a row's CPU is that of all of them, what the dashboards take meanwhile
    included. Before each call a server is asked that has its answer ready: how long that takes at the longest
    is the machine's and the client's part.
    """
    rows, floor_ms = [], []
    pids = [at.pid for at in fleet]
    async with contextlib.AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=at.admin, timeout=30, trust_env=False))
            for at in fleet
        ]
        floor = await stack.enter_async_context(_constant())
        cursor = await _deep(clients[0])
        some = (await _json(clients[0], f"/api/v1/queue?limit=200&cursor={cursor}"))["requests"][0]
        for path in (
            "state", "flows", "flows?limit=200", f"flows/{some['flow']}", "queue", "queue?limit=200",
            f"queue?flow={some['flow']}", f"queue?limit=200&cursor={cursor}", "inflight",
            "workloads", "workloads?limit=200", f"workloads/{some['workload']}", "endpoints", "replicas",
            f"requests/{some['id']}", "config",
        ):  # fmt: skip
            took_ms: list[list[float]] = [[], []]
            before = cpu_ns(pids), cpu_ns([it.pid])
            for each in range(2 * rounds):
                floor_ms.append(await _timed_ms(floor, "/"))
                client = clients[each % len(clients)]
                took_ms[each // rounds].append(await _timed_ms(client, f"/api/v1/{path}"))
            longest_ms, other_ms = sorted(map(max, took_ms))
            used = [
                (after - start) / 1e6 / (2 * rounds)
                for after, start in zip((cpu_ns(pids), cpu_ns([it.pid])), before, strict=True)
            ]
            shown = path.partition("&cursor")[0] + (", deep in the queue" if "cursor" in path else "")
            shown = shown.replace(some["id"], "{id}")
            rows.append(
                Row(
                    f"`GET {shown}`",
                    f"{median(chain(*took_ms)):.1f} ms, longest {longest_ms:.1f} ms, in the other half"
                    f" {other_ms:.1f} ms; CPU {used[0]:.1f} + {used[1]:.1f} ms",
                    f"longest {_READ_MS:g} ms",
                    longest_ms <= _READ_MS,
                )
            )
            print(rows[-1], flush=True)
    floor_ms.sort()
    late = sum(took_ms > _READ_MS for took_ms in floor_ms)
    rows.append(
        Row(
            f"floor: a server that has its answer ready, {len(floor_ms)} calls among these",
            f"{median(floor_ms):.1f} ms, longest {floor_ms[-1]:.1f} ms; {late} longer than {_READ_MS:g} ms",
            "",
            True,
        )
    )
    print(rows[-1], flush=True)
    return rows


@contextlib.asynccontextmanager
async def _listening(*module: str) -> AsyncIterator[str]:
    """What a module of this bench prints once it listens; it ends with the block."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *module), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_READY_S):
            said = (await process.stdout.readline()).decode().strip()
        yield said
    finally:
        await end(process, _ENDS_S)


@contextlib.asynccontextmanager
async def _constant() -> AsyncIterator[httpx.AsyncClient]:
    async with (
        _listening("bench.adminload.constant") as url,
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as client,
    ):
        yield client


@contextlib.asynccontextmanager
async def _stand_in(admin: str) -> AsyncIterator[list[str]]:
    """URLs of dashboards with no fleet behind them."""
    async with _listening("bench.adminload.standin", admin) as urls:
        yield json.loads(urls)


async def _timed_ms(http: httpx.AsyncClient, path: str) -> float:
    begun = time.perf_counter()
    await _json(http, path)
    return (time.perf_counter() - begun) * 1000


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


@dataclass(slots=True)
class _Turns:
    """Of the turns with dashboards, or of those without: sorted latencies, and CPU as a share of a core."""

    latencies_ms: list[list[float]]
    cpu: list[float]


async def _decisions(
    it: Server,
    fleet: Sequence[Bound],
    pages: Viewers,
    streams: Viewers,
    control: Viewers,
    rounds: int,
    seconds: float,
) -> list[Row]:
    """Latencies with dashboards, with what they are told and nothing drawn, with those of the stand-in, and
    without, in turns, each turn against its neighbours."""
    decider = Decider([at.grpc for at in fleet])
    pids = [it.pid, *(at.pid for at in fleet)]
    alone, drawn, watched, told = (_Turns([], []) for _ in range(4))
    kinds = [(alone, None), (told, streams), (watched, pages), (drawn, control)]

    async def measure(into: _Turns) -> None:
        decider.latencies_ms = []
        begun, before = time.monotonic(), cpu_ns(pids)
        await decider.run(seconds)
        into.cpu.append((cpu_ns(pids) - before) / 1e9 / (time.monotonic() - begun))
        into.latencies_ms.append(sorted(decider.latencies_ms))

    try:
        await decider.run(seconds)  # warm
        for turn in range(rounds):
            for into, viewing in kinds if turn % 2 else reversed(kinds):
                async with viewing.watching() if viewing else contextlib.nullcontext():
                    await measure(into)
    finally:
        await decider.close()
    rows = []
    for name, share in (("median", 0.5), ("99th percentile", 0.99)):
        here, there = f"{DASHBOARDS} dashboards", f"{DASHBOARDS} dashboards drawn elsewhere"
        rows.append(_against(name, share, here, watched, "none", alone))
        rows.append(_against(name, share, here, watched, "as many of the stand-in", drawn))
        rows.append(_against(name, share, there, told, "none", alone))
        print(*rows[-3:], sep="\n", flush=True)
    rows.append(
        Row(
            f"CPU of the replicas and Valkey: {DASHBOARDS} dashboards against none",
            f"{median(watched.cpu) * 1000:.0f} against {median(alone.cpu) * 1000:.0f} ms a second, at"
            f" {sum(len(each) for each in alone.latencies_ms) / (rounds * seconds):.0f} decisions a second",
            "",
            True,
        )
    )
    print(rows[-1], flush=True)
    return rows


def _against(name: str, share: float, some: str, watched: _Turns, others: str, other: _Turns) -> Row:
    """Latencies at this share of the turns of `watched`, by those of `other`."""
    without = [each[int(len(each) * share)] for each in other.latencies_ms]
    among = [each[int(len(each) * share)] for each in watched.latencies_ms]
    ratios = sorted(a / b for a, b in zip(among, without, strict=True))
    return Row(
        f"decision latency, {name}: {some} against {others}",
        f"{median(among):.2f} ms against {median(without):.2f} ms: {median(ratios):.3f}"
        f" ({ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f})",
        f"{_RATIO:g}",
        median(ratios) <= _RATIO,
    )


def _updates(gaps_ms: Sequence[float]) -> Row:
    """How often the open pages showed something new."""
    middle_s, longest_s = median(gaps_ms) / 1000, max(gaps_ms) / 1000
    return Row(
        f"time between updates of a page, {len(gaps_ms)} updates of {DASHBOARDS} pages",
        f"median {middle_s:.2f} s, longest {longest_s:.2f} s",
        f"median {_GAP_S:g} s, longest {_STALE_S:g} s",
        middle_s <= _GAP_S and longest_s <= _STALE_S,
    )


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
    _, rows = fcall("FCALL", it.library.function("view_queue"), 1, KEY, 2, names[0], 0, 1)
    request = rows[0].decode().split(BETWEEN)
    return {
        "claim_queue_snapshot": [CLAIM_MS],
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
    return [name for name in NAMES if name in ("claim_queue_snapshot", "state") or name.startswith("view_")]


async def _measure(it: Server, options: argparse.Namespace) -> list[Row]:
    filler = Filler(it)
    async with contextlib.AsyncExitStack() as stack:
        addresses = await stack.enter_async_context(endpoints())
        fleet = [await stack.enter_async_context(replica(it.port, addresses)) for _ in range(REPLICAS)]
        for at in fleet:
            await _ready(at, len(addresses))
        await asyncio.to_thread(filler.fill, options.queued, 1000, 10_000)
        print(f"{options.queued} wait", flush=True)
        pages = await stack.enter_async_context(viewers([at.admin for at in fleet], options.priority))
        it.client.config_set("slowlog-log-slower-than", 0)
        it.client.slowlog_reset()
        async with asyncio.TaskGroup() as tasks:
            beating = tasks.create_task(filler.keep_alive())
            async with pages.watching():
                rows = await _reads(it, fleet, options.rounds)
                rows += await asyncio.to_thread(_scripts, it)
            it.client.config_set("slowlog-log-slower-than", 1_000_000)
            async with (
                viewers([at.admin for at in fleet], options.priority, "streams") as streams,
                _stand_in(fleet[0].admin) as urls,
                viewers(urls, options.priority) as control,
            ):
                rows += await _decisions(it, fleet, pages, streams, control, options.turns, options.seconds)
            rows.append(_updates(pages.gaps_ms))
            async with httpx.AsyncClient(base_url=fleet[0].admin, timeout=30, trust_env=False) as http:
                print(f"{(await _json(http, '/api/v1/state'))['queued']} wait still", flush=True)
            beating.cancel()
    return rows


async def _ready(at: Bound, backends: int) -> None:
    async with httpx.AsyncClient(base_url=at.admin, timeout=30, trust_env=False) as http:

        async def ready() -> bool | None:
            state = await _json(http, "/api/v1/state")
            return True if state["ready_backends"] == backends else None

        if await until(ready, within_s=_READY_S) is None:
            raise RuntimeError("a replica does not see its endpoints")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.adminload")
    parser.add_argument("--queued", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=50, help="times each call is made")
    parser.add_argument("--turns", type=int, default=24, help="of decisions with and without dashboards")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each turn")
    parser.add_argument("--priority", default="idle", help="the browser's: idle, or a nice value")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    options = parser.parse_args()
    here = look([])
    with server(first=True) as it:
        rows = asyncio.run(_measure(it, options))
    load = look([]).load
    lines = [
        "# What the admin API costs", "",
        f"`python -m bench.adminload`, {here.date}, {here.cores} cores, load {here.load:.2f} before,"
        f" {load:.2f} after. {REPLICAS} replicas as processes over one Valkey that is first in line for a"
        f" core (SCHED_FIFO), as on a machine of its own, {options.queued} queued"
        f" requests of 1000 flows and 10 000 workloads, {RUNNING} in flight; {DASHBOARDS} dashboards,"
        f" spread over the replicas, in one headless Chromium of priority {options.priority}. Each call"
        f" twice {options.rounds} times while they are open, one after the other, the replicas in turn,"
        " as a client measures it, with the CPU that replicas and Valkey used meanwhile for one, the"
        " dashboards' included; the longest is that of the half in which it was shorter."
        f" Scripts by the server's CPU over {_CALLS} calls that read as much as they may, and by its slow"
        " log. Decisions:"
        f" ext_proc streams of {USERS} users a replica, each with a pause of {PAUSE_S * 1000:g} ms"
        " between its requests; the stock has room for these, though not for the larger requests of the"
        f" queue, so that no decision waits. {options.turns} turns of {options.seconds:g} s each with"
        " dashboards, without, with dashboards of a stand-in, which tells what the fleet told once again"
        " each second: what the browser does to a machine that it shares with the fleet is in both of that"
        " ratio's terms; and with dashboards drawn elsewhere, of which there is here what the fleet tells"
        " them: as where operators' browsers are on machines of their own. Ratios are of neighbouring turns,"
        " their median (and quartiles). A page is updated when its figures are drawn, in whatever turn.", "",
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
