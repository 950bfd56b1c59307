"""The tree of tenants in the admin API: each node's settings, balances and shares, and operators' changes.

`TenantTree` works through the shared state, so a change is in force for the whole fleet with the next
decision. `add_routes` adds these API calls to an HTTP server.
"""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from fastapi import APIRouter, Path, Request
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter, ValidationError

from picker_fleet.admin import models
from picker_fleet.admin.changes import FleetControls, json_body, read_object
from picker_fleet.admin.fleet_state import PAUSE_S, FleetState, FleetStateCache
from picker_fleet.admin.protection import Deadlines, Refused, faults, within
from picker_fleet.admin.views import decode_cursor, encode_cursor
from picker_fleet.domain.config import parse
from picker_fleet.domain.errors import ConfigError, StateUnavailable
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.domain.tenants import PERIODS, Node, Tree
from picker_fleet.state.reads import LimitRow, TenantRow
from picker_fleet.state.store import STALE, Store

PAGE = 50  # maximum child nodes on a page
_SUMMED_AT_ONCE = 100  # flows summed between two pauses
OF_TENANTS = TypeAdapter(tuple[Literal["tenants"], str])
_NODE: dict[str, Any] = {
    "weight": 3,
    "over_limit": "queue",
    "limits": [{"tokens": 1000000, "per": "1m", "burst": 200000}],
}
_TOP_UP: dict[str, Any] = {"unit": "tokens", "per": "1m", "amount": 50000}
_Path = Annotated[str, Path(description="the node's path, such as acme/search", examples=["acme/search"])]


@dataclass(slots=True)
class _Activity:
    """The waiting requests of the flows below a node, and their served cost per second, over 10 s."""

    above: str = ""  # the parent's path
    queued: int = 0
    oldest_s: float = 0.0
    cost_per_s: float = 0.0
    weight: float = 1.0  # weight of the leaf's requests
    can_run: bool = False  # whether some flow waits without being throttled


class _Siblings(NamedTuple):
    """The `paths` of children of one node, the sum of their weights, and their served cost per second."""

    paths: frozenset[str]
    weights: float
    cost_per_s: float


