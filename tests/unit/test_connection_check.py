"""Reports that an endpoint accepts no connection count only if that is true."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from background import until

from picker_fleet.admission import connection_check
from picker_fleet.admission.connection_check import ConnectionCheck
from picker_fleet.domain.request import Endpoint
from picker_fleet.endpoints.snapshot import Snapshot, SnapshotCell


def checking(address: str) -> tuple[ConnectionCheck, Callable[[int, str], None], list[int]]:
    """A check for a fleet with one endpoint, a function that sends a numbered report to the check, and the
    numbers of the reports that the check confirms."""
    cell, confirmed = SnapshotCell(), list[int]()
    cell.publish(Snapshot("1", (Endpoint(address),)))
    check = ConnectionCheck(cell)
    return check, lambda number, about: check.report(about, lambda: confirmed.append(number)), confirmed


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
        check, report, confirmed = checking(address)
        for number in range(1000):
            report(number, address)
        await until(lambda: accepted)
        await until(lambda: not check._checks)
        assert (accepted, confirmed) == ([1], [])
        report(1000, address)
        await until(lambda: len(accepted) == 2)


async def test_reports_about_an_endpoint_that_refuses_connections_are_confirmed_up_to_a_bound() -> None:
    async with listening() as (server, address, _):
        server.close()
        await server.wait_closed()
        check, report, confirmed = checking(address)
        for number in range(1000):
            report(number, address)
        await until(lambda: not check._checks)
        assert confirmed == list(range(connection_check._MOST_WAITING))


async def test_a_report_about_an_unknown_endpoint_opens_no_connection() -> None:
    async with listening() as (_, address, accepted):
        check, report, confirmed = checking("127.0.0.1:1")
        report(1, address)
        assert not check._checks
        assert (accepted, confirmed) == ([], [])
