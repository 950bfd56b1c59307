"""The shared state as typed methods, one a script; state/reads.py has those of the admin API.

Admission, failover, replica/ and admin/ call it. No other code names a script or reads its replies.
Arguments and replies are those of the files in `lua/`; times are seconds unless named `_ms`."""

import asyncio
import contextlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from picker_fleet.bands import Bands
from picker_fleet.request import Ejection, Endpoint, Fault, InferenceRequest, Outcome
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.state.batching import BatchingClient, CallMetrics
from picker_fleet.state.connection import FailureDetector, PauseDetector
from picker_fleet.state.keys import BETWEEN, Keys
from picker_fleet.state.reads import QueueSnapshots, Reads
from picker_fleet.state.schema import ARRIVAL_NUMBERS, ARRIVAL_TEXTS, UNPICKABLE

_PACKED_NUMBERS = struct.Struct(f"<{len(ARRIVAL_NUMBERS)}d")
_ADOPTED = " adopted"
_KEPT_CHANGES = 200
_ANSWERED = "answered"  # `completed` of a request whose endpoint is well


_UNKNOWN_EJECTION = Ejection("unknown", 0)


@dataclass(slots=True)
class Decision:
    """The reply about one request: its `status` and a `detail` (endpoints, a time, a reason). With a new
    placement, `loads` are the loads that it was chosen from, as `lua/place.lua` gives them.

    Not frozen: one is made for each request, and a frozen one takes three times as long."""

    status: str
    detail: str
    loads: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """The reply to a heartbeat. `epoch` identifies a lifetime of the shared state; 0 while it is unknown."""

    epoch: str
    was_known: bool
    leader: bool
    live_replicas: int
    config_version: str
    endpoints_version: str
    stock: float
    queued: int
    upper: float
    lower: float
    ready_endpoints: int
    tuned_version: str
    paused: bool


@dataclass(frozen=True, slots=True)
class SweepReply:
    ran: bool
    expired: int
    reclaimed: int
    more: bool
    given_up: int = 0  # requests whose end nobody reported, reclaimed before their lease ran out
    suspects: tuple[str, ...] = ()  # endpoints whose metrics pages may show more of them


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What publishing an unknown pool has filed anew: how many requests, and which key was lost, '' if that
    was `pool`."""

    records: int
    lost: str


@dataclass(frozen=True, slots=True)
class LiveConfig:
    """The live changes in force: the settings they override, and the changes in the operator's words
    (replica/live_config.py). `version` is '' while nothing has ever been changed."""

    version: str = ""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PoolState:
    """The pool's state at one moment, by the names of the admin API. `in_flight` is by endpoint.

    What is by band is by its name, the highest first: the configured bands, and others that are in use.
    `queue_bytes` are those of the bodies of waiting requests.
    `lower` and `upper` are the bounds of the stock. `born_us`: when this epoch of the pool began; 0: unknown.
    `about`: what each of the live `replicas` says of itself, the JSON objects of its heartbeats.
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
    replicas: Sequence[str]
    in_flight: Mapping[str, int]
    about: Mapping[str, Mapping[str, object]]


