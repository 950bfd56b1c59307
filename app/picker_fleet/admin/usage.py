"""The export of usage by hour, leaf and model, from which bills are made; fleet/usage.py counts it.

No token is counted in two rows. A row without a tenant has no figures, but a note where usage may be missing.
"""

import asyncio
import csv
import heapq
import io
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from picker_fleet.admin.fleet_state import PAUSE_S
from picker_fleet.admin.protection import Deadlines, Refused, Responses, faults, within
from picker_fleet.admin.tenants import TenantTree
from picker_fleet.domain.sections import Leases
from picker_fleet.fleet.usage import HOUR_MS
from picker_fleet.state.reads import Usage, UsageMark
from picker_fleet.state.store import Store

_DEFAULT_HOURS = 24
_AT_ONCE = 250  # rows made between two pauses
_MOST_HOURS = 2  # hours that are read at once: an hour may take 60 MB and half a second of CPU
_CSV, _JSON_LINES = "text/csv", "application/x-ndjson"
_NONE = Usage(0, 0, 0, 0, 0, 0.0)
_OTHERS = "the sum of tenants beyond the bound of an hour"
_UNFINISHED = "the hour has not ended"


class Row(NamedTuple):
    hour: int  # number of the hour since 1970
    tenant: str
    model: str
    usage: Usage
    note: str

    def fields(self) -> dict[str, Any]:
        """The row's columns by name, in order."""
        tenant, model = (each.encode(errors="replace").decode() for each in (self.tenant, self.model))
        named = {"hour": _text_of(self.hour * HOUR_MS), "tenant": tenant, "model": model}
        return {**named, **self.usage._asdict(), "note": self.note}


class UsageExport:
    """Reads the usage of one pool, an hour at a time. Methods raise StateFault if Redis does not answer."""

    def __init__(self, store: Store, leases: Leases) -> None:
        self._store, self._leases = store, leases
        self._reading = asyncio.Semaphore(_MOST_HOURS)

    def now_hour(self) -> int:
        """The present hour, by Redis's clock."""
        return self._store.now_ms() // HOUR_MS

    async def hours(self) -> list[int]:
        """The hours that have usage, the earliest first."""
        return await self._store.reads.usage_hours()

    async def rows(self, hour: int, *, is_followed: bool) -> AsyncGenerator[list[Row], None]:
        """The rows of an hour by tenant and model, a few at a time: requests must not wait while 100 000 rows
        are made. `is_followed`: the next hour has usage. At most `_MOST_HOURS` hours are read at once."""
        async with self._reading:
            async for part in self._rows(hour, is_followed=is_followed):
                yield part

    async def _rows(self, hour: int, *, is_followed: bool) -> AsyncIterator[list[Row]]:
        found = await self._store.reads.usage(hour)
        after = (await self._store.reads.usage(hour + 1)).marks if is_followed else {}
        names, parts = iter(found.rows), []
        while part := sorted(islice(names, _AT_ONCE)):
            parts.append(part)
            await asyncio.sleep(0)
        in_order = heapq.merge(*parts)
        while part := list(islice(in_order, _AT_ONCE)):
            yield [Row(hour, *each, found.rows[each], "" if any(each) else _OTHERS) for each in part]
            await asyncio.sleep(PAUSE_S)
        unfinished = [Row(hour, "", "", _NONE, _UNFINISHED)] if hour >= self.now_hour() else []
        yield [*unfinished, *self._losses(hour, found.marks, after)]

    def _losses(
        self, hour: int, marks: Mapping[str, UsageMark], after: Mapping[str, UsageMark]
    ) -> Iterator[Row]:
        """A row if Redis lost usage, and a row for each replica that stopped in the hour without leaving."""
        lost = marks.get("")
        if lost is not None:
            note = f"Redis lost data: usage before {_text_of(lost.sent_ms, 'milliseconds')} may be missing"
            yield Row(hour, "", "", _NONE, note)
        silent_ms = self._store.now_ms() - int(self._leases.replica_silence * 1000)
        for replica, mark in sorted(marks.items()):
            goes_on = replica in after or mark.sent_ms >= min((hour + 1) * HOUR_MS, silent_ms)
            if not (mark.left or goes_on):
                since, interval = _text_of(mark.sent_ms, "milliseconds"), f"{self._leases.heartbeat:g} s"
                note = f"replica {replica} stopped: usage may be missing, of up to {interval} after {since}"
                yield Row(hour, "", "", _NONE, f"{note}, or of an outage of Redis that began then")


