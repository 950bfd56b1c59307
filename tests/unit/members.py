"""A replica's membership for tests."""

import asyncio
from typing import Any
from unittest.mock import Mock

from picker_fleet.admission.failover import Failover
from picker_fleet.admission.shared_queue import SharedQueue
from picker_fleet.domain.config import Settings
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.endpoints.readings import MetricsCache
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.fleet.heartbeat import HeartbeatTrigger, Membership
from picker_fleet.fleet.limits import LimitKeeper
from picker_fleet.scheduling.latency_model import LatencyModel
from picker_fleet.state.store import Store
from picker_fleet.telemetry.metrics import Metrics


def stays_shared() -> Mock:
    """A mock of Failover that always stays in the state SHARED."""
    fields = {"heartbeat_fields.return_value": {"degraded": False}}
    return Mock(spec=Failover, **{"status.return_value": None, **fields})


def member_of(
    store: Store, queue: SharedQueue, settings: Settings, cell: SnapshotCell, metrics: Metrics, **more: Any
) -> Membership:
    """A membership whose replica info is `{"host": "test"}`; nothing follows its live changes or suspects."""
    fleet = KnownFleet(settings)
    clock = asyncio.get_running_loop().time
    return Membership(
        store,
        queue,
        settings,
        endpoints=cell,
        metrics=metrics,
        fleet=fleet,
        limits=LimitKeeper(store, fleet, MetricsCache(None, clock), LatencyModel(), clock, metrics),
        replica_info={"host": "test"}.copy,
        on_config=lambda _: None,
        on_suspects=lambda _: None,
        **{"heartbeat_now": HeartbeatTrigger(), "failover": stays_shared(), **more},
    )
