"""Calls the scripts on a server, at a time that the test sets, and reads all effects of each call."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import redis
from direct_calls import arrival, clock_of
from pool_model import Reply
from script_fleet import counters, doubles
from shared_queue import named_bands

from picker_fleet.domain.request import Endpoint
from picker_fleet.state.keys import Keys
from picker_fleet.state.pool_state import describe
from picker_fleet.state.schema import REQUEST_ROW, VIEW_LIMIT
from picker_fleet.state.scripts import load_library

READ_ORDERS = """
local found = {}
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  if redis.call('TYPE', key).ok == 'zset' then
    found[#found + 1] = key
    found[#found + 1] = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  end
end
return found
"""
SILENCE_MS = 3000
TEXT: dict[str, Any] = {"decode_responses": True, "encoding_errors": "surrogateescape"}


@dataclass(frozen=True, slots=True)
class Seen:
    """A call's reply, its events in the decision log ('EVENT REQUEST CAUSE'), and the resulting state."""

    reply: Reply
    events: list[str]
    numbers: dict[str, Any]
    workloads: dict[str, list[float]]  # thirteen numbers of each workload, as docs/redis-schema.md lists them
    flow_workloads: dict[str, list[float]]
    orders: dict[str, dict[str, float]]  # the scores by member of every sorted set, by name without prefix
    balances: dict[str, tuple[float, ...]]  # the numbers of each field of the hash `balances`
    placed: dict[str, str]  # the endpoints of each placed request, best first
    prefillers: dict[str, str]  # the prefill endpoints of each request whose prompt another endpoint computes


class ScriptSide:
    """A pool on the server of `client` (made with options TEXT); `clear` empties the pool."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._library = load_library(clock=clock_of("clock"))
        self._redis.function_load(self._library.source, replace=True)
        self._keys = Keys.of("model")
        self._log_at = 0

    def clear(self) -> None:
        self._redis.flushall()
        self._log_at = 0

    def key_names(self) -> set[str]:
        """The names of the pool's keys, without the prefix."""
        names = self._redis.keys(f"{self._keys.prefix}*")
        return {str(name).removeprefix(self._keys.prefix) for name in names}

    def log(self) -> list[dict[str, str]]:
        """All entries of the decision log, oldest first."""
        return [fields for _, fields in self._redis.xrange(self._keys.log)]

    def scan_order(self) -> list[str]:
        """The ids of all requests in the order of a scan by the server."""
        return [str(id) for id, _ in self._redis.hscan_iter(f"{self._keys.prefix}requests")]

    def call(self, now_us: int, name: str, args: Sequence[Any]) -> Seen:
        pipe = self._redis.pipeline(transaction=False)
        pipe.set("clock", now_us)
        pipe.fcall(self._library.function(name), 1, self._keys.pool, *args)
        pipe.fcall(self._library.function("state"), 1, self._keys.pool, SILENCE_MS)
        pipe.hmget(self._keys.pool, "counters", "bands", "settings")
        pipe.xrange(self._keys.log, f"({self._log_at}" if self._log_at else "-")
        pipe.hgetall(self._keys.prefix + "workloads")
        pipe.hgetall(self._keys.prefix + "flow_workloads")
        pipe.eval(READ_ORDERS, 0, f"{self._keys.prefix}*")
        pipe.fcall(self._library.function("view_inflight"), 1, self._keys.pool, "", "", VIEW_LIMIT)
        pipe.hgetall(self._keys.prefix + "balances")
        _, raw, state, (packed, others, settings), log, *registries, sets, rows, balances = pipe.execute()
        if log:
            self._log_at = log[-1][0]
        events = [f"{e['event']} {e['request'] or flow_queue_of(e)} {e['by']}" for _, e in log]
        reply = Reply(raw[1], int(raw[2]), int(raw[3]), [plain(value) for value in raw[4:]])
        priorities = priorities_of(others or "", settings)
        workloads = [{name: doubles(text) for name, text in each.items()} for each in registries]
        orders = {
            by_priority(key.removeprefix(self._keys.prefix), priorities): scores_of(pairs)
            for key, pairs in zip(sets[::2], sets[1::2], strict=True)
        }
        requests = [dict(zip(REQUEST_ROW, row.split("\x1f"), strict=True)) for row in rows[2::2]]
        placed = {each["id"]: each["endpoints"] for each in requests if each["state"] == "placed"}
        prefillers = {each["id"]: each["prefillers"] for each in requests}
        numbers = numbers_of(state) | band_tags(packed, others or "", priorities)
        tenancy = json.loads(settings or "{}").get("tenancy", 1)
        found = {key: balance(key, text, tenancy) for key, text in balances.items()}
        return Seen(reply, events, numbers, *workloads, orders, found, placed, prefillers)


def flow_queue_of(entry: dict[str, str]) -> str:
    return entry["flow"] if entry["event"] in ("throttled", "unthrottled") else ""


def balance(key: str, text: str, tenancy: int) -> tuple[float, ...]:
    """The numbers of a field of the hash `balances` (docs/redis-schema.md); 0 for an outdated count."""
    kind = key.rpartition("\x1f")[2].partition(":")[0]
    if kind == "parallel":
        counted, count = text.split()
        return (float(count) if int(counted) == tenancy else 0.0,)
    return tuple(map(float, text.split())) if kind in ("budget", "served") else tuple(doubles(text))


def scores_of(pairs: Sequence[Any]) -> dict[str, float]:
    """Parse a reply that lists name, score, name, score into scores by name."""
    return dict(zip(pairs[::2], map(float, pairs[1::2]), strict=True))


def plain(value: Any) -> Any:
    """Convert numeric texts to floats, so that the texts equal the model's numbers."""
    if isinstance(value, list):
        return [plain(each) for each in value]
    try:
        return float(value)
    except ValueError:
        return value


def numbers_of(state: list[Any]) -> dict[str, Any]:
    """The values in the reply of lua/state.lua by name, without the epoch."""
    names = (
        "epoch", "now_us", "stock", "queued", "upper", "lower", "ready", "in_flight", "dispatches", "ended",
        "bands", "replicas", "loads", "limits", "amounts", "guards", "credit", "overdue", "rate", "paused",
        "tuned", "retry_after_s", "refusals", "prefill_loads",
        "prefill_limits", "prompt_lines",
    )  # fmt: skip
    found = dict(zip(names, state, strict=True))
    bands, replicas, loads, limits, refusals, amounts = (
        found.pop(each) for each in ("bands", "replicas", "loads", "limits", "refusals", "amounts")
    )
    prefills, prefill_limits = found.pop("prefill_loads"), found.pop("prefill_limits")
    del found["epoch"], found["prompt_lines"]
    for priority, *values in zip(*(bands[at::5] for at in range(5)), strict=True):
        of_band = (f"{name}:{priority}" for name in ("v", "flow_queues", "queued", "bytes"))
        found |= zip(of_band, values, strict=True)
    numbers: dict[str, Any] = {name: plain(value) for name, value in found.items()}
    numbers["refusals"] = json.loads(refusals)
    of_endpoints = {name: float(limit) for name, limit in zip(loads[::2], limits, strict=False) if limit}
    numbers |= {"loads": scores_of(loads), "limits": of_endpoints, "replicas": sorted(replicas[::2])}
    of_prefill = zip(prefills[::2], prefill_limits, strict=False)
    numbers |= {"prefill_loads": scores_of(prefills)}
    numbers["prefill_limits"] = {name: float(limit) for name, limit in of_prefill if limit}
    return numbers | {f"amount:{each}": float(n) for each, n in zip(loads[::2], amounts, strict=False)}


def priorities_of(others: str, settings: str | None) -> dict[int, int]:
    """The priority of each band in use, by the band's number."""
    named = json.loads(settings or "{}").get("bands") or named_bands()
    made = {int(number): int(priority) for number, priority, *_ in map(str.split, others.splitlines())}
    return {number: each["priority"] for number, each in enumerate(named[:3])} | made


def by_priority(name: str, priorities: dict[int, int]) -> str:
    """Replace the band's number in the name of a sorted set by the band's priority."""
    kind, _, rest = name.partition(":")
    number, colon, rest = rest.partition(":")
    return f"{kind}:{priorities.get(int(number), number)}{colon}{rest}" if number.isdecimal() else name


def band_tags(packed: str | None, others: str, priorities: dict[int, int]) -> dict[str, float]:
    """The tags of weighted bands, read from Redis because no script returns these tags."""
    found = counters(packed) if packed else {}
    tags = {f"band:{priorities[number]}": found.get(f"band:{number}", 0.0) for number in range(3)}
    tags |= {f"band:{fields[1]}": float(fields[6]) for fields in map(str.split, others.splitlines())}
    return tags | {"bv": found.get("bv", 0.0)}


def arguments(name: str, caller: str, *rest: Any) -> list[Any]:
    """Convert the arguments of the model's method to the arguments of the script."""
    if name == "admit":
        return [caller, *(arrival(**asdict(it)) for it in rest[0])]
    if name == "renew":
        rest = ([(*item[:3], accounting_token(item[3]), 0) for item in rest[0]],)
    if name == "place":
        rest = ([(*item, "")[:4] for item in rest[0]],)
    if name == "settle":
        # no prompt sizes, since the model does not estimate prompts
        rest = ([(*item[:4], None, *(item[4:] or ("",))) for item in rest[0]],)
    if rest and isinstance(rest[0], list):  # flatten the items of a batch
        return [caller, *("" if value is None else value for item in rest[0] for value in item)]
    if name == "heartbeat":
        return [caller, "{}", *rest]
    if name == "publish":
        versions, settings, draining, *stages = rest
        listed = {}
        for address, drains in draining.items():
            of = stages[0].get(address, "decode") if stages else "decode"
            endpoint = Endpoint(address, {}, drains, prefills="prefill" in of, decodes="decode" in of)
            listed[address] = describe(endpoint)
        return [caller, *versions, json.dumps(settings), *itertools.chain(*listed.items())]
    if name == "set_tenants":
        return [caller, rest[0], *itertools.chain(*rest[1].items())]
    if name == "set_limits":
        return [caller, json.dumps(rest[0], sort_keys=True), "{}"]
    if name == "tune":
        return [caller, json.dumps(rest[0]), json.dumps(rest[0])]
    return [caller, *rest]


def accounting_token(r: Any) -> str:
    """The accounting token of request `r`, which restores a lost record of `r` (lua/renew.lua)."""
    if r is None:
        return ""
    fields = (
        r.flow, 1, r.weight, r.cost, r.workload, r.criticality, r.model, r.endpoints, r.limit,
        f"priority={r.priority}",
    )  # fmt: skip
    return "\t".join(str(value) for value in fields)
