"""One replica as a process, as it is or as a control: `python -m bench.prefix.replica VARIANT CONFIG`.

Prints the ready line of `picker serve`. A control replaces one part of the product.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import uvloop

from picker_fleet import pool, serve
from picker_fleet.config import load
from picker_fleet.scheduling.route_stream import RouteStream
from picker_fleet.telemetry import logs


class OwnRoutes(RouteStream):
    """Knows only what this replica has routed."""

    async def run(self) -> None:
        await asyncio.Event().wait()


VARIANTS: Mapping[str, Callable[[], None]] = {
    "product": lambda: None,
    "own-routes": lambda: setattr(pool, "RouteStream", OwnRoutes),
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
