"""Makes model servers fail in every way, in pools of 2, 4 and 8 servers, in every mode.

For each mode, pool size and failure, 50 clients of 50 flows send requests, and one server fails and recovers.
Then one server hangs, one flow sends prompts that make every server fail, and all servers fail.
"""

import argparse
import asyncio
import time
from contextlib import AbstractAsyncContextManager

from fleet_load import answered
from model_servers import FAILURES, HANGS, FailingServers, Failure, failing_servers, static

from bench.rig.fleet import RunningFleet, picker_up
from bench.rig.report import table
from long.findings import Findings
from picker_tools.load.generator import Load, Request, closed_loop, flow_header, requests_of_flows
from picker_tools.local_fleet.network import until
from picker_tools.local_fleet.parts import MODES

_SERVICE_S = 0.3
_CLIENTS = 50
_MOST_SHARE, _MOST_ERRORS, _BACK_S = 0.02, 0.005, 10.0
# A failing server that passes health checks gets three tries: 1, 3 and 7 s after its first failure.
_TRIES = 3
_AT_FIRST_S, _ROLLED_S, _STUCK_S = 1.0, 8.0, 30.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)


def run(options: argparse.Namespace, findings: Findings) -> None:
    rows: list[list[str]] = []
    for mode in options.modes:
        for count in options.servers:
            rows += asyncio.run(_pool(mode, count, findings))
    head = ["mode", "servers", "failure", "share of the failing server", "errors", "back after, s"]
    findings.add(table(head, rows))


async def _pool(mode: str, count: int, findings: Findings) -> list[list[str]]:
    rows = []
    async with failing_servers(count, _SERVICE_S) as servers, _fleet(mode, servers) as fleet:
        for name, failure in FAILURES.items():
            what = f"{mode}, {count} servers, {name}"
            hits, total, errors, back_s = await _one(fleet, servers, failure)
            findings.check(
                f"{what}: the failing server gets at most {_MOST_SHARE:.0%} or {_TRIES} tries",
                hits <= max(_MOST_SHARE * total, _TRIES),
            )
            if not failure.cuts:
                findings.check(f"{what}: {_MOST_ERRORS:.1%} errors at most", errors <= _MOST_ERRORS)
            findings.check(f"{what}: the recovered server serves within {_BACK_S:g} s", back_s <= _BACK_S)
            share = f"{hits} of {total}, {hits / total:.2%}"
            rows.append([mode, str(count), name, share, f"{errors:.2%}", f"{back_s:.1f}"])
        stuck_s = await _until_stuck(fleet, servers)
        findings.check(
            f"{mode}, {count} servers: a hanging server is ejected within {_STUCK_S:g} s", stuck_s <= _STUCK_S
        )
        servers.poison = FAILURES["500"]
        async with (
            _clients(fleet, 20) as others,
            closed_loop(fleet.url, clients=4, make_request=_poison),
        ):
            await answered(others, 100)
            findings.check(
                f"{mode}, {count} servers: bad prompts of one flow fail no other",
                len(others.history) == others.served,
            )
        servers.failing = dict.fromkeys(servers.addresses, FAILURES["503 with a healthy page"])
        async with _clients(fleet, 20) as load:
            await answered(load, 200)
            servers.failing.clear()
            await asyncio.sleep(_BACK_S)
            before = load.served
            await answered(load, 20)
            findings.check(
                f"{mode}, {count} servers: a pool whose servers all failed recovers", load.served > before
            )
    return rows


def _clients(fleet: RunningFleet, count: int) -> AbstractAsyncContextManager[Load]:
    """`count` clients of `count` flows; each client sends its next request after an answer."""
    return closed_loop(fleet.url, clients=count, make_request=requests_of_flows(count))


def _poison(_: object, number: int) -> Request:
    return Request("poison", 1, headers=flow_header("attacker"))


async def _one(
    fleet: RunningFleet, servers: FailingServers, failure: Failure
) -> tuple[int, int, float, float]:
    """Make one server fail for a while. Returns the number of its requests, of all requests, the share of
    errors, and the seconds from its recovery until it gets requests again."""
    broken = servers.addresses[0]
    async with _clients(fleet, _CLIENTS) as load:
        await answered(load, 2 * _CLIENTS)
        servers.failing[broken] = failure
        await asyncio.sleep(_AT_FIRST_S)
        servers.hits.clear()
        load.history.clear()
        await asyncio.sleep(_ROLLED_S)
        hits, total = servers.hits[broken], max(servers.hits.total(), 1)
        errors = sum(not answer.served for answer in load.history) / max(len(load.history), 1)
        del servers.failing[broken]
        servers.hits.clear()
        since_s = time.monotonic()

        async def is_back() -> bool:
            return servers.hits[broken] >= 4

        await until(is_back, within_s=2 * _BACK_S)
        return hits, total, errors, time.monotonic() - since_s


async def _until_stuck(fleet: RunningFleet, servers: FailingServers) -> float:
    """Let a server hang, except its health and metrics pages; return the seconds to its ejection."""
    hangs = servers.addresses[0]

    async def is_ejected() -> bool:
        found = await fleet.get("endpoints")
        return any(each["address"] == hangs and each["status"] == "ejected" for each in found)

    async with _clients(fleet, 20) as load:
        await answered(load, 20)
        servers.failing[hangs] = HANGS
        since_s = time.monotonic()
        await until(is_ejected, within_s=2 * _STUCK_S, pause_s=0.2)
        del servers.failing[hangs]
        load.stop()
        return time.monotonic() - since_s


def _fleet(mode: str, servers: FailingServers) -> AbstractAsyncContextManager[RunningFleet]:
    return picker_up({"discovery": static(servers.addresses)}, "--endpoints", "0", "--mode", mode)
