"""A script that fails at any of its Redis commands changes nothing, and may be called again."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import redis
from direct_calls import OPEN, ClockedPool, arrival
from script_fleet import SETTINGS

from picker_fleet.state.scripts import Library

ENDPOINTS = ("e1:1", "e2:1", "e3:1")
TOKEN = "\t".join(("lost", "1", "1", "1", "w", "3", "m", "e2:1", "1"))
ROOM = {"upper_per": 2, "lower_per": 2, "total_capacity": 9}


UNFAIR = json.dumps({**SETTINGS, **ROOM, "fairness": "none"})
SWEEP = ("a", 0, 3000, 60_000, 2000)


def of(request_id: str, flow: str = "flow", **fields: Any) -> bytes:
    return arrival(request_id, flow=flow, workload="w-" + flow, **fields)


CALLS: dict[str, tuple[str | int | float | bytes, ...]] = {
    "admit": ("a", of("new"), of("other", "fresh"), of("urgent", band=0), of("of 7", priority=7), of("q1")),
    "place": ("a", "q1", "1", "*", "", "g2", "1", "e1:1=0.5,e2:1=0.4", ""),
    "acknowledge": ("a", "q1", "1", "q2", "1"),
    "settle": (
        "a", "p1", "completed", "30", "7", "80", "p2", "client_gone", "", "", "",
        "q2", "completed", "", "", "",
    ),
    "report_fault": (
        "a", "p1", "e1:1", "", "500", 0, "p2", "e2:1", "", "full", 0, "x", "e1:1", "f9", "500", 0,
    ),
    "cancel": ("a", "p3", "1", "withdrawn", "q3", "1", "cancelled"),
    "renew": ("a", "p1", "", "e3:1", "", 0, "gone", "", "", TOKEN, 0, "p2", "1", "", "", 0),
    "tombstone": ("a", "x", 0, "y", 0),
    "note_origin": ("a", "resp_1", "e1:1", "resp_2", "e2:1", "resp_1", "e3:1"),
    "mark_endpoint": ("a", "e1:1", "drained", "1"),
    "evict": ("a", "q2"),
    "heartbeat": ("a", "{}", 5000, "fresh old", "1:first"),
    "publish": ("a", "c2", "e2", UNFAIR, "e1:1", OPEN, "e4:1", OPEN),
    "publish_changes": ("a", "e", "e2", "e1:1", "", "e2:1", OPEN, "e4:1", OPEN),
    "tune": ("a", '{"upper_per": 3, "lower_per": 3}', '{"x": 1}'),
    "sweep": SWEEP,
    "next sweep": SWEEP,
}  # fmt: skip


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
# Key type -> the command that reads a key of this type.
_READS: Mapping[bytes, tuple[Any, ...]] = {
    b"hash": ("HGETALL",),
    b"zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    b"stream": ("XRANGE", "-", "+"),
    b"string": ("GET",),
}


class FailingPool(ClockedPool):
    """A pool whose library, after `fail_at(n)`, fails at the n-th Redis command that it calls."""

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
        """The number of Redis commands that the library has called since `fail_at`."""
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


def prepare(library: FailingPool) -> None:
    """Fill a pool with placed, granted, waiting and overdue requests, and a silent replica."""
    library.publish(*ENDPOINTS, **ROOM, ordering="workload-aware", silence_ms=5000)
    for replica in ("a", "silent"):
        library.call("heartbeat", replica, "{}", 5000, f"key-{replica}")
    placed = [of(f"p{number}", f"f{number % 2}", limit=number % 2) for number in range(1, 7)]
    library.call("admit", "a", *placed)
    limited = [of(f"g{number}", "f1", limit=1) for number in (1, 2)]
    brief = [of(f"q{number}", f"f{number % 3}", ttl_ms=4000, cost=1 + number % 2) for number in range(1, 6)]
    library.call("admit", "a", *limited, *brief, of("g3", "f7"), of("sheddable", "f8", band=2))
    library.call("admit", "silent", of("orphan", "f5"), of("late", "f6", ttl_ms=1000))
    library.passes(3000)
    library.call("heartbeat", "a", "{}", 5000, "key-a")
    library.call("tombstone", "a", "old", 0)
    library.call("settle", "a", "p5", "completed", "5", "", "", "", "p6", "completed", "2", "9", "", "")
    library.passes(500)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_failed_at_any_redis_command_has_its_usual_effect_when_repeated(
    client: redis.Redis, pool: str, name: str
) -> None:
    library = FailingPool(client, pool)
    prepare(library)
    if name == "next sweep":
        library.passes(90_000)
    script, args = name.split()[-1], CALLS[name]
    saved, at_first = library.save(), library.everything()
    library.restore(saved)
    library.fail_at(0)
    library.call(script, *args)
    calls, due = library.calls_made(), library.everything()
    failures = 0
    for number in range(1, calls + 1):
        library.restore(saved)
        library.fail_at(number)
        try:
            library.call(script, *args)
        except redis.ResponseError:
            assert library.everything() == at_first, number
            failures += 1
            library.call(script, *args)
        # The repeated call gives the usual state. If a last write failed, the script itself repeated it.
        assert library.everything() == due, number
    assert failures > 0
