"""The check of tenants' quotas: no node on a path grants more than its limits and budget allow.

A limit of `amount` units in `per_ms` is a leaky bucket (ITU-T I.371): the units owed leak at amount / per_ms,
and a request may start if its own units and the units owed are at most `burst`. The check computes all
buckets from these entries of the log:

- `charged`: a request was charged by estimate: at its arrival, to nodes that reject or demote; at its grant,
  to all other limits. Each limit must have had the estimate left. While the request is `running`, new
  limits on requests in flight charge it. Nodes that demote do not charge a demoted request.
- `used`: usage replaces the estimate; the tokens are already spent, so the units owed may exceed `burst`.
- `refunded`: a request was not served, or returned to the queue (then only nodes that queue refund it).
- `topped_up`: an operator lowered the used part of a limit or budget, or a replica raised it after an outage.

A request counts once, however often it is retried or adopted: a second charge, refund or usage is a
violation, and so is a request that starts without a charge. If the log begins midway, nothing is owed at its
beginning, so a correct log never shows a violation.
"""

import datetime
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from picker_fleet.domain.bands import NAMED
from picker_tools.audit.checks import Check, Finding
from picker_tools.audit.log import Entry, EntryError
from picker_tools.audit.nodes import BETWEEN, DEMOTE, QUEUE, Limit, Node, ancestry
from picker_tools.audit.replay import Replay, RequestState, Step

_ARRIVAL, _GRANT, _RUNNING, _ALL, _DEMOTED = "arrival", "grant", "running", "all", "demoted"
_Kind = tuple[str, str, str]  # names a limit: the node's path, the unit, the period
_PARALLEL = "requests in flight"  # the unit of limits on requests in flight
_UNSERVED = frozenset({
    "refused", "cancelled", "expired", "preempted", "evicted", "abandoned", "withdrawn", "upstream_failed",
})  # fmt: skip
_ROUNDING = 1e-6  # absolute tolerance for rounding errors, as in the Lua scripts
_RELATIVE = 1e-9
_LEAST_KEPT = 1000  # balances without effect are dropped only beyond this number of balances


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A request's charge in tokens (limits), and in cost units (`units`; budgets)."""

    prompt: float
    answer: float
    units: float

    def of(self, unit: str) -> float:
        if unit in ("requests", "units", _PARALLEL):
            return self.units if unit == "units" else 1.0
        prompt = 0.0 if unit == "answer_tokens" else self.prompt
        return prompt if unit == "prompt_tokens" else prompt + self.answer


@dataclass(slots=True)
class _Charge:
    """A request's charge in force: the limits that have charged the request, and the log entries of its
    charges by phase, of its usage (`used`) and of its end."""

    first: Entry
    tokens: _Tokens
    demoted: bool
    limits: set[_Kind] = field(default_factory=set)
    entries: dict[str, Entry] = field(default_factory=dict)
    used: Entry | None = None
    end: Entry | None = None


