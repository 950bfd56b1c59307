"""The check of tenants' quotas: no node of a path grants more than its limits and budget allow.

A limit of `amount` units in `per_ms` is a leaky bucket (ITU-T I.371): the units owed leak at amount / per_ms,
and a request may start if its units and they are at most `burst`. All buckets are computed from the log:

- `charged`: a request was charged its estimate, at its arrival to nodes that reject or demote, at its grant
  to nodes that queue. Each charged node must have had the estimate left. A demoted request is not charged to
  nodes that demote.
- `used`: the usage replaces the estimate. The tokens are used, so the units owed may pass `burst`.
- `refunded`: a request was not served, or returned to the queue.
- `topped_up`: an operator lowered the used part of a limit or budget; a replica raised it after a loss.

A request counts once, however often it is retried or adopted: a second charge, refund or usage is a
violation, and so is a request that starts without a charge. If the log begins midway, nothing is owed at its
beginning, so a correct log never shows a violation.
"""

import datetime
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from picker_fleet.domain.bands import NAMED
from picker_tools.audit.checks import Check, Finding
from picker_tools.audit.log import Entry, EntryError
from picker_tools.audit.nodes import BETWEEN, DEMOTE, QUEUE, Limit, Node, ancestry
from picker_tools.audit.replay import Replay, RequestState, Step

_ARRIVAL, _GRANT, _ALL, _DEMOTED = "arrival", "grant", "all", "demoted"
_UNSERVED = frozenset({
    "refused", "cancelled", "expired", "preempted", "evicted", "abandoned", "withdrawn", "upstream_failed",
})  # fmt: skip
_ROUNDING = 1e-6  # absolute tolerance, as in the Lua scripts
_RELATIVE = 1e-9
_LEAST_KEPT = 1000  # balances


@dataclass(frozen=True, slots=True)
class _Tokens:
    """A request's charge in each unit; `units`: in units of budgets."""

    prompt: float
    answer: float
    units: float

    def of(self, unit: str) -> float:
        if unit in ("requests", "units"):
            return 1.0 if unit == "requests" else self.units
        prompt = 0.0 if unit == "answer_tokens" else self.prompt
        return prompt if unit == "prompt_tokens" else prompt + self.answer


@dataclass(slots=True)
class _Charge:
    """The charges of a request in force: the entries of its charges at `arrival` and `grant`, of its usage
    (`used`) and of its end."""

    first: Entry
    tokens: _Tokens
    demoted: bool
    arrival: Entry | None = None
    grant: Entry | None = None
    used: Entry | None = None
    end: Entry | None = None

    def includes(self, node: Node, phase: str) -> bool:
        """Whether the charge at `phase` includes `node`."""
        if node.over_limit == QUEUE:
            return phase == _GRANT
        return phase != _GRANT and not (self.demoted and node.over_limit == DEMOTE)

    @property
    def in_force(self) -> list[str]:
        phases = ((_ARRIVAL, self.arrival), (_GRANT, self.grant))
        return [phase for phase, entry in phases if entry is not None]


