"""Quotas of tenants: finds the limits on a request's tenant path, and charges the request to these limits.
Pure.

During an outage, a `LocalGate` counts this replica's share of each limit by the class `Quotas`. The reference
model in tests/model counts whole limits by the same class; tests compare it with `lua/lib/quotas.lua`.

A limit is a leaky bucket (ITU-T I.371, continuous-state leaky bucket): the units owed leak at `rate`, and a
request that takes c units may start while at most burst - c units are owed. Charges are estimates that usage
corrects later, so more than the burst may be owed.
"""

import datetime
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from picker_fleet.admission.tenant_tree import INNER
from picker_fleet.domain.tenants import Node, Price, Tree

RESIDUE = 1e-6  # tolerance for rounding errors in sums of fractions
MOST_KEPT = 10_000  # maximum balances, and maximum flows whose balances are remembered for an outage
_DAY_MS = 86_400_000
_FREE = Price()


class Arriving(Protocol):
    """A request that is charged to tenants' limits. The numbers of tokens are estimates."""

    @property
    def id(self) -> str: ...
    @property
    def flow(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def prompt_tokens(self) -> float: ...
    @property
    def answer_tokens(self) -> float: ...


@dataclass(slots=True)
class Charge:
    """The charge of a request, in tokens. `limits` has the keys of the limits that have charged the request.
    Nodes that demote do not charge a `demoted` request. `used`: the charge is usage, not an estimate."""

    flow: str
    model: str
    prompt: float
    answer: float
    limits: set[str] = field(default_factory=set)
    started: bool = False
    demoted: bool = False
    used: bool = False


class Usage(NamedTuple):
    """The numbers of tokens in a request's prompt and answer; `cached` of the prompt tokens are cached. If
    `prompt` is negative, the prompt's tokens are unknown, and `answer` is a lower bound."""

    prompt: float
    cached: float
    answer: float


class Granted(NamedTuple):
    """An amount that a replica granted under a tenant node's limit; `unit` and `per` are as in `Limit`."""

    path: str
    unit: str
    per: str
    amount: float


class Limit(NamedTuple):
    """One limit of a tenant node. `unit`: requests, tokens, prompt_tokens, answer_tokens, parallel or budget.
    `per`: a rate limit's interval in ms, '0' for `parallel`, the period's name for `budget`. `burst`: maximum
    units at once; `whole`: the burst of all replicas together. `rate`: units a ms, 0 without an interval."""

    unit: str
    per: str
    burst: float
    whole: float
    rate: float
    key: str


class _Settings(NamedTuple):
    """A tenant node with its limits."""

    path: str
    over_limit: str
    limits: tuple[Limit, ...]


class Lack(NamedTuple):
    """A tenant node's limit that does not suffice for a request. `wait_ms`: the time until the limit
    suffices, infinite if other requests must end first. `over_burst`: the request exceeds the burst."""

    path: str
    limit: Limit
    wait_ms: float
    over_burst: bool

    @property
    def retry_s(self) -> int:
        """The whole seconds until the limit suffices, at least 1; 1 if other requests must end first."""
        return max(1, math.ceil(self.wait_ms / 1000 - RESIDUE)) if self.wait_ms < math.inf else 1

    def __str__(self) -> str:
        """The text by which replies of the Lua scripts name the limit (lua/admit.lua)."""
        return f"{self.limit.unit} {self.limit.per} {self.path}"


def period_of(name: str, now_ms: float) -> tuple[int, float]:
    """The number of the current calendar period `name` (day, week from Monday on, month; UTC), and the ms
    until its end. Days and weeks are counted from 1970, months from January of year 0."""
    days = int(now_ms // _DAY_MS)
    if name == "day":
        return days, (days + 1) * _DAY_MS - now_ms
    if name == "week":  # 1970-01-01 was a Thursday
        week = (days + 3) // 7
        return week, ((week + 1) * 7 - 3) * _DAY_MS - now_ms
    today = datetime.date(1970, 1, 1) + datetime.timedelta(days=days)
    following = (today.replace(day=1) + datetime.timedelta(days=32)).replace(day=1)
    end = (following - datetime.date(1970, 1, 1)).days
    return today.year * 12 + today.month - 1, end * _DAY_MS - now_ms


class Quotas:
    """The balances of tenant nodes, and the charges of requests by id.

    `live` is the number of replicas. This object counts one replica's share: an equal part of each rate,
    burst and budget, and at least 1 request in flight. A request that exceeds this share of a burst, but not
    the whole burst, is granted once the share is full. `log` is called with event and request id.

    `balances` has the numbers of each field of the hash `balances` (docs/redis-schema.md): for a rate, units
    owed and the time in ms; requests in flight; for a budget, its period and the units spent in the period.
    """

    def __init__(
        self,
        tree: Tree,
        prices: Mapping[str, Price],
        now_ms: Callable[[], float],
        *,
        live: int = 1,
        log: Callable[[str, str], object] = lambda event, request_id: None,
    ) -> None:
        self.tree, self._prices, self._now_ms, self._live, self._log = tree, prices, now_ms, live, log
        self.balances: OrderedDict[str, tuple[float, ...]] = OrderedDict()
        self._told: dict[str, tuple[float, ...]] = {}  # balances taken over from Redis's replies, by key
        self.charges: dict[str, Charge] = {}
        self._eased: dict[str, None] = {}  # paths of nodes with refilled balances, first refilled first

    # Handle the steps of a request.

    def arrive(self, r: Arriving, *, may_wait: bool = True) -> Lack | None:
        """Charge an arriving request to the nodes that reject or demote; mark its charge if a node demotes
        it. If nodes refuse the request, return the reason for which it must wait longest, and charge
        nothing; unless the request `may_wait`, nodes that queue refuse it, too."""
        nodes = self._nodes(r.flow)
        if not nodes:
            return None
        charge = Charge(r.flow, r.model, r.prompt_tokens, r.answer_tokens)
        longest: Lack | None = None
        for node in nodes:
            lack = self._lack(node, charge)
            if lack is None:
                continue
            if node.over_limit == "demote":
                charge.demoted = True
            elif lack.over_burst:
                return lack
            elif node.over_limit == "reject" or not may_wait:
                longest = max(longest or lack, lack, key=lambda each: each.retry_s)
        if longest is not None:
            return longest
        self.charges[r.id] = charge
        for node in nodes:
            if node.over_limit != "queue":
                self._charge(node, charge)
        self._log("charged", r.id)
        return None

    def is_demoted(self, request_id: str) -> bool:
        charge = self.charges.get(request_id)
        return charge is not None and charge.demoted

    def lacking(self, request_id: str) -> tuple[str, float] | None:
        """The highest node on a waiting request's path whose balance is too low, by its name among its
        siblings, and the ms until its balance suffices. None if the request may start."""
        charge = self.charges.get(request_id)
        if charge is None or charge.started:
            return None
        for node in self._nodes(charge.flow):
            if (lack := self._lack(node, charge)) is not None:
                return _child(node.path, charge.flow), lack.wait_ms
        return None

    def longest_lack(self, request_id: str) -> Lack | None:
        """The limit for which a waiting request must wait longest; None if the request may start."""
        charge = self.charges.get(request_id)
        if charge is None or charge.started:
            return None
        lacks = filter(None, (self._lack(node, charge) for node in self._nodes(charge.flow)))
        return max(lacks, key=lambda lack: (lack.over_burst, lack.retry_s), default=None)

    def holding_up(self, request_id: str, waits: Mapping[str, float]) -> Lack | None:
        """The limit for which an earlier request waits, so that this one, which may start, must wait behind
        it: the limit with the least part left, of the highest node on the path in `waits` (name among
        siblings -> ms until the balance suffices). None if no node is in `waits`."""
        charge = self.charges[request_id]
        for node in self._nodes(charge.flow):
            wait_ms = waits.get(_child(node.path, charge.flow), 0.0)
            limits = [each for each in self._uncharged(node, charge) if each.unit != "parallel"]
            if wait_ms > 0 and limits:
                worst = max(limits, key=lambda limit: self._taken(limit) / limit.burst)
                return Lack(node.path, worst, wait_ms, False)
        return None

    def start(self, request_id: str) -> None:
        """A request starts: charge it to all limits to which it has not been charged yet."""
        charge = self.charges.get(request_id)
        if charge is not None and not charge.started:
            charge.started = True
            for node in (nodes := self._nodes(charge.flow)):
                self._charge(node, charge)
            if nodes:
                self._log("charged", request_id)

    def use(self, request_id: str, usage: Usage) -> None:
        """Correct a request's charge by its usage."""
        charge = self.charges.get(request_id)
        if charge is None or not self._nodes(charge.flow):
            return
        if usage.prompt < 0:
            if usage.answer <= charge.answer:
                return
            usage = Usage(charge.prompt, 0, usage.answer)
        for node, limit in self._charged(charge):
            if limit.unit not in ("requests", "parallel"):
                amount = self._amount(limit.unit, charge.model, usage)
                self._give_back(node, limit, self._estimate(limit.unit, charge) - amount)
        charge.prompt, charge.answer, charge.used = usage.prompt, usage.answer, True
        self._log("used", request_id)

    def end(self, request_id: str, *, unserved: bool) -> None:
        """End a request's charge; refund it if the request is `unserved` and its usage is unknown."""
        charge = self.charges.pop(request_id, None)
        if charge is None or not (nodes := self._nodes(charge.flow)):
            return
        refunds = unserved and not charge.used
        for node, limit in self._charged(charge):
            if refunds or limit.unit == "parallel":
                self._give_back(node, limit, self._estimate(limit.unit, charge))
        if not charge.started:  # a waiting request may have throttled its nodes
            queueing = (node for node in nodes if node.over_limit == "queue")
            self._eased |= {node.path: None for node in queueing if self._uncharged(node, charge)}
        if refunds and charge.limits:
            self._log("refunded", request_id)

    def eased(self) -> list[str]:
        """The queueing nodes whose next request may fit now, since they got balance back, or one of their
        requests stopped waiting, after the last call of this method. Each node has two names among its
        siblings: as a leaf and as an inner node."""
        found = [child for path in self._eased for child in (path, path + INNER)]
        self._eased.clear()
        return found

    # Report balances.

    def quota(self, request_id: str) -> str:
        """The balances that a request's answer shows to the client, and whether the request was demoted."""
        charge = self.charges.get(request_id)
        if charge is None:
            return ""
        return ";".join(filter(None, (self.shown(charge.flow), "demoted=1" if charge.demoted else "")))

    def shown(self, flow: str) -> str:
        """The balances that answers show (lua/lib/quotas.lua): the request limit and the token limit with the
        least part left, if each replica has as much left as this replica."""
        worst = dict[str, tuple[float, Limit]]()
        for node in self._nodes(flow):
            for limit in node.limits:
                kind = _kind(limit)
                share = self._left(limit) / limit.burst
                if kind and (kind not in worst or share < worst[kind][0]):
                    worst[kind] = share, limit
        parts = []
        for kind, (_, limit) in sorted(worst.items()):
            left = self._left(limit)
            reset_ms = math.ceil((limit.burst - left) / limit.rate - RESIDUE)
            parts.append(f"{kind}={int(limit.whole)},{int(max(left * self._live + RESIDUE, 0.0))},{reset_ms}")
        return ";".join(parts)

    def take_over(self, flow: str, quota: str, at_ms: float) -> None:
        """Take over this replica's share of the balances that Redis reported in `quota` at `at_ms`."""
        for part in quota.split(";"):
            kind, _, numbers = part.partition("=")
            if numbers.count(",") != 2:
                continue
            burst, left, reset_ms = map(float, numbers.split(","))
            for node in self._nodes(flow):
                for limit in node.limits:
                    # A reply does not name its limit: recognise the limit by its burst and by the time
                    # until its balance is full.
                    expected = max(limit.whole - reset_ms * limit.rate * self._live, 0.0)
                    tolerance = 1 + limit.rate * self._live  # `reset_ms` and `left` are rounded
                    if _kind(limit) == kind and limit.whole == burst and abs(expected - left) <= tolerance:
                        self._put(limit.key, reset_ms * limit.rate, at_ms)
                        self._told[limit.key] = self.balances[limit.key]

    def granted(self) -> Iterator[Granted]:
        """The amounts that were granted since the balances were taken over, and are still owed or were spent
        in this period. Limits on requests in flight are left out."""
        for key, balance in self.balances.items():
            path = key.partition("\x1f")[0]
            node = self.tree.node(path)
            for limit in self._settings(path, node).limits if node is not None else ():
                if limit.key == key and limit.unit != "parallel":
                    amount = self._units(limit, balance) - self._units(limit, self._told.get(key))
                    if amount > RESIDUE:
                        yield Granted(path, limit.unit, limit.per, amount)

    # Compute balances.

    def _nodes(self, flow: str) -> list[_Settings]:
        """The nodes on a flow's path that have limits, the highest first."""
        found = ((path, self.tree.node(path)) for path in self.tree.paths(flow))
        nodes = [self._settings(path, node) for path, node in found if node is not None]
        return [node for node in nodes if node.limits]

    def _settings(self, path: str, node: Node) -> _Settings:
        live, limits = self._live, []
        for each in node.limits:
            per, whole = str(each.per_ms), float(each.most_at_once)
            rate = each.amount / each.per_ms / live
            limits.append(Limit(each.unit, per, whole / live, whole, rate, f"{path}\x1f{each.unit}:{per}"))
        if node.max_parallel_requests is not None:
            most = float(node.max_parallel_requests)
            limits.append(Limit("parallel", "0", max(most / live, 1.0), most, 0.0, f"{path}\x1fparallel"))
        if node.budget is not None:
            units, period = node.budget.units, node.budget.period
            limits.append(Limit("budget", period, units / live, units, 0.0, f"{path}\x1fbudget:{period}"))
        return _Settings(path, node.over_limit, tuple(limits))

    def _lack(self, node: _Settings, charge: Charge) -> Lack | None:
        """The uncharged limit of a node for which a request must wait longest; None if all limits suffice."""
        worst: Lack | None = None
        for limit in self._uncharged(node, charge):
            amount = self._estimate(limit.unit, charge)
            if amount > limit.whole + RESIDUE:
                return Lack(node.path, limit, math.inf, True)
            missing = min(amount, limit.burst) - self._left(limit)
            if missing > RESIDUE:
                wait_ms = missing / limit.rate if limit.rate else math.inf
                if limit.unit == "budget":
                    wait_ms = period_of(limit.per, self._now_ms() // 1)[1]
                if worst is None or wait_ms > worst.wait_ms:
                    worst = Lack(node.path, limit, wait_ms, False)
        return worst

    def _left(self, limit: Limit) -> float:
        return limit.burst - self._taken(limit)

    def _taken(self, limit: Limit) -> float:
        """The units of a limit that are owed, are in flight, or were spent in this period."""
        return self._units(limit, self.balances.get(limit.key))

    def _units(self, limit: Limit, balance: tuple[float, ...] | None) -> float:
        if balance is None:
            return 0.0
        now_ms = self._now_ms()
        if limit.unit == "parallel":
            return balance[0]
        if limit.unit == "budget":
            return balance[1] if balance[0] == period_of(limit.per, now_ms)[0] else 0.0
        owed, at_ms = balance
        return max(owed - max(now_ms - at_ms, 0.0) * limit.rate, 0.0)

    def _take(self, limit: Limit, amount: float) -> None:
        taken, now_ms = self._taken(limit) + amount, self._now_ms()
        if limit.unit == "parallel":
            self._put(limit.key, max(taken, 0.0))
        elif limit.unit == "budget":
            self._put(limit.key, period_of(limit.per, now_ms)[0], max(taken, 0.0))
        else:
            self._put(limit.key, max(taken, 0.0), now_ms)

    def _give_back(self, node: _Settings, limit: Limit, amount: float) -> None:
        if amount:
            self._take(limit, -amount)
        if amount > 0 and node.over_limit == "queue":
            self._eased[node.path] = None

    def _put(self, key: str, *numbers: float) -> None:
        self.balances[key] = numbers
        self.balances.move_to_end(key)
        if len(self.balances) > MOST_KEPT:
            self.balances.popitem(last=False)

    def _estimate(self, unit: str, charge: Charge) -> float:
        return self._amount(unit, charge.model, Usage(charge.prompt, 0.0, charge.answer))

    def _amount(self, unit: str, model: str, usage: Usage) -> float:
        """How many units of a limit a request takes."""
        prompt, cached, answer = usage
        match unit:
            case "tokens":
                return prompt + answer
            case "prompt_tokens":
                return prompt
            case "answer_tokens":
                return answer
            case "budget":
                price = self._prices.get(model) or self._prices.get("*") or _FREE
                of_cached = price.prompt if price.cached is None else price.cached
                return (prompt - cached) * price.prompt + cached * of_cached + answer * price.answer
        return 1.0

    def _charged(self, charge: Charge) -> Iterator[tuple[_Settings, Limit]]:
        """The limits to which a request is charged, each with its node."""
        for node in self._nodes(charge.flow):
            yield from ((node, limit) for limit in node.limits if limit.key in charge.limits)

    def _uncharged(self, node: _Settings, charge: Charge) -> list[Limit]:
        """The limits of a node that have not yet charged a request, but must."""
        if charge.demoted and node.over_limit == "demote":
            return []
        return [limit for limit in node.limits if limit.key not in charge.limits]

    def _charge(self, node: _Settings, charge: Charge) -> None:
        for limit in self._uncharged(node, charge):
            self._give_back(node, limit, -self._estimate(limit.unit, charge))
            charge.limits.add(limit.key)


class ToldQuotas:
    """The balances in Redis's last reply about each of the latest flows; an outage begins with them."""

    def __init__(self) -> None:
        self._by_flow: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def note(self, flow: str, quota: str, at_ms: float) -> None:
        self._by_flow[flow] = quota, at_ms
        self._by_flow.move_to_end(flow)
        if len(self._by_flow) > MOST_KEPT:
            self._by_flow.popitem(last=False)

    def oldest_first(self) -> Iterable[tuple[str, str, float]]:
        return ((flow, quota, at_ms) for flow, (quota, at_ms) in self._by_flow.items())


def _kind(limit: Limit) -> str:
    """The name by which replies show a limit; '' for `parallel` and `budget`, which replies do not show."""
    if not limit.rate:
        return ""
    return "requests" if limit.unit == "requests" else "tokens"


def _child(path: str, flow: str) -> str:
    """The name, among its siblings, of a node on a flow's path."""
    return flow if path == flow else path + INNER
