"""One replica as a process, as it is or as a control: `python -m bench.rig.replica VARIANT CONFIG`.

Prints the ready line of `picker serve`. A control differs from the product in one part, which the replica is
given in place of its own.
"""

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import uvloop

from picker_fleet import assembly, serve
from picker_fleet.config import load
from picker_fleet.endpoints.snapshot import SnapshotCell
from picker_fleet.request import InferenceRequest
from picker_fleet.scheduling.chooser import Choice, ScoringChooser
from picker_fleet.scheduling.route_stream import RouteStream
from picker_fleet.scheduling.scheduler import Scheduler
from picker_fleet.telemetry import logs


class SnapshotOnly(ScoringChooser):
    """Chooses by what this replica knows, and leaves the script nothing to choose: no atomic reserve."""

    def choose(self, request: InferenceRequest) -> Choice:
        choice = super().choose(request)
        return Choice(choice.candidates.partition(",")[0], choice.basis)


class OwnRoutes(RouteStream):
    """Knows what this replica has routed and nothing of the others."""

    async def run(self) -> None:
        await asyncio.Event().wait()


class RoundRobin(ScoringChooser):
    """Every endpoint in its turn."""

    def __init__(self, scheduler: Scheduler | None, endpoints: SnapshotCell, **parts: Any) -> None:
        super().__init__(scheduler, endpoints, **parts)
        self._pool = endpoints
        self._turn = itertools.count()

    def choose(self, request: InferenceRequest) -> Choice:
        known = self._pool.current.endpoints
        chosen = known[next(self._turn) % len(known)].address
        return super().choose(request)._replace(candidates=chosen)


VARIANTS: Mapping[str, Callable[[], None]] = {
    "product": lambda: None,
    "snapshot-only": lambda: setattr(assembly, "ScoringChooser", SnapshotOnly),
    "own-routes": lambda: setattr(assembly, "RouteStream", OwnRoutes),
    "round-robin": lambda: setattr(assembly, "ScoringChooser", RoundRobin),
}


def _report(bound: serve.Bound) -> None:
    print(json.dumps({"ready": True, **asdict(bound)}), flush=True)


if __name__ == "__main__":
    variant, config = sys.argv[1:]
    VARIANTS[variant]()
    settings = load(Path(config), os.environ)
    name = serve.new_incarnation()
    logs.setup("WARNING", replica=name, pool=settings.pool)
    uvloop.run(serve.serve(settings, name, _report))