class Quotas(Check):
    PROMISE = "quotas"
    TITLE = "tenants stay within their limits; a request is charged once"

    def __init__(self, finding: Finding, replay: Replay) -> None:
        super().__init__(finding, replay)
        # Path, unit, per_ms -> the units owed, at which time (ms), and when nothing will be owed.
        self._owed: dict[tuple[str, str, float], tuple[float, float, float]] = {}
        self._spent: dict[tuple[str, str], tuple[int, float]] = {}  # path, period -> its number, cost spent
        self._parallel: Counter[str] = Counter()  # path -> charged requests that have not ended
        self._charges: dict[str, _Charge] = {}
        self._granted: dict[str, Entry] = {}  # requests that this decision granted and has not charged yet
        # Requests that this decision ended, and whether a node of theirs has a limit.
        self._ended: list[tuple[str, _Charge, bool]] = []
        self._most_kept = _LEAST_KEPT
        self._decision_us = 0
        self._had_tenants = False
        self._counts_again = False  # whether nodes have changed since `_parallel` was counted

    def check(self, step: Step) -> None:
        entry, rules = step.entry, self._replay.rules
        has_tenants = rules is not None and rules.tenants is not None
        if has_tenants is not self._had_tenants:  # the scripts forget all charges then, too
            self._had_tenants = has_tenants
            self._charges.clear()
            self._parallel.clear()
            self._granted.clear()
        if has_tenants and entry.event == "topped_up":
            self._top_up(entry)
        self._counts_again |= entry.event == "tenant"
        if not has_tenants or not entry.request:
            return
        if self._counts_again:
            self._count_all()
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
        if entry.event in ("granted", "bypassed") and charge.grant is None and self._has_quota(entry):
            self._granted[entry.request] = entry
        elif step.before is not RequestState.ABSENT and step.after is RequestState.ABSENT:
            charge.end = entry
            # Nodes may have lost their limits since the charge, which leaves nothing to refund.
            self._ended.append((entry.request, charge, self._has_quota(entry)))
            self._granted.pop(entry.request, None)
            for phase in charge.in_force:
                for path, node in self._path(entry.flow):
                    if charge.includes(node, phase):
                        self._count(path, -1)

    def _end_decision(self) -> None:
        """Check the requests of a decision whose entries have all been seen."""
        for name, charge, has_quota in self._ended:
            assert charge.end is not None
            if charge.end.event in _UNSERVED and charge.used is None and charge.in_force and has_quota:
                what = f"request {name} was not served and is not refunded"
                self._finding.add(what, charge.first, charge.end)
            if self._charges.get(name) is charge:
                del self._charges[name]
        for name, entry in self._granted.items():
            self._finding.add(f"request {name} starts and is not charged", entry)
        self._ended.clear()
        self._granted.clear()
        if len(self._owed) + len(self._spent) > self._most_kept:  # forget balances without effect
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
        former = charge.grant if phase == _GRANT else charge.arrival
        if former is not None:
            self._finding.add(f"request {entry.request} is charged twice", former, entry)
            return
        charge.tokens = tokens
        if demoted and phase == _ARRIVAL and is_new:
            self._check_demotion(entry, tokens)
        for path, node in self._path(entry.flow):
            if charge.includes(node, phase):
                self._finding.checked += 1
                for name, amount, left, most in self._balances(path, node, entry, tokens):
                    if amount > left + _ROUNDING + _RELATIVE * most:
                        what = f"{path} is charged {amount:g} {name} and has {left:.12g} of {most:g} left"
                        self._finding.add(what, entry)
        self._take(entry, phase, charge, tokens, None)
        if phase == _GRANT:
            charge.grant = entry
        else:
            charge.arrival = entry

    def _check_demotion(self, entry: Entry, tokens: _Tokens) -> None:
        rules = self._replay.rules
        # The scripts demote to the lowest band in use; the named bands are always in use.
        lowest = min(band.priority for band in rules.bands[: len(NAMED)]) if rules else entry.priority
        if entry.priority > lowest:
            what = f"request {entry.request} is demoted to priority {entry.priority}, not {lowest}"
            self._finding.add(what, entry)
        short = (
            amount > left - _ROUNDING - _RELATIVE * most
            for path, node in self._path(entry.flow)
            if node.over_limit == DEMOTE
            for _, amount, left, most in self._balances(path, node, entry, tokens)
        )
        if self._replay.complete and not any(short):
            self._finding.add(f"request {entry.request} is demoted and no limit is short", entry)

    def _balances(
        self, path: str, node: Node, entry: Entry, tokens: _Tokens
    ) -> Iterator[tuple[str, float, float, float]]:
        """For each limit of a node: name, amount that `tokens` take, amount left, most at once."""
        for limit in node.limits:
            left = limit.most - self._owed_now(path, limit, entry)
            yield f"{limit.unit} (in {limit.per_ms:g} ms)", tokens.of(limit.unit), left, limit.most
        if node.budget is not None:
            number, spent = self._spent.get((path, node.budget.period), (0, 0.0))
            spent = spent if number == _number(node.budget.period, entry.time_us) else 0.0
            most = node.budget.units
            yield f"units (in a {node.budget.period})", tokens.units, most - spent, most
        if node.max_parallel is not None:
            most = node.max_parallel
            yield "requests in flight", 1, most - self._parallel[path], most

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
        phases = [each for each in charge.in_force if phase in (each, _ALL)]
        if not phases:
            what = f"request {entry.request} is refunded ({phase}), but this charge is not in force"
            self._finding.add(what, charge.first, entry)
        if charge.used is not None:
            what = f"request {entry.request} is refunded, although its usage is known"
            self._finding.add(what, charge.used, entry)
        if charge.end is not None and charge.end.event not in _UNSERVED:
            self._finding.add(f"request {entry.request} was served and is refunded", charge.end, entry)
        for each in phases:
            self._take(entry, each, charge, None, charge.tokens)
        charge.arrival = None if _ARRIVAL in phases else charge.arrival
        charge.grant = None if _GRANT in phases else charge.grant
        if not charge.in_force:
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
            return  # charged before the log, or restored uncharged
        self._finding.checked += 1
        if charge.used is not None:
            self._finding.add(f"the usage of request {entry.request} is charged twice", charge.used, entry)
            return
        if cached > prompt:
            self._finding.add(f"request {entry.request} had {cached:g} of {prompt:g} tokens cached", entry)
        used = _Tokens(prompt, answer, units)
        for phase in charge.in_force:
            self._take(entry, phase, charge, used, charge.tokens)
        charge.used, charge.tokens = entry, used

    def _take(
        self, entry: Entry, phase: str, charge: _Charge, tokens: _Tokens | None, former: _Tokens | None
    ) -> None:
        """Replace the charge `former` at `phase` by `tokens`; None: no charge."""

        def change(unit: str) -> float:
            return (tokens.of(unit) if tokens else 0.0) - (former.of(unit) if former else 0.0)

        for path, node in self._path(entry.flow):
            if not charge.includes(node, phase):
                continue
            for limit in node.limits:
                self._owe(path, limit, entry, change(limit.unit))
            if node.budget is not None:
                self._count_spent(path, node.budget.period, entry, change("units"))
            if (tokens is None or former is None) and charge.end is None:
                self._count(path, 1 if former is None else -1)

    def _owe(self, path: str, limit: Limit, entry: Entry, change: float) -> None:
        owed, now_ms = max(0.0, self._owed_now(path, limit, entry) + change), entry.time_us / 1000
        self._owed[path, limit.unit, limit.per_ms] = owed, now_ms, now_ms + owed * limit.per_ms / limit.amount

    def _count_spent(self, path: str, period: str, entry: Entry, change: float) -> None:
        number = _number(period, entry.time_us)
        before, spent = self._spent.get((path, period), (number, 0.0))
        self._spent[path, period] = number, max(0.0, (spent if before == number else 0.0) + change)

    def _count_all(self) -> None:
        """Recount the requests in flight of each node, as the scripts do after a change of nodes."""
        self._counts_again = False
        self._parallel.clear()
        for charge in self._charges.values():
            for phase in charge.in_force if charge.end is None else ():
                for path, node in self._path(charge.first.flow):
                    if charge.includes(node, phase):
                        self._parallel[path] += 1

    def _count(self, path: str, change: int) -> None:
        self._parallel[path] += change
        if self._parallel[path] <= 0:
            del self._parallel[path]

    def _has_quota(self, entry: Entry) -> bool:
        return any(node.has_quota for _, node in self._path(entry.flow))

    def _path(self, flow: str) -> Iterator[tuple[str, Node]]:
        """The path and settings of each node of `flow`."""
        tenants = self._replay.rules.tenants if self._replay.rules else None
        if tenants is not None:
            for path in ancestry(flow, tenants.separator):
                yield path, self._replay.nodes.find(path, tenants.separator)


def _read(entry: Entry) -> tuple[str, _Tokens, bool]:
    """Read an entry `charged` or `refunded`, whose note is PHASE PROMPT ANSWER UNITS, perhaps followed by
    `demoted`. Returns the phase, the tokens, and whether the request is demoted.

    Raises:
        EntryError: the note cannot be read.
    """
    phase, *texts = entry.note.split() or [""]
    demoted = texts[-1:] == [_DEMOTED]
    prompt, answer, units = _numbers(entry, texts[:-1] if demoted else texts, 3)
    if phase not in (_ARRIVAL, _GRANT, _ALL):
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