class Store:
    """Typed access to one pool's shared state for one replica.

    `on_notification(what, about)` is called with each grant, expiry or eviction in a reply;
    `on_dequeued(attempts, successes)` with what a call dispatched; `on_adopted()` for each admission of a
    request that Redis already knew; `on_unavailable(cause, why)` when Redis becomes unavailable.
    `reads` are those of the admin API, `queue_snapshots` the part that is read once for all replicas.
    Heartbeats keep `signing` in step with the fleet's keys. `bands` are the configured ones.
    Every method raises StateFault: StateUnavailable without Redis, the others if Redis answers with an error
    (state/batching.py).
    """

    def __init__(
        self,
        url: str,
        *,
        pool: str,
        replica: str,
        failure_detector: FailureDetector,
        pause_detector: PauseDetector,
        connect_timeout_s: float,
        metrics: CallMetrics,
        on_notification: Callable[[str, str], object],
        on_dequeued: Callable[[int, int], None],
        on_adopted: Callable[[], None],
        on_unavailable: Callable[[str, str], object],
        signing: Keyring | None = None,
        bands: Bands = Bands(),  # noqa: B008 - it only remembers what it has made
    ) -> None:
        self.keys = Keys.of(pool)
        self._signing = signing or Keyring()
        self._bands = bands
        self.epoch = "0"
        self._clock = asyncio.get_running_loop().time
        self._redis_clock: tuple[str, int, float] | None = None  # epoch, its clock in µs, ours in s
        self._read: dict[str, tuple[str, Endpoint]] = {}  # what was last read of each endpoint
        self._replica = replica
        self._on_notification = on_notification
        self._on_dequeued = on_dequeued
        self._on_adopted = on_adopted
        self._on_strays = metrics.strays
        self._client = BatchingClient(
            url,
            key=self.keys.pool,
            caller=replica,
            failure_detector=failure_detector,
            pause_detector=pause_detector,
            connect_timeout_s=connect_timeout_s,
            metrics=metrics,
            on_batch=self._take_head,
            on_unavailable=on_unavailable,
        )
        self.reads = Reads(self._client, self.keys.log)
        self.queue_snapshots = QueueSnapshots(self._client, self.reads, self.keys.queue_snapshot)

    async def run(self) -> None:
        await self._client.run()

    @property
    def fault(self) -> str | None:
        """Why the shared state cannot be reached at the moment; None while it can."""
        return self._client.fault

    @property
    def connection_epoch(self) -> int:
        """Connections made so far. A new one may lead to a server that lacks the last writes (a failover)."""
        return self._client.connection_epoch

    def unsent_ends(self) -> list[str]:
        """Ids of ended requests whose end Redis cannot have seen, oldest first."""
        return [str(args[0]) for args in self._client.unsent("settle")]

    async def admit(
        self, request: InferenceRequest, attempt: str, candidates: str, age_s: float = 0.0
    ) -> Decision:
        """placed a,b,c | queued TTL_LEFT_MS | refused REASON RETRY_AFTER_S | expired | unknown-pool | foreign

        `candidates`: '*', 'a,b' or 'a=0.7,b=0.5' (scores without the load in flight); '' for none. With '*' a
        request that is queued is placed when it is granted.
        """
        reply: str = await self._client.submit("admit", (_arrival(request, attempt, candidates, age_s),))
        if reply.endswith(_ADOPTED):
            reply = reply.removesuffix(_ADOPTED)
            self._on_adopted()
        return _verdict(reply)

    async def place(self, request_id: str, attempt: str, candidates: str) -> Decision:
        """placed a,b,c | queued TTL_LEFT_MS (put back) | refused no-endpoints 1 | expired | gone"""
        return _verdict(await self._client.submit("place", (request_id, attempt, candidates)))

    def acknowledge(self, request_id: str, attempt: str) -> asyncio.Future[str]:
        """taken | unknown: this replica knows where a request is that was placed when it was granted. Kept
        until taken."""
        return self._client.submit("acknowledge", (request_id, attempt), durable=True)

    def settle(
        self,
        request_id: str,
        outcome: Outcome,
        actual: float | None = None,
        answer_tokens: int | None = None,
        *,
        answered: bool = False,
        urgent: bool = False,
    ) -> asyncio.Future[str]:
        """settled MODEL | left MODEL | unknown. Kept until Redis takes it.

        `actual` is the request's real cost, in the unit it was charged in; `answer_tokens` what its answer
        had, for the estimate of later ones. None: not known. `answered`: its endpoint is well. `urgent`: a
        request may wait for its place.
        """
        known = ("" if actual is None else actual, "" if answer_tokens is None else answer_tokens)
        args = (request_id, _ANSWERED if answered else outcome.value, *known)
        return self._client.submit("settle", args, durable=True, urgent=urgent)

    def report_fault(self, fault: Fault, flow: str) -> asyncio.Future[str]:
        """ejected, down (by this fault) | noted | unknown. `flow` is that of its request, '' unknown."""
        args = (fault.id, fault.endpoint, flow, fault.why, _milliseconds(fault.hold_s))
        return self._client.submit("report_fault", args)

    def tombstone(self, request_id: str, ago_s: float = 0.0) -> asyncio.Future[str]:
        """stored | back (it had been restored, and counts). After it, no sign of life from before the end,
        which was `ago_s` ago, restores the request."""
        return self._client.submit("tombstone", (request_id, _milliseconds(ago_s)))

    def note_origin(self, state_id: str, endpoint: str) -> asyncio.Future[str]:
        """noted: `endpoint` has the state of an id of the Responses API. Kept until taken."""
        return self._client.submit("note_origin", (state_id, endpoint), durable=True)

    async def origins(self, ids: Sequence[str]) -> list[str | None]:
        """The endpoints that have the state of `ids`, in their order; None for one that is not known."""
        found: list[str | None] = await self._client.command("HMGET", self.keys.origins, *ids)
        return found

    def report_client_gone(self, request_id: str) -> asyncio.Future[str]:
        """suspected | waiting | unknown: the client may have gone. Of a request that is placed the endpoint's
        next metrics pages decide."""
        return self._client.submit("report_client_gone", (request_id,))

    def cancel(self, request_id: str, attempt: str, why: str) -> asyncio.Future[str]:
        """ended | granted | foreign | unknown; `why`: cancelled, expired, withdrawn. Kept until taken."""
        return self._client.submit("cancel", (request_id, attempt, why), durable=True)

    def return_grant(self, request_id: str) -> asyncio.Future[str]:
        """Give back a grant that no stream here waits for: ended | foreign | unknown. Repeated if lost."""
        return self._client.submit("cancel", (request_id, "", "unclaimed"))

    def renew(
        self, request_id: str, attempt: str | None, served: str, accounting_token: str, ago_s: float = 0.0
    ) -> asyncio.Future[str]:
        """renewed | restored | waiting | unknown; `attempt` is None when an access log reports it. It was
        last seen alive `ago_s` ago."""
        mine = "" if attempt is None else attempt
        return self._client.submit(
            "renew", (request_id, mine, served, accounting_token, _milliseconds(ago_s))
        )

    async def heartbeat(self, about: str, silence_s: float) -> HeartbeatReply:
        """Report that this replica is alive. `about` is its replica info, JSON; '': the same as last time."""
        signing = self._signing
        keys = (signing.offer(), signing.first)
        reply = await self._client.call(
            "heartbeat", self._replica, about, int(silence_s * 1000), *keys, *self._now_at_least()
        )
        self._take_head(reply)
        (
            known, leader, live, config, endpoints, tuned, stock, queued, upper, lower, ready, paused,
            signing_keys, now_us, variant_key,
        ) = reply[4:]  # fmt: skip
        self._redis_clock = (reply[0], int(now_us), self._clock())
        signing.take(signing_keys, variant_key)
        return HeartbeatReply(
            reply[0], known == 1, leader == 1, live, config, endpoints,
            float(stock), queued, float(upper), float(lower), ready, tuned, paused == 1,
        )  # fmt: skip

    def _now_at_least(self) -> tuple[str, ...]:
        """The last epoch known, and a lower bound of its clock now (µs); empty before the first heartbeat."""
        if self._redis_clock is None:
            return ()
        epoch, now_us, read_s = self._redis_clock
        return epoch, str(now_us + int((self._clock() - read_s) * 1e6))

    def now_ms(self) -> int:
        """Redis's clock, or slightly less; 0 before the first heartbeat."""
        clock = self._now_at_least()
        return int(clock[1]) // 1000 if clock else 0

    async def notifications(self) -> list[tuple[str, str]]:
        """The notifications in this replica's inbox, each as (what, request id). They stay there. What was
        placed when it was granted is among the granted, as in a heartbeat's reply."""
        flat = await self._client.command("HGETALL", self.keys.inbox(self._replica))
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return [("granted" if what.startswith("placed") else what, request_id) for request_id, what in pairs]

    async def server_info(self) -> str:
        """What the server says of its memory, and of its part in replication."""
        return str(await self._client.command("INFO", "memory", "replication"))

    async def library_is_intact(self) -> bool:
        """Whether the library that the server has under our name is ours; so it is while it has none."""
        listed = await self._client.command(
            "FUNCTION", "LIST", "LIBRARYNAME", self._client.library.name, "WITHCODE"
        )
        return all(self._client.library.source in library for library in listed)

    async def load_library(self) -> None:
        await self._client.command("FUNCTION", "LOAD", "REPLACE", self._client.library.source)

    async def leave(self) -> None:
        """Take this replica off the list of live ones; the sweep takes care of requests that it left."""
        await self._client.command("ZADD", self.keys.replicas, "XX", 0, self._replica)

    async def publish(
        self,
        settings: Mapping[str, object],
        endpoints: Sequence[Endpoint],
        *,
        config_version: str,
        endpoints_version: str,
    ) -> Rebuilt | None:
        """Returns what was rebuilt if the pool was unknown."""
        caps = {each.address: each.max_inflight for each in endpoints if each.max_inflight is not None}
        if caps:
            settings = {**settings, "caps": caps}  # read at each choice
        pairs = [text for each in endpoints for text in (each.address, _description(each))]
        reply = await self._client.call(
            "publish", self._replica, config_version, endpoints_version, json.dumps(settings), *pairs
        )
        self._take_head(reply)
        return Rebuilt(int(reply[7]), str(reply[8])) if reply[7] >= 0 else None

    async def publish_changes(
        self, former_version: str, version: str, changes: Mapping[str, Endpoint | None]
    ) -> bool:
        """Change the published endpoints by address; None: no longer published. None of them may have a
        limit. False, and nothing done, unless `former_version` is published."""
        pairs = [
            text
            for address, each in changes.items()
            for text in (address, "" if each is None else _description(each))
        ]
        reply = await self._client.call("publish_changes", self._replica, former_version, version, *pairs)
        self._take_head(reply)
        return bool(reply[4] == 1)

    async def set_live_config(self, overrides: Mapping[str, object], note: Mapping[str, object]) -> str:
        """Change settings for the whole fleet; the version that results, '' while the pool is unknown.

        `overrides` are named as `publish` names them, `note` says the same in the operator's words; None
        takes a change back.
        """
        reply = await self._client.call("tune", self._replica, json.dumps(overrides), json.dumps(note))
        self._take_head(reply)
        return str(reply[4])

    async def live_config(self) -> LiveConfig:
        version, overrides, note = await self._client.command(
            "HMGET", self.keys.pool, "tuned_version", "overrides", "tuned"
        )
        return LiveConfig(version or "", json.loads(overrides or "{}"), json.loads(note or "{}"))

    async def note_change(self, text: str) -> None:
        """Keep what an operator has changed, among the last ones."""
        await self._client.command(
            "XADD", self.keys.operator_changes, "MAXLEN", _KEPT_CHANGES, "*", "change", text
        )

    async def operator_changes(self) -> list[str]:
        """What operators have changed, the newest first."""
        found = await self._client.command(
            "XREVRANGE", self.keys.operator_changes, "+", "-", "COUNT", _KEPT_CHANGES
        )
        return [fields[1] for _, fields in found]

    def mark_endpoint(self, address: str, what: str, on: bool) -> asyncio.Future[str]:
        """marked | ejected | unknown. `what`: drained, down; nothing new goes to a marked endpoint.
        `ejected`: a probe has found one unwell (`on`) or well. `stuck`: its page stands still."""
        return self._client.submit("mark_endpoint", (address, what, int(on)))

    async def evict(self, request_id: str) -> str:
        """Take a request out of the queue: evicted | running (too late) | unknown"""
        reply = await self._client.call("evict", self._replica, request_id)
        self._take_head(reply)
        return str(reply[4])

    async def sweep(self, *, interval_s: float, grace_s: float, idle_s: float, unseen_s: float) -> SweepReply:
        times = (int(seconds * 1000) for seconds in (interval_s, grace_s, idle_s, unseen_s))
        reply = await self._client.call("sweep", self._replica, *times)
        self._take_head(reply)
        ran, expired, reclaimed, more, ghosts, suspects = reply[4:]
        return SweepReply(ran == 1, expired, reclaimed, more == 1, ghosts, tuple(suspects))

    async def endpoints(self) -> tuple[Endpoint, ...]:
        """The pool's endpoints as published, by address."""
        published = await self._client.command("HGETALL", self.keys.endpoints)
        marks, ejections = await self.marks(), await self.ejections()
        # Few of thousands differ from one reading to the next.
        read, self._read = self._read, {}
        for address, text in sorted(zip(published[::2], published[1::2], strict=True)):
            known = read.get(address)
            if known is None or known[0] != text:
                about = json.loads(text)
                labels, limit = about["labels"] or {}, about.get("max_inflight")
                known = text, Endpoint(address, labels, about["draining"], max_inflight=limit)
            self._read[address] = known
        return marked((endpoint for _, endpoint in self._read.values()), marks, ejections)

    async def ejections(self) -> Mapping[str, Ejection]:
        """Of the endpoints that are ejected or were lately, by address."""
        flat = await self._client.command("HGETALL", self.keys.outliers)
        found = {}
        for address, text in zip(flat[::2], flat[1::2], strict=True):
            # One that was never ejected has no time; others may be another program's.
            with contextlib.suppress(ValueError, TypeError, KeyError):
                entry = json.loads(text)
                found[address] = Ejection(str(entry["why"]), int(entry["until_ms"]))
        return found

    async def marks(self) -> frozenset[tuple[str, str]]:
        """What is marked: `drained`, `down` or `ejected`, and the address."""
        fields = (await self._client.command("HGETALL", self.keys.marks))[::2]
        parts = (field.partition(BETWEEN) for field in fields)
        return frozenset((what, address) for what, _, address in parts)

    async def state(self, silence_s: float) -> PoolState:
        """The pool's state; replicas without a heartbeat for `silence_s` are not live."""
        reply = await self._client.call("state", int(silence_s * 1000))
        epoch, now_us, stock, queued, upper, lower, ready, inflight, dispatched, ended = reply[:10]
        bands, replicas, load, guards, credit, overdue, rate, paused, tuned_version, retry_after_s = reply[
            10:
        ]
        by_band = {band.priority: (0.0, 0, 0) for band in self._bands}
        rows = zip(bands[::5], bands[1::5], bands[3::5], bands[4::5], strict=True)
        for priority, v, length, size_bytes in rows:
            # Two have one priority for a while after the configuration gave it to one of the three.
            former_v, former, former_bytes = by_band.get(priority, (0.0, 0, 0))
            by_band[priority] = max(former_v, float(v)), former + length, former_bytes + int(size_bytes)
        named = {self._bands.of(each).name: by_band[each] for each in sorted(by_band, reverse=True)}
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
            active_flows=sum(bands[2::5]),
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
            replicas=replicas[::2],
            in_flight={
                address: int(float(score) % UNPICKABLE)
                for address, score in zip(load[::2], load[1::2], strict=True)
            },
            about={name: _info(text) for name, text in zip(replicas[::2], replicas[1::2], strict=True)},
        )

    def _take_head(self, head: Sequence[Any]) -> None:
        self.epoch = head[0]
        if head[2]:
            self._on_dequeued(head[2], head[3])
        for item in head[1]:
            what, _, about = item.partition(" ")
            if what == "strays":
                self._on_strays(int(about))
            else:
                self._on_notification(what, about)


