"""A model of the shared queue in plain Python. Tests compare the model with the Lua scripts call by call.

Each public method of `QueueModel` models one script of `lua/`. The model's clock is `moment.now_us` (µs).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from model_state import Request
from pool_model import CHUNK, PoolModel, Reply, first, placed

from picker_fleet.admission.fair_queue import QueueFull
from picker_fleet.admission.quotas import Usage
from picker_fleet.state.connection import smoothed
from picker_fleet.state.store import PACKED_USAGE


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to admit. `candidates` and `prefill`: endpoints as '*', 'a,b' or, with scores, 'a=0.7,b=0.5';
    with `prefill` '' the request is not split. `limit`: the flow's limit of requests per endpoint (0: none).
    `learn`: add the flow's mean tokens of an answer to `cost`."""

    id: str
    attempt: str = "1"
    flow: str = "f"
    priority: int = 0
    weight: float = 1.0
    cost: float = 1.0
    ttl_ms: int = 10_000
    age_ms: int = 0
    workload: str = ""
    criticality: int = 3
    model: str = "m"
    candidates: str = "*"
    prefill: str = ""
    limit: int = 0
    learn: bool = False
    body_bytes: int = 0
    prompt_tokens: float = 0.0
    answer_tokens: float = 0.0


Batch = Callable[["QueueModel", str, Iterable[tuple[Any, ...]]], Reply]


def of_each(answer: Callable[..., str]) -> Batch:
    """Turn a method that answers one item into a method that answers a batch of items."""
    return lambda model, caller, items: model._batch(caller, items, lambda item: answer(model, *item))