class Quotas(Check):
    PROMISE = "quotas"
    TITLE = "tenants stay within their limits; a request is charged once"

    def __init__(self, finding: Finding, replay: Replay) -> None:
        super().__init__(finding, replay)
        # (path, unit, per_ms) -> the units owed, the time (ms) of that amount, and when no unit will be owed.
        self._owed: dict[tuple[str, str, float], tuple[float, float, float]] = {}
        self._spent: dict[tuple[str, str], tuple[int, float]] = {}  # (path, period) -> its number, cost spent
        self._parallel: Counter[str] = Counter()  # path -> number of charged requests that have not ended
        self._charges: dict[str, _Charge] = {}
        self._granted: dict[str, Entry] = {}  # requests that the current decision granted but has not charged
        # Requests that the current decision ended, and whether a node on their path has a limit.
        self._ended: list[tuple[str, _Charge, bool]] = []
        self._most_kept = _LEAST_KEPT
        self._decision_us = 0
        self._had_tenants = False

    def check(self, step: Step) -> None:
        entry, rules = step.entry, self._replay.rules
        has_tenants = rules is not None and rules.tenants is not None
        if has_tenants is not self._had_tenants:  # forget all charges, as the scripts do
            self._had_tenants = has_tenants
            self._charges.clear()
            self._parallel.clear()
            self._granted.clear()
        if has_tenants and entry.event == "topped_up":
            self._top_up(entry)
        if not has_tenants or not entry.request:
            return
        if entry.time_us != self._decision_us:
            self._decision_us = entry.time_us
            self._end_decision()
        if entry.event == "charged":
            self._charge(entry, is_new=step.before is RequestState.ABSENT)
        elif entry.event == "refunded":
            self._refund(entry)
        elif entry.event == "used":
            self._use(entry)
        else:
            self._follow(step)

    def close(self) -> None:
        self._end_decision()

    def _follow(self, step: Step) -> None:
        """Follow a request that begins, starts or ends."""
        entry = step.entry
        charge = self._charges.get(entry.request)
        if step.before is RequestState.ABSENT and entry.event in ("queued", "bypassed"):
            self._finding.checked += 1
            if charge is None and self._has_quota(entry):
                self._finding.add(f"request {entry.request} arrives and is not charged", entry)
        if charge is None:
            return
        if entry.event in ("granted", "bypassed") and _GRANT not in charge.entries and self._has_quota(entry):
            self._granted[entry.request] = entry
        elif step.before is not RequestState.ABSENT and step.after is RequestState.ABSENT:
            charge.end = entry
            # If nodes have lost their limits since the charge, there is nothing to refund.
            self._ended.append((entry.request, charge, self._has_quota(entry)))
            self._granted.pop(entry.request, None)
            self._leave(charge, entry)

    def _leave(self, charge: _Charge, entry: Entry) -> None:
        """Remove a request from the counts of requests in flight, also of nodes that have lost this limit."""
        for kind in [kind for kind in charge.limits if kind[1] == _PARALLEL]:
            self._change(kind, None, entry, -1)
            charge.limits.remove(kind)

    def _end_decision(self) -> None:
        """Check the requests of a decision whose entries have all been seen."""
        for name, charge, has_quota in self._ended:
            assert charge.end is not None
            if charge.end.event in _UNSERVED and charge.used is None and charge.limits and has_quota:
                what = f"request {name} was not served and is not refunded"
                self._finding.add(what, charge.first, charge.end)
            if self._charges.get(name) is charge:
                del self._charges[name]
        for name, entry in self._granted.items():
            self._finding.add(f"request {name} starts and is not charged", entry)
        self._ended.clear()
        self._granted.clear()
        if len(self._owed) + len(self._spent) > self._most_kept:  # drop balances that have no effect
            now_ms = self._decision_us / 1000
            self._owed = {key: owed for key, owed in self._owed.items() if owed[2] > now_ms}
            self._spent = {
                key: (number, spent)
                for key, (number, spent) in self._spent.items()
                if number >= _number(key[1], self._decision_us)
            }
            self._most_kept = max(_LEAST_KEPT, 2 * (len(self._owed) + len(self._spent)))

    def _charge(self, entry: Entry, *, is_new: bool) -> None:
        phase, tokens, demoted = _read(entry)
        charge = self._charges.get(entry.request)
        if phase == _GRANT:
            self._granted.pop(entry.request, None)
        if charge is None or charge.end is not None:
            charge = self._charges[entry.request] = _Charge(entry, tokens, demoted)
        if phase != _RUNNING and phase in charge.entries:
            self._finding.add(f"request {entry.request} is charged twice", charge.entries[phase], entry)
            return
        if demoted and phase == _ARRIVAL and is_new:
            self._check_demotion(entry, tokens)
        for kind, node, limit in self._limits(entry.flow):
            path, unit, per = kind
            if phase == _RUNNING:
                is_charged = unit == _PARALLEL
            else:
                is_charged = phase == _GRANT or node.over_limit != QUEUE
            if kind in charge.limits or not is_charged or (charge.demoted and node.over_limit == DEMOTE):
                continue
            self._finding.checked += 1
            amount, left, most = tokens.of(unit), *self._left(kind, node, limit, entry)
            if phase != _RUNNING and amount > left + _ROUNDING + _RELATIVE * most:
                what = f"{path} is charged {amount:g} {unit} (per {per}) and has {left:.12g} of {most:g} left"
                self._finding.add(what, entry)
            charge.limits.add(kind)
            self._change(kind, limit, entry, amount)
        charge.entries[phase] = entry

    def _check_demotion(self, entry: Entry, tokens: _Tokens) -> None:
        rules = self._replay.rules
        # The scripts demote a request to the lowest band in use; the named bands are always in use.
        lowest = min(band.priority for band in rules.bands[: len(NAMED)]) if rules else entry.priority
        if entry.priority > lowest:
            what = f"request {entry.request} is demoted to priority {entry.priority}, not {lowest}"
            self._finding.add(what, entry)
        short = (
            tokens.of(kind[1]) > left - _ROUNDING - _RELATIVE * most
            for kind, node, limit in self._limits(entry.flow)
            if node.over_limit == DEMOTE
            for left, most in [self._left(kind, node, limit, entry)]
        )
        if self._replay.complete and not any(short):
            self._finding.add(f"request {entry.request} is demoted and no limit is short", entry)

    def _limits(self, flow: str) -> Iterator[tuple[_Kind, Node, Limit | None]]:
        """The limits on the path of a flow, each with its node."""
        for path, node in self._path(flow):
            for limit in node.limits:
                yield (path, limit.unit, f"{limit.per_ms:g} ms"), node, limit
            if node.budget is not None:
                yield (path, "units", node.budget.period), node, None
            if node.max_parallel is not None:
                yield (path, _PARALLEL, "node"), node, None

    def _left(self, kind: _Kind, node: Node, limit: Limit | None, entry: Entry) -> tuple[float, float]:
        """How much of a limit is left, and how much it allows at once."""
        path, _, period = kind
        if limit is not None:
            return limit.most - self._owed_now(path, limit, entry), limit.most
        if node.budget is None or kind[1] == _PARALLEL:
            most = node.max_parallel or 0
            return most - self._parallel[path], most
        number, spent = self._spent.get((path, period), (0, 0.0))
        spent = spent if number == _number(period, entry.time_us) else 0.0
        return node.budget.units - spent, node.budget.units

    def _change(self, kind: _Kind, limit: Limit | None, entry: Entry, by: float) -> None:
        """Raise the used part of a limit. If `by` is 0, the time of the amount stays: a limit that changes
        later applies since then, as in the scripts."""
        path, unit, period = kind
        if limit is not None:
            if by:
                self._owe(path, limit, entry, by)
        elif unit == _PARALLEL:
            self._parallel[path] += int(by)
            if self._parallel[path] <= 0:
                del self._parallel[path]
        else:
            self._count_spent(path, period, entry, by)

    def _owed_now(self, path: str, limit: Limit, entry: Entry) -> float:
        units, at_ms, _ = self._owed.get((path, limit.unit, limit.per_ms), (0.0, 0.0, 0.0))
        return max(0.0, units - max(0.0, entry.time_us / 1000 - at_ms) * limit.amount / limit.per_ms)

    def _refund(self, entry: Entry) -> None:
        phase, *_ = _read(entry)
        charge = self._charges.get(entry.request)
        if charge is None:
            if self._replay.complete:
                self._finding.add(f"request {entry.request} is refunded and was not charged", entry)
            return
        self._finding.checked += 1
        if not charge.entries or (phase != _ALL and phase not in charge.entries):
            what = f"request {entry.request} is refunded ({phase}), but this charge is not in force"
            self._finding.add(what, charge.first, entry)
        if charge.used is not None:
            what = f"request {entry.request} is refunded, although its usage is known"
            self._finding.add(what, charge.used, entry)
        if charge.end is not None and charge.end.event not in _UNSERVED:
            self._finding.add(f"request {entry.request} was served and is refunded", charge.end, entry)
        for kind, node, limit in self._limits(entry.flow):
            if kind in charge.limits and (phase != _GRANT or node.over_limit == QUEUE):
                self._change(kind, limit, entry, -charge.tokens.of(kind[1]))
                charge.limits.remove(kind)
        charge.entries.pop(phase, None)
        if phase != _GRANT:
            self._leave(charge, entry)
            charge.limits.clear()  # limits that nodes have lost since the charge cannot be refunded
            del self._charges[entry.request]

    def _top_up(self, entry: Entry) -> None:
        path, unit, per, amount = (entry.note.split(BETWEEN) + [""] * 4)[:4]
        (by,) = _numbers(entry, [amount], 1)
        if unit == "budget":
            self._count_spent(path, per, entry, -by)
            return
        (per_ms,) = _numbers(entry, [per], 1)
        for limit in dict(self._path(path))[path].limits:
            if (limit.unit, limit.per_ms) == (unit, per_ms):
                self._owe(path, limit, entry, -by)

    def _use(self, entry: Entry) -> None:
        prompt, cached, answer, units = _numbers(entry, entry.note.split(), 4)
        charge = self._charges.get(entry.request)
        if charge is None:
            return  # the request was charged before the log, or restored without a charge
        self._finding.checked += 1
        if charge.used is not None:
            self._finding.add(f"the usage of request {entry.request} is charged twice", charge.used, entry)
            return
        if cached > prompt:
            self._finding.add(f"request {entry.request} had {cached:g} of {prompt:g} tokens cached", entry)
        used = _Tokens(prompt, answer, units)
        for kind, _, limit in self._limits(entry.flow):
            if kind in charge.limits:
                self._change(kind, limit, entry, used.of(kind[1]) - charge.tokens.of(kind[1]))
        charge.used, charge.tokens = entry, used

    def _owe(self, path: str, limit: Limit, entry: Entry, change: float) -> None:
        owed, now_ms = max(0.0, self._owed_now(path, limit, entry) + change), entry.time_us / 1000
        self._owed[path, limit.unit, limit.per_ms] = owed, now_ms, now_ms + owed * limit.per_ms / limit.amount

    def _count_spent(self, path: str, period: str, entry: Entry, change: float) -> None:
        number = _number(period, entry.time_us)
        before, spent = self._spent.get((path, period), (number, 0.0))
        self._spent[path, period] = number, max(0.0, (spent if before == number else 0.0) + change)

    def _has_quota(self, entry: Entry) -> bool:
        return any(node.has_quota for _, node in self._path(entry.flow))

    def _path(self, flow: str) -> Iterator[tuple[str, Node]]:
        """The path and settings of each node of `flow`."""
        tenants = self._replay.rules.tenants if self._replay.rules else None
        if tenants is not None:
            for path in ancestry(flow, tenants.separator):
                yield path, self._replay.nodes.find(path, tenants.separator)