class TenantTree:
    """Reads and changes the tree of one pool; `follow` reads the nodes with settings into `fleet`. One event
    loop."""

    def __init__(
        self,
        store: Store,
        cache: FleetStateCache,
        fleet: KnownFleet,
        follow: Callable[[], Awaitable[None]],
    ) -> None:
        self._store, self._cache, self._fleet, self._follow = store, cache, fleet, follow
        # The tree whose children are listed, and by path the children with settings (own, or of nodes below).
        self._listed: tuple[Tree | None, dict[str, set[str]]] = None, {}
        self._summed: tuple[FleetState, dict[str, _Activity]] = FleetState(), {}

    def tree(self) -> Tree:
        """The nodes with settings, as read last. Raises Refused (404) without tenants."""
        if self._fleet.tenants is None:
            raise Refused(404, "no_tenants", "the configuration has no section `tenants`")
        return self._fleet.tenants

    async def page(self, path: str, cursor: str | None = None) -> models.Tenants:
        """The node at `path` ('': the root), and a page of its children.

        Raises:
            Refused: 404 if the node has neither settings, requests, balances nor children.
            BadCursor: another list returned `cursor`.
        """
        await self._follow()
        tree = self.tree()
        after = "" if cursor is None else decode_cursor(cursor, OF_TENANTS)[1]
        fleet, active = await self._activities(tree)
        with_requests = (each for each, activity in active.items() if activity.above == path)
        children = sorted({*self._with_settings(tree, path), *with_requests})
        shown = list(itertools.islice((each for each in children if each > after), PAGE + 1))
        rows = await self._store.reads.tenants([path, *shown[:PAGE]] if path else shown[:PAGE])
        own = rows.pop(0) if path else None
        if own is not None and not (own.of or own.limits or children or path in active):
            raise Refused(404, "unknown_tenant", "the node has no settings, no requests and no children")
        tenant = None
        if own is not None:
            above = ("", *tree.paths(path))[-2]
            tenant = _tenant(own, tree, fleet, active, _siblings(active, above, tree))
        siblings = _siblings(active, path, tree)
        return models.Tenants(
            tenant=tenant,
            children=[_tenant(row, tree, fleet, active, siblings) for row in rows],
            total=len(children),
            cursor=encode_cursor("tenants", shown[PAGE - 1]) if len(shown) > PAGE else None,
        )

    # Changes return the former and the new value, and note both in `request.state.detail`, for the record of
    # the change. Changes raise StateFault if Redis does not answer.

    async def put(self, request: Request, path: str, body: Mapping[str, Any]) -> models.TenantChange:
        """Replace the node at `path`. Raises ConfigError if the node is invalid, or its limits contradict the
        limits above or below it."""
        if body.get("path", path) != path:
            raise ConfigError(f"path: this call changes the node {path}; leave `path` out of the body")
        section = {"separator": self.tree().separator, "nodes": [{**body, "path": path}]}
        tenants = parse({"tenants": section}).tenants
        assert tenants is not None
        return await self._set(request, path, tenants.nodes[0].shared())

    async def undo(self, request: Request, path: str) -> models.TenantChange:
        """Undo the live change of the node at `path`. Raises Refused (404) without a change, ConfigError if
        the configured limits contradict the limits above or below."""
        self.tree()
        return await self._set(request, path, "")

    async def _set(self, request: Request, path: str, text: str) -> models.TenantChange:
        """Store the live change `text`; '' removes the change, and the configured settings apply again. If
        another change is made meanwhile, by any replica, check this change against the other change, too."""
        answer = STALE
        while answer == STALE:
            version = await self._store.tenants_version()
            configured, live = await self._store.tenant_settings(path)
            if not (text or live):
                raise Refused(404, "unknown_change", "no operator has changed this node")
            await self._follow()
            settings = live or configured, text or configured
            former, node = (Node.of_shared(path, each) if each else None for each in settings)
            tree = self.tree().changed(path, node)
            if node is not None and (fault := await asyncio.to_thread(tree.fault_by, node)):
                raise ConfigError(fault)
            change = models.TenantChange(path=path, old=_told(former), new=_told(node))
            request.state.detail = change.model_dump_json()
            answer = await self._store.set_tenants("tenant_changes", {"": version, path: text})
        if not answer:
            raise StateUnavailable("the pool is not known yet: no replica has published its settings")
        return change

    async def top_up(self, request: Request, path: str, asked: models.TopUp) -> models.TenantChange:
        """Lower the used part of a limit. Raises Refused (404) if the node has no such limit, or no balances,
        since its path ends in `*`."""
        self.tree()
        if path.endswith("*"):
            raise Refused(404, "unknown_limit", f"{path} stands for other nodes; top up one of them")
        kind = asked.unit, next((ms for ms, name in PERIODS.items() if name == asked.per), asked.per)
        (row,) = await self._store.reads.tenants([path])
        left = await self._store.top_up_tenant(path, *kind, asked.amount)
        if left is None:
            raise Refused(404, "unknown_limit", f"{path} has no limit of {asked.unit} per {asked.per}")
        limit = {"unit": asked.unit, "per": asked.per}
        before = next((each.left for each in row.limits if (each.unit, each.per) == kind), None)
        change = models.TenantChange(
            path=path, old={**limit, "remaining": before}, new={**limit, "remaining": left}
        )
        request.state.detail = change.model_dump_json()
        return change

    def _with_settings(self, tree: Tree, above: str) -> set[str]:
        """The children of `above` with settings, for themselves or for nodes below."""
        if tree is not self._listed[0]:
            children: dict[str, set[str]] = {}
            for path in tree.nodes:
                for parent, child in itertools.pairwise(("", *tree.paths(path))):
                    children.setdefault(parent, set()).add(child)
            self._listed = tree, children
        return self._listed[1].get(above, set())

    async def _activities(self, tree: Tree) -> tuple[FleetState, dict[str, _Activity]]:
        """The activity of each node with requests, from a fleet state that is at most a second old."""
        fleet = await self._cache.get()
        if fleet is self._summed[0]:
            return self._summed
        found: dict[str, _Activity] = {}
        for at, queue in enumerate(fleet.queues, 1):
            for above, path in _steps(tree, queue.name):
                each = found.setdefault(path, _Activity(above))
                each.queued += queue.queued
                each.oldest_s = max(each.oldest_s, queue.oldest_s)
                each.can_run = each.can_run or not queue.throttled
            found[queue.name].weight = queue.weight
            if at % _SUMMED_AT_ONCE == 0:
                await asyncio.sleep(PAUSE_S)
        for (_, flow), cost in fleet.served.flows.items():
            for above, path in _steps(tree, flow):
                found.setdefault(path, _Activity(above)).cost_per_s += cost
        self._summed = fleet, found
        return self._summed


def _steps(tree: Tree, flow: str) -> Iterator[tuple[str, str]]:
    """The pairs (parent's path, child's path) on a flow's way from the root down. The root has the path '';
    a flow without tenant, such as `/key`, is the root's child."""
    return itertools.pairwise(("", *filter(None, tree.paths(flow))))


def _told(node: Node | None) -> dict[str, Any] | None:
    """The settings of a node in the form of a call that sets them."""
    return None if node is None else node.model_dump(mode="json", exclude_unset=True, exclude={"path"})


