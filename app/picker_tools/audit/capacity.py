"""G1: the stock never passes the upper bound, no endpoint its limit, and no flow its own on an endpoint."""

from collections import Counter
from typing import Any

from picker_tools.audit.entry import Entry
from picker_tools.audit.finding import Finding
from picker_tools.audit.life import RUNNING, Place, Step
from picker_tools.audit.replay import Replay, same


class Capacity:
    """Checked wherever stock or an endpoint is taken: both rise nowhere else, so the bounds hold between too.

    What is restored, or was moved by Envoy to a fallback, runs already: it is counted and not judged.
    """

    TITLE = "stock within its bound, endpoints and flows within their limits"

    def __init__(self, finding: Finding, replay: Replay) -> None:
        self._finding = finding
        self._replay = replay
        self._in_flight: Counter[str] = Counter()  # of limited flows, granted and placed
        self._placed: Counter[tuple[str, str]] = Counter()  # of limited flows, by endpoint
        self._on: Counter[str] = Counter()  # all requests, by endpoint

    def see(self, step: Step) -> None:
        entry, life = step.entry, step.life
        if life is None:
            return
        if step.takes:
            self._count(self._in_flight, entry, entry.flow, 1)
            if entry.event != "restored":
                self._judge_take(entry)
        elif step.gives_back:
            self._count(self._in_flight, entry, entry.flow, -1)
        if life.endpoint and (step.gives_back or entry.event == "moved"):
            self._count(self._placed, entry, (entry.flow, life.endpoint), -1)
            self._on[life.endpoint] -= 1
            if self._on[life.endpoint] <= 0:
                del self._on[life.endpoint]
        if (
            entry.endpoint
            and step.now is Place.PLACED
            and (step.was is not Place.PLACED or entry.event == "moved")
        ):
            self._count(self._placed, entry, (entry.flow, entry.endpoint), 1)
            self._on[entry.endpoint] += 1
            if entry.event not in ("restored", "moved"):
                self._judge_place(entry)

    def close(self) -> None:
        """Nothing is open at the end of a log."""

    def _judge_take(self, entry: Entry) -> None:
        replay, finding = self._replay, self._finding
        finding.checked += 1
        if entry.stock > entry.upper and not same(entry.stock, entry.upper):
            finding.blame(f"over-admission: stock {entry.stock:g} past the bound {entry.upper:g}", entry)
        before = replay.stock
        queues = replay.rules is None or replay.rules.queues
        if queues and entry.event == "granted" and before is not None and before >= entry.lower:
            finding.blame(
                f"dispatched at a stock of {before:g}, not below the lower bound {entry.lower:g}",
                *_before(replay, entry),
            )
        rules = replay.rules
        if rules is None:
            return
        if rules.paused:
            finding.blame("stock was taken while the pool is paused", entry)
        count, ready = self._in_flight[entry.flow], rules.ready(entry.upper)
        if entry.limit and count > entry.limit * ready:
            finding.blame(
                f"flow limit passed: {count} of flow {entry.flow!r} in flight, {entry.limit} on each of "
                f"{ready} endpoints allowed",
                *self._others(entry),
            )

    def _judge_place(self, entry: Entry) -> None:
        self._finding.checked += 1
        count = self._placed[entry.flow, entry.endpoint]
        if entry.limit and count > entry.limit:
            what = f"{count} of flow {entry.flow!r} on {entry.endpoint}, {entry.limit} allowed"
            self._finding.blame(f"endpoint limit passed: {what}", *self._others(entry, entry.endpoint))
        rules = self._replay.rules
        most = rules.caps.get(entry.endpoint) if rules is not None else None
        if most is not None and self._on[entry.endpoint] > most:
            what = f"{self._on[entry.endpoint]} requests on {entry.endpoint}, {most} allowed"
            self._finding.blame(f"endpoint limit passed: {what}", entry)

    def _others(self, entry: Entry, endpoint: str = "") -> list[Entry]:
        """The beginnings of those that run beside `entry`, a few of them, and `entry`."""
        found = [
            life.granted or life.begun
            for life in self._replay.lives.values()
            if life.place in RUNNING and life.begun.flow == entry.flow and endpoint in ("", life.endpoint)
        ]
        return [*found[:5], entry]

    @staticmethod
    def _count(counts: Counter[Any], entry: Entry, key: object, change: int) -> None:
        if not entry.limit:
            return
        counts[key] += change
        if counts[key] <= 0:
            del counts[key]


def _before(replay: Replay, entry: Entry) -> list[Entry]:
    return [replay.last, entry] if replay.last else [entry]
