"""The pool's state and endpoints as Redis stores them: parsed for heartbeats, metrics and the admin API."""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import msgspec

from picker_fleet.domain.bands import Bands
from picker_fleet.domain.request import Ejection, Endpoint, PromptLine
from picker_fleet.state.keys import BETWEEN
from picker_fleet.state.schema import UNPICKABLE

PREFILL = "prefill="  # prefix of the address in the name of a limit for the stage prefill
_NEW_S = 1.0  # a limit found more recently may have been stored after the limits in force were read
_UNKNOWN_EJECTION = Ejection("unknown", 0)


@dataclass(frozen=True, slots=True)
class PoolState:
    """The pool's state at one moment, with names as in the admin API. The keys of `in_flight` are endpoints.

    `limits` has the endpoints' limits of requests in flight: configured, found by the fleet, or temporary; an
    endpoint without a limit is missing. If the fleet finds limits in tokens, `limits` has these limits, and
    `amounts` the tokens in flight; otherwise `amounts` is empty.

    The keys of `queue_length`, `queue_bytes` and `virtual_times` are names of bands, the highest priority
    first: all configured bands, and other bands in use. `queue_bytes` is the total size of the bodies of
    waiting requests. `lower` and `upper` are the bounds of the stock. `born_us`: when this epoch of the pool
    began; 0: unknown. `about`: the replica info of each of the live `replicas`, as its heartbeats report it.
    `endpoint_refusals` counts the requests that each endpoint has refused with status 429 or 503; an endpoint
    without refusals is missing, and the counts begin at 0 again when Redis loses the pool.
    `prompt_lines` has the lines of models whose usage is known. `prefill_in_flight` and `prefill_limits` are
    `in_flight` and `limits` for the stage prefill.
    """

    born_us: int
    now_us: int
    stock: float
    lower: float
    upper: float
    ready_backends: int
    queued: int
    queue_length: Mapping[str, int]
    queue_bytes: Mapping[str, int]
    active_flows: int
    virtual_times: Mapping[str, float]
    leases: int
    dispatched_total: int
    ended_total: int
    guard_dispatches_total: int
    guard_credit: float
    overdue: int
    drain_rate: float
    retry_after_s: int
    paused: bool
    tuned_version: str
    endpoint_refusals: Mapping[str, int]
    replicas: Sequence[str]
    in_flight: Mapping[str, int]
    limits: Mapping[str, int]
    amounts: Mapping[str, float]
    about: Mapping[str, Mapping[str, object]]
    prompt_lines: Mapping[str, PromptLine]
    prefill_in_flight: Mapping[str, int] = field(default_factory=dict)
    prefill_limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def limits_by_name(self) -> Mapping[str, int]:
        """`limits` and `prefill_limits`, by the names that limits have in `limit_state`."""
        return {**self.limits, **{PREFILL + address: limit for address, limit in self.prefill_limits.items()}}


def parse_pool_state(reply: Sequence[Any], bands: Bands) -> PoolState:
    """The parsed reply of the script `state`. `bands` are the configured bands."""
    *reply, refusals, prefill_load, prefill_limits, prompts = reply
    epoch, now_us, stock, queued, upper, lower, ready, inflight, dispatched, ended = reply[:10]
    counts, replicas, load, limits, amounts, guards, credit, *reply = reply[10:]
    overdue, rate, paused, tuned_version, retry_after_s = reply
    addresses = load[::2]
    by_band = {band.priority: (0.0, 0, 0) for band in bands}
    rows = zip(counts[::5], counts[1::5], counts[3::5], counts[4::5], strict=True)
    for priority, v, length, size_bytes in rows:
        # After a reconfiguration a dynamic band may share a named band's priority: add their counts.
        former_v, former, former_bytes = by_band.get(priority, (0.0, 0, 0))
        by_band[priority] = max(former_v, float(v)), former + length, former_bytes + int(size_bytes)
    named = {bands.of(each).name: by_band[each] for each in sorted(by_band, reverse=True)}
    return PoolState(
        born_us=int(epoch),
        now_us=int(now_us),
        stock=float(stock),
        lower=float(lower),
        upper=float(upper),
        ready_backends=ready,
        queued=queued,
        queue_length={name: length for name, (_, length, _) in named.items()},
        queue_bytes={name: size_bytes for name, (_, _, size_bytes) in named.items()},
        active_flows=sum(counts[2::5]),
        virtual_times={name: v for name, (v, _, _) in named.items()},
        leases=inflight,
        dispatched_total=int(dispatched),
        ended_total=int(ended),
        guard_dispatches_total=int(guards),
        guard_credit=float(credit),
        overdue=overdue,
        drain_rate=float(rate),
        retry_after_s=retry_after_s,
        paused=paused == 1,
        tuned_version=tuned_version,
        endpoint_refusals=_counts(refusals),
        replicas=replicas[::2],
        in_flight=_in_flight(load),
        limits=_limits(load, limits),
        prefill_in_flight=_in_flight(prefill_load),
        prefill_limits=_limits(prefill_load, prefill_limits),
        amounts={address: float(amount) for address, amount in zip(addresses, amounts, strict=False)},
        about={name: _info(text) for name, text in zip(replicas[::2], replicas[1::2], strict=True)},
        prompt_lines={
            model: PromptLine(float(base), float(slope))
            for model, base, slope in zip(prompts[::3], prompts[1::3], prompts[2::3], strict=True)
        },
    )


