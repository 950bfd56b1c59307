"""Publishes the settings and endpoints of this replica's configuration. fleet/heartbeat.py calls it."""

import asyncio
import contextlib
import hashlib
import json
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace

from picker_fleet.domain.config import Settings
from picker_fleet.domain.errors import ConfigError
from picker_fleet.domain.request import Endpoint
from picker_fleet.endpoints.snapshot import Snapshot, unmarked
from picker_fleet.fleet import live_config
from picker_fleet.state.pool_state import PoolState, describe
from picker_fleet.state.replies import HeartbeatReply, Rebuilt
from picker_fleet.state.store import Store

_RECENT = 64  # discovered lists that a `Publisher` keeps
# A new endpoint takes no requests until every Envoy has acknowledged it, or this time (s) has passed. An
# Envoy answers 503 to a request for an unknown endpoint.
_ACKNOWLEDGE_S = 5.0
UNKNOWN = "0"  # the epoch of a pool that no replica has published


class Publisher:
    """Publishes the settings and endpoints of this replica's configuration.

    The leader, the replica with the least id, publishes, or while discovery has not told the leader a list,
    the least replica that has one. While the pool is unknown (start, FLUSHALL) any replica publishes. An
    endpoint added later is published as draining until Envoys know the endpoint.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings
        self._shared = live_config.shared_settings(settings, {})
        facts = json.dumps(self._shared, sort_keys=True)
        self._config_version = hashlib.sha1(facts.encode()).hexdigest()[:12]
        self._clock = asyncio.get_running_loop().time
        self._listed: tuple[Endpoint, ...] | None = None  # the endpoints that discovery reported last
        self._new: dict[str, float] = {}  # endpoint address that Envoys may not know -> since when
        self._discovered: tuple[Endpoint, ...] | None = None  # the endpoints that this replica would publish
        self._discovered_version = ""
        self._recent: OrderedDict[str, tuple[Endpoint, ...]] = OrderedDict()  # version -> list of endpoints
        self._digests: dict[str, tuple[Endpoint, bytes]] = {}  # address -> (endpoint, its digest)

    def discovered(self, endpoints: Sequence[Endpoint]) -> None:
        former, self._listed = self._listed, tuple(sorted(endpoints, key=lambda endpoint: endpoint.address))
        addresses = {each.address for each in self._listed}
        if former is not None:
            takes = {each.address for each in self._listed if not each.draining}
            self._new |= dict.fromkeys(takes - {each.address for each in former}, self._clock())
        self._new = {address: since_s for address, since_s in self._new.items() if address in addresses}
        self._remember(self._listed)  # another replica may publish this list, with no endpoint draining
        self._prepare()

    @property
    def has_list(self) -> bool:
        """Whether discovery has reported endpoints, even an empty list."""
        return self._listed is not None

    @property
    def awaits_envoys(self) -> bool:
        """Whether this replica publishes some new endpoints as draining because Envoys may not know them."""
        return bool(self._new)

    def acknowledged(self, snapshot: Snapshot, versions: Collection[str]) -> None:
        """Stop draining new endpoints that all Envoys know, or that are new for 5 s. `snapshot` has the
        published endpoints, `versions` the versions that Envoys have acknowledged."""
        is_known = set(versions) <= {unmarked(snapshot.version)}
        known = {each.address for each in snapshot.endpoints} if is_known else set()
        # If `versions` is empty, no Envoy gets endpoints from the fleet, so no Envoy will acknowledge.
        late_s = self._clock() - _ACKNOWLEDGE_S if versions else math.inf
        self._no_longer_new(
            {address for address, since_s in self._new.items() if address in known or since_s <= late_s}
        )

    def in_outage(self, published: Snapshot) -> Snapshot:
        """The endpoints that discovery reports, of which new ones drain, with the marks of `published`, the
        last published endpoints."""
        if self._discovered is None or not published.version or self.discovered_last(published.version):
            return published
        known = {each.address: each for each in published.endpoints}
        endpoints = tuple(
            replace(each, drained=last.drained, down=last.down, ejected=last.ejected)
            if (last := known.get(each.address))
            else each
            for each in self._discovered
        )
        return Snapshot(f"{self._discovered_version}+outage", endpoints)

    def in_force(self, snapshot: Snapshot) -> None:
        """Stop draining new endpoints that do not drain in `snapshot`, the published endpoints."""
        self._no_longer_new({each.address for each in snapshot.endpoints if not each.draining})

    def _no_longer_new(self, addresses: set[str]) -> None:
        if not addresses.isdisjoint(self._new):
            self._new = {each: since_s for each, since_s in self._new.items() if each not in addresses}
            self._prepare()

    def _prepare(self) -> None:
        """Compute the endpoints to publish: the discovered endpoints, of which new ones drain."""
        assert self._listed is not None
        self._discovered = tuple(
            replace(each, draining=True) if each.address in self._new else each for each in self._listed
        )
        self._discovered_version = self._remember(self._discovered)

    def _remember(self, endpoints: tuple[Endpoint, ...]) -> str:
        """Remember the list `endpoints`, which the method `endpoints_of` returns. Returns their version."""
        digests = {each.address: (each, self._digest(each)) for each in endpoints}
        self._digests = digests
        together = hashlib.blake2b(b"".join(digest for _, digest in digests.values()), digest_size=6)
        version = together.hexdigest()
        self._recent[version] = endpoints
        self._recent.move_to_end(version)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        return version

    def _digest(self, endpoint: Endpoint) -> bytes:
        """A digest of the endpoint's published fields, equal on every replica; cached per address."""
        known = self._digests.get(endpoint.address)
        if known is not None and (known[0] is endpoint or known[0] == endpoint):
            return known[1]
        published = f"{endpoint.address} {describe(endpoint)}"
        return hashlib.blake2b(published.encode(), digest_size=16).digest()

    def is_due(self, pulse: HeartbeatReply, *, publishes: bool) -> bool:
        """Whether to publish; `publishes` says that this replica publishes for the fleet."""
        if self._discovered is None:
            return False
        published = pulse.config_version, unmarked(pulse.endpoints_version)
        differs = published != (self._config_version, self._discovered_version)
        return pulse.epoch == UNKNOWN or (publishes and differs)

    def discovered_last(self, version: str) -> bool:
        """Whether `version`, without the part for marks, is the version of the endpoints discovered last."""
        return self._discovered is not None and unmarked(version) == self._discovered_version

    def endpoints_of(self, version: str) -> tuple[Endpoint, ...] | None:
        """The endpoints of a published version, without marks; None unless discovered here recently."""
        return self._recent.get(unmarked(version))

    async def publish(self, pulse: HeartbeatReply) -> Rebuilt | None:
        """Publish the discovered endpoints and the settings; the heartbeat reply `pulse` has the published
        versions. Returns the result of the rebuild if the pool was unknown, else None."""
        if await self._publish_changes(pulse):
            return None
        return await self._publish_all()

    async def _publish_changes(self, pulse: HeartbeatReply) -> bool:
        """Publish only the changed endpoints, if possible. Returns False if a full publication is needed."""
        assert self._discovered is not None
        published = self.endpoints_of(pulse.endpoints_version)
        if published is None or pulse.epoch == UNKNOWN or pulse.config_version != self._config_version:
            return False
        before = {each.address: each for each in published}
        after = {each.address: each for each in self._discovered}
        changes: dict[str, Endpoint | None] = dict.fromkeys(before.keys() - after.keys())
        changes |= {
            address: each
            for address, each in after.items()
            if (former := before.get(address)) is not each and former != each  # `is not` is cheap
        }
        if any(each.max_inflight is not None for some in (before, after) for each in some.values()):
            return False  # endpoints' limits are settings, which only a full publish writes
        former_version = unmarked(pulse.endpoints_version)
        return await self._store.publish_changes(former_version, self._discovered_version, changes)

    async def _publish_all(self) -> Rebuilt | None:
        assert self._discovered is not None
        rebuilt = await self._store.publish(
            self._shared,
            self._discovered,
            config_version=self._config_version,
            endpoints_version=self._discovered_version,
        )
        # A live change may yield other overrides under this configuration than under the last.
        current = await self._store.live_config()
        with contextlib.suppress(ConfigError):
            wanted = live_config.overrides(self._settings, current.changes)
            if current.changes and wanted != {name: current.overrides.get(name) for name in wanted}:
                await self._store.set_live_config(live_config.replacing(current.overrides, wanted), {})
        return rebuilt


def acknowledged(pool: PoolState) -> Sequence[str]:
    """For each replica that serves EDS, the version of the endpoints that all Envoys of the replica have."""
    return [version for about in pool.about.values() if isinstance(version := about.get("eds"), str)]
