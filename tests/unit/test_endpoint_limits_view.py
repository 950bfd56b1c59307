"""The rows of endpoints in the admin API say which limit is in force, and why."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from scripted_store import POOL

from picker_fleet.admin.views import FleetView
from picker_fleet.domain.config import parse
from picker_fleet.domain.request import Endpoint
from picker_fleet.state.pool_state import PREFILL, FoundLimit

FOUND, CAPPED, FULL, PINNED, NEW, PREFILLER = (f"10.0.0.{n}:8000" for n in range(1, 7))
LISTED = (
    *(Endpoint(address) for address in (FOUND, FULL, PINNED, NEW)),
    Endpoint(CAPPED, max_inflight=8),
    Endpoint(PREFILLER, prefills=True, decodes=False),
)
LIMITS = {FOUND: 36, CAPPED: 8, FULL: 5, PINNED: 24, NEW: 8}
WHY = "engine queued 3 requests at 40 in flight"


class Replica:
    """A replica's membership, store, readings and latencies, with scripted limits."""

    def __init__(self, controller: dict[str, Any]) -> None:
        self.effective = SimpleNamespace(settings=parse({"request_queue_controller": controller}))
        self.outage: object = None
        self.reads = 0
        self.limits = LIMITS
        self.moved_ms = 47_500

    async def state(self) -> Any:
        pool = replace(POOL, now_us=50_000_000, limits=self.limits, prefill_limits={PREFILLER: 36})
        return SimpleNamespace(pool=pool, outage=self.outage)

    async def endpoints(self) -> tuple[Endpoint, ...]:
        return LISTED

    async def found_limits(self) -> dict[str, FoundLimit]:
        self.reads += 1
        names = (FOUND, CAPPED, FULL, PINNED, PREFILL + PREFILLER)
        return {name: FoundLimit(36, WHY, self.moved_ms) for name in names}

    def snapshot(self) -> dict[str, Any]:
        return {}

    def stats(self, _: str) -> None: ...

    def view(self) -> FleetView:
        parts = [cast(Any, self)] * 4
        return FleetView(*parts, cast(Any, None), cast(Any, None), replica="r", pool="default")


async def rows(view: FleetView) -> dict[str, tuple[object, ...]]:
    return {
        each.address: (each.limit, each.limit_reason, each.limit_changed_s, each.pinned)
        for each in await view.endpoints()
    }


async def test_an_endpoints_row_gives_the_reason_of_its_limit_in_force_also_in_an_outage() -> None:
    replica = Replica({"pinned": {PINNED: 24}})
    view = replica.view()
    shown = await rows(view)
    assert shown == {
        FOUND: (36, WHY, 2.5, False),
        CAPPED: (8, "max_inflight of discovery; the fleet found 36", None, False),
        FULL: (5, "the endpoint was full or ejected; the fleet found 36", None, False),
        PINNED: (24, "pinned", None, True),
        NEW: (8, None, None, False),
        PREFILLER: (None, WHY, 2.5, False),
    }
    replica.outage = object()
    assert await rows(view) == shown
    assert replica.reads == 1


async def test_an_endpoint_is_not_called_full_just_after_a_change_of_the_bounds() -> None:
    replica = Replica({"max_per_backend": 5})
    assert (await rows(replica.view()))[FULL] == (5, "max_per_backend; the fleet found 36", None, False)


async def test_a_limit_in_force_since_shortly_before_an_outage_has_no_reason() -> None:
    replica = Replica({})
    view = replica.view()
    await rows(view)
    replica.limits, replica.outage = {**LIMITS, FOUND: 30}, object()
    assert (await rows(view))[FOUND] == (30, None, None, False)


async def test_a_limit_that_rises_while_a_row_is_read_does_not_make_the_endpoint_full() -> None:
    replica = Replica({})
    replica.limits, replica.moved_ms = {**LIMITS, FOUND: 30}, 49_990
    assert (await rows(replica.view()))[FOUND][1] == WHY


async def test_in_mode_static_rows_have_no_reasons_and_no_command_reads_found_limits() -> None:
    replica = Replica({"watermark_per_backend": 4, "pinned": {PINNED: 24}})
    shown = await rows(replica.view())
    assert set(shown.values()) == {(limit, None, None, False) for limit in (*LIMITS.values(), None)}
    assert replica.reads == 0


def test_an_unready_replica_says_why_it_does_not_join_its_pool() -> None:
    replica = Replica({})
    vars(replica).update(pulse=None, fault="", unfit="", refusal="the pool has format 2", has_list=True)
    _, components = replica.view().ready()
    assert components == {"redis": "ok", "pool": "the pool has format 2", "endpoints": "none is ready"}


def test_health_tells_that_discovery_has_no_list_although_redis_knows_the_endpoints() -> None:
    replica = Replica({})
    vars(replica).update(fault="", unfit="", status="ok", refusal="", has_list=False)
    for ready_endpoints in (0, 4):
        vars(replica).update(pulse=SimpleNamespace(epoch="1", ready_endpoints=ready_endpoints))
        joined, components = replica.view().ready()
        assert joined
        assert components["endpoints"] == "discovery has no list yet; the log says why"
