"""Checks whether the Redis server is configured for the shared state; fleet/heartbeat.py runs the check.

Each fault is logged when it appears; `epp_redis_unfit` and `/healthz` show the fault while it lasts. Checks
for which the Redis user lacks the rights (`+info`, `+function|list`) report no fault.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping

from picker_fleet.domain.errors import StateFault
from picker_fleet.state.store import Store

_CHECK_S = 10.0
_LOOK_S = 1.0  # seconds between checks for a new connection or a failed heartbeat
_CHANGED_S = 60.0  # seconds for which a changed library counts as a fault
_NEARLY_FULL = 0.9  # part of maxmemory
KINDS = ("evicts", "nearly_full", "read_only", "library_changed", "refuses")

_log = logging.getLogger(__name__)


def faults_in(info: str) -> dict[str, str]:
    """The server's faults by the reply to INFO: kind -> description with the remedy."""
    facts = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    policy, limit = facts.get("maxmemory_policy", ""), int(facts.get("maxmemory", 0))
    found = {}
    if policy.startswith("allkeys"):
        found["evicts"] = f"maxmemory-policy {policy} evicts keys of the pool: set noeviction"
    used = int(facts.get("used_memory", 0)) / limit if limit else 0.0
    if used > _NEARLY_FULL:
        found["nearly_full"] = f"{used:.0%} of maxmemory are used: raise it, or new requests will be refused"
    if facts.get("role") == "slave":
        of = f"{facts.get('master_host')}:{facts.get('master_port')}"
        found["read_only"] = (
            f"the server is a replica of {of} and takes no writes: redis.url must lead to the primary"
        )
    return found


class ServerCheck:
    """Checks the server every `_CHECK_S` and on each new connection. The function `refusal` returns why Redis
    refused the last heartbeat, '' if it did not. The callback `on_checked` gets a mapping: each of KINDS ->
    whether the server has that fault."""

    def __init__(
        self, store: Store, refusal: Callable[[], str], on_checked: Callable[[Mapping[str, bool]], object]
    ) -> None:
        self._store, self._refusal, self._on_checked = store, refusal, on_checked
        self._may_ask = {"info": True, "library": True}
        self._asked: Mapping[str, str] = {}
        self._changed_s = -math.inf
        self.faults: Mapping[str, str] = {}

    async def run(self) -> None:
        asked_s, connection, loop = 0.0, 0, asyncio.get_running_loop()
        while True:
            if connection != self._store.connection_epoch:
                connection, asked_s = self._store.connection_epoch, 0.0
                self._may_ask = dict.fromkeys(self._may_ask, True)
            if connection and loop.time() >= asked_s + _CHECK_S:
                asked_s = loop.time()
                self._asked = {**await self._ask_info(), **await self._ask_library()}
            refusal = self._refusal()
            self._report({**self._asked, "refuses": refusal} if refusal else self._asked)
            await asyncio.sleep(_LOOK_S)

    async def _ask_info(self) -> Mapping[str, str]:
        with self._asking("info") as allowed:
            if allowed:
                return faults_in(await self._store.server_info())
        return {}

    async def _ask_library(self) -> Mapping[str, str]:
        with self._asking("library") as allowed:
            if allowed and not await self._store.library_is_intact():
                await self._store.load_library()
                self._changed_s = asyncio.get_running_loop().time()
        if asyncio.get_running_loop().time() - self._changed_s < _CHANGED_S:
            return {"library_changed": "another client had changed the library; it is loaded again"}
        return {}

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[bool]:
        """Yields whether to send the command `what`: False once Redis has denied it on this connection."""
        try:
            yield self._may_ask[what]
        except StateFault:
            self._may_ask[what] = False

    def _report(self, faults: Mapping[str, str]) -> None:
        for kind in faults.keys() - self.faults.keys():
            if kind != "refuses":  # the heartbeat's code logs refusals
                _log.warning("Redis is not configured for the shared state: %s", faults[kind])
        self.faults = faults
        self._on_checked({kind: kind in faults for kind in KINDS})
