"""One pool on a server whose TIME is set by hand."""

import json
from typing import Any

import redis
from script_fleet import SETTINGS

from picker_fleet.state.scripts import load_library
from picker_fleet.state.store import pack_arrival

START_MS = 1_800_000_000_000
LEASE_MS, SILENCE_MS, SECOND_MS = 15_000, 5_000, 1_000
OPEN = json.dumps({"labels": {}, "draining": False})


class Server:
    """One pool on a server whose TIME is set, and a replica that beats and sweeps on it."""

    def __init__(self, client: redis.Redis, pool: str) -> None:
        library = load_library()
        assert library.source.count("redis.call('TIME')") == 1
        source = library.source.replace("redis.call('TIME')", "{redis.call('GET', 'seconds'), '0'}")
        self._version = f"{library.version}_time"
        self._source = source.replace(library.version, self._version)
        client.function_load(self._source, replace=True)
        self._client, self._prefix = client, f"epp:{{{pool}}}:"
        self.real_ms, self._off_ms = 0, 0
        self._last_beat: tuple[bytes, int, int] | None = None
        self.step(0)
        self.publish()
        self.beat()

    def publish(self) -> None:
        published = json.dumps({**SETTINGS, "lease_ms": LEASE_MS, "silence_ms": SILENCE_MS})
        self.call("publish", "a", "c", "e", published, "e:1", OPEN)

    def step(self, by_ms: int) -> None:
        self._off_ms += by_ms
        self._set()

    def _set(self) -> None:
        self._client.set("seconds", f"{(START_MS + self.real_ms + self._off_ms) / 1000:.3f}")

    def passes(self, ms: int) -> None:
        self.real_ms += ms
        self._set()

    def call(self, name: str, *args: Any) -> Any:
        return self._client.fcall(f"{name}_{self._version}", 1, f"{self._prefix}pool", *args)

    def beat(self) -> list[Any]:
        known = ()
        if self._last_beat is not None:
            epoch, now_us, at_ms = self._last_beat
            known = (epoch, now_us + (self.real_ms - at_ms) * 1000)
        reply: list[Any] = self.call("heartbeat", "a", "{}", SILENCE_MS, "", *known)
        self._last_beat = (reply[0], int(reply[18]), self.real_ms)
        return reply

    def sweep(self) -> bool:
        """Whether it ran."""
        return self.call("sweep", "a", 100, 3000, 300_000, 1_000_000)[4] == 1

    def knows(self, name: str) -> bool:
        return bool(self._client.hexists(f"{self._prefix}requests", name))

    def admit(self, name: str, ttl_ms: int = 60_000) -> bytes:
        request = pack_arrival((name, "1", "flow", "w", "m", "*"), (1, 1, 1, ttl_ms, 0, 3, 0, 0))
        return bytes(self.call("admit", "a", request)[4])

    def renew(self, *names: str) -> None:
        self.call("renew", "a", *(part for name in names for part in (name, "", "", "", "0")))

    def live(self) -> int:
        return int(self.beat()[6])

    def clear(self) -> None:
        for key in self._client.scan_iter(match=self._prefix + "*"):
            self._client.delete(key)

    def calm(self, ms: int) -> None:
        """Time passes, in which the replica beats as usual."""
        for _ in range(ms // SECOND_MS):
            self.passes(SECOND_MS)
            self.beat()

    def restart(self) -> None:
        """The server forgets what it has in memory but the keys, as another one after a failover."""
        self._client.function_load(self._source, replace=True)

    def lose(self, *names: str) -> None:
        """The records of requests are lost, and what they took, as if a failover had lost the last writes."""
        for name in names:
            self._client.hdel(f"{self._prefix}requests", name)
            self._client.zrem(f"{self._prefix}inflight", name)

    def damage(self, name: str) -> None:
        self._client.hset(f"{self._prefix}requests", name, "damaged")

    def flush(self) -> None:
        """All keys are lost; its TIME goes on."""
        self._client.flushdb()
        self._last_beat = None
        self._set()

    def exists(self, name: str) -> bool:
        return bool(self._client.exists(f"{self._prefix}{name}"))

    def report(self, name: str, accounting_token: str, attempt: str = "") -> str:
        """What a sign of life is answered."""
        reply: bytes = self.call("renew", "a", name, attempt, "", accounting_token, "0")[4]
        return reply.decode()

    def end(self, name: str) -> str:
        reply: bytes = self.call("settle", "a", name, "completed", "", "")[4]
        return reply.decode()

    def now_ms(self) -> int:
        """By the pool's clock."""
        return int(self.beat()[18]) // 1000
