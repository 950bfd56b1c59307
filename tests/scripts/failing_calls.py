"""The library with a `redis.call` that fails once, at a call of choice, and all that a pool holds."""

from collections.abc import Mapping
from typing import Any

import redis
from set_clock import clock_of

from picker_fleet.state.scripts import load_library

Everything = Mapping[str, Any]
_FAILING = """
local made, fails_at = 0, 0
local function failing(server)
  return {{call = function(...)
    made = made + 1
    if made == fails_at then error('failed on purpose', 0) end
    return server.call(...)
  end}}
end
redis.register_function{{function_name='fail_at_{version}', callback=function(keys, args)
  made, fails_at = 0, tonumber(args[1])
end}}
redis.register_function{{function_name='made_{version}', callback=function() return made end}}
"""


class FailingLibrary:
    """The scripts of one pool on `server`, by a clock that is set.

    `fail_at(n)`: of the calls to Redis from then on, the n-th fails.
    """

    def __init__(self, server: redis.Redis, key: str) -> None:
        library = load_library(clock_of("clock"))
        self._version = f"{library.version}_failing"
        head, body = library.source.split("\n", 1)
        builtins = "return redis, struct"
        assert body.count(builtins) == 1
        body = body.replace(builtins, "return failing(redis), struct").replace(library.version, self._version)
        helpers = _FAILING.format(version=self._version)
        server.function_load(f"{head}_failing\n{helpers}\n{body}", replace=True)
        self._server, self._key = server, key

    def call(self, name: str, *args: str | int | float | bytes) -> Any:
        return self._server.fcall(f"{name}_{self._version}", 1, self._key, *args)

    def set_clock(self, now_ms: int) -> None:
        self._server.set("clock", now_ms * 1000)

    def fail_at(self, number: int) -> None:
        self._server.fcall(f"fail_at_{self._version}", 1, self._key, number)

    def calls_made(self) -> int:
        """Since `fail_at`."""
        return int(self._server.fcall(f"made_{self._version}", 1, self._key))

    def everything(self) -> Everything:
        """All keys of the pool with their values; of the decision log, its entries without their ids."""
        found: dict[str, Any] = {}
        for key in self._server.scan_iter(match=self._key.removesuffix("pool") + "*"):
            kind = self._server.type(key)
            if kind == b"hash":
                found[key] = self._server.hgetall(key)
            elif kind == b"zset":
                found[key] = dict(self._server.zrange(key, 0, -1, withscores=True))
            elif kind == b"stream":
                found[key] = [fields for _, fields in self._server.xrange(key)]
            else:
                found[key] = self._server.get(key)
        return found

    def save(self) -> dict[bytes, bytes]:
        """The pool as it stands, for `restore`."""
        keys = self._server.scan_iter(match=self._key.removesuffix("pool") + "*")
        return {key: self._server.dump(key) or b"" for key in keys}

    def restore(self, saved: Mapping[bytes, bytes]) -> None:
        for key in self._server.scan_iter(match=self._key.removesuffix("pool") + "*"):
            self._server.delete(key)
        for key, value in saved.items():
            self._server.restore(key, 0, value)
        # What the library remembers of this pool is of what it was.
        self._server.fcall(f"state_{self._version}", 1, "epp:{another}:pool", 1000)
