"""A Lua library in which one chosen `redis.call` fails, and dumps of all keys of a pool."""

from collections.abc import Mapping, Sequence
from typing import Any

from direct_calls import ClockedPool

from picker_fleet.state.scripts import Library

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
# The command that reads each key type.
_READS: Mapping[bytes, tuple[Any, ...]] = {
    b"hash": ("HGETALL",),
    b"zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    b"stream": ("XRANGE", "-", "+"),
    b"string": ("GET",),
}


class FailingPool(ClockedPool):
    """After `fail_at(n)` the n-th call from Lua to Redis fails."""

    def named_library(self, name: str) -> Library:
        library = super().named_library(name)
        version = f"{library.version}_failing"
        head, body = library.source.split("\n", 1)
        builtins = "return redis, struct"
        assert body.count(builtins) == 1
        body = body.replace(builtins, "return failing(redis), struct").replace(library.version, version)
        return Library(f"{head}_failing\n{_FAILING.format(version=version)}\n{body}", version)

    def fail_at(self, number: int) -> None:
        self.client.fcall(f"fail_at_{self.library.version}", 1, f"{self.prefix}pool", number)

    def calls_made(self) -> int:
        """The number of calls to Redis since `fail_at`."""
        return int(self.client.fcall(f"made_{self.library.version}", 1, f"{self.prefix}pool"))

    def everything(self) -> Mapping[bytes, Any]:
        """All keys of the pool with their values; entries of the decision log appear without their ids."""
        keys = self.keys()
        kinds = dict(zip(keys, self._of_each("TYPE", keys), strict=True))
        found: dict[bytes, Any] = {}
        for kind, (command, *rest) in _READS.items():
            those = [key for key in keys if kinds[key] == kind]
            found |= zip(those, self._of_each(command, those, *rest), strict=True)
        logs = {key: [fields for _, fields in found[key]] for key in keys if kinds[key] == b"stream"}
        return found | logs

    def save(self) -> dict[bytes, bytes]:
        """Dump the pool, so that `restore` can put it back."""
        keys = self.keys()
        return dict(zip(keys, self._of_each("DUMP", keys), strict=True))

    def restore(self, saved: Mapping[bytes, bytes]) -> None:
        self.clear()
        with self.client.pipeline(transaction=False) as restoring:
            for key, value in saved.items():
                restoring.restore(key, 0, value)
            restoring.execute()
        # A call for another pool makes the library drop the state that is cached for this pool.
        self.client.fcall(self.library.function("state"), 1, "epp:{another}:pool", 1000)

    def _of_each(self, command: str, keys: Sequence[bytes], *rest: Any) -> list[Any]:
        """The replies to the command `command` for each key."""
        with self.client.pipeline(transaction=False) as asking:
            for key in keys:
                asking.execute_command(command, key, *rest)
            return asking.execute()
