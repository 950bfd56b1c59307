"""The admin API's controls of the whole fleet, through the shared state."""

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from picker_fleet import live_config
from picker_fleet.config import Settings
from picker_fleet.errors import ConfigError, StateUnavailable
from picker_fleet.live_config import LiveConfig
from picker_fleet.replica.heartbeat import Membership
from picker_fleet.state.store import Store

_TRIES = 3
_SECRET = "(set)"


class FleetControls:
    """`admin.view.Controls` over a replica's own parts."""

    def __init__(self, store: Store, membership: Membership, settings: Settings) -> None:
        self._store = store
        self._membership = membership
        self._settings = settings
        self._changing = asyncio.Lock()

    async def config(self) -> dict[str, Any]:
        return self._shown(LiveConfig(*await self._store.tuned()))

    async def change(self, patch: Mapping[str, Any]) -> dict[str, Any]:
        changes = live_config.flattened(patch)
        async with self._changing:
            for _ in range(_TRIES):
                tuned = LiveConfig(*await self._store.tuned())
                wanted = live_config.overrides(self._settings, live_config.merged(tuned.changes, changes))
                version = await self._tune(live_config.replacing(tuned.overrides, wanted), changes)
                if int(version) == int(tuned.version or 0) + 1:
                    break
                # Another replica's change came between. The note has both; the overrides are to follow it.
                changes = {}
        return await self.config()

    async def pause(self, paused: bool) -> dict[str, Any]:
        version = await self._tune({"paused": 1 if paused else None}, {})
        return {"paused": paused, "tuned_version": version}

    async def evict(self, request_id: str) -> str:
        return await self._store.evict(request_id)

    async def drain(self, address: str, on: bool) -> bool:
        done = await self._store.mark(address, "drained", on) == "marked"
        self._membership.heartbeat_now()
        return done

    async def _tune(self, overrides: Mapping[str, Any], note: Mapping[str, Any]) -> str:
        version = await self._store.tune(overrides, note)
        if not version:
            raise StateUnavailable("the pool is not known yet: no replica has published its settings")
        self._membership.heartbeat_now()
        return version

    def _shown(self, tuned: LiveConfig) -> dict[str, Any]:
        settings, weights = self._settings, {}
        try:
            effective = live_config.applied(self._settings, tuned.changes)
            settings, weights = effective.settings, dict(effective.weights)
        except ConfigError:
            pass  # changed under another configuration than this replica's; `changes` shows what
        return {
            "config": _without_secrets(settings.model_dump(mode="json")),
            "weights": weights,
            "changes": live_config.nested(tuned.changes),
            "paused": bool(tuned.overrides.get("paused")),
            "tuned_version": tuned.version,
            "live": list(live_config.LIVE),
        }


def _without_secrets(tree: dict[str, Any]) -> dict[str, Any]:
    """`tree` without the token and what the address of Redis may hold besides the address."""
    url = urlsplit(tree["redis"]["url"])
    tree["redis"]["url"] = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
    if tree["admin"]["token"] is not None:
        tree["admin"]["token"] = _SECRET
    return tree