def marked(
    endpoints: Iterable[Endpoint],
    marks: frozenset[tuple[str, str]],
    ejections: Mapping[str, Ejection] = MappingProxyType({}),
) -> tuple[Endpoint, ...]:
    """`endpoints`, of which none is marked, with their marks."""
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


def _description(endpoint: Endpoint) -> str:
    """What is published of an endpoint beside its address."""
    about: dict[str, object] = {"labels": endpoint.labels, "draining": endpoint.draining}
    if endpoint.max_inflight is not None:
        about["max_inflight"] = endpoint.max_inflight
    return json.dumps(about, separators=(",", ":"))


def _milliseconds(seconds: float) -> int:
    return max(0, int(seconds * 1000))


def _info(text: str) -> Mapping[str, object]:
    """The info that a replica publishes; empty if it is damaged."""
    try:
        about = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return about if isinstance(about, dict) else {}


def _verdict(reply: str) -> Decision:
    what, _, detail = reply.partition(" ")
    if what == "placed":
        return Decision(what, *detail.split(" "))
    return Decision(what, detail)


def _arrival(request: InferenceRequest, attempt: str, candidates: str, age_s: float = 0.0) -> bytes:
    """Packed for Redis; times in ms, the age to the µs: it orders those that come again in one message.

    ValueError where a text holds byte 0, which would end it early.
    """
    workload = request.workload
    return pack_arrival(
        (request.id, attempt, request.flow, workload.id, request.model, candidates),
        (
            request.band.priority,
            request.weight,
            request.cost,
            int(request.ttl_s * 1000),
            round(age_s * 1000, 3) if age_s else 0.0,
            workload.criticality,
            request.limit,
            request.learn,
            request.body_bytes,
        ),
    )


def pack_arrival(texts: tuple[str, str, str, str, str, str], numbers: tuple[float, ...]) -> bytes:
    """ARRIVAL_TEXTS and ARRIVAL_NUMBERS in their order. Raises ValueError where a text holds byte 0."""
    packed = ("\0".join(texts) + "\0").encode(errors="surrogateescape")
    if packed.count(0) != len(ARRIVAL_TEXTS):
        raise ValueError("byte 0 in a text")
    return packed + _PACKED_NUMBERS.pack(*numbers)
