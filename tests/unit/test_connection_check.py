"""Reports that an endpoint accepts no connection count only if that is true."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from background import until

from picker_fleet.admission import connection_check
from picker_fleet.admission.connection_check import ConnectionCheck
from picker_fleet.domain.request import CONNECT, Endpoint, Fault
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell


def fault(number: int, address: str) -> Fault:
    return Fault(f"req-{number}", address, CONNECT, "")


def checking(address: str) -> tuple[ConnectionCheck, list[str]]:
    """A check for a fleet with one endpoint, and the ids of the reports that the check confirms."""
    cell, confirmed = SnapshotCell(), list[str]()
    cell.publish(Snapshot("1", (Endpoint(address),)))
    return ConnectionCheck(cell, lambda fault: confirmed.append(fault.id)), confirmed


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[asyncio.Server, str, list[int]]]:
    """A server, its address, and an entry for each accepted connection."""
    accepted: list[int] = []

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(1)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield server, f"127.0.0.1:{server.sockets[0].getsockname()[1]}", accepted


async def test_a_thousand_false_reports_cost_one_connection_and_have_no_effect() -> None:
    async with listening() as (_, address, accepted):
        check, confirmed = checking(address)
        for number in range(1000):
            check.report(fault(number, address))
        await until(lambda: accepted)
        await until(lambda: not check._checks)
        assert (accepted, confirmed) == ([1], [])
        check.report(fault(1000, address))
        await until(lambda: len(accepted) == 2)


async def test_reports_about_an_endpoint_that_refuses_connections_are_confirmed_up_to_a_bound() -> None:
    async with listening() as (server, address, _):
        server.close()
        await server.wait_closed()
        check, confirmed = checking(address)
        for number in range(1000):
            check.report(fault(number, address))
        await until(lambda: not check._checks)
        assert confirmed == [f"req-{number}" for number in range(connection_check._MOST_WAITING)]


async def test_a_report_about_an_unknown_endpoint_opens_no_connection() -> None:
    async with listening() as (_, address, accepted):
        check, confirmed = checking("127.0.0.1:1")
        check.report(fault(1, address))
        assert not check._checks
        assert (accepted, confirmed) == ([], [])
