"""Direct calls of one pool's scripts, without a replica."""

import json
from typing import Any

import redis
from script_fleet import settings_with

from picker_fleet.domain.bands import NAMED
from picker_fleet.state.scripts import Library, load_library
from picker_fleet.state.store import pack_arrival

OPEN = json.dumps({"labels": {}, "draining": False})  # record of an endpoint that takes requests
START_MS = 1_800_000_000_000
_CLOCK = """
-- %s
local now_us, now_ms
local clock_shift_ms = 0
local function steady_clock()
  now_us = tonumber(redis.call('GET', '%s') or 1700000000000000)
  now_ms = math.floor(now_us / 1000)
end
local function advance_clock() end
local function clock_change() end
"""


def clock_of(key: str, name: str = "") -> str:
    """Lua that replaces the clock of lua/lib/pool.lua by the microseconds stored at `key`. Libraries with
    different clock names have different versions."""
    return _CLOCK % (name, key)


def arrival(
    id: str, *, attempt: str = "1", flow: str = "flow", workload: str = "w", candidates: str = "*",
    prefill: str = "", band: int = 1, priority: int | None = None, weight: float = 1, cost: float = 1,
    ttl_ms: float = 60_000, age_ms: float = 0, criticality: float = 3, limit: int = 0, learn: bool = False,
    model: str = "m", body_bytes: int = 0, prompt_tokens: float = 0, answer_tokens: float = 0,
) -> bytes:  # fmt: skip
    """A packed request for the script `admit`, in named band number `band` or with any `priority`."""
    if priority is None:
        priority = NAMED[band].priority
    numbers = (priority, weight, cost, ttl_ms, age_ms, criticality, limit, learn, body_bytes)
    numbers += (prompt_tokens, answer_tokens)
    return pack_arrival((id, attempt, flow, workload, model, candidates, prefill), numbers)


class DirectPool:
    """The pool `pool` on the server of `client`, with `library`, by default the current library."""

    def __init__(self, client: redis.Redis, pool: str, library: Library | None = None) -> None:
        self.client, self.prefix = client, f"epp:{{{pool}}}:"
        self.library = library or load_library()
        if not self.client.function_list(self.library.name):
            self.load(self.library)

    def load(self, library: Library) -> Library:
        """Load `library` even if the server has it already, which drops the library's cached state."""
        self.client.function_load(library.source, replace=True)
        return library

    def call(self, name: str, *args: Any, library: Library | None = None) -> Any:
        return self.client.fcall((library or self.library).function(name), 1, f"{self.prefix}pool", *args)

    def publish(
        self, *addresses: str, version: str = "e", library: Library | None = None, **settings: Any
    ) -> list[bytes]:
        listed = (part for address in addresses for part in (address, OPEN))
        text = json.dumps(settings_with(settings))
        reply: list[bytes] = self.call("publish", "a", "c", version, text, *listed, library=library)
        return reply

    def admit(self, request_id: str, *, library: Library | None = None, **fields: Any) -> list[str]:
        """Admit a request; return the words of the script's reply."""
        reply = self.call("admit", "a", arrival(request_id, **fields), library=library)
        return bytes(reply[4]).decode().split()

    def settle(self, request_id: str, library: Library | None = None) -> str:
        end = (request_id, "completed", "", "", "", "")
        return bytes(self.call("settle", "a", *end, library=library)[4]).decode()

    def stock(self) -> float:
        return float(self.call("state", 60_000)[2])

    def loads(self) -> dict[str, float]:
        rows = self.client.zrange(f"{self.prefix}load", 0, -1, withscores=True)
        return {address.decode(): load for address, load in rows}

    def requests(self) -> set[bytes]:
        return set(self.client.hkeys(f"{self.prefix}requests"))

    def keys(self) -> list[bytes]:
        return list(self.client.keys(f"{self.prefix}*"))

    def clear(self) -> None:
        if keys := self.keys():
            self.client.delete(*keys)


class ClockedPool(DirectPool):
    """A pool with a simulated clock, which starts at START_MS; the method `passes` advances the clock."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        self._clock, self.now_ms = f"clock:{pool}", START_MS
        super().__init__(client, pool, self.named_library("one"))
        self.passes(0)

    def named_library(self, name: str) -> Library:
        """The current library with this pool's clock; each `name` gives a different library version."""
        return load_library(clock_of(self._clock, name))

    def passes(self, ms: int) -> None:
        self.now_ms += ms
        self.client.set(self._clock, self.now_ms * 1000)
