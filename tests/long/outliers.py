"""Servers that fail in every way, in pools of 2, 4 and 8, in every mode.

For each combination a fleet runs with 50 clients of as many flows; one server fails after a while, and is
well again later. Then all fail, and one flow sends prompts that make every engine fail.
"""

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence

from failing_servers import HANGS, KINDS, Clients, FailingServers, Kind, failing_servers

from bench.rig.fleet import RunningFleet, picker_up
from bench.rig.report import table
from long.findings import Findings

_MODES = ("lean", "http", "standard")
_SERVICE_S = 0.3
_CLIENTS = 50
_MOST_SHARE, _MOST_ERRORS, _BACK_S = 0.02, 0.005, 10.0
# A failing server with a healthy health page gets these tries while measured: 1, 3 and 7 s after the first.
_TRIES = 3
_AT_FIRST_S, _ROLLED_S, _STUCK_S = 1.0, 8.0, 30.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--modes", nargs="*", choices=_MODES, default=list(_MODES))
    parser.add_argument("--kinds", nargs="*", choices=sorted(KINDS), default=list(KINDS))


def run(options: argparse.Namespace, findings: Findings) -> None:
    rows: list[list[str]] = []
    for mode in options.modes:
        for count in options.servers:
            rows += asyncio.run(_pool(mode, count, options.kinds, findings))
    head = ["mode", "servers", "kind", "share of the broken", "errors", "back after, s"]
    findings.add(table(head, rows))


async def _pool(mode: str, count: int, kinds: Sequence[str], findings: Findings) -> list[list[str]]:
    rows = []
    async with failing_servers(count, _SERVICE_S) as servers, _fleet(mode, servers) as fleet:
        for name in kinds:
            what = f"{mode}, {count} servers, {name}"
            hits, total, errors, back_s = await _one(fleet, servers, KINDS[name])
            findings.check(
                f"{what}: the broken server gets {_MOST_SHARE:.0%} or {_TRIES} tries at most",
                hits <= max(_MOST_SHARE * total, _TRIES),
            )
            if not KINDS[name].cuts:
                findings.check(f"{what}: {_MOST_ERRORS:.1%} errors at most", errors <= _MOST_ERRORS)
            findings.check(f"{what}: it is back within {_BACK_S:g} s", back_s <= _BACK_S)
            share = f"{hits} of {total}, {hits / total:.2%}"
            rows.append([mode, str(count), name, share, f"{errors:.2%}", f"{back_s:.1f}"])
        stuck_s = await _until_stuck(fleet, servers)
        findings.check(
            f"{mode}, {count} servers: one that hangs is ejected within {_STUCK_S:g} s", stuck_s <= _STUCK_S
        )
        servers.poison = KINDS["500"]
        async with (
            Clients(fleet.url, 20) as others,
            Clients(fleet.url, 4, prompt="poison", flow="attacker"),
        ):
            await others.until_asked(100)
            findings.check(f"{mode}, {count} servers: prompts of one flow harm nobody", not others.failed)
        servers.failing = dict.fromkeys(servers.addresses, KINDS["503, well by its page"])
        async with Clients(fleet.url, 20) as clients:
            await clients.until_asked(200)
            servers.failing.clear()
            await asyncio.sleep(_BACK_S)
            answered = clients.answered
            await clients.until_asked(20)
            findings.check(
                f"{mode}, {count} servers: a pool in which all fail still tries", clients.answered > answered
            )
    return rows


async def _one(fleet: RunningFleet, servers: FailingServers, kind: Kind) -> tuple[int, int, float, float]:
    """Let one server fail. Returns its requests, all requests, the part of errors, and its time to return."""
    broken = servers.addresses[0]
    async with Clients(fleet.url, _CLIENTS) as clients:
        await clients.until_asked(2 * _CLIENTS)
        servers.failing[broken] = kind
        await asyncio.sleep(_AT_FIRST_S)
        servers.hits.clear()
        clients.failed.clear()
        clients.answered = 0
        await asyncio.sleep(_ROLLED_S)
        hits, total = servers.hits[broken], max(servers.hits.total(), 1)
        errors = clients.failed.total() / max(clients.asked, 1)
        del servers.failing[broken]
        servers.hits.clear()
        since_s = time.monotonic()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * _BACK_S):
                while servers.hits[broken] < 4:  # noqa: ASYNC110 - it is counted by all servers
                    await asyncio.sleep(0.05)
        return hits, total, errors, time.monotonic() - since_s


async def _until_stuck(fleet: RunningFleet, servers: FailingServers) -> float:
    """Seconds until a server is ejected that hangs while its health and metrics pages answer."""
    hangs = servers.addresses[0]
    async with Clients(fleet.url, 20) as clients:
        await clients.until_asked(20)
        servers.failing[hangs] = HANGS
        since_s = time.monotonic()
        while time.monotonic() - since_s < 2 * _STUCK_S:
            found = await fleet.read("endpoints")
            if any(each["address"] == hangs and each["status"] == "ejected" for each in found):
                break
            await asyncio.sleep(0.2)
        del servers.failing[hangs]
        return time.monotonic() - since_s


@contextlib.asynccontextmanager
async def _fleet(mode: str, servers: FailingServers) -> AsyncIterator[RunningFleet]:
    listed = [{"address": address} for address in servers.addresses]
    async with picker_up({"discovery": {"static": listed}}, "--endpoints", "0", "--mode", mode) as fleet:
        yield fleet