def _read(entry: Entry) -> tuple[str, _Tokens, bool]:
    """Read an entry `charged` or `refunded`, whose note is `PHASE PROMPT ANSWER UNITS`, perhaps followed by
    `demoted`. Returns the phase, the tokens, and whether the request is demoted.

    Raises:
        EntryError: the note cannot be read.
    """
    phase, *texts = entry.note.split() or [""]
    demoted = texts[-1:] == [_DEMOTED]
    prompt, answer, units = _numbers(entry, texts[:-1] if demoted else texts, 3)
    if phase not in (_ARRIVAL, _GRANT, _RUNNING, _ALL):
        raise _unreadable(entry)
    return phase, _Tokens(prompt, answer, units), demoted


def _numbers(entry: Entry, texts: list[str], count: int) -> list[float]:
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        raise _unreadable(entry) from None
    if len(numbers) != count:
        raise _unreadable(entry)
    return numbers


def _unreadable(entry: Entry) -> EntryError:
    return EntryError(f"entry {entry.seq}: note is {entry.note[:80]!r}")


def _number(period: str, time_us: int) -> int:
    """The number of the calendar period (UTC) at `time_us`; weeks begin on Monday."""
    day = datetime.datetime.fromtimestamp(time_us / 1e6, datetime.UTC).date()
    if period == "day":
        return day.toordinal()
    return (day.toordinal() - 1) // 7 if period == "week" else day.year * 12 + day.month
