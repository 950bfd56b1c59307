"""Makes each call on the scripts and on the model; raises an AssertionError that shows any difference."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from endpoint_counts import Burden
from model_state import Registry
from pool_model import Reply, reservation
from queue_model import QueueModel
from script_side import SILENCE_MS, ScriptSide, arguments, plain
from shared_queue import throttled_of

from picker_fleet.admission.tenant_tree import INNER
from picker_fleet.domain.bands import Band
from picker_fleet.state.keys import joined

START_US = 1_750_000_000_000_123


class SideBySide:
    """The scripts, the model, and their common clock."""

    def __init__(self, side: ScriptSide) -> None:
        self.side = side
        self.now_us = START_US
        self.model = QueueModel(self._choose, self._choose_prefill)
        self.agree = True  # whether scripts and model have agreed so far
        # Request id -> endpoints and prefill endpoints chosen by the scripts, after a call
        self._placed: dict[str, str] = {}
        self._prefillers: dict[str, str] = {}
        side.clear()

    def call(self, name: str, caller: str, *rest: Any) -> Reply:
        """Make the call on scripts and model, and compare replies, logged events and resulting states."""
        self.agree = False
        if name == "sweep":
            self.model.scan_order = self.side.scan_order()
        seen = self.side.call(self.now_us, name, arguments(name, caller, *rest))
        # Both maps may be incomplete, since the script `view` lists only about fifty requests.
        self._placed, self._prefillers = seen.placed, seen.prefillers
        if name in ("admit", "place"):
            for item, answer in zip(rest[0], seen.reply.answers, strict=True):
                if answer.startswith("placed "):
                    id = item.id if name == "admit" else item[0]
                    self._placed[id], _, self._prefillers[id] = answer.split()[1].partition(">")
        self.model.moment.now_us = self.now_us
        reply: Reply = getattr(self.model, name)(caller, *rest)
        where = f"{name} {caller} {rest}"
        assert_same(where, seen.reply.notifications, reply.notifications, any_order=name == "heartbeat")
        assert_alike(where, seen.reply.answers, [plain(answer) for answer in reply.answers])
        assert (seen.reply.attempts, seen.reply.served) == (reply.attempts, reply.served), where
        # The scripts `sweep` and `set_tenants` find requests in the arbitrary order of a Redis hash.
        assert_same(where, seen.events, self.model.events, any_order=name in ("sweep", "set_tenants"))
        self._compare_numbers(where, seen.numbers)
        assert_same_balances(where, seen.balances, self.model.quotas.balances)
        self._compare_workloads(where, seen.workloads, self.model.workloads)
        self._compare_workloads(where, seen.flow_workloads, self.model.workloads.in_flows)
        assert_same_orders(where, seen.orders, self.orders())
        self.agree = True
        return reply

    def _compare_numbers(self, where: str, seen: dict[str, Any]) -> None:
        expected = self.numbers()
        assert seen.keys() == expected.keys()
        for name, value in expected.items():
            assert_alike(f"{where}: {name}", [seen[name]], [value])

    def _compare_workloads(self, where: str, seen: dict[str, list[float]], registry: Registry) -> None:
        """Compare workloads after sliding their windows: the scripts slide a window only on a write."""
        assert seen.keys() == registry.known.keys(), where
        for name, (total, active, dispatched, ema_ms, last_ms, slot, *counts) in seen.items():
            arrivals, it = registry.arrivals(name), registry.known[name]
            passed = min(int(it.slot - slot), 7)
            found = [total, active, dispatched, ema_ms, last_ms, *([0.0] * passed + counts)[:7]]
            expected = [it.total, it.active, it.dispatched, it.ema_ms, it.last_ms, *arrivals]
            assert_alike(f"{where}: workload {name}", found, expected)

    def numbers(self) -> dict[str, Any]:
        """The model's state in the form of lua/state.lua's reply."""
        model, queue = self.model, self.model.queue
        limits = model.found if model.in_tokens else model.caps
        same = ("stock", "upper", "lower", "dispatches", "ended", "guards", "rate")
        numbers: dict[str, Any] = {name: getattr(model, name) for name in same} | {
            "now_us": self.now_us, "queued": len(queue), "in_flight": len(model.in_flight()),
            "ready": model.endpoints.ready, "loads": model.endpoints.loads(), "credit": queue.credit,
            "limits": {each: cap for each, cap in limits.items() if each in model.endpoints.counts},
            "bv": queue.bv, "overdue": len(queue.overdue), "tuned": model.tuned or "",
            "retry_after_s": model.retry_after_s(), "refusals": model.refusals,
            "prefill_loads": model.prefill.loads(),
            "prefill_limits": {a: cap for a, cap in model.prefill_caps.items() if a in model.prefill.counts},
            "paused": model.moment.settings.get("paused", 0), "replicas": sorted(model.live(SILENCE_MS)),
        }  # fmt: skip
        if model.in_tokens:
            numbers |= {f"amount:{each}": amount for each, amount in model.amounts.items()}
        for priority, band in model.queue.bands.items():
            of_band = {"v": band.v, "flow_queues": len(band.queues), "queued": band.queued}
            of_band |= {"bytes": band.bytes, "band": band.tag}
            numbers |= {f"{name}:{priority}": value for name, value in of_band.items()}
        return numbers

    def orders(self) -> dict[str, dict[str, float]]:
        """The model's state in the form of the sorted sets in docs/redis-schema.md."""
        requests = self.model.requests.values()
        orders = {
            "timers": {r.id: float(r.timer_ms) for r in requests if r.state in ("queued", "orphaned")},
            "overdue": self.model.queue.overdue.scores(),
            "inflight": {r.id: float(r.lease_ms) for r in self.model.in_flight()},
            "prefills": {reservation(r): float(r.prefill_lease_ms) for r in requests if r.prefillers},
            "pending": {joined(r.blocker, r.id): 0.0 for r in requests if r.blocker},
        }
        by_workload = self.model.moment.settings.get("ordering") == "workload-aware"
        for number, band in self.model.queue.bands.items():
            orders[f"flows:{number}"] = band.turns.scores()
            orders[f"throttled:{number}"] = throttled_of(band)
            for path, order in band.inner.items():
                orders[f"children:{number}:{path}{INNER}"] = order.turns.scores()
                orders[f"finished:{number}:{path}{INNER}"] = order.finish
            orders[f"finish:{number}"] = band.finish
            if number != Band.CRITICAL.priority:
                last = {name: float(when) for name, when in band.preempted.items()}
                orders[f"candidates:{number}"] = {name: last.get(name, 0.0) for name in band.queues}
                orders[f"preempted:{number}"] = {k: when for k, when in last.items() if k not in band.queues}
            for address in ("e1", "e2", "e3", "=e3", "=p1"):
                orders[f"blocked:{number}:{address}"] = self.model.queue.blocked(number, address)
            for name, queue in band.queues.items() if by_workload and not self.model.refiling else ():
                orders[f"growing:{number}:{name}"] = queue.growing.scores()
                orders[f"static:{number}:{name}"] = queue.static.scores()
        return orders

    def _choose(self, id: str, burdens: dict[str, Burden]) -> str:
        """Return the endpoints that the script chose; assert that they have the least burdens, best first."""
        assert id in self._placed, f"{id} may go to {burdens}, but the script did not place it"
        chosen = self._placed[id].split(",")
        want = min(self.model.moment.settings["fallbacks"] + 1, len(burdens))
        best = sorted(burdens.values())[:want]
        assert len(set(chosen)) == len(chosen), (id, chosen)
        assert [burdens.get(address) for address in chosen] == best, (id, chosen, burdens)
        return self._placed[id]

    def _choose_prefill(self, id: str, burdens: dict[str, Burden], endpoint: str) -> str:
        """Return the prefill endpoints that the script chose; assert that they have the least burdens, best
        first, and that the request's own endpoint is not among them."""
        want = min(self.model.moment.settings["fallbacks"] + 1, len(burdens))
        best = sorted(burdens.values())[:want]
        chosen = self._prefillers[id].split(",") if self._prefillers[id] else []
        if not chosen:
            assert burdens.get(endpoint) == best[0], (id, endpoint, burdens)
            return ""
        found = [burdens[address] for address in chosen]
        assert endpoint not in chosen, (id, endpoint, chosen)
        assert found[0] == best[0], (id, endpoint, chosen, burdens)
        if len(chosen) < want:
            found = sorted([*found, burdens[endpoint]])
        assert found == best, (id, endpoint, chosen, burdens)
        return self._prefillers[id]


