"""A chooser for tests, with parts that the test can set."""

from collections.abc import Callable, Mapping
from typing import Any

from picker_fleet.domain.config import parse
from picker_fleet.domain.known_fleet import KnownFleet
from picker_fleet.endpoints.readings import MetricsCache
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.scheduling.chooser import EndpointChooser
from picker_fleet.scheduling.route_stream import RouteStream
from picker_fleet.state.accounting_token import Keyring


def fleet_with(*scorers: str, busy: bool = True, **scheduling: Any) -> KnownFleet:
    """A replica's view of the fleet, configured with `scorers` of weight 1 and the settings `scheduling`; the
    bounds are configured."""
    scheduling = {"scorers": dict.fromkeys(scorers, 1), **scheduling}
    bounds = {"watermark_per_backend": 2}
    fleet = KnownFleet(parse({"scheduling": scheduling, "request_queue_controller": bounds}))
    fleet.busy = busy
    return fleet


def chooser_of(
    cell: SnapshotCell,
    fleet: KnownFleet | None = None,
    *,
    in_flight: Mapping[str, int] | None = None,
    readings: MetricsCache | None = None,
    keys: Keyring | None = None,
    routes: RouteStream | None = None,
    clock: Callable[[], float] = lambda: 0.0,
) -> EndpointChooser:
    """A chooser over the endpoints in `cell`, by default without scorers, whose clock stands still."""
    fleet = fleet or fleet_with()
    fleet.in_flight = in_flight or {}
    readings = readings or MetricsCache(None, clock)
    routes = routes or RouteStream("redis://127.0.0.1:1/0", stream="s", replica="r")
    return EndpointChooser(fleet, cell, readings=readings, routes=routes, keys=keys or Keyring(), clock=clock)
