"""A pool on a Redis server whose command TIME the tests control."""

from typing import Any

import redis
from direct_calls import START_MS, DirectPool

from picker_fleet.state.scripts import Library, load_library

LEASE_MS, SILENCE_MS, SECOND_MS = 15_000, 5_000, 1_000


def library_with_time(time: str) -> Library:
    """The Lua library with the Lua expression `time` in place of Redis's TIME."""
    library = load_library()
    assert library.source.count("redis.call('TIME')") == 1
    source = library.source.replace("redis.call('TIME')", time)
    version = f"{library.version}_time"
    return Library(source.replace(library.version, version), version)


class TimedPool(DirectPool):
    """A pool on a simulated clock, with one replica that sends heartbeats and sweeps."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        super().__init__(client, pool, library_with_time("{redis.call('GET', 'seconds'), '0'}"))
        self.real_ms, self._off_ms = 0, 0
        self._last_beat: tuple[bytes, int, int] | None = None
        self.step(0)
        self.publish_endpoint()
        self.beat()

    def publish_endpoint(self) -> None:
        self.publish("e:1", lease_ms=LEASE_MS, silence_ms=SILENCE_MS)

    def step(self, by_ms: int) -> None:
        self._off_ms += by_ms
        self.client.set("seconds", f"{(START_MS + self.real_ms + self._off_ms) / 1000:.3f}")

    def passes(self, ms: int) -> None:
        self.real_ms += ms
        self.step(0)

    def beat(self) -> list[Any]:
        known: tuple[Any, ...] = ()
        if self._last_beat is not None:
            epoch, now_us, at_ms = self._last_beat
            known = (epoch, now_us + (self.real_ms - at_ms) * 1000)
        reply: list[Any] = self.call("heartbeat", "a", "{}", SILENCE_MS, "", "", *known)
        self._last_beat = (reply[0], int(reply[17]), self.real_ms)
        return reply

    def sweep(self) -> bool:
        """Call a sweep; return whether the sweep ran."""
        return bool(self.call("sweep", "a", 100, 3000, 300_000, 1_000_000)[4])

    def knows(self, name: str) -> bool:
        return name.encode() in self.requests()

    def renew(self, *names: str) -> None:
        self.call("renew", "a", *(part for name in names for part in (name, "", "", "", "0")))

    def calm(self, ms: int) -> None:
        """Let `ms` milliseconds pass while the replica sends heartbeats more often than the silence limit."""
        for at in range(0, ms, SILENCE_MS - SECOND_MS):
            self.passes(min(SILENCE_MS - SECOND_MS, ms - at))
            self.beat()

    def lose(self, *names: str) -> None:
        """Delete records and leases of the requests `names`, as if a failover had lost the last writes."""
        self.client.hdel(f"{self.prefix}requests", *names)
        self.client.zrem(f"{self.prefix}inflight", *names)

    def flush(self) -> None:
        """Delete all keys, but keep the simulated TIME."""
        self.client.flushdb()
        self._last_beat = None
        self.step(0)

    def report(self, name: str, accounting_token: str, attempt: str = "") -> str:
        """Report that a request runs, with this accounting token; return the reply."""
        return bytes(self.call("renew", "a", name, attempt, "", accounting_token, "0")[4]).decode()

    def now_ms(self) -> int:
        """The pool's clock in milliseconds."""
        return int(self.beat()[17]) // 1000