class QueueModel(PoolModel):
    """The model has one method for each script. Like a script, a batch call answers each item with a text."""

    def admit(self, caller: str, items: Iterable[Arrival]) -> Reply:
        if not self._base:
            return Reply(answers=["unknown-pool" for _ in items])
        return self._batch(caller, items, self._admit)

    @of_each
    def place(self, id: str, attempt: str, candidates: str, split: str = "") -> str:
        r = self._owned(id, attempt)
        if r is None or r.state not in ("granted", "placed"):
            return "gone"
        self._lease(r)
        if r.state == "granted":
            return self._place_granted(r, candidates, split)
        reply, former = None, r.endpoints
        if first(former) not in self.endpoints.open and self._is_untaken(r):
            reply = self._place(r, candidates)[0]
        self._withdraw_notification(r)
        if reply is None:
            return placed(r)
        self._release(r, former)
        self._log("moved", r.id)
        return reply

    @of_each
    def prefilled(self, id: str) -> str:
        r = self.requests.get(id)
        if r is None or not r.prefillers:
            return "unknown"
        self._end_prefill(r)
        return "released"

    @of_each
    def acknowledge(self, id: str, attempt: str) -> str:
        inbox = self.inboxes.get(self._caller, {})
        if inbox.get(id) != f"placed {attempt}":
            return "unknown"
        del inbox[id]
        return "taken"

    @of_each
    def settle(
        self, id: str, outcome: str, actual: float | None, answer_tokens: int | None, usage: bytes = b""
    ) -> str:
        r = self.requests.get(id)
        if r is None:
            return "unknown"
        if r.state in ("queued", "orphaned"):
            self._finish(r, "cancelled")
            return f"left {r.model}"
        self._correct(r, actual)
        if outcome == "answered":
            outcome, address = "completed", first(r.endpoints)
            if r.state == "placed":
                self.outliers.answered_elsewhere(address, r.flow)
                if address in self.outliers and address not in self.endpoints.ejected:
                    self.outliers.answered(address)
        if answer_tokens is not None:
            self._learn({(r.flow, r.model), (r.model, r.model)}, answer_tokens)
        if usage and self.has_tenants:
            self.quotas.use(r.id, Usage(*map(int, PACKED_USAGE.unpack(usage))))
        self._finish(r, outcome)
        return f"settled {r.model}"

    @of_each
    def report_fault(self, id: str, address: str, flow: str, why: str, hold_ms: int) -> str:
        r = self.requests.get(id)
        r = r if r is not None and r.state == "placed" else None
        is_here = r is not None and first(r.endpoints) == address
        if not is_here and (not flow or why == "retried"):
            return "unknown"
        _, _, following = r.endpoints.partition(",") if r is not None and is_here else ("", "", "")
        if why in ("full", "503") and is_here and (following or flow):
            self._count_refusal(address)
        if r is not None and following:
            self._move(r, following)
        mine = int(is_here and not following)
        if why == "full":
            self._is_full(address, mine, hold_ms)
        elif why == "connect":
            if is_here and address in self.endpoints.open and self._mark("down", True, address):
                return "down"
        else:
            return self._failed(address, id, r.flow if r is not None else flow, why, mine)
        return "noted"

    @of_each
    def cancel(self, id: str, attempt: str, why: str) -> str:
        r = self.requests.get(id)
        if r is None:
            note = self.inboxes.get(self._caller, {}).get(id, "") if why == "expired" else ""
            is_refusal = self.has_tenants and note.startswith("refused")
            return note.removesuffix("\x1f") if is_refusal else "unknown"
        if why == "unclaimed":
            if r.owner != self._caller or not self._is_untaken(r):
                return "foreign"
            why = "withdrawn"
        elif self._owned(id, attempt) is None:
            return "foreign"
        elif why == "expired" and r.state in ("granted", "placed"):
            return "granted"
        reply = self._expire(r) if why == "expired" else "ended"
        if why != "expired":
            self._finish(r, why)
        self._withdraw_notification(r)
        return reply

    @of_each
    def renew(self, id: str, attempt: str, served: str, accounting_token: Request | None) -> str:
        """Renew a lease. In place of an accounting token the model gets the request that it restores."""
        r = self.requests.get(id)
        if r is None:
            return self._restore(replace(accounting_token), served) if accounting_token else "unknown"
        if r.state in ("queued", "orphaned"):
            return "waiting"
        self._lease(r)
        if r.state == "placed" and served not in ("", first(r.endpoints)):
            self._move(r, served)
        return "renewed"

    @of_each
    def mark_endpoint(self, address: str, what: str, on: int) -> str:
        if what == "ejected":
            return self._probed(address, not on)
        return "marked" if self._mark(what, bool(on), address) else "unknown"

    @of_each
    def evict(self, id: str) -> str:
        r = self.requests.get(id)
        if r is None:
            return "unknown"
        if r.state not in ("queued", "orphaned"):
            return "running"
        self._turn_away(r, "evicted")
        return "evicted"

    def heartbeat(self, caller: str, silence_ms: int) -> Reply:
        """Model lua/heartbeat.lua: the reply has the notifications of the replica's inbox, then those of the
        call's own dispatch."""
        self._begin(caller)
        was_known = caller in self.live(silence_ms)
        self.replicas[caller] = self.moment.now_ms
        live = self.live(silence_ms)
        inbox = self.inboxes.get(caller, {})
        # Repeat the notification of a grant until `place` or `acknowledge` takes it. Drop notifications of
        # requests that ended or that another stream adopted, and of an earlier request with the same id.
        placed = {id for id, what in inbox.items() if what.startswith("placed")}
        over = {id for id in placed if id not in self.requests or not self._is_untaken(self.requests[id])}
        over |= {
            id for id, what in inbox.items() if id not in placed and what != "granted" and id in self.requests
        }
        granted = placed - over | {id for id, what in inbox.items() if what == "granted"}
        kept = [f"{'granted' if id in placed else inbox[id]} {id}" for id in inbox if id not in over]
        self.inboxes[caller] = {id: what for id, what in inbox.items() if id in granted}
        config, endpoints = self._versions
        if self.endpoints.marks_version:
            endpoints = f"{endpoints}+{self.endpoints.marks_version}"
        versions = config, endpoints, self.tuned or ""
        reply = self._conclude([int(was_known), int(caller == min(live)), len(live), *versions])
        reply.notifications = kept + reply.notifications
        reply.answers += [self.stock, len(self.queue), self.upper, self.lower, self.endpoints.ready]
        # The first '' stands for the signing keys, which the model lacks; the server's time (µs) follows.
        reply.answers += [self.moment.settings["paused"], "", self.moment.now_us, ""]
        return reply

    def publish(
        self,
        caller: str,
        versions: tuple[str, str],
        settings: Mapping[str, Any],
        draining: Mapping[str, bool],
        stages: Mapping[str, str] = MappingProxyType({}),
    ) -> Reply:
        """Publish settings and endpoints; `stages` names the stages of endpoints that do not only decode. The
        model never loses a key, so it has nothing to rebuild."""
        self._begin(caller)
        for address in self.endpoints.published - draining.keys():
            self.outliers.pop(address, None)
        decode = {each for each in draining if "decode" in stages.get(each, "decode")}
        self.endpoints.publish(draining, decode, set(draining))
        prefill = {each for each in draining if each in stages}
        self.prefill.publish(draining, prefill, prefill)
        self._try_ejected()
        filed = -1 if self._base else 0
        if not self._base:
            self.queue.credit = 1.0
        self._base, self._versions = dict(settings), versions
        self._put_settings()
        reply = self._conclude([])
        reply.answers = [self.upper, self.lower, self.endpoints.ready, filed, ""]
        return reply

    def tune(self, caller: str, overrides: Mapping[str, Any]) -> Reply:
        self._begin(caller)
        merged = self._overrides | dict(overrides)
        self._overrides = {name: value for name, value in merged.items() if value is not None}
        self.tuned += 1
        self._put_settings()
        return self._conclude([self.tuned])

    def set_limits(self, caller: str, found: Mapping[str, Any]) -> Reply:
        self._begin(caller)
        changed = found != self._found
        if self._base:
            self._found = dict(found)
            if changed and self.finds_limits:
                self._put_settings()
        return self._conclude([])

    def set_tenants(self, caller: str, kind: str, nodes: Mapping[str, str]) -> Reply:
        self._begin(caller)
        if not self._base:
            return self._conclude([""])
        for path, text in nodes.items():
            if text:
                self.tenants[kind][path] = text
            else:
                self.tenants[kind].pop(path, None)
            self._log("tenant", "")
        self.tenants_version += 1
        self._put_tenants()
        if self.has_tenants and any(not text or "max_parallel" in text for text in nodes.values()):
            self.quotas.count_running(self.in_flight())
        if self.has_tenants:
            self._changed_nodes = [path for path in nodes if not path.endswith("*")]
            self._more = self._more or len(self._changed_nodes) < len(nodes)  # `PATH/*` sets defaults
        return self._conclude([self.tenants_version])

    def sweep(self, caller: str, interval_ms: int, grace_ms: int, idle_ms: int, unseen_ms: int) -> Reply:
        """The answers: whether the sweep ran, numbers of expired and reclaimed requests, whether more work is
        left, how many requests metrics pages reclaim (here 0), and the endpoints of suspect requests."""
        self._begin(caller)
        fresh = self.moment.now_ms - self._swept_ms >= interval_ms
        if not fresh and not (self._more or self._suspected):
            return Reply(answers=[0, 0, 0, 0, 0, []])
        ran, expired = self._run_timers(CHUNK)
        reclaimed = self._reclaim(CHUNK - ran)
        self._end_lapsed_prefills(CHUNK)
        self._more = ran + reclaimed == CHUNK
        self._suspected = [] if self._more else self._endpoints_of_suspects(CHUNK - ran - reclaimed)
        if not self._more:
            self._orphan_silent(grace_ms)
        self._walk()
        self.queue.unthrottle_all()
        at_rest = len(self.queue) == 0 and self.stock == 0
        if fresh and self.has_tenants:
            self._drop_idle(idle_ms)
        for band in self.queue.bands.values():
            band.forget_finish_tags(at_rest)
        if fresh:
            self.queue.rebase()
            self.queue.collect({r.priority for r in self.requests.values()}, at_rest)
        self.queue.forget_preemptions()
        if fresh:
            self._expire_down_marks()
            self._sweep_outliers()
            self._measure_rate()
        self.workloads.forget_idle(idle_ms)
        self.means = {f: it for f, it in self.means.items() if self.moment.now_ms - it[1] <= idle_ms}
        return self._conclude([1, expired, reclaimed, int(self._more), 0, self._suspected])

    def _endpoints_of_suspects(self, limit: int) -> list[str]:
        """Return the endpoints of suspect requests that run without a renewal since the suspicion began."""
        found: list[str] = []
        oldest = sorted(self.suspects, key=lambda id: (self.suspects[id], id.encode()))
        for id in oldest[:limit]:
            r = self.requests.get(id)
            if r is None or r not in self.in_flight() or self._seen_ms(r) > self.suspects[id]:
                del self.suspects[id]
            elif r.state == "placed" and first(r.endpoints) not in found:
                found.append(first(r.endpoints))
        return found

    def _seen_ms(self, r: Request) -> float:
        return r.lease_ms - self.moment.settings["lease_ms"]

    def _admit(self, item: Arrival) -> str:
        known = self.requests.get(item.id)
        if known:
            return self._adopt(known, item) if self._is_same(known, item) else "foreign"
        answer = self.mean_answer(item.flow, item.model) if item.learn else 0
        cost = item.cost + answer
        r = Request(
            item.id, self._caller, item.attempt, item.flow, item.priority, item.weight, cost, item.workload,
            item.criticality, item.model, item.limit, item.body_bytes, item.prompt_tokens,
            item.answer_tokens + answer, item.candidates == "*" and not item.prefill,
        )  # fmt: skip
        r.arrived = self._arrival_by(item.age_ms) if item.age_ms > 0 else self._next_arrival()
        left_ms = item.ttl_ms - item.age_ms
        r.deadline_ms = self.moment.now_ms + left_ms
        # Each arriving request counts in the rate of its workload, even a refused request.
        self.workloads.arrived(r.flow, r.workload)
        reply = self._decide(r, item, left_ms)
        if reply.startswith(("refused", "expired")):
            if self.has_tenants:
                self.quotas.refuse(r.id)
            self.workloads.active(r.workload, -1)
        return reply

    def _decide(self, r: Request, item: Arrival, left_ms: int) -> str:
        if left_ms <= 0:
            return "expired"
        self.queue.band(r.priority)
        if self.has_tenants and (refusal := self._charge(r)):
            return refusal
        if self.endpoints.ready == 0 and not self.moment.settings.get("queue_unready"):
            return self._refuse(r, "no-endpoints")
        return self._bypass(r, item) or self._full(r) or self._queue(r, left_ms)

    def _charge(self, r: Request) -> str | None:
        """Charge r to its tenants. Returns a refusal, or None; a demoted request gets the lowest priority."""
        lack = self.quotas.arrive(r, may_wait=self.queues)
        if lack is not None:
            self._log("refused", r.id)
            return self._beyond(lack, r)
        if self.quotas.is_demoted(r.id):
            r.priority = min(self.queue.bands)
        return None

    def _bypass(self, r: Request, item: Arrival) -> str | None:
        take = self.claim(r.cost, self.upper)
        no_room = take > 0 and self.stock + take > self.upper
        may_not = self.moment.settings["paused"] or not self._may_bypass(r)
        blocked = may_not or no_room or not self.endpoints.ready
        if blocked or self.endpoints.flow_full(r) or self.places() <= 1e-6:
            return None
        if self.has_tenants:
            if self.quotas.lacking(r.id):
                return None
            self.quotas.count_start(r.id, r.cost)
        reply, limited, _ = self._place(r, item.candidates, item.prefill)
        if reply is None:
            if self.has_tenants:
                self.quotas.send_back(r.id, r.cost)
            return None if limited else self._refuse(r, "no-endpoints")
        self.requests[r.id] = r
        self._take(r, take)
        self.workloads.dispatched(r.flow, r.workload, item.age_ms)
        self._log("bypassed", r.id)
        return reply

    def _may_bypass(self, r: Request) -> bool:
        """Whether r may start before all waiting requests: only if none waits or, with tenants, if all
        waiting flows are throttled, but neither r's flow queue nor a node above it."""
        if not len(self.queue) or not self.has_tenants:
            return not len(self.queue)
        return not any(band.turns for band in self.queue.bands.values()) and not self.queue.is_throttled(r)

    def _full(self, r: Request) -> str | None:
        """Return the refusal of r if the queue has no room, even by preempting a request; else None."""
        s = self.moment.settings
        if not self.queues and not s["paused"] and self._may_bypass(r):
            return self._refuse(r, "saturated")
        try:
            preempted = self.queue.make_room(r)
        except QueueFull as full:
            return self._refuse(r, full.reason)
        if preempted is not None:
            self._turn_away(preempted, "preempted")
        return None

    def _queue(self, r: Request, left_ms: int) -> str:
        self.requests[r.id] = r
        if self.has_tenants:
            self.quotas.wait(r)
        self.queue.insert(r)
        self._log("queued", r.id)
        return f"queued {left_ms}"

    def _refuse(self, r: Request, reason: str) -> str:
        retry_after_s = 1 if reason == "no-endpoints" else self.retry_after_s()
        self._log("refused", r.id)
        return f"refused {reason} {retry_after_s}"

    def _is_same(self, r: Request, item: Arrival) -> bool:
        digests = r.attempt.partition(".")[1:], item.attempt.partition(".")[1:]
        return r.attempt != "" and (r.flow, r.model, digests[0]) == (item.flow, item.model, digests[1])

    def _adopt(self, r: Request, item: Arrival) -> str:
        old_owner, old_attempt = r.owner, r.attempt
        r.owner, r.attempt = self._caller, item.attempt
        if r.state in ("queued", "orphaned"):
            if r.deadline_ms <= self.moment.now_ms:
                return self._expire(r)
            if r.state == "orphaned":
                self.queue.insert(r)
            r.any_endpoint = item.candidates == "*" and not item.prefill
            self._withdraw_notification(r)  # discard the notification of an earlier request with this id
            self._log("adopted", r.id)
            return f"queued {r.deadline_ms - self.moment.now_ms} adopted"
        self._log("adopted", r.id)
        self._lease(r)
        self.inboxes.get(old_owner, {}).pop(r.id, None)
        if r.state == "placed":
            if (old_owner, old_attempt) != (r.owner, r.attempt):
                # Envoy may still listen to either stream, so neither may cancel: clear the attempt number.
                r.attempt = "".join(item.attempt.partition(".")[1:])
            return f"{placed(r)} adopted"
        reply = self._place_granted(r, item.candidates, item.prefill)
        return f"{reply} adopted" if reply.startswith(("placed", "queued")) else reply

    def _owned(self, id: str, attempt: str) -> Request | None:
        r = self.requests.get(id)
        return r if r and (r.owner, r.attempt) == (self._caller, attempt) else None

    def _restore(self, r: Request, served: str) -> str:
        """Restore a running request whose record was lost. The request takes stock even beyond the upper
        bound, but at most its claim under the bound of all listed endpoints."""
        where = served if served in self.endpoints.counts else r.endpoints
        if where not in self.endpoints.counts:
            return "unknown"
        r.owner, r.state, r.endpoints = self._caller, "placed", where
        self.queue.band(r.priority)
        self.requests[r.id] = r
        self._reserve(r)
        most = max(self.upper, self.moment.settings["upper_per"] * max(len(self.endpoints.listed), 1))
        self._take(r, self.claim(r.cost, most))
        self.workloads.active(r.workload, 1)
        self._log("restored", r.id)
        return "restored"

    def _correct(self, r: Request, actual: float | None) -> None:
        """Correct the charges of r's flow queue and band to its actual cost, unless r bypassed the queue."""
        if actual is not None and actual < 0:
            actual = max(r.cost, -actual)
        if r.tag is None or actual is None or actual == r.cost:
            return
        self.queue.charge_band(r, actual - r.cost)
        if self.moment.settings["fairness"] == "weighted-fair":
            self.queue.correct(r, (actual - r.cost) / r.cost, r.tag + self.queue.share(r))
            self._log("corrected", r.id)

    def _learn(self, keys: set[tuple[str, str]], tokens: int) -> None:
        alpha = self.moment.settings["answer_alpha"]
        for key in keys:
            mean = smoothed(self.means[key][0], tokens, alpha) if key in self.means else float(tokens)
            self.means[key] = (mean, self.moment.now_ms)
