"""The base class of the model: the pool's counts, and changes of requests that several scripts make."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from endpoint_counts import Burden, EndpointCounts, burdens, read_candidates
from model_state import Moment, Request, Workloads
from outlier_model import FULL_MS, MOST_ALONE, MOST_FAILURES, TRIAL_MS, UNSEEN_MS, Entry, Outliers
from shared_queue import SharedQueue
from swept_quotas import SweptQuotas

from picker_fleet.admission.quotas import Lack
from picker_fleet.admission.tenant_tree import INNER
from picker_fleet.domain.tenants import Node, Price, Tree

Choose = Callable[[str, dict[str, Burden]], str]
ChoosePrefill = Callable[[str, dict[str, Burden], str], str]
Item = TypeVar("Item")

DISPATCH_LIMIT, TENANTS_LIMIT = 24, 16
TIMERS_LIMIT = 24
CHUNK = 32  # maximum requests of one kind that a sweep handles
DOWN_MS = 10_000
SMALLEST = 1e-9  # the least drain rate (requests/s) while requests wait
# If a request ends by an event in REFUNDED, its tenants' charges are refunded.
REFUNDED = (
    "refused", "cancelled", "expired", "preempted", "evicted", "abandoned", "withdrawn", "upstream_failed"
)  # fmt: skip
REFILED_BY = (
    "fairness", "ordering", "wait_signal", "wait_weight", "criticality_weight", "rate_weight", "wait_cap_ms",
    "rate_cap",
)  # fmt: skip


@dataclass(slots=True)
class Reply:
    """A call's reply: the caller's notifications, dispatch attempts, grants (`served`), and the answers."""

    notifications: list[str] = field(default_factory=list)
    attempts: int = 0
    served: int = 0
    answers: list[Any] = field(default_factory=list)


class PoolModel:
    """The pool's state. `events`: the last call's decision log, as 'EVENT REQUEST-OR-FLOW-QUEUE CAUSE'.

    The function `choose` gets a request id and the burden of each allowed endpoint, and returns the request's
    endpoints as 'a,b,c', best first, as chosen by the scripts: the model does not know how these break ties.
    The function `choose_prefill` also gets the request's endpoint, and returns the prefill endpoints, or ''
    if the request's endpoint is the best one for the prefill, too.
    """

    def __init__(self, choose: Choose, choose_prefill: ChoosePrefill) -> None:
        self.moment = Moment()
        self.workloads = Workloads(self.moment)
        self.queue = SharedQueue(self.moment, self.workloads, self._next_arrival, self._log)
        marks: dict[tuple[str, str], int] = {}
        self.endpoints, self.prefill = EndpointCounts(marks), EndpointCounts(marks)
        self.outliers = Outliers(self.moment)
        self.refusals: dict[str, int] = {}  # endpoint -> requests that it has refused
        self.requests: dict[str, Request] = {}
        self.inboxes: dict[str, dict[str, str]] = {}
        self.suspects: dict[str, float] = {}  # request whose end may be unreported -> suspected since, ms
        self.replicas: dict[str, int] = {}  # replica -> time of its last heartbeat in ms
        # (flow, model) or (model, model) -> mean tokens of an answer, time of the last change (ms)
        self.means: dict[tuple[str, str], tuple[float, int]] = {}
        self.stock = self.upper = self.lower = self.rate = 0.0
        self.seq = self.dispatches = self.guards = self.ended = self.tuned = 0
        self.events: list[str] = []
        self.scan_order: Sequence[str] = ()  # request ids in the order of the next sweep's scan
        self._choose, self._choose_prefill = choose, choose_prefill
        self._base: dict[str, Any] = {}
        self._overrides: dict[str, Any] = {}
        # The limits that the fleet has found, by endpoint, and their `unit`.
        self._found: Mapping[str, Any] = {}
        self._versions = ("", "")
        self._swept_ms = self._swept_dispatches = 0
        self._more = self.refiling = self._timed = False
        self._suspected: list[str] = []  # endpoints that had suspect requests at the last sweep
        self._caller = ""
        self._notifications: list[str] = []
        # Kind -> path of a tenant's node -> settings as JSON; `tenant_changes` replace `tenants`.
        self.tenants: dict[str, dict[str, str]] = {"tenants": {}, "tenant_changes": {}}
        self.tenants_version = 0
        self._changed_nodes: list[str] = []  # paths of nodes that this call has changed
        self.quotas = SweptQuotas(self.moment.tree, {}, lambda: self.moment.now_us / 1000, log=self._log)
        self._states: dict[tuple[int, str], tuple[float, float, int]] = {}  # v, newcomers, changed_ms
        self._aged = Counter[int]()  # time of arrival (µs) -> number of this call's requests with an age

    def live(self, silence_ms: int) -> list[str]:
        return [name for name, last in self.replicas.items() if last > self.moment.now_ms - silence_ms]

    def in_flight(self) -> list[Request]:
        return [r for r in self.requests.values() if r.state in ("granted", "placed")]

    def mean_answer(self, flow: str, model: str) -> float:
        """The smoothed mean tokens of an answer: for flow and model, else for the model, else the default.
        The first answer's tokens become the mean."""
        default = float(self.moment.settings["default_answer"]), 0
        return self.means.get((flow, model), self.means.get((model, model), default))[0]

    # The beginning and the end of each script call; each call ends with a dispatch.

    def _begin(self, caller: str) -> None:
        self._caller, self._notifications, self.events, self._timed = caller, [], [], False
        self._aged.clear()
        self.quotas.eased()  # discard the nodes that got balance back in the last dispatch

    def _conclude(self, answers: list[Any]) -> Reply:
        attempts, served = self._dispatch() if self._base else (0, 0)
        self._states = {key: each for key, each in self._states.items() if key[0] in self.queue.bands}
        for priority, band in self.queue.bands.items():
            for path, order in band.inner.items():
                v, newcomers, _ = self._states.get((priority, path), (0.0, 0.0, 0))
                if (v, newcomers) != (order.v, order.newcomers):
                    self._states[priority, path] = order.v, order.newcomers, self.moment.now_ms
        return Reply(self._notifications, attempts, served, answers)

    def _batch(self, caller: str, items: Iterable[Item], answer: Callable[[Item], str]) -> Reply:
        self._begin(caller)
        return self._conclude([answer(item) for item in items])

    def _log(self, event: str, about: str, by: str = "") -> None:
        self.events.append(f"{event} {about} {by}")

    def _withdraw_notification(self, r: Request) -> None:
        self.inboxes.get(r.owner, {}).pop(r.id, None)

    def _notify(self, r: Request, what: str) -> None:
        if what == "granted" or r.owner in self.replicas:
            self.inboxes.setdefault(r.owner, {})[r.id] = what
        if r.owner == self._caller:
            self._notifications.append(f"{what} {r.id}")

    def _notify_placed(self, r: Request, reply: str) -> None:
        """Notify r's owner that a grant has placed r; `reply` is the answer that `place` would give."""
        self.inboxes.setdefault(r.owner, {})[r.id] = f"placed {r.attempt}"
        if r.owner == self._caller:
            self._notifications.append(f"placed {r.attempt} {reply.removeprefix('placed ')} {r.id}")

    def _is_untaken(self, r: Request) -> bool:
        """Whether r is granted, or was placed by its grant without an acknowledgement by its replica."""
        note = self.inboxes.get(r.owner, {}).get(r.id)
        return r.state == "granted" or (r.state == "placed" and note == f"placed {r.attempt}")

    def _put_settings(self) -> None:
        old, new = self.moment.settings, self._base | self._overrides
        changed = any(old.get(name) != new[name] for name in REFILED_BY)
        self.refiling = self.refiling or (changed and len(self.queue) > 0)
        self.moment.settings = new
        self._put_tenants()
        self._put_bounds()
        self._log("tuned", "")
        if bool(old.get("tenants")) != self.has_tenants:
            self.quotas.restart({r.id for r in self.in_flight()})
            if self.has_tenants:
                self.quotas.count_running(self.in_flight())

    def _put_bounds(self) -> None:
        new, ready = self.moment.settings, self.endpoints.ready
        if self.finds_limits:
            self.upper = self.lower = float(sum(map(self._found_limit, self.endpoints.open)))
        else:
            self.upper = float(f"{new['upper_per'] * ready:.9g}")
            self.lower = float(f"{new['lower_per'] * ready:.9g}")
        self.lower = max(self.lower, 1e-9)

    def _put_tenants(self) -> None:
        """Apply the settings of tenants' nodes, and the settings of the queue's order."""
        tenants = self.moment.settings.get("tenants") or {}
        nodes = self.tenants["tenants"] | self.tenants["tenant_changes"]
        found = (Node.of_shared(path, text) for path, text in nodes.items())
        self.moment.tree = Tree(found, tenants.get("separator", "/"))
        prices = {model: Price(**each) for model, each in tenants.get("prices", {}).items()}
        self.quotas.put_settings(self.moment.tree, prices)
        self.queue.put_settings(self.moment)

    @property
    def has_tenants(self) -> bool:
        return bool(self.moment.settings.get("tenants"))

    def _next_arrival(self) -> int:
        """The next arrival number: unique, increasing, and close to the time in µs."""
        self.seq = max(self.seq + 1, self.moment.now_us)
        return self.seq

    def _arrival_by(self, age_ms: int) -> int:
        """The arrival number of a request with an age; requests of equal age keep their order in the call."""
        arrived = self.moment.now_us - age_ms * 1000
        self._aged[arrived] += 1
        return arrived + self._aged[arrived] - 1

    # Changes of stock, leases and endpoints

    def _take(self, r: Request, amount: float) -> None:
        r.taken = amount
        self.stock += amount
        self.endpoints.count_flow(r, "", 1)
        self._lease(r)

    def _give_back(self, r: Request) -> None:
        left = self.stock - r.taken
        self.stock = left if left > 1e-6 else 0.0  # floating-point sums leave a small residue
        self.endpoints.count_flow(r, "", -1)
        r.taken = 0.0

    def _lease(self, r: Request) -> None:
        r.lease_ms = self.moment.now_ms + self.moment.settings["lease_ms"]

    def _reserve(self, r: Request) -> None:
        self.endpoints.reserve(first(r.endpoints))
        self.endpoints.count_flow(r, first(r.endpoints), 1)

    def _reserve_prefill(self, r: Request) -> None:
        self.prefill.reserve(first(r.prefillers))
        r.prefill_lease_ms = self.moment.now_ms + self.moment.settings["lease_ms"]

    def _end_prefill(self, r: Request) -> None:
        """End the prefill of a placed request; its decode endpoint goes on."""
        endpoint, r.prefillers = first(r.prefillers), ""
        self.prefill.release(endpoint)
        self._log("prefilled", r.id)
        self._use_room(f"={endpoint}")

    def _release(self, r: Request, endpoints: str) -> None:
        self.endpoints.release(first(endpoints))
        self.endpoints.count_flow(r, first(endpoints), -1)

    @property
    def queues(self) -> bool:
        """Whether the queue is enabled."""
        return bool(self.moment.settings.get("queue_enabled", 1))

    def claim(self, cost: float, most: float) -> float:
        """The stock that a request of cost `cost` takes if the upper bound of the stock is `most`."""
        settings = self.moment.settings
        share = settings.get("largest_claim", 1)
        return min(cost, max(most * share, min(1, most))) if self.queues else 0.0

    @property
    def finds_limits(self) -> bool:
        """Whether the fleet finds the endpoints' limits (`adaptive`)."""
        return bool(self.moment.settings.get("adaptive"))

    @property
    def in_tokens(self) -> bool:
        """Whether the limits that the fleet finds are in tokens."""
        return self.finds_limits and self.moment.settings.get("unit") == "tokens"

    @property
    def amounts(self) -> dict[str, float]:
        """The tokens in flight on each endpoint: the stock that its requests have taken."""
        amounts = dict.fromkeys(self.endpoints.counts, 0.0)
        for r in self.requests.values():
            if r.state == "placed":
                amounts[first(r.endpoints)] += r.taken
        return amounts

    def _found_limit(self, address: str) -> int:
        """An endpoint's limit in the mode `adaptive`: pinned, or found within the configured limits."""
        return self._bounded(address, self._found, self.moment.settings.get("caps") or {})

    def _bounded(self, address: str, found: Mapping[str, Any], caps: Mapping[str, float]) -> int:
        s = self.moment.settings
        if address in (s.get("pinned") or {}):
            return int(s["pinned"][address])
        is_usable = (self._found.get("unit") == "tokens") == self.in_tokens
        limit = found.get(address, s["limit_initial"]) if is_usable else s["limit_initial"]
        limit = max(s["limit_min"], min(limit, s.get("limit_max", math.inf)))
        return int(limit if self.in_tokens else min(limit, caps.get(address, math.inf)))

    @property
    def prefill_caps(self) -> dict[str, float]:
        """The limits of the stage prefill, in requests; in tokens the fleet finds only decode limits."""
        caps = self.moment.settings.get("prefill_caps") or {}
        if not self.finds_limits or self.in_tokens:
            return dict(caps)
        found = self._found.get("prefill", {})
        return {each: self._bounded(each, found, caps) for each in self.prefill.counts}

    @property
    def found(self) -> dict[str, int]:
        """The limits of all endpoints in the mode `adaptive`, in requests or tokens."""
        return {each: self._found_limit(each) for each in self.endpoints.counts}

    def _caps_of_requests(self) -> dict[str, int]:
        """The limits in requests that discovery gives, lowered where an endpoint is full or on trial."""
        return self.outliers.lower(self.moment.settings.get("caps") or {})

    @property
    def caps(self) -> dict[str, float]:
        """The limits in requests, by endpoint. If the fleet finds limits in tokens, an endpoint at its limit
        of tokens may run no more requests than it runs now."""
        if not self.in_tokens:
            return self.outliers.lower(self.found) if self.finds_limits else self._caps_of_requests()
        caps = dict.fromkeys(self.endpoints.counts, math.inf) | self._caps_of_requests()
        at_limit = {each for each, limit in self.found.items() if self.amounts[each] > limit - 1e-6}
        return caps | {each: min(caps[each], self.endpoints.counts[each]) for each in at_limit}

    def places(self) -> float:
        """The requests, or tokens, that may be granted until every endpoint is at its limit."""
        granted = [r for r in self.requests.values() if r.state == "granted"]
        if not self.in_tokens:
            return (
                self.endpoints.places(self.caps, len(granted)) if self.caps or self.finds_limits else math.inf
            )
        # Convert a limit in requests to tokens, by the mean tokens of the requests in flight.
        mean = max(self.stock / max(len(self.in_flight()), 1), 1)
        counts, caps, amounts = self.endpoints.counts, self._caps_of_requests(), self.amounts
        room = {
            each: min((caps.get(each, math.inf) - counts[each]) * mean, self.found[each] - amounts[each])
            for each in self.endpoints.open
        }
        return sum(max(each, 0) for each in room.values()) - sum(r.taken for r in granted)

    def _slots(self, blocker: str) -> float:
        """How many more requests the endpoint `blocker` accepts ('=' marks a prefill endpoint)."""
        address, is_prefill = blocker.removeprefix("="), blocker.startswith("=")
        stage = self.prefill if is_prefill else self.endpoints
        if address not in stage.open or address not in stage.counts:
            return 0
        caps = self.prefill_caps if is_prefill else self._caps_of_requests() if self.in_tokens else self.caps
        left = caps.get(address, math.inf) - stage.counts[address]
        if is_prefill or not self.in_tokens:
            return max(left, 0)
        mean = max(self.stock / max(len(self.in_flight()), 1), 1)
        left = min(left * mean, self.found[address] - self.amounts[address])
        return (max(left, 0) - 1e-6) / mean

    def _pending(self, blocker: str) -> list[Request]:
        """The live replicas' requests that were granted because `blocker` had room, still unplaced."""
        live = self.live(self.moment.settings["silence_ms"])
        return [r for r in self.requests.values() if r.blocker == blocker and r.owner in live]

    def _room(self, blocker: str) -> float:
        slots = self._slots(blocker)
        return (slots if slots == math.inf else math.ceil(slots)) - len(self._pending(blocker))

    def _use_room(self, blocker: str) -> None:
        """If `blocker` has room, unthrottle a flow queue that waits for it."""
        if self._room(blocker) > 0:
            self.queue.use_room(blocker)

    def _admits(self, r: Request) -> tuple[bool, str]:
        """Whether r may be granted, and the endpoint (blocker) whose room r is to take, if any."""
        blockers = [] if r.any_endpoint else sorted(self.queue.blockers(r))
        if not blockers:
            return True, ""
        best = max(blockers, key=self._room)
        if self._room(best) >= DISPATCH_LIMIT:
            self.queue.forget_blockers(r.priority, r.flow_queue)
            return True, ""
        if self._room(best) > 0:
            return True, best
        pending = {(p.priority, self.queue.name_of(p)) for each in blockers for p in self._pending(each)}
        return self.queue.takes_probe(r) and (r.priority, r.flow_queue) not in pending, best

    def _decide_room(self, r: Request) -> str:
        blocker, r.blocker = r.blocker, ""
        return blocker

    def _place(self, r: Request, candidates: str, split: str = "") -> tuple[str | None, bool, list[str]]:
        """Place r. Returns the reply (None: r cannot be placed), whether a limit is the only obstacle, and
        the full endpoints, with '=' before a full prefill endpoint."""
        named, scores = read_candidates(candidates)
        counts, limited, closed = self.endpoints.options(r, named, self.caps)
        if not counts:
            return None, limited, closed
        prefills = self._weigh_prefills(r, split) if split else {}
        if isinstance(prefills, list):
            if self.queues:
                return None, True, prefills
            prefills = {}  # without a queue no request waits for a prefill endpoint
        # If the fleet finds limits, endpoints at their limit are the last fallbacks.
        fallbacks = {each: self.endpoints.counts[each] for each in closed if self.finds_limits}
        limits, shares = (self.caps, self._shares_of_limits()) if self.finds_limits else ({}, {})
        weighed = burdens(counts | fallbacks, scores, self.moment.settings["live_weight"], limits, shares)
        r.endpoints, r.state = self._choose(r.id, weighed), "placed"
        if named is None:
            loads = [str((counts | fallbacks)[each]) for each in r.endpoints.split(",")]
        else:
            loads = [str(counts.get(each, "")) for each in named]
        self._reserve(r)
        if prefills:
            r.prefillers = self._choose_prefill(r.id, prefills, first(r.endpoints))
        if r.prefillers:
            self._reserve_prefill(r)
        quota = self.quotas.quota(r.id) if self.has_tenants else ""
        told = f"\x1f{quota}" if quota else ""
        return f"{placed(r)} {','.join(loads)}{told}", False, closed

    def _weigh_prefills(self, r: Request, candidates: str) -> dict[str, Burden] | list[str]:
        """The burdens of the prefill endpoints that r may use; if all of these are full, a list of the full
        endpoints instead; {} if no prefill endpoint is ready."""
        named, scores = read_candidates(candidates)
        caps, finds = self.prefill_caps, self.finds_limits and not self.in_tokens
        among = self.prefill.open if named is None else named
        counts, _, closed = self.prefill.options(r, among, caps, last_resort=False)
        if not counts:
            return [f"={each}" for each in closed] if closed else {}
        found = self._found.get("prefill", {})
        compared = caps | self._compared(found, "prefill_caps", "prefill=") if finds else {}
        shares = {each: self.prefill.counts[each] / max(cap, 1) for each, cap in compared.items()}
        fallbacks = {each: self.prefill.counts[each] for each in closed if finds}
        limits = caps if finds else {}
        return burdens(counts | fallbacks, scores, self.moment.settings["live_weight"], limits, shares)

    def _shares_of_limits(self) -> dict[str, float]:
        """The fraction of each endpoint's limit that is in flight."""
        if self.in_tokens:
            limits = self.found | self._compared(self._found, "caps")
            return {each: self.amounts[each] / limit for each, limit in limits.items()}
        limits = self.caps | self._compared(self._found, "caps")
        return {each: self.endpoints.counts[each] / max(cap, 1) for each, cap in limits.items()}

    def _compared(self, found: Mapping[str, Any], caps: str, prefix: str = "") -> dict[str, float]:
        """The limits in `found` that still double; compared with loads, each counts as the highest such
        limit. `caps` is the setting with discovery's limits."""
        s, names = self.moment.settings, self._found.get("doubling", ())
        if (self._found.get("unit") == "tokens") != self.in_tokens:
            return {}
        own = {
            each: max(s["limit_min"], min(limit, s.get("limit_max", math.inf)))
            for each, limit in found.items()
            if prefix + each in names
        }
        own = {each: it for each, it in own.items() if self._bounded(each, found, s.get(caps) or {}) == it}
        return dict.fromkeys(own, max(own.values(), default=0))

    def _place_granted(self, r: Request, candidates: str, split: str = "") -> str:
        self._withdraw_notification(r)
        blocker = self._decide_room(r)
        reply = self._place_or_requeue(r, candidates, split)
        if blocker:
            self._decided(r, blocker)
        return reply

    def _decided(self, r: Request, blocker: str) -> None:
        """Pass on room that r, granted for the room of `blocker`, leaves free. If r is placed on none of its
        flow queue's blockers, the next request may not need the blockers, either."""
        if r.state != "queued":
            is_on_blocker = self.queue.served(r, (first(r.endpoints), f"={first(r.prefillers)}"))
            if r.state == "placed" and not is_on_blocker:
                self.queue.probe(r.priority, self.queue.name_of(r))
        self._use_room(blocker)

    def _place_or_requeue(self, r: Request, candidates: str, split: str) -> str:
        reply, limited, closed = self._place(r, candidates, split)
        if reply:
            self._log("placed", r.id)
            return reply
        if not limited or r.deadline_ms <= self.moment.now_ms:
            self._finish(r, "expired" if limited else "refused")
            return "expired" if limited else "refused no-endpoints 1"
        # Requeue r at its position and refund its charge. Throttle r's flow queue until a request of the flow
        # ends or an endpoint has room. If no endpoint has room, dispatch stops: do not throttle the queue.
        self._give_back(r)
        self.workloads.sent_back(r.workload)
        r.any_endpoint = candidates == "*" and not split
        self.queue.insert(r)
        self.queue.correct(r, -1, r.tag)
        self.queue.charge_band(r, -r.cost)
        self._log("requeued", r.id)
        if self.has_tenants:
            self.quotas.send_back(r.id, r.cost)
            self._end_waits()
        if not closed or closed[0].startswith("=") or self.places() > 1e-6:
            if self.queue.is_in_order(r):
                self.queue.throttle(r, r.flow_queue)
            self.queue.wait_for_endpoints(r, closed)
        return f"queued {r.deadline_ms - self.moment.now_ms}"

    # Ends of requests

    def _finish(self, r: Request, event: str) -> None:
        state, blocker = r.state, self._decide_room(r)
        ran = state in ("granted", "placed")
        if r.state == "queued":
            self.queue.remove(r)
        elif r.state == "placed":
            self._release(r, r.endpoints)
        elif r.state == "granted":
            self._withdraw_notification(r)
        if r.prefillers:
            self.prefill.release(first(r.prefillers))
        if ran:
            self._give_back(r)
        del self.requests[r.id]
        self.workloads.active(r.workload, -1)
        self.ended += 1
        self._log(event, r.id)
        if self.has_tenants:
            self.quotas.end(r.id, unserved=event in REFUNDED)
        self.quotas.charges.pop(r.id, None)
        if state == "placed":
            self._use_room(first(r.endpoints))
        if r.prefillers:
            self._use_room(f"={first(r.prefillers)}")
        if blocker:
            self._decided(r, blocker)
        if ran and r.limit > 0:
            for priority in self.queue.bands:
                self.queue.unthrottle(priority, self.queue.name_of(r))

    def _turn_away(self, r: Request, event: str, *, for_limit: bool = False) -> None:
        """End a waiting request that its client has not cancelled, and notify the request's owner."""
        if for_limit or event == "expired":
            notice = self._expire(r, event)
        else:
            notice = event
            self._finish(r, event)
        self._notify(r, notice + "\x1f" if notice.startswith("refused") else notice)

    def _expire(self, r: Request, event: str = "expired") -> str:
        """End a request that may wait no longer. Returns `event`, or the refusal of a tenant's limit."""
        lack = None
        if self.has_tenants and r.id in self.quotas.charges:
            lack = self.quotas.longest_lack(r.id) or self.quotas.holding_up(r.id, self._waits_of(r))
        reply = self._beyond(lack, r) if lack is not None else event
        self._finish(r, event)
        return reply

    def _waits_of(self, r: Request) -> dict[str, float]:
        """The throttled nodes on r's path that wait for balance, and the ms until the balance suffices."""
        waits, now_ms = self.queue.waits, self.moment.now_ms
        return {child: waits.get((r.priority, child), 0) - now_ms for child in self.queue.throttled(r)}

    def _beyond(self, lack: Lack, r: Request) -> str:
        """The refusal of a request by a tenant's limit."""
        reason = "over-burst 0" if lack.over_burst else f"over-limit {lack.retry_s}"
        shown = "\x1f" + shown if (shown := self.quotas.shown(r.flow)) else ""
        return f"refused {reason}\x1f{lack}{shown}"

    def _orphan(self, r: Request, until_ms: int) -> None:
        """Orphan a request of a silent replica: remove it from the queue until another replica adopts it."""
        self.queue.remove(r)
        r.state, r.timer_ms = "orphaned", min(r.deadline_ms, until_ms)
        self._log("orphaned", r.id)

    def _run_timers(self, limit: int) -> tuple[int, int]:
        """Run at most `limit` due timers of requests; return the numbers of timers run and requests ended."""
        self._timed = True
        waiting = [r for r in self.requests.values() if r.state in ("queued", "orphaned")]
        due = sorted((r.timer_ms, r.id) for r in waiting if r.timer_ms <= self.moment.now_ms)[:limit]
        ended = self.ended
        for _, id in due:
            r = self.requests[id]
            if r.state == "orphaned":
                self._finish(r, "abandoned")
            elif r.deadline_ms <= self.moment.now_ms:
                self._turn_away(r, "expired")
            else:
                self.queue.mark_overdue(r)
                r.timer_ms = r.deadline_ms
        return len(due), self.ended - ended

    # Dispatch

    def _dispatch(self) -> tuple[int, int]:
        """Grant requests while the stock is below the lower bound. Returns (attempts, grants)."""
        if not self._timed:
            self._run_timers(TIMERS_LIMIT)
        s = self.moment.settings
        lower = self.lower if self.queues else math.inf
        attempts, served, most = 0, 0, TENANTS_LIMIT if self.has_tenants else DISPATCH_LIMIT
        if self.has_tenants:
            self._end_waits()
        places = self.places()
        while not s["paused"] and self.stock < lower and attempts < DISPATCH_LIMIT and places > 1e-6:
            turn = self.queue.next_turn() if served < most else None
            if turn is None:
                break
            r, by_guard = turn
            attempts += 1
            take = self.claim(r.cost, self.upper)
            if r.deadline_ms <= self.moment.now_ms:
                self._turn_away(r, "expired")
            elif r.owner not in self.live(s["silence_ms"]):
                self._orphan(r, self.moment.now_ms + s["lease_ms"])
            elif self.endpoints.flow_full(r):
                self.queue.throttle(r, r.flow_queue)
            elif self.has_tenants and (lacking := self.quotas.lacking(r.id)):
                if self.quotas.never_suffices(r.id):
                    self._turn_away(r, "evicted", for_limit=True)
                else:
                    self._wait_for_balance(r, *lacking)
            elif self.upper <= 0 or (take > 0 and self.stock + take > self.upper):
                break
            else:
                may_start, blocker = self._admits(r)
                if not may_start:
                    self.queue.throttle(r, r.flow_queue)
                    continue
                self._grant(r, take, by_guard, blocker)
                served, places = served + 1, places - (take if self.in_tokens else 1)
        return attempts, served

    def _wait_for_balance(self, r: Request, child: str, wait_ms: float) -> None:
        self.queue.throttle(r, child)
        if wait_ms < math.inf:
            at_ms = math.ceil(self.moment.now_us / 1000 + wait_ms)
            self.queue.waits[r.priority, child] = at_ms
            self._notifications.append(f"wake {max(1, at_ms - self.moment.now_ms)}")

    def _end_waits(self) -> None:
        """Unthrottle the tenants' nodes whose balances may suffice again."""
        changed, self._changed_nodes = self._changed_nodes, []
        eased = [child for path in changed for child in (path, path + INNER)] + self.quotas.eased()
        for priority in self.queue.bands:
            for child in eased:
                self.queue.unthrottle(priority, child)
        waits, ranks = self.queue.waits, {priority: rank for rank, priority in enumerate(self.queue.bands)}
        due = [wait for wait, at_ms in waits.items() if at_ms <= self.moment.now_ms and wait[0] in ranks]
        for priority, child in sorted(due, key=lambda wait: (waits[wait], ranks[wait[0]], wait[1])):
            del waits[priority, child]
            self.queue.unthrottle(priority, child)

    def _grant(self, r: Request, take: float, by_guard: bool, blocker: str) -> None:
        r.tag = self.queue.serve(r, by_guard)
        r.state = "granted"
        self._take(r, take)
        self.dispatches += 1
        self.guards += by_guard
        self.workloads.dispatched(r.flow, r.workload, (self.moment.now_us - r.arrived) / 1000)
        self._log("granted", r.id, "guard" if by_guard else "turn")
        if self.has_tenants:
            self.quotas.count_start(r.id, r.cost)
        reply = self._place(r, "*")[0] if r.any_endpoint else None
        if reply:
            self._log("placed", r.id)
            self._notify_placed(r, reply)
        else:
            r.blocker = blocker
            self._notify(r, "granted")

    # Steps of the script `sweep`

    def _reclaim(self, most: int) -> int:
        ran_out = sorted((r.lease_ms, r.id) for r in self.in_flight() if r.lease_ms <= self.moment.now_ms)
        for _, id in ran_out[:most]:
            self._finish(self.requests[id], "reclaimed")
        return len(ran_out[:most])

    def _end_lapsed_prefills(self, most: int) -> None:
        splits = (r for r in self.requests.values() if r.prefillers)
        ran_out = [r for r in splits if r.prefill_lease_ms <= self.moment.now_ms]
        for r in sorted(ran_out, key=lambda r: (r.prefill_lease_ms, reservation(r).encode()))[:most]:
            self._end_prefill(r)

    def _orphan_silent(self, grace_ms: int) -> None:
        """Orphan the queued requests of the replica that has been silent for the longest time."""
        gone = set(self.replicas) - set(self.live(self.moment.settings["silence_ms"]))
        if not gone:
            return
        silent = min(gone, key=lambda name: (self.replicas[name], name))
        for r in list(self.requests.values()):
            if r.owner == silent and r.state == "queued":
                self._orphan(r, self.moment.now_ms + grace_ms)
        del self.replicas[silent]
        for id, what in self.inboxes.pop(silent, {}).items():
            if what.startswith("placed"):
                self.suspects[id] = self.moment.now_ms

    def _walk(self) -> None:
        if self.refiling or self.moment.settings["ordering"] == "workload-aware":
            self.queue.reorder(self.refiling, self.scan_order)
        self.refiling = False

    def _drop_idle(self, idle_ms: int) -> None:
        """Drop balances without effect, and the virtual times of nodes without requests."""
        now_ms = self.moment.now_ms
        self.quotas.drop_idle()
        for (priority, path), (_, _, changed_ms) in list(self._states.items()):
            band = self.queue.bands[priority]
            order = band.inner[path]
            is_idle = (band.queued == 0 or not order.turns) and now_ms - changed_ms > idle_ms
            if is_idle and not order.throttled:  # a throttled child keeps its tag
                del self._states[priority, path]
                order.v, order.newcomers, order.finish = 0.0, 0.0, {}
            else:
                order.forget_finish_tags(at_rest=False)

    def _expire_down_marks(self) -> None:
        """Remove marks `down` that no replica has confirmed for DOWN_MS."""
        for (what, address), since_ms in list(self.endpoints.marks.items()):
            if what == "down" and self.moment.now_ms - since_ms > DOWN_MS:
                self._mark("down", False, address)

    # Outliers

    def _mark(self, what: str, on: bool, address: str) -> bool:
        ready = self.endpoints.ready
        known = self.endpoints.mark(what, on, address, self.moment.now_ms)
        if self.endpoints.ready != ready:
            self._try_ejected()
        self._put_bounds()
        return known

    def _try_ejected(self) -> None:
        """If no endpoint is ready, let ejected endpoints take requests again."""
        if self.endpoints.ready == 0:
            for address in self.endpoints.ejected:
                self._mark("ejected", False, address)

    def _move(self, r: Request, listed: str) -> None:
        """Record that Envoy moved request r to the first endpoint of `listed`."""
        old = first(r.endpoints)
        self._release(r, r.endpoints)
        r.endpoints = listed
        self._reserve(r)
        self._use_room(old)
        self._log("moved", r.id)

    def _is_failing(self, entry: Entry) -> bool:
        flows = entry.flows()
        alone = all(r.flow == flow for r in self.in_flight() for flow in flows[:1])
        return len(set(flows)) > 1 or (len(flows) >= MOST_ALONE and entry.elsewhere and alone)

    def _failed(self, address: str, request_id: str, flow: str, why: str, mine: int) -> str:
        if address not in self.endpoints.counts:
            return "noted"
        if told := self.outliers.told(request_id):
            other, failure = told
            if other != address and failure[1]:
                failure[1] = ""
                entry = self.outliers[other]
                if other in self.endpoints.ejected and not self._is_failing(entry):
                    entry.times = max(entry.times - 1, 0)
                    self._mark("ejected", False, other)
            return "noted"
        if address not in self.endpoints.open:
            return "noted"
        entry = self.outliers.of(address)
        if why == "retried" and not entry.trial and (entry.fulls or self.outliers.is_limited(entry)):
            return "noted"
        entry.by.append([request_id, flow])
        if len(entry.by) > MOST_FAILURES:
            entry.forget_one()
        entry.at_ms = self.moment.now_ms
        if not self._is_failing(entry):
            return "noted"
        if why == "503" and not entry.trial and self.endpoints.counts[address] - mine >= 1:
            self._is_full(address, mine, 0)
            return "noted"
        if not self.outliers.may_eject(self.endpoints.ready, len(self.endpoints.ejected)):
            return "noted"
        self.outliers.eject(entry)
        self._mark("ejected", True, address)
        return "ejected"

    def _is_full(self, address: str, mine: int, hold_ms: int) -> None:
        if address in self.endpoints.counts:
            entry = self.outliers.of(address)
            self.outliers.full(entry, max(self.endpoints.counts[address] - mine, 0), hold_ms or FULL_MS)

    def _count_refusal(self, address: str) -> None:
        if address not in self.refusals:
            kept = self.refusals.keys() & self.endpoints.listed
            self.refusals = {each: self.refusals[each] for each in kept}
        self.refusals[address] = self.refusals.get(address, 0) + 1

    def _try(self, address: str) -> None:
        entry = self.outliers[address]
        entry.trial = True
        self.outliers.limit(entry, self.endpoints.counts[address] + 1, TRIAL_MS)
        self._mark("ejected", False, address)

    def _probed(self, address: str, well: bool) -> str:
        if address not in self.endpoints.ejected:
            return "unknown"
        entry = self.outliers[address]
        if not well:
            entry.seen_ms = self.moment.now_ms
        elif self.moment.now_ms >= entry.until_ms:
            self._try(address)
        return "marked"

    def _sweep_outliers(self) -> None:
        for address, entry in list(self.outliers.items()):
            if address not in self.endpoints.listed:
                del self.outliers[address]
            elif address not in self.endpoints.ejected:
                self.outliers.expire(address)
            elif self.moment.now_ms - max(entry.until_ms, entry.seen_ms) > UNSEEN_MS:
                self._try(address)

    def retry_after_s(self) -> int:
        """The seconds until the queue has drained at the measured rate: 1 to 60; 1 if the rate is unknown."""
        return max(1, math.ceil(min(60, (len(self.queue) + 1) / self.rate))) if self.rate else 1

    def _measure_rate(self) -> None:
        """Measure the drain rate of the queue, which determines Retry-After."""
        passed_ms = self.moment.now_ms - self._swept_ms
        if self._swept_ms and passed_ms > 0:
            measured = max(0, self.dispatches - self._swept_dispatches) * 1000 / passed_ms
            rate = (self.rate + measured) / 2 if self.rate else measured
            least = SMALLEST if self.rate and self.queue else 0.0
            self.rate = rate if rate >= SMALLEST else least
        self._swept_ms, self._swept_dispatches = self.moment.now_ms, self.dispatches


def placed(r: Request) -> str:
    return f"placed {r.endpoints}>{r.prefillers}" if r.prefillers else f"placed {r.endpoints}"


def reservation(r: Request) -> str:
    """The member of the sorted set `prefills` that stands for the prefill of request r."""
    return f"{first(r.prefillers)}\x1f{r.id}"


def first(endpoints: str) -> str:
    """The serving endpoint of a list like 'a,b,c': the first endpoint."""
    return endpoints.split(",")[0]