def _siblings(active: Mapping[str, _Activity], above: str, tree: Tree) -> _Siblings:
    """The children of `above` with requests that may run; thousands of them, summed once for a page."""
    paths = frozenset(path for path, each in active.items() if each.above == above and each.can_run)
    weights = sum(_weight(each, tree, active) for each in paths)
    return _Siblings(paths, weights, sum(active[each].cost_per_s for each in paths))


def _weight(path: str, tree: Tree, active: Mapping[str, _Activity]) -> float:
    node = tree.node(path)
    return node.weight if node is not None else active[path].weight if path in active else 1.0


def _tenant(
    row: TenantRow,
    tree: Tree,
    fleet: FleetState,
    active: Mapping[str, _Activity],
    siblings: _Siblings,
) -> models.Tenant:
    activity = active.get(row.path, _Activity())
    weight = _weight(row.path, tree, active)
    weights = siblings.weights if row.path in siblings.paths else 0.0
    served = siblings.cost_per_s
    has_all = fleet.complete and not fleet.served.truncated
    settings = orjson.loads(row.settings) if row.settings else {}
    in_flight = next((each for each in row.limits if each.unit == "parallel"), None)
    return models.Tenant(
        path=row.path,
        source=("operator" if row.is_live else "configuration") if row.of else "default",
        settings_of=row.of or None,
        weight=weight,
        over_limit=settings.get("over_limit", "queue"),
        limits=[_limit(each) for each in row.limits],
        in_flight=None if in_flight is None else int(in_flight.burst - in_flight.left),
        served_cost=row.served,
        queued=activity.queued,
        oldest_s=activity.oldest_s if activity.queued else None,
        served_cost_per_s=activity.cost_per_s if has_all else None,
        share=min(activity.cost_per_s / served, 1.0) if served and weights and has_all else None,
        fair_share=weight / weights if weights and fleet.complete else None,
        waits=row.waits_s is not None,
        waits_s=row.waits_s or None,
    )


def _limit(row: LimitRow) -> models.TenantLimit:
    return models.TenantLimit(
        unit=row.unit,
        per=PERIODS.get(row.per, row.per) or None,
        amount=row.amount,
        burst=row.burst,
        remaining=row.left,
        reset_s=None if row.unit == "parallel" else row.reset_s,
    )


def add_routes(
    reading: APIRouter,
    changing: APIRouter,
    tree: TenantTree,
    controls: FleetControls,
    deadlines: Deadlines,
) -> None:
    """Add the calls that read the tree to `reading`, and the calls that change it, which `controls` records,
    to `changing`."""

    limit_s = deadlines.change_s

    @reading.get("/tenants", summary="The tenants", responses=faults(400, 404))
    async def tenants(cursor: models.Cursor = None) -> models.Tenants:
        """The tenants at the top of the tree that have settings or requests."""
        return await within(deadlines.read_s, tree.page("", cursor))

    @reading.get("/tenants/{tenant:path}", summary="One tenant", responses=faults(400, 404))
    async def tenant(tenant: _Path, cursor: models.Cursor = None) -> models.Tenants:
        """One node of the tree, and a page of its children that have settings or requests."""
        return await within(deadlines.read_s, tree.page(tenant, cursor))

    @changing.put(
        "/tenants/{tenant:path}",
        summary="Change a tenant",
        responses=faults(400, 404, 408, 413, 422),
        openapi_extra=json_body(_NODE),
    )
    async def put(request: Request, tenant: _Path) -> models.TenantChange:
        """Put a node's settings in force in place of the configured ones; the body is the whole node."""
        body = await read_object(request, deadlines.body_s)
        return await controls.noted(request, limit_s, tree.put(request, tenant, body))

    @changing.delete("/tenants/{tenant:path}", summary="Undo a tenant's change", responses=faults(404))
    async def undo(request: Request, tenant: _Path) -> models.TenantChange:
        """Remove a node's live change, so that the configured settings, if any, are in force again."""
        return await controls.noted(request, limit_s, tree.undo(request, tenant))

    @changing.post(
        "/tenants/{tenant:path}/top-up",
        summary="Top a tenant's limit up",
        responses=faults(400, 404, 408, 413, 422),
        openapi_extra=json_body(_TOP_UP),
    )
    async def top_up(request: Request, tenant: _Path) -> models.TenantChange:
        """Lower the used part of one limit or budget of a node, at most to 0."""
        body = await read_object(request, deadlines.body_s)
        try:
            asked = models.TopUp.model_validate(body)
        except ValidationError as fault:
            raise RequestValidationError(fault.errors()) from None
        return await controls.noted(request, limit_s, tree.top_up(request, tenant, asked))
