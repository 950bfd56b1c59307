"""Typed access to the state in Redis, with one method per script. state/reads.py has the admin API's reads.

Admission, failover, fleet/ and admin/ call this module. Only state/ names scripts and reads their words;
other code matches the types of state/replies.py. The files in `lua/` describe arguments and replies. Times
are seconds unless their names end in `_ms`."""

import asyncio
import json
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, cast

import msgspec

from picker_fleet.domain.bands import Bands
from picker_fleet.domain.request import Ejection, Endpoint, Fault, InferenceRequest, Outcome
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.state.batching import BatchingClient, CallMetrics
from picker_fleet.state.connection import HEAD, FailureDetector, PauseDetector
from picker_fleet.state.keys import BETWEEN, Keys
from picker_fleet.state.pool_state import (
    PREFILL,
    FoundLimit,
    PoolState,
    describe,
    marked,
    parse_ejections,
    parse_found_limits,
    parse_marks,
    parse_pool_state,
)
from picker_fleet.state.reads import QueueSnapshots, Reads, Usage, fields_of
from picker_fleet.state.replies import (
    NOTIFIED,
    AnyVerdict,
    CancelReply,
    Dispatched,
    Event,
    EvictReply,
    FaultReply,
    HeartbeatReply,
    LiveConfig,
    MarkReply,
    Notification,
    Placed,
    PrefilledReply,
    Queued,
    Rebuilt,
    RedisLost,
    Refused,
    Renewal,
    SettleReply,
    SuspicionReply,
    SweepReply,
    TombstoneReply,
    Verdict,
)
from picker_fleet.state.schema import ARRIVAL_NUMBERS, ARRIVAL_TEXTS, Refusal

_PACKED_NUMBERS = struct.Struct(f"<{len(ARRIVAL_NUMBERS)}d")
PACKED_USAGE = struct.Struct("<3d")  # the argument `usage` of the script `settle`
STALE = "stale"  # the nodes of tenants have another version than the caller's
_NODES_AT_ONCE = 100  # tenants' nodes that a call changes, in well below 5 ms
_KEPT_CHANGES = 200
_ANSWERED = "answered"  # like `completed`; also: the request's endpoint is healthy
_ADOPTED = " adopted"  # follows the verdict on a request that Redis already knew


def parse_verdict(reply: str) -> AnyVerdict:
    """Parse a script's reply about one request. Raises ValueError for an unknown reply."""
    what, _, detail = reply.partition(" ")
    if what == "placed":
        endpoints, _, loads = detail.partition(" ")
        return _placed(endpoints, loads)
    if what == "queued":
        return Queued(float(detail or 0) / 1000)
    if what == "refused":
        reason, _, seconds = detail.partition(" ")
        seconds, _, limit = seconds.partition(BETWEEN)
        limit, _, quota = limit.partition(BETWEEN)
        return Refused(Refusal(reason), int(seconds), limit, quota)
    return Verdict(what)


def _placed(endpoints: str, loads: str) -> Placed:
    loads, _, quota = loads.partition(BETWEEN)
    endpoints, _, prefillers = endpoints.partition(">")
    return Placed(
        tuple(endpoints.split(",")), loads, quota, tuple(prefillers.split(",")) if prefillers else ()
    )


def parse_notification(what: str, about: str) -> Notification | None:
    """Parse a notification; None if it is malformed, since other programs may write to the channel. `about`
    is the request's id, `ATTEMPT ENDPOINTS LOADS ID` if the grant has placed the request, or a refusal as
    in replies, byte 31, a blank and the id."""
    if what == "placed":
        parts = about.split(" ", 3)
        if len(parts) < 4:
            return None
        attempt, endpoints, loads, request_id = parts
        return Notification(request_id, _placed(endpoints, loads), attempt)
    verdict: AnyVerdict | None = NOTIFIED.get(what)
    if what == "refused":
        refusal, _, about = about.rpartition(f"{BETWEEN} ")
        with suppress(ValueError):
            verdict = parse_verdict(f"refused {refusal}")
    return Notification(about, verdict) if verdict is not None else None


def _parse_expiry(reply: str) -> AnyVerdict:
    return parse_verdict(reply) if reply.startswith(("granted", "refused")) else Verdict.EXPIRED


