"""The command `picker functions load` loads the library of Redis Functions (docs/redis.md).

The command runs as a Redis user with the right to load functions, so that replicas need no such right. With
the option `--keep` the command runs beside Redis and loads the library again whenever the library is missing
or changed: after a restart without persistence, or a failover.
"""

import argparse
import asyncio
import os
import sys
from pathlib import Path

from picker_fleet.domain.config import load, pools_of
from picker_fleet.domain.errors import ConfigError, StateUnavailable
from picker_fleet.domain.redis_address import redis_url
from picker_fleet.state.error_replies import explained
from picker_fleet.state.keys import Keys
from picker_fleet.state.scripts import load_library
from picker_fleet.state.subscriptions import CommandClient

_DEADLINE_S = 10.0
_LOOK_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("load",), help="load the library of this version")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration; its redis.url and pools are used"
    )
    parser.add_argument(
        "--redis", metavar="URL", help="overrides the configuration's redis.url; default $PICKER_REDIS__URL"
    )
    parser.add_argument(
        "--pool", default="default", help="without --config: the pool whose Cluster node gets the library"
    )
    parser.add_argument("--keep", action="store_true", help="keep running; reload a missing library")


def run(args: argparse.Namespace) -> int:
    """Load the library; exit code 0 if it is loaded, 1 if it cannot be."""
    targets = _targets(args)
    try:
        return asyncio.run(_run(targets, keep=args.keep))
    except KeyboardInterrupt:
        return 0


def _targets(args: argparse.Namespace) -> set[tuple[str, str]]:
    """For each pool, the Redis URL and one of the pool's keys, which selects the node of a Redis Cluster."""
    url = args.redis or os.environ.get("PICKER_REDIS__URL")
    if args.config is not None:
        pools = pools_of(load(args.config, os.environ))
        return {(args.redis or each.redis.url, Keys.of(name).pool) for name, each in pools.items()}
    if url is None:
        raise ConfigError("--config FILE, --redis URL or PICKER_REDIS__URL is needed")
    try:
        return {(redis_url(url), Keys.of(args.pool).pool)}
    except ValueError as fault:
        raise ConfigError(f"--redis: {fault}") from None


async def _run(targets: set[tuple[str, str]], *, keep: bool) -> int:
    printed: dict[str, str] = {}
    while True:
        for url, key in sorted(targets):
            printed[key] = await _load_if_missing(url, key, printed.get(key, ""))
        if not keep:
            return int(any(printed.values()))
        await asyncio.sleep(_LOOK_S)


async def _load_if_missing(url: str, key: str, before: str) -> str:
    """Load the library if it is missing. Returns '' or the failure; prints a failure other than `before`."""
    library = load_library()
    # Use a new connection each time, to find the current primary.
    client = CommandClient(url, key, deadline_s=_DEADLINE_S)
    try:
        [listed] = await client.execute([("FUNCTION", "LIST", "LIBRARYNAME", library.name, "WITHCODE")])
        if not any(library.source.encode() in found for found in listed):
            await client.execute([("FUNCTION", "LOAD", "REPLACE", library.source)])
            print(f"loaded {library.name}", flush=True)
        return ""
    except StateUnavailable as fault:
        why = explained(str(fault))
        if why != before:
            print(f"{library.name} cannot be loaded: {why}", file=sys.stderr, flush=True)
        return why
    finally:
        await client.close()