def _in_flight(load: Sequence[str]) -> Mapping[str, int]:
    return {
        address: int(float(score) % UNPICKABLE) for address, score in zip(load[::2], load[1::2], strict=True)
    }


def _limits(load: Sequence[str], limits: Sequence[str]) -> Mapping[str, int]:
    return {address: int(limit) for address, limit in zip(load[::2], limits, strict=False) if limit}


class FoundLimit(msgspec.Struct, frozen=True):
    """The limit that the fleet has found for one endpoint, and why it last moved (fleet/limit_controller.py).

    The limit is in `unit` (requests or tokens). `changed_ms` is by Redis's clock. A new leader continues from
    the remaining fields.
    """

    limit: int
    reason: str
    changed_ms: int
    grows_fast: bool = True
    full_at: int = 0
    pause_s: float = 0.0
    unit: str = "requests"


def parse_found_limits(text: str | None) -> Mapping[str, FoundLimit]:
    """Address -> found limit, from the field `limit_state`; empty if missing or damaged."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, FoundLimit])
    except msgspec.MsgspecError:
        return {}


def why_limited(
    endpoint: Endpoint, limit: int | None, found: FoundLimit | None, most: int | None, now_us: int
) -> tuple[str | None, float | None]:
    """Why the limit in force is `limit`, at most `most`, and the seconds since the fleet set it."""
    if limit is None or found is None:
        return None, None
    moved_s = max(0.0, now_us / 1e6 - found.changed_ms / 1e3)
    if limit < found.limit and moved_s >= _NEW_S:
        bounds = {endpoint.max_inflight: "max_inflight of discovery", most: "max_per_backend"}
        why = bounds.get(limit, "the endpoint was full or ejected")
        return f"{why}; the fleet found {found.limit}", None
    return found.reason, moved_s


def parse_ejections(flat: Sequence[str]) -> Mapping[str, Ejection]:
    """Address -> ejection, of endpoints ejected now or recently, from the hash `outliers`."""
    found = {}
    for address, text in zip(flat[::2], flat[1::2], strict=True):
        # Skip entries without a time (never ejected), and malformed entries by other programs.
        with contextlib.suppress(ValueError, TypeError, KeyError):
            entry = json.loads(text)
            found[address] = Ejection(str(entry["why"]), int(entry["until_ms"]))
    return found


def parse_marks(fields: Iterable[str]) -> frozenset[tuple[str, str]]:
    """Pairs (mark, address), from the hash `marks`; a mark is `drained`, `down` or `ejected`."""
    parts = (field.partition(BETWEEN) for field in fields)
    return frozenset((what, address) for what, _, address in parts)


def marked(
    endpoints: Iterable[Endpoint],
    marks: frozenset[tuple[str, str]],
    ejections: Mapping[str, Ejection] = MappingProxyType({}),
) -> tuple[Endpoint, ...]:
    """Copies of `endpoints` with the given `marks` and `ejections` set."""
    if not marks:
        return tuple(endpoints)
    addresses = {address for _, address in marks}
    return tuple(
        replace(
            each,
            drained=("drained", each.address) in marks,
            down=("down", each.address) in marks,
            ejected=ejections.get(each.address, _UNKNOWN_EJECTION)
            if ("ejected", each.address) in marks
            else None,
        )
        if each.address in addresses
        else each
        for each in endpoints
    )


def describe(endpoint: Endpoint) -> str:
    """The JSON that is published for an endpoint under the endpoint's address."""
    about: dict[str, object] = {"labels": endpoint.labels, "draining": endpoint.draining}
    if endpoint.max_inflight is not None:
        about["max_inflight"] = endpoint.max_inflight
    stages = {"decode": endpoint.decodes, "prefill": endpoint.prefills, "encode": endpoint.encodes}
    names = [name for name, serves in stages.items() if serves]
    if names != ["decode"]:
        about["stages"] = " ".join(names)
    return json.dumps(about, separators=(",", ":"), sort_keys=True)


def _counts(text: str) -> Mapping[str, int]:
    """Counts in JSON, parsed; empty if another program has damaged the text."""
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        return {name: int(count) for name, count in json.loads(text).items()}
    return {}


def _info(text: str) -> Mapping[str, object]:
    """A replica's published info, parsed; empty if malformed."""
    try:
        about = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return about if isinstance(about, dict) else {}
