"""A pool for hand-written tests. Each call runs a script and its model, and compares the resulting states."""

from collections.abc import Mapping, Sequence
from typing import Any

from pool_model import Reply
from queue_model import Arrival
from script_fleet import SETTINGS
from script_side import ScriptSide
from side_by_side import SideBySide

REPLICAS = ("a", "b")
SILENCE_MS = SETTINGS["silence_ms"]
PRIORITIES = (10, 0, -10)  # priorities of Critical, Default and Sheddable
KEPT = {"pool", "endpoints", "load", "log", "replica_info", "replicas", "workloads", "flow_workloads"}


def arrivals(text: str) -> list[Arrival]:
    """Parse arrivals like 'x1 cost=2, x2, y1 band=0, z priority=7': each id, with the fields that are not
    default. The id without its digits names the flow: x1 and x2 belong to flow x."""
    found = []
    for each in filter(None, text.split(",")):
        name, *fields = each.split()
        given = dict(field.split("=", 1) for field in fields)
        numbers = {key: _number(value) for key, value in given.items()}
        if "candidates" in numbers:
            numbers["candidates"] = str(numbers["candidates"]).replace("+", ",")
        if "band" in numbers:
            numbers["priority"] = PRIORITIES[numbers.pop("band")]
        found.append(Arrival(name, **{"flow": name.rstrip("0123456789"), **numbers}))
    return found


def _number(text: str) -> Any:
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text


class Pool:
    """A pool with replicas `a` and `b`, and one request per endpoint unless `settings` say otherwise."""

    def __init__(self, side: ScriptSide, endpoints: int = 1, **settings: Any) -> None:
        self.both = SideBySide(side)
        self.model = self.both.model
        self.events: list[str] = []
        self.told: dict[str, list[str]] = {name: [] for name in REPLICAS}
        self._settings = {**SETTINGS, "upper_per": 1, "lower_per": settings.get("upper_per", 1), **settings}
        self.publish({f"e{number}": False for number in range(1, endpoints + 1)})
        for name in REPLICAS:
            self.beat(name)

    def call(self, name: str, *rest: Any, by: str = "a") -> Reply:
        reply = self.both.call(name, by, *rest)
        self.events += self.model.events
        self.told[by] += reply.notifications
        return reply

    def publish(self, draining: Mapping[str, bool], **settings: Any) -> None:
        self._settings |= settings
        self.call("publish", ("1", "1"), self._settings, draining)

    def mark(self, endpoint: str, what: str, on: bool = True, by: str = "a") -> str:
        return str(self.call("mark_endpoint", [(endpoint, what, int(on))], by=by).answers[0])

    def tune(self, **overrides: Any) -> None:
        self.call("tune", overrides)

    def beat(self, by: str = "a") -> list[Any]:
        return self.call("heartbeat", SILENCE_MS, by=by).answers

    def sweep(self) -> list[Any]:
        return self.call("sweep", 0, 60_000, 300_000, 10**9).answers

    def passes(self, ms: float) -> None:
        self.both.now_us += round(ms * 1000)

    def admit(self, text: str, by: str = "a") -> list[str]:
        """Admit the requests in `text` in one call. Returns the answers."""
        return list(map(str, self.call("admit", arrivals(text), by=by).answers))

    def place(self, name: str, candidates: str = "*", by: str = "a") -> str:
        return str(self.call("place", [(name, "1", candidates)], by=by).answers[0])

    def end(self, *names: str, actual: float | None = None, tokens: int | None = None) -> list[str]:
        """Settle requests. Returns the requests that were granted as a result."""
        known = len(self.granted)
        self.call("settle", [(name, "completed", actual, tokens) for name in names])
        return self.granted[known:]

    def cancel(self, name: str, why: str = "cancelled", by: str = "a") -> str:
        return str(self.call("cancel", [(name, "1", why)], by=by).answers[0])

    def serve(self, turns: int = 1000) -> list[str]:
        """End all requests in flight, `turns` times or until none is left; return the granted requests."""
        known = len(self.granted)
        while self.model.in_flight() and turns > 0:
            self.end(*(request.id for request in self.model.in_flight()))
            turns -= 1
        return self.granted[known:]

    @property
    def granted(self) -> list[str]:
        return self.those("granted")

    def those(self, event: str, by: str = "") -> list[str]:
        """The requests or flow queues of each logged `event`, in order; with `by`, only for that cause."""
        words = [each.split(" ") for each in self.events]
        return [about for what, about, how in words if what == event and by in ("", how)]

    def of(self, request: str) -> list[str]:
        """The logged events of a request, in order."""
        return [each.split(" ")[0] for each in self.events if each.split(" ")[1] == request]

    def counts(self) -> tuple[float, int, Sequence[int]]:
        """The stock (claims in flight), the queue length, and the load of each endpoint."""
        loads = self.model.endpoints.counts
        return self.model.stock, len(self.model.queue), [loads[name] for name in sorted(loads)]

    def is_at_rest(self) -> bool:
        """Whether, after a sweep, all counts of requests are 0 and no key of a request is left."""
        for name in REPLICAS:
            self.beat(name)
        self.sweep()
        left = self.both.side.key_names() - KEPT
        return not left and self.counts()[:2] == (0, 0) and not any(self.counts()[2])


def many(text: str, count: int) -> str:
    """Join `count` copies of `text` by commas; in each copy its number, from 0, replaces `{n}`."""
    return ", ".join(text.format(n=n) for n in range(count))


def holding(side: ScriptSide, *texts: str, **settings: Any) -> Pool:
    """A pool in which the requests of each text have arrived, with one call per text."""
    pool = Pool(side, **settings)
    for text in texts:
        pool.admit(text)
    return pool


def full(side: ScriptSide, *waiting: str, **settings: Any) -> Pool:
    """A pool filled by the request `runs`; the requests in the text `waiting` wait behind `runs`."""
    return holding(side, "runs", *waiting, **settings)