def _text_of(ms: int, precision: str = "seconds") -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec=precision).replace("+00:00", "Z")


_COLUMNS = tuple(Row(0, "", "", _NONE, "").fields())
_EXAMPLE = Row(490896, "acme/search/key-17", "llama", Usage(12, 1, 5400, 1024, 2210, 12030.0), "")


def _encoded(rows: Iterable[Row], kind: str, *, header: bool = False) -> bytes:
    """The rows as lines of JSON or CSV (RFC 4180), with the names of the columns if `header`."""
    if kind == _JSON_LINES:
        return b"".join(orjson.dumps(row.fields(), option=orjson.OPT_APPEND_NEWLINE) for row in rows)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows([_COLUMNS] * header)
    writer.writerows(map(_cell, row.fields().values()) for row in rows)
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    """`value`, after an apostrophe if a spreadsheet could take the text for a formula (OWASP, "CSV
    Injection"), or if it begins with an apostrophe: then no two texts have the same cell."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "'")) else value


_ANSWERS: Responses = {
    200: {
        "description": "a row for each hour, tenant and model; rows without a tenant have a `note`",
        "content": {
            kind: {"schema": {"type": "string"}, "example": _encoded([_EXAMPLE], kind, header=True).decode()}
            for kind in (_JSON_LINES, _CSV)
        },
    }
}
_FROM = Query(alias="from", description="RFC 3339; from this hour on", examples=["2026-01-01T00:00:00Z"])
_TO = Query(alias="to", description="RFC 3339; up to this hour, exclusive", examples=["2026-01-02T00:00:00Z"])
_FORMAT = Query(alias="format", description="left out: by the header Accept, else `jsonl`", examples=["csv"])


def add_routes(routes: APIRouter, export: UsageExport, tenants: TenantTree, deadlines: Deadlines) -> None:
    """Add the call that exports usage."""
    limit_s = deadlines.read_s

    @routes.get(
        "/usage",
        summary="Usage by hour, tenant and model",
        response_class=StreamingResponse,
        responses={**_ANSWERS, **faults(404)},
    )
    async def usage(
        request: Request,
        first: Annotated[datetime | None, _FROM] = None,
        end: Annotated[datetime | None, _TO] = None,
        form: Annotated[Literal["jsonl", "csv"] | None, _FORMAT] = None,
    ) -> StreamingResponse:
        """Ended requests, their tokens and costs, as JSON lines or CSV; without times the last 24 hours."""
        if not (kept := await within(limit_s, export.hours())):
            tenants.tree()  # raises no_tenants: without tenants there is no usage
        end_hour = export.now_hour() + 1 if end is None else _hour_of(end)
        first_hour = max(0, end_hour - _DEFAULT_HOURS if first is None else _hour_of(first))
        if first is not None and first_hour > end_hour:
            raise Refused(422, "bad_from", "query.from: is later than query.to, or than now")
        is_csv = form == "csv" or (form is None and _CSV in request.headers.get("accept", ""))
        kind = _CSV if is_csv else _JSON_LINES

        async def lines() -> AsyncIterator[bytes]:
            notes = []
            if kept and first_hour < kept[0]:
                oldest = _text_of(kept[0] * HOUR_MS)
                notes.append(Row(first_hour, "", "", _NONE, f"no usage is kept of hours before {oldest}"))
            yield _encoded(notes, kind, header=True)
            for hour in kept:
                if first_hour <= hour < end_hour:
                    async with aclosing(export.rows(hour, is_followed=hour + 1 in kept)) as parts:
                        async for rows in parts:
                            yield _encoded(rows, kind)

        return StreamingResponse(lines(), media_type=kind)


def _hour_of(time: datetime) -> int:
    at = time if time.tzinfo is not None else time.replace(tzinfo=UTC)
    return max(int(at.timestamp()), 0) * 1000 // HOUR_MS
