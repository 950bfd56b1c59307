"""What an operator reads of the shared state, as typed methods, one a script; state/store.py has the
rest. Each call looks at no more than CHUNK rows, so that none holds Redis up, however long the queue is.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from picker_fleet.state import rows
from picker_fleet.state.keys import BETWEEN
from picker_fleet.state.link import Link
from picker_fleet.state.rows import Entry, Lane, WorkloadRow
from picker_fleet.state.schema import VIEW_LIMIT

CHUNK = VIEW_LIMIT  # rows a call
MOST_REPLICAS = 256
_MOST_SCANS = 10  # calls that one page of workloads may take


@dataclass(frozen=True, slots=True)
class Lanes:
    """Lanes in their order, each once; how many each group has in all: bands 0 to 2, then those parked."""

    lanes: list[Lane]
    totals: tuple[int, ...]


class Stretch(NamedTuple):
    """Ranks `first` to `last`, both with, of a lane."""

    band: int
    lane: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Running:
    """A request in flight; `lease_ms` is when its lease ends, as Redis spells it."""

    entry: Entry
    lease_ms: str
    lease_in_s: float


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """One request, with its lane and its rank in it while it is queued, and its lease while it runs."""

    entry: Entry
    rank: int | None
    lane: Lane | None
    overdue_rank: int | None
    lease_in_s: float | None


@dataclass(frozen=True, slots=True)
class ReplicaRow:
    id: str
    heartbeat_s_ago: float
    about: str  # JSON objects, one a line


class Reads:
    """Every method raises StateFault where Redis does not answer it in time (state/link.py)."""

    def __init__(self, link: Link, log: str) -> None:
        self._link = link
        self._log = log

    async def lanes(
        self,
        limit: int,
        *,
        group: int = 0,
        behind: tuple[str, str] | None = None,
        band: int | None = None,
        pause_s: float = 0.0,
    ) -> Lanes:
        """At most `limit` lanes from `group` on, behind a (start tag, name) in it; `band`: of that one.

        `pause_s` between the calls, of which each brings at most CHUNK.
        """
        found: list[Lane] = []
        totals: tuple[int, ...] = (0,) * 6
        while True:
            wanted = min(CHUNK, limit - len(found))
            tag, name = behind or ("", "")
            now, counts, *page = await self._link.call(
                "view_flows", group, tag, name, wanted, "" if band is None else int(band)
            )
            totals = tuple(counts)
            found += [rows.lane(row, float(now)) for row in page]
            if len(page) < wanted or len(found) >= limit:
                return Lanes(_each_once(found), totals)
            await asyncio.sleep(pause_s)
            group, behind = found[-1].group, (repr(found[-1].start), found[-1].name)

    async def lane(self, name: str) -> list[Lane]:
        """The lane of each band that has waiting requests under this name."""
        now, *page = await self._link.call("view_flow", name)
        return [rows.lane(row, float(now)) for row in page]

    async def queued(self, stretches: Sequence[Stretch]) -> list[list[Entry]]:
        """The requests of each stretch; some are missing if the queue has moved on meanwhile."""
        found: list[list[Entry]] = [[] for _ in stretches]
        for batch in _batches(stretches):
            args = [
                part for _, each in batch for part in (int(each.band), each.lane, each.first, each.last)
            ]  # fmt: skip
            now, *pages = await self._link.call("view_queue", *args)
            for (at, _), page in zip(batch, pages, strict=True):
                found[at] += [rows.entry(row, float(now)) for row in page]
        return found

    async def in_flight(self, limit: int, behind: tuple[str, str] | None = None) -> tuple[list[Running], int]:
        """At most `limit` in flight, behind a (lease, id), by when their leases end; and the total."""
        found: list[Running] = []
        while True:
            wanted = min(CHUNK, limit - len(found))
            now, total, *page = await self._link.call("view_inflight", *(behind or ("", "")), wanted)
            now_us = float(now)
            for row, lease_ms in zip(page[::2], page[1::2], strict=True):
                request_id, _, known = row.partition(BETWEEN)
                behind = (lease_ms, request_id)
                if known:
                    left_s = float(lease_ms) / 1e3 - now_us / 1e6
                    found.append(Running(rows.entry(row, now_us), lease_ms, left_s))
            if len(page) < 2 * wanted or len(found) >= limit:
                return found, total

    async def request(self, request_id: str) -> Whereabouts | None:
        """Where a request is; None if the pool knows nothing of it."""
        now, *told = await self._link.call("view_request", request_id)
        if not told:
            return None
        now_us = float(now)
        row, rank, lane, overdue, lease_ms = told
        return Whereabouts(
            rows.entry(row, now_us),
            None if rank == "" else int(rank),
            rows.lane(lane, now_us) if lane else None,
            None if overdue == "" else int(overdue),
            float(lease_ms) / 1e3 - now_us / 1e6 if lease_ms else None,
        )

    async def workloads(
        self, limit: int, cursor: str = "0", skip: int = 0
    ) -> tuple[list[WorkloadRow], int, tuple[str, int] | None]:
        """At most `limit` workloads of the registry, in no order, and their total.

        The third tells where to go on, as `cursor` and how many of what it gives have been given: None at
        the end. A workload that comes or goes meanwhile may be missed or come twice.
        """
        found: list[WorkloadRow] = []
        for _ in range(_MOST_SCANS):
            now, total, following, *page = await self._link.call(
                "view_workloads", cursor, min(CHUNK, limit + skip - len(found))
            )
            fresh = [rows.workload(row, float(now)) for row in page[skip:]]
            room = limit - len(found)
            found += fresh[:room]
            if len(fresh) > room:
                return found, total, (cursor, skip + room)
            if following == "0":
                return found, total, None
            cursor, skip = following, 0
            if len(found) == limit:
                break
        return found, total, (cursor, 0)

    async def workload(self, workload_id: str) -> WorkloadRow | None:
        now, *page = await self._link.call("view_workload", workload_id)
        return rows.workload(page[0], float(now)) if page else None

    async def replicas(self) -> list[ReplicaRow]:
        """Replicas that are known, live or silent."""
        now, *told = await self._link.call("view_replicas", MOST_REPLICAS)
        now_s = float(now) / 1e6
        return [
            ReplicaRow(replica, max(0.0, now_s - float(last_ms) / 1e3), about)
            for replica, last_ms, about in zip(told[::3], told[1::3], told[2::3], strict=True)
        ]

    async def decisions(self, limit: int) -> list[dict[str, str]]:
        """The last entries of the decision log, at most `limit`, oldest first; fields of
        docs/redis-schema.md."""
        page = await self._link.command("XREVRANGE", self._log, "+", "-", "COUNT", limit)
        return [dict(zip(fields[::2], fields[1::2], strict=True)) for _, fields in reversed(page)]


def _each_once(lanes: list[Lane]) -> list[Lane]:
    """In their order. One that moved on while they were read has come twice; it stands where it was last."""
    last = {(group % rows.PARKED, name): at for at, (group, name, *_) in enumerate(lanes)}
    return lanes if len(last) == len(lanes) else [lanes[at] for at in sorted(last.values())]


def _batches(stretches: Sequence[Stretch]) -> list[list[tuple[int, Stretch]]]:
    """The stretches, cut so that no call brings more than CHUNK rows; each with its own place."""
    batches: list[list[tuple[int, Stretch]]] = []
    room = 0
    for at, stretch in enumerate(stretches):
        first = stretch.first
        while first <= stretch.last:
            if not room:
                batches.append([])
                room = CHUNK
            last = min(stretch.last, first + room - 1)
            batches[-1].append((at, Stretch(stretch.band, stretch.lane, first, last)))
            room -= last - first + 1
            first = last + 1
    return batches
