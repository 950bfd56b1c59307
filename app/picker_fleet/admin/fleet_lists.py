"""The admin API's lists, read from the shared state at a cost that does not grow with the queue."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from picker_fleet.admin import cursor as cursors
from picker_fleet.admin import foretold, shown
from picker_fleet.admin.foretold import Point, Turn
from picker_fleet.admin.standing import MOST_LANES, Lookout
from picker_fleet.admin.whereabouts import why
from picker_fleet.replica.heartbeat import Membership
from picker_fleet.request import Band
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.state.reads import Stretch
from picker_fleet.state.rows import Entry, Lane
from picker_fleet.state.store import Store

_Row = TypeVar("_Row")
_SCANNED = 200  # workloads among which the busiest are looked for
_BY_TURN = "in dispatch order: flows by start tag, each request where its flow's next ones are foretold to be"
_BETWEEN_BANDS = {
    "strict": "band after band",
    "weighted": "band after band, though bands take turns by their weights",
}
_WITHIN = {
    "fcfs": "in a flow by arrival",
    "edf": "in a flow by deadline",
    "workload-aware": "in a flow by arrival, and those on one page by score",
}


class FleetLists:
    """`admin.view.Lists` over a replica's own parts. `chooser` tells of what this replica has placed."""

    def __init__(
        self, store: Store, membership: Membership, lookout: Lookout, chooser: EndpointChooser, replica: str
    ) -> None:
        self._store = store
        self._membership = membership
        self._lookout = lookout
        self._chooser = chooser
        self._replica = replica

    async def flows(self, limit: int, cursor: str | None, band: Band | None) -> dict[str, Any]:
        group, behind = 0, None
        if cursor is not None:
            group_told, tag, name = cursors.decode(cursor, "flows", int, str, str)
            group, behind = int(group_told), (cursors.finite(tag), str(name))
        standing = await self._lookout.standing()
        lanes, totals = standing.page(limit + 1, group, behind, band), standing.totals
        if lanes is None:
            page = await self._store.reads.lanes(limit + 1, group=group, behind=behind, band=band)
            lanes, totals = page.lanes, page.totals
        lanes, more = lanes[:limit], len(lanes) > limit
        return {
            "flows": await self._flows(lanes),
            "total": sum(count for at, count in enumerate(totals) if band is None or at % 3 == band),
            "cursor": _cursor(more, "flows", lanes, lambda last: (last.group, repr(last.start), last.name)),
        }

    async def flow(self, name: str) -> dict[str, Any] | None:
        lanes = await self._store.reads.lane(name)
        standing = await self._lookout.standing()
        served = {band: standing.served_per_s(band, name) or 0.0 for band in Band}
        if not lanes and not any(served.values()):
            return None
        queue = self._membership.effective.settings.fair_request_queue
        return {
            "flow": name,
            "bands": await self._flows(lanes),
            "served_cost_per_s": {shown.BANDS[band]: round(each, 6) for band, each in served.items()},
            "weight_override": self._membership.effective.weights.get(name),
            "flow_capacity": queue.flow_capacity,
        }

    async def queue(
        self, limit: int, cursor: str | None, band: Band | None, flow: str | None
    ) -> dict[str, Any]:
        behind = None
        if cursor is not None:
            group, tag, name = cursors.decode(cursor, "queue", int, str, str)
            behind = Point(int(group), float(cursors.finite(tag)), str(name))
        lanes: Sequence[Lane]
        if flow is None:
            standing = await self._lookout.standing()
            lanes = standing.lanes if band is None else standing.bands[band].lanes
            total = standing.queued(band) if standing.whole else await self._queue_length(band)
        else:
            lanes = [lane for lane in await self._store.reads.lane(flow) if band is None or lane.band == band]
            total = sum(lane.queued for lane in lanes)
        turns = foretold.turns(lanes, behind, limit + 1)
        turns, more = turns[:limit], len(turns) > limit
        return {
            "requests": await self._queued(turns),
            "total": total,
            "cursor": _cursor(
                more, "queue", turns, lambda last: (last.lane.group, repr(last.tag), last.lane.name)
            ),
            "order": self._order(),
        }

    async def in_flight(self, limit: int, cursor: str | None) -> dict[str, Any]:
        behind = None
        if cursor is not None:
            lease_ms, request_id = cursors.decode(cursor, "inflight", str, str)
            behind = (cursors.finite(lease_ms), str(request_id))
        found, total = await self._store.reads.in_flight(limit + 1, behind)
        found, more = found[:limit], len(found) > limit
        return {
            "requests": [shown.running(each) for each in found],
            "total": total,
            "cursor": _cursor(more, "inflight", found, lambda last: (last.lease_ms, last.entry.id)),
        }

    async def request(self, request_id: str) -> dict[str, Any] | None:
        explained = self._chooser.explain(request_id)
        explanation = None if explained is None else explained.to_dict()
        found = await self._store.reads.request(request_id)
        if found is None:
            if explanation is None:
                return None
            reason = (
                "this replica placed it; it has ended since, or the pool has lost it"
                if explanation["chosen"]
                else "this replica refused it: there was no endpoint for it"
            )
            return {
                "id": request_id,
                "state": "unknown-to-the-pool",
                "why": reason,
                "explanation": explanation,
            }
        state = await self._membership.state()
        ahead: int | None = None
        told = shown.in_flight(found.entry)
        if found.entry.state in ("queued", "held"):
            tag = None
            if found.lane is not None and found.rank is not None:
                tag = foretold.tag_of(found.lane, found.rank)
                others = (await self._lookout.standing()).lanes
                ahead = found.rank + foretold.before(
                    [
                        each
                        for each in others
                        if (each.group, each.name) != (found.lane.group, found.lane.name)
                    ],
                    Point(found.lane.group, tag, found.lane.name),
                )
            told = shown.queued(found.entry, None if ahead is None else ahead + 1, tag)
        return {
            **told,
            "lease_in_s": shown.rounded(found.lease_in_s),
            "why": why(found, state, ahead, self._membership.effective.settings.claim_share),
            "explanation": explanation,
        }

    async def workloads(self, limit: int, cursor: str | None) -> dict[str, Any]:
        place: tuple[str, int] = ("0", 0)
        if cursor is not None:
            at, skip = cursors.decode(cursor, "workloads", str, int)
            if not str(at).isascii() or not str(at).isdigit() or int(at) >= 2**64 or int(skip) > 10_000:
                raise cursors.BadCursor
            place = (str(at), int(skip))
        found, total, following = await self._store.reads.workloads(limit, *place)
        settings = self._membership.effective.settings
        return {
            "workloads": [shown.workload(row, settings) for row in found],
            "total": total,
            "cursor": following and cursors.encode("workloads", *following),
        }

    async def busiest(self, limit: int) -> dict[str, Any]:
        found, total, _ = await self._store.reads.workloads(_SCANNED)
        found.sort(key=lambda row: (-row.active, row.last_request_s_ago))
        settings = self._membership.effective.settings
        return {"workloads": [shown.workload(row, settings) for row in found[:limit]], "total": total}

    async def workload(self, workload_id: str) -> dict[str, Any] | None:
        row = await self._store.reads.workload(workload_id)
        return None if row is None else shown.workload(row, self._membership.effective.settings)

    async def replicas(self) -> list[dict[str, Any]]:
        silence_s = self._membership.effective.settings.leases.replica_silence
        standing = await self._lookout.standing()
        found = [shown.replica(told, this=self._replica, silence_s=silence_s) for told in standing.replicas]
        return sorted(found, key=lambda each: (not each["live"], each["id"]))

    async def _flows(self, lanes: Sequence[Lane]) -> list[dict[str, Any]]:
        standing = await self._lookout.standing()
        even = self._membership.effective.settings.fair_request_queue.fairness == "round-robin"
        weights = {band: standing.weights(band, even=even) for band in Band}
        return [shown.flow(lane, standing, weights[Band(lane.band)], even=even) for lane in lanes]

    async def _queue_length(self, band: Band | None) -> int:
        state = await self._membership.state()
        return int(state["queued"] if band is None else state["queue_length"][shown.BANDS[band]])

    async def _queued(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """The requests of `turns`."""
        of_lanes: dict[tuple[int, str], list[Turn]] = {}
        for turn in turns:
            of_lanes.setdefault((turn.lane.group, turn.lane.name), []).append(turn)
        stretches = [
            Stretch(theirs[0].lane.band, theirs[0].lane.name, theirs[0].rank, theirs[-1].rank)
            for theirs in of_lanes.values()
        ]
        found: dict[str, tuple[Turn, Entry]] = {}
        for theirs, entries in zip(of_lanes.values(), await self._store.reads.queued(stretches), strict=True):
            if len(entries) > 1:  # of what stands on one page of a lane, the best score is served first
                entries.sort(key=lambda entry: -sum(entry.score or ()))
            for turn, entry in zip(theirs, entries, strict=False):
                found[entry.id] = turn, entry
        rows = sorted(found.values(), key=lambda row: row[0].position)
        return [shown.queued(entry, turn.position, turn.tag) for turn, entry in rows]

    def _order(self) -> str:
        queue = self._membership.effective.settings.fair_request_queue
        order = f"{_BY_TURN}; {_BETWEEN_BANDS[queue.band_policy]}; {_WITHIN[queue.ordering]}"
        guard = f"; up to {queue.guard_share:.0%} of dispatches go to the most overdue before all others"
        return order + guard + f"; flows at their limit last; of the first {MOST_LANES} flows"


def _cursor(
    more: bool, name: str, rows: Sequence[_Row], place: Callable[[_Row], tuple[str | int, ...]]
) -> str | None:
    """Where the list `name` goes on behind the last of `rows`; None if there are no more."""
    return cursors.encode(name, *place(rows[-1])) if more else None