class Store:
    """Typed access to one pool's shared state for one replica.

    Every event goes to `on_event`, which the store's owner sets before `run`. The attribute `reads` serves
    the admin API; `queue_snapshots` reads all flow queues once for the fleet. Heartbeats keep `signing` in
    step with the fleet's keys. `bands` are the configured bands. Every method raises a StateFault, which is
    StateUnavailable without Redis, or another subclass if Redis answers with an error (state/batching.py).
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
        signing: Keyring | None = None,
        bands: Bands = Bands(),  # noqa: B008 - a cache of bands may be shared
    ) -> None:
        self.keys = Keys.of(pool)
        self._signing = signing or Keyring()
        self._bands = bands
        self.epoch = "0"
        self._clock = asyncio.get_running_loop().time
        self._redis_clock: tuple[str, int, float] | None = None  # epoch, Redis's clock (µs), own clock (s)
        self._read: dict[str, tuple[str, Endpoint]] = {}  # address -> (its last JSON, the parsed JSON)
        self.replica = replica
        self.on_event: Callable[[Event], object] = lambda event: None
        self._metrics = metrics
        self._wake: asyncio.TimerHandle | None = None
        self._client = BatchingClient(
            url,
            key=self.keys.pool,
            caller=replica,
            failure_detector=failure_detector,
            pause_detector=pause_detector,
            connect_timeout_s=connect_timeout_s,
            metrics=metrics,
            on_batch=self._take_head,
            on_unavailable=self._unavailable,
        )
        self.reads = Reads(self._client, self.keys)
        self.queue_snapshots = QueueSnapshots(self._client, self.reads, self.keys.queue_snapshot)

    async def run(self) -> None:
        await self._client.run()

    @property
    def fault(self) -> str | None:
        """The reason why the shared state cannot be reached now; None while it can be reached."""
        return self._client.fault

    @property
    def connection_epoch(self) -> int:
        """The number of connections made so far. After a failover the new server may lack the last writes."""
        return self._client.connection_epoch

    def unsent_ends(self) -> list[str]:
        """Ids of ended requests whose end Redis cannot have seen, oldest first."""
        return [str(args[0]) for args in self._client.unsent("settle")]

    def admit(
        self,
        request: InferenceRequest,
        attempt: str,
        candidates: str,
        age_s: float = 0.0,
        prefill: str = "",
    ) -> asyncio.Future[AnyVerdict]:
        """Admit a request; the answer is Placed, Queued, Refused, EXPIRED, FOREIGN or UNKNOWN_POOL.

        `candidates`: '*', 'a,b' or 'a=0.7,b=0.5' (scores without the load in flight); '' for none. With '*',
        the call that grants the queued request also places it. `prefill`: candidates for the stage prefill in
        the same form; '': do not split the request.
        """
        arrival = _arrival(request, attempt, candidates, age_s, prefill)
        return self._client.submit("admit", (arrival,), self._admitted)

    def _admitted(self, reply: str) -> AnyVerdict:
        if reply.endswith(_ADOPTED):
            reply = reply.removesuffix(_ADOPTED)
            self._metrics.adopted()
        return parse_verdict(reply)

    def place(
        self, request_id: str, attempt: str, candidates: str, prefill: str = ""
    ) -> asyncio.Future[AnyVerdict]:
        """Place a granted request; the answer is Placed, Queued (put back), Refused, EXPIRED or GONE."""
        return self._client.submit("place", (request_id, attempt, candidates, prefill), parse_verdict)

    def prefilled(self, request_id: str) -> asyncio.Future[PrefilledReply]:
        """End the prefill reservation of a split request: its answer has begun."""
        return self._client.submit("prefilled", (request_id,))

    def acknowledge(self, request_id: str, attempt: str) -> asyncio.Future[str]:
        """Confirm the endpoint of a request placed by its grant. The call repeats until Redis accepts it."""
        return self._client.submit("acknowledge", (request_id, attempt), durable=True)

    def settle(
        self,
        request_id: str,
        outcome: Outcome,
        actual: float | None = None,
        answer_tokens: int | None = None,
        prompt_size: int | None = None,
        *,
        usage: tuple[int, int, int] | None = None,
        answered: bool = False,
        urgent: bool = False,
    ) -> asyncio.Future[SettleReply]:
        """Report an end. The call is repeated until Redis accepts it.

        `actual` is the request's real cost, in the unit of its charge; below 0: at least -actual. The
        answer's length, `answer_tokens`, and the size of the prompt's text, `prompt_size`, improve later
        estimates; give the size only if `actual` is the tokens of that text and of the answer. None: unknown.
        `usage` corrects the charges of the request's tenants: the tokens of prompt, prompt from a cache, and
        answer; (-1, -1, N) if the answer has at least N tokens, None if unknown.
        `answered`: the answer shows that the endpoint is healthy. `urgent`: send the call at once, since
        another request may wait for the freed capacity.
        """
        known = ("" if each is None else each for each in (actual, answer_tokens, prompt_size))
        packed = PACKED_USAGE.pack(*usage) if usage else ""
        args = (request_id, _ANSWERED if answered else outcome.value, *known, packed)
        return self._client.submit("settle", args, SettleReply.parse, durable=True, urgent=urgent)

    def report_fault(self, fault: Fault, flow: str) -> asyncio.Future[FaultReply]:
        """Report a failed attempt of a request. `flow` is the request's flow, '' if unknown."""
        args = (fault.id, fault.endpoint, flow, fault.why, _milliseconds(fault.hold_s))
        return self._client.submit("report_fault", args)

    def tombstone(self, request_id: str, ago_s: float = 0.0) -> asyncio.Future[TombstoneReply]:
        """Store that a request ended `ago_s` ago: replicas that saw it only earlier cannot restore it."""
        return self._client.submit("tombstone", (request_id, _milliseconds(ago_s)))

    def note_origin(self, state_id: str, endpoint: str) -> asyncio.Future[str]:
        """Store that `endpoint` has the state of an id; the call repeats until Redis accepts it."""
        return self._client.submit("note_origin", (state_id, endpoint), durable=True)

    async def origins(self, ids: Sequence[str]) -> list[str | None]:
        """The endpoint that has the state of each of `ids`, in the order of `ids`; None for an unknown id."""
        found: list[str | None] = await self._client.command("HMGET", self.keys.origins, *ids)
        return found

    def report_client_gone(self, request_id: str) -> asyncio.Future[SuspicionReply]:
        """Report that a client may have gone. If the client's request is placed, the sweep checks the
        endpoint's next metrics pages."""
        return self._client.submit("report_client_gone", (request_id,))

    def cancel(self, request_id: str, attempt: str, why: str) -> asyncio.Future[CancelReply]:
        """Cancel a request; `why`: cancelled, withdrawn. The call repeats until Redis accepts it."""
        return self._client.submit("cancel", (request_id, attempt, why), durable=True)

    def expire(self, request_id: str, attempt: str) -> asyncio.Future[AnyVerdict]:
        """End a request past its deadline. The answer is EXPIRED, GRANTED if Redis granted it first, or the
        refusal of the tenant's limit for which it waited. The call repeats until Redis accepts it."""
        return self._client.submit("cancel", (request_id, attempt, "expired"), _parse_expiry, durable=True)

    def return_grant(self, request_id: str) -> asyncio.Future[CancelReply]:
        """Give back a grant that no stream waits for. If this call is lost, Redis repeats the grant."""
        return self._client.submit("cancel", (request_id, "", "unclaimed"))

    def renew(
        self, request_id: str, attempt: str | None, served: str, accounting_token: str, ago_s: float = 0.0
    ) -> asyncio.Future[Renewal]:
        """Renew the lease of a request that ran `ago_s` ago. `attempt` is None if an access-log entry shows
        that it runs."""
        mine = "" if attempt is None else attempt
        args = (request_id, mine, served, accounting_token, _milliseconds(ago_s))
        return self._client.submit("renew", args)

    async def heartbeat(self, about: str, silence_s: float) -> HeartbeatReply:
        """Report that this replica is alive. `about` is the replica info (JSON); '': unchanged."""
        signing = self._signing
        keys = (signing.offer(), signing.first)
        reply = await self._call("heartbeat", about, int(silence_s * 1000), *keys, *self._now_at_least())
        (
            known, leader, live, config, endpoints, tuned, stock, queued, upper, lower, ready, paused,
            signing_keys, now_us, variant_key,
        ) = reply  # fmt: skip
        self._redis_clock = (self.epoch, int(now_us), self._clock())
        signing.take(signing_keys, variant_key)
        return HeartbeatReply(
            self.epoch, known == 1, leader == 1, live, config, endpoints,
            float(stock), queued, float(upper), float(lower), ready, tuned, paused == 1,
        )  # fmt: skip

    def _now_at_least(self) -> tuple[str, ...]:
        """The last known epoch, and a lower bound of Redis's clock (µs); empty before the first heartbeat."""
        if self._redis_clock is None:
            return ()
        return self._redis_clock[0], str(self._now_us())

    def now_ms(self) -> int:
        """Redis's clock, or slightly less; 0 before the first heartbeat."""
        return self._now_us() // 1000

    def _now_us(self) -> int:
        if self._redis_clock is None:
            return 0
        _, now_us, read_s = self._redis_clock
        return now_us + int((self._clock() - read_s) * 1e6)

    async def notifications(self) -> list[Notification]:
        """Read this replica's inbox without removing notifications; a Placed notification becomes GRANTED."""
        flat = await self._client.command("HGETALL", self.keys.inbox(self.replica))
        pairs = zip(flat[::2], flat[1::2], strict=True)
        lines = (f"{'granted' if what.startswith('placed') else what} {id}" for id, what in pairs)
        found = (parse_notification(*line.partition(" ")[::2]) for line in lines)
        return [each for each in found if each is not None]

    async def server_info(self) -> str:
        """The sections `memory` and `replication` of the server's reply to INFO."""
        return str(await self._client.command("INFO", "memory", "replication"))

    async def library_is_intact(self) -> bool:
        """Whether the server's library of this version has the right source; True if it has no library."""
        listed = await self._client.command(
            "FUNCTION", "LIST", "LIBRARYNAME", self._client.library.name, "WITHCODE"
        )
        return all(self._client.library.source in library for library in listed)

    async def load_library(self) -> None:
        await self._client.command("FUNCTION", "LOAD", "REPLACE", self._client.library.source)

    async def leave(self) -> None:
        """Remove this replica from the live replicas; the sweep orphans its queued requests."""
        await self._client.command("ZADD", self.keys.replicas, "XX", 0, self.replica)

    async def publish(
        self,
        settings: Mapping[str, object],
        endpoints: Sequence[Endpoint],
        *,
        config_version: str,
        endpoints_version: str,
    ) -> Rebuilt | None:
        """Publish settings and endpoints. Returns the result of the rebuild; None if the pool was known."""
        limited = [each for each in endpoints if each.max_inflight is not None]
        caps = {each.address: each.max_inflight for each in limited if each.decodes}
        prefill_caps = {each.address: each.max_inflight for each in limited if each.prefills}
        if caps:
            settings = {**settings, "caps": caps}  # cached: each placement reads the limits
        if prefill_caps:
            settings = {**settings, "prefill_caps": prefill_caps}
        pairs = [text for each in endpoints for text in (each.address, describe(each))]
        *_, records, lost = await self._call(
            "publish", config_version, endpoints_version, json.dumps(settings), *pairs
        )
        return Rebuilt(records, lost) if records >= 0 else None

    async def publish_changes(
        self, former_version: str, version: str, changes: Mapping[str, Endpoint | None]
    ) -> bool:
        """Change published endpoints by address; None removes an endpoint. Endpoints with limits are not
        allowed.Returns False and changes nothing unless `former_version` is the published version."""
        pairs = [
            text
            for address, each in changes.items()
            for text in (address, "" if each is None else describe(each))
        ]
        (changed,) = await self._call("publish_changes", former_version, version, *pairs)
        return bool(changed == 1)

    async def set_live_config(self, overrides: Mapping[str, object], note: Mapping[str, object]) -> str:
        """Change settings fleet-wide. Returns the new version of live changes; '' while the pool is unknown.

        The argument `overrides` uses the setting names of `publish`; `note` has the same changes in the
        operator's words. The value None removes a change.
        """
        (version,) = await self._call("tune", json.dumps(overrides), json.dumps(note))
        return str(version)

    async def set_limits(self, found: Mapping[str, FoundLimit]) -> None:
        """Put the limits that the fleet has found in force, by address; all have the same unit. The key of a
        limit in the stage prefill is PREFILL and the address."""
        limits: dict[str, Any] = {"doubling": [name for name, each in found.items() if each.grows_fast]}
        for name, each in found.items():
            stage = limits.setdefault("prefill", {}) if name.startswith(PREFILL) else limits
            stage[name.removeprefix(PREFILL)] = each.limit
        if any(each.unit == "tokens" for each in found.values()):
            limits["unit"] = "tokens"
        state = msgspec.json.encode(found).decode()
        await self._call("set_limits", json.dumps(limits), state)

    async def found_limits(self) -> Mapping[str, FoundLimit]:
        """The limits that the fleet has found, by address, with PREFILL before it for the stage prefill."""
        return parse_found_limits(await self._client.command("HGET", self.keys.pool, "limit_state"))

    async def set_tenants(self, kind: Literal["tenants", "tenant_changes"], nodes: Mapping[str, str]) -> str:
        """Change tenants' nodes: path -> JSON (lua/lib/tenants.lua), '' removes the node. `kind`: set by the
        configuration, or by operators. The path '' may come first, with a version: nothing is changed unless
        this version is in force. Returns the new version, '' while the pool is unknown, or STALE."""
        version, left = "", list(nodes.items())
        while left:
            some, left = left[:_NODES_AT_ONCE], left[_NODES_AT_ONCE:]
            (version,) = await self._call("set_tenants", kind, *(text for pair in some for text in pair))
        return str(version)

    async def nodes_of(self, kind: Literal["tenants", "tenant_changes"]) -> Mapping[str, str]:
        """The tenants' nodes of one kind: path -> JSON."""
        return {path: text async for path, text in fields_of(self._client, getattr(self.keys, kind))}

    async def tenants_version(self) -> str:
        """The version of the nodes, which grows with each change; '' before the first change."""
        return str(await self._client.command("HGET", self.keys.pool, "tenants_version") or "")

    async def count_usage(
        self, batch: int, hour: int, former: int, rows: Mapping[tuple[str, str], Usage], *, leaves: bool
    ) -> None:
        """Add a batch of usage, by (leaf, model), to an hour; a repeated batch counts once. `former`: the
        hour of the batch before; 0 for the first batch."""
        texts = [text for names, usage in rows.items() for text in (*names, *map(repr, usage))]
        await self._client.call("count_usage", self.replica, batch, hour, int(leaves), former, *texts)

    async def tenant_settings(self, path: str) -> tuple[str, str]:
        """The JSON of a node's settings in the configuration, and of an operator's change; '' for none."""
        configured = await self._client.command("HGET", self.keys.tenants, path)
        changed = await self._client.command("HGET", self.keys.tenant_changes, path)
        return configured or "", changed or ""

    async def top_up_tenant(self, path: str, unit: str, per: str, amount: float) -> float | None:
        """Lower the used part of a tenant's limit by `amount`, at most to 0; LimitRow explains `per`. Returns
        the free part of the limit; None if the node has no such limit."""
        (left,) = await self._call("top_up_tenant", path, unit, per, amount, secrets.token_hex(16))
        return float(left) if left else None

    async def live_config(self) -> LiveConfig:
        version, overrides, note = await self._client.command(
            "HMGET", self.keys.pool, "tuned_version", "overrides", "tuned"
        )
        return LiveConfig(version or "", json.loads(overrides or "{}"), json.loads(note or "{}"))

    async def note_change(self, text: str) -> None:
        """Append an operator's change to the log, which keeps the last `_KEPT_CHANGES` changes."""
        await self._client.command(
            "XADD", self.keys.operator_changes, "MAXLEN", _KEPT_CHANGES, "*", "change", text
        )

    async def operator_changes(self) -> list[str]:
        """The logged changes of operators, newest first."""
        found = await self._client.command(
            "XREVRANGE", self.keys.operator_changes, "+", "-", "COUNT", _KEPT_CHANGES
        )
        return [fields[1] for _, fields in found]

    def mark_endpoint(self, address: str, what: str, on: bool) -> asyncio.Future[MarkReply]:
        """Set (`on`) or remove the mark `what`. `drained` or `down`: the endpoint takes no new requests.
        `ejected`: a probe found the ejected endpoint unhealthy (`on` True) or healthy (False). `stuck`: the
        endpoint's metrics page does not change while requests run there."""
        return self._client.submit("mark_endpoint", (address, what, int(on)))

    async def evict(self, request_id: str) -> EvictReply:
        """Evict a waiting request from the queue."""
        (reply,) = await self._call("evict", request_id)
        return cast(EvictReply, reply)

    async def sweep(self, *, interval_s: float, grace_s: float, idle_s: float, unseen_s: float) -> SweepReply:
        times = (int(seconds * 1000) for seconds in (interval_s, grace_s, idle_s, unseen_s))
        ran, expired, reclaimed, more, ghosts, suspects = await self._call("sweep", *times)
        return SweepReply(ran == 1, expired, reclaimed, more == 1, ghosts, tuple(suspects))

    async def endpoints(self) -> tuple[Endpoint, ...]:
        """The pool's published endpoints, by address."""
        published = await self._client.command("HGETALL", self.keys.endpoints)
        marks, ejections = await self.marks(), await self.ejections()
        # Parse only changed endpoints: of thousands of endpoints, few change between two calls.
        read, self._read = self._read, {}
        for address, text in sorted(zip(published[::2], published[1::2], strict=True)):
            known = read.get(address)
            if known is None or known[0] != text:
                about = json.loads(text)
                labels, limit = about["labels"] or {}, about.get("max_inflight")
                stages = about.get("stages", "decode").split()
                known = (
                    text,
                    Endpoint(
                        address,
                        labels,
                        about["draining"],
                        max_inflight=limit,
                        prefills="prefill" in stages,
                        decodes="decode" in stages,
                        encodes="encode" in stages,
                    ),
                )
            self._read[address] = known
        return marked((endpoint for _, endpoint in self._read.values()), marks, ejections)

    async def ejections(self) -> Mapping[str, Ejection]:
        """Address -> ejection, of endpoints that are ejected now or were recently."""
        return parse_ejections(await self._client.command("HGETALL", self.keys.outliers))

    async def marks(self) -> frozenset[tuple[str, str]]:
        """The marks of all endpoints, as pairs (mark, address); a mark is `drained`, `down` or `ejected`."""
        return parse_marks((await self._client.command("HGETALL", self.keys.marks))[::2])

    async def state(self, silence_s: float) -> PoolState:
        """The pool's state; replicas without a heartbeat for `silence_s` are not live."""
        reply = await self._client.call("state", int(silence_s * 1000))
        return parse_pool_state(reply, self._bands)

    def _unavailable(self, cause: str, why: str) -> None:
        self.on_event(RedisLost(cause, why))

    async def _call(self, script: str, *args: str | int | float) -> Sequence[Any]:
        """Run `script` alone. Returns the reply without the head, which every reply has."""
        reply = await self._client.call(script, self.replica, *args)
        self._take_head(reply)
        return reply[HEAD:]  # type: ignore[no-any-return]

    def _take_head(self, head: Sequence[Any]) -> None:
        self.epoch = head[0]
        if head[2]:
            self.on_event(Dispatched(head[2], head[3]))
        for item in head[1]:
            what, _, about = item.partition(" ")
            if what == "strays":
                self._metrics.strays(int(about))
            elif what == "wake":
                self._dispatch_in(int(about) / 1000)
            elif (notification := parse_notification(what, about)) is not None:
                self.on_event(notification)

    def _dispatch_in(self, seconds: float) -> None:
        """Dispatch in `seconds`, when a tenant's balance suffices again; any call of a script dispatches."""
        loop = asyncio.get_running_loop()
        at_s = loop.time() + seconds
        if self._wake is not None and not self._wake.cancelled() and loop.time() < self._wake.when() <= at_s:
            return
        if self._wake is not None:
            self._wake.cancel()
        self._wake = loop.call_at(at_s, self._dispatch)

    def _dispatch(self) -> None:
        def finish(call: "asyncio.Future[Any]") -> None:
            if not call.cancelled() and call.exception() is None:  # after a failure a later call dispatches
                self._take_head(call.result())

        self._client.call("cancel", self.replica).add_done_callback(finish)


def _milliseconds(seconds: float) -> int:
    return max(0, int(seconds * 1000))


def _arrival(
    request: InferenceRequest, attempt: str, candidates: str, age_s: float = 0.0, prefill: str = ""
) -> bytes:
    """The `request`, packed for `lua/admit.lua`. Times are in ms; the age is exact to the µs, since ages
    order the requests that one message resubmits. Raises ValueError where a text holds byte 0."""
    workload = request.workload
    return pack_arrival(
        (request.id, attempt, request.flow, workload.id, request.model, candidates, prefill),
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
            request.prompt_tokens,
            request.answer_tokens,
        ),
    )


def pack_arrival(texts: tuple[str, str, str, str, str, str, str], numbers: tuple[float, ...]) -> bytes:
    """Pack the values of ARRIVAL_TEXTS and ARRIVAL_NUMBERS, in that order. Each text ends in byte 0: raises
    ValueError if a text contains byte 0."""
    packed = ("\0".join(texts) + "\0").encode(errors="surrogateescape")
    if packed.count(0) != len(ARRIVAL_TEXTS):
        raise ValueError("byte 0 in a text")
    return packed + _PACKED_NUMBERS.pack(*numbers)