def assert_same(where: str, seen: list[str], expected: list[str], any_order: bool) -> None:
    assert seen == expected or (any_order and sorted(seen) == sorted(expected)), (where, seen, expected)


def assert_alike(where: str, seen: Sequence[Any], expected: Sequence[Any]) -> None:
    """Assert that both values are equal, with numbers compared to nine digits."""
    assert len(seen) == len(expected), (where, seen, expected)
    for one, other in zip(seen, expected, strict=True):
        both_numbers = isinstance(one, int | float) and isinstance(other, int | float)
        same = math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9) if both_numbers else one == other
        assert same, (where, seen, expected)


def assert_same_balances(
    where: str, seen: Mapping[str, tuple[float, ...]], expected: Mapping[str, tuple[float, ...]]
) -> None:
    found, wanted = with_effect(seen), with_effect(expected)
    assert found.keys() == wanted.keys(), (where, seen, expected)
    for key, values in wanted.items():
        assert found[key] == pytest.approx(values, rel=0, abs=0.01), (where, key, found[key], values)


def with_effect(balances: Mapping[str, tuple[float, ...]]) -> dict[str, tuple[float, ...]]:
    """`balances` without zero balances, since a sweep may drop a zero balance at any time."""
    return {key: each for key, each in balances.items() if each[1 if "\x1fbudget:" in key else 0]}


def assert_same_orders(
    where: str, seen: dict[str, dict[str, float]], expected: dict[str, dict[str, float]]
) -> None:
    for name, scores in expected.items():
        found = seen.get(name, {})
        assert found.keys() == scores.keys(), (where, name, found, scores)
        for member, score in scores.items():
            assert math.isclose(found[member], score, rel_tol=1e-12, abs_tol=1e-9), (where, name, member)
