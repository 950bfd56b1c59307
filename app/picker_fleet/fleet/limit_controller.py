"""Finds how many requests each endpoint should have in flight. Pure: observations in, decisions out.

One controller serves a pool; fleet/limits.py feeds it. The fleet's own count is exact, so the controller only
has to find the number at which an engine's batch is full and no request waits behind it (docs/limits.md):

- A limit grows while requests wait in the fleet's queue, the endpoint is at its limit, and the engine starts
  its requests at once: first by doubling (slow start; Jacobson, "Congestion avoidance and control", 1988),
  after the first signal of a full engine by small steps. Bounds of an operator may push the limit far below
  the number at which the engine was full; then it doubles again.
- A limit falls as soon as the engine queues requests that it does not start, or preempts many or refuses any.
  The number of running requests shows how many fit, so the limit falls at once to that number plus a slack.
  After a fall, growth pauses; the pause doubles each time the same number turns out to be too many. A KV
  cache that nears its end only ends the doubling: once it is full, the engine queues or preempts.
- A limit falls if requests at that limit would miss a latency objective, and never grows to such a value.
- Limits of endpoints without a usable page move together (hill climbing): up by a fraction, and back unless
  the pool then completes more requests a second; at times down, and back unless the rate holds. After an
  endpoint has refused requests, its limit grows by small steps until the endpoint refuses again.

Limits count requests, or the tokens that the fleet has charged for requests in flight. In tokens, the page's
fraction of running requests gives the number of running tokens. A load below the limit moves no limit.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

# The slack: how much a limit adds to the running batch so that the batch stays full. A fraction of the batch,
# or as many requests as were on their way (in flight, but not on a page), at most those that end within a
# time. The fleet fills a freed place in a few ms on a calm host, in some 100 ms on a busy one; requests of
# one length that began together free all places at once.
_SLACK: Final = 1 / 16
_SLACK_S: Final = 0.3
_REMEMBERED: Final = 0.98  # each page lowers the remembered maximum of requests on their way to this part
_KV_NEAR: Final = 0.9  # fraction of the KV cache in use at which a limit ceases to double
# Preemptions on the kept pages are a signal above this fraction of the batch and of the ended requests: a
# preempted request repeats only its prefill, so fewer preemptions cost less than a lower limit.
_PREEMPTED: Final = 1 / 4
# This many pages in a row with a queue in the engine are a signal, if the limit is reached. Below the limit,
# new requests may only wait for the end of a slow step.
_CONFIRMED: Final = 2
_CONFIRMED_BELOW: Final = 8
_DEEPEST_CUT: Final = 0.5  # one step cuts a limit at most to this fraction
_CUT: Final = 0.93  # factor for a limit at which requests were preempted or refused
_FIRST_PAUSE_S: Final = 4.0
_LONGEST_PAUSE_S: Final = 32.0
_SAME: Final = 0.15  # two limits that differ by a smaller fraction count as the same
_SETTLED_S: Final = 0.5  # a page read sooner after a change may still show the former limit
_SAME_START_S: Final = 1.0  # two readings of one engine's start time differ by fewer seconds
_KEPT: Final = 8  # most pages since the last change of the limit whose figures are kept
# Trials without pages: a trial lasts until enough requests have ended to compare rates, but not too long.
_TRIAL_S: Final = 3.0
_TRIAL_REQUESTS: Final = 40
_LONGEST_TRIAL_S: Final = 20.0
_UP: Final = 1.25
_DOWN: Final = 0.8
_WORTH_IT: Final = 0.4  # the endpoints' rate must grow by this fraction of the limits' growth
_AS_GOOD: Final = 0.97  # with lower limits the endpoints must keep this fraction of their rate

# Address, limit -> why the limit would make a latency objective be missed; '' if it would not.
Misses = Callable[[str, int], str]


@dataclass(frozen=True, slots=True)
class Page:
    """An endpoint's figures by its metrics page; None if the page lacks one. `read_s` is when it was read,
    `started_s` when the engine started, by the engine's clock (0: unknown)."""

    read_s: float
    waiting: float
    running: float
    kv_utilisation: float | None = None
    preemptions: float | None = None
    started_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Observation:
    """The fleet's present figures of one endpoint. `page` is None if it is missing, stale or unreadable.

    `requests` and `tokens` are in flight; `tokens` is None if limits count requests. `refusals` counts the
    requests that the endpoint has refused with status 429 or 503 so far.
    """

    requests: int
    page: Page | None = None
    refusals: int = 0
    tokens: int | None = None

    @property
    def in_flight(self) -> int:
        """The load in flight, in the unit of the limits."""
        return self.requests if self.tokens is None else self.tokens

    @property
    def mean_request(self) -> float:
        """The mean size of a request in flight, in the unit of the limits; at least 1."""
        return max(1.0, self.in_flight / max(self.requests, 1))

    @property
    def is_on_page(self) -> bool:
        """Whether the page shows at least half of the requests; others may wait in front of the engine."""
        return self.page is not None and self.page.running + self.page.waiting >= self.requests / 2

    @property
    def load(self) -> str:
        return f"{self.in_flight}{'' if self.tokens is None else ' tokens'} in flight"


class _Figures(NamedTuple):
    """Figures of a metrics page: the running load, and requests preempted and ended since the last page."""

    running: float
    preempted: float
    ended: float


@dataclass(slots=True)
class EndpointLimit:
    """The limit of one endpoint. `reason` says why the limit last moved, `changed_s` when."""

    limit: int
    reason: str
    changed_s: float
    grows_fast: bool = True  # whether the limit doubles: no signal of a full engine has come yet
    pause_s: float = _FIRST_PAUSE_S
    resumes_s: float = -math.inf  # the limit does not grow before this time
    full_at: int = 0  # the limit after the last signal of a full engine; 0: none
    page_s: float = -math.inf  # time of the last page that was taken into account
    queued_pages: int = 0  # pages in a row that showed a queue in the engine
    preemptions: float | None = None
    started_s: float = 0.0
    refusals: int | None = None
    refused: bool = False  # whether the engine has refused requests since the last change
    on_way: float = 0.0  # most requests in flight, but not on a page, on recent pages
    pages: list[_Figures] = field(default_factory=list)  # the last _KEPT pages since the last change


@dataclass(slots=True)
class _Trial:
    """A measurement of the rate of completions, for endpoints without pages.

    `factor` is the change of the limits on trial, 1.0 for none; `former` has the limits before the trial, and
    `base` the rate under those limits (requests/s; 0: unknown). The endpoints on trial had the fraction
    `share` of the pool's requests in flight, so the pool's rate shows only this fraction of a change.
    """

    began_s: float
    completed: int
    factor: float = 1.0
    former: Mapping[str, int] = field(default_factory=dict)
    base: float = 0.0
    share: float = 1.0

    @property
    def wanted(self) -> float:
        """The least rate at which the limits on trial are kept."""
        change = _WORTH_IT * (self.factor - 1) if self.factor > 1 else _AS_GOOD - 1
        return self.base * (1 + change * self.share)

    def rate(self, now_s: float, completed: int, *, is_over: bool) -> float | None:
        """The rate since the trial began; None while too few requests have ended and the trial goes on."""
        # The trial begins after a pause, or Redis has lost the count.
        if now_s <= self.began_s or completed < self.completed:
            self.completed = completed
        lasted_s, ended = now_s - self.began_s, completed - self.completed
        is_few = ended * self.share < _TRIAL_REQUESTS
        is_short = lasted_s < _TRIAL_S or (is_few and lasted_s < _LONGEST_TRIAL_S)
        return None if is_short and not is_over else ended / max(lasted_s, 1e-3)


class LimitController:
    """The limits of a pool's endpoints, between `least` and `most`; a new endpoint begins with `initial`."""

    def __init__(self, *, least: int, most: int, initial: int) -> None:
        self._least, self._most, self._initial = least, most, initial
        self.endpoints: dict[str, EndpointLimit] = {}
        self._trial: _Trial | None = None
        self._ended: tuple[float, int] | None = None  # time and count of completed requests at the last look
        self._rate = 0.0  # completions per second, per request in flight
        self._next_factor = 2.0  # factor of the next trial: doubling at first
        self._trial_pause_s = _FIRST_PAUSE_S

    def configure(self, *, least: int, most: int, initial: int) -> None:
        self._least, self._most, self._initial = least, most, initial

    def look(
        self,
        now_s: float,
        observed: Mapping[str, Observation],
        *,
        waiting: bool,
        completed: int = 0,
        misses: Misses | None = None,
    ) -> None:
        """Take one observation of each endpoint into account; missing endpoints are forgotten.

        `waiting` says whether requests wait in the fleet's queue; `completed` counts the requests that the
        pool has ended. `misses` says which limits would miss a latency objective.
        """
        self._misses: Misses = misses or (lambda address, limit: "")
        self.endpoints = {
            address: self.endpoints.get(address)
            or EndpointLimit(self._bounded(self._initial), "new endpoint", now_s)
            for address in observed
        }
        requests = sum(seen.requests for seen in observed.values())
        self._measure_rate(now_s, completed, requests)
        for address, seen in observed.items():
            self._look_at(address, seen, now_s, waiting=waiting)
        unseen = {address: each for address, each in observed.items() if not each.is_on_page}
        self._try(unseen, now_s, completed, requests=requests, waiting=waiting)

    def limits(self) -> dict[str, int]:
        return {address: each.limit for address, each in self.endpoints.items()}

    def _measure_rate(self, now_s: float, completed: int, requests: int) -> None:
        if self._ended is not None and now_s > self._ended[0] and requests > 0:
            rate = (completed - self._ended[1]) / (now_s - self._ended[0]) / requests
            self._rate += (max(rate, 0.0) - self._rate) / 4
        self._ended = now_s, completed

    def _look_at(self, address: str, seen: Observation, now_s: float, *, waiting: bool) -> None:
        known = self.endpoints[address]
        if (bounded := self._bounded(known.limit)) != known.limit:
            self._move(known, bounded, "the configured bounds changed", now_s)
        refused = known.refusals is not None and seen.refusals > known.refusals
        known.refusals = seen.refusals
        if refused and seen.requests > 0:  # an engine that refuses all requests shows no limit
            # The first refusals after a change may be of requests from before the change.
            most = math.floor(known.limit * _CUT) if known.refused else known.limit
            limit = max(min(seen.in_flight, most), math.ceil(known.limit * _DEEPEST_CUT))
            known.refused = True
            self._fall(known, limit, f"engine refused requests at {seen.load}", now_s)
        # The requests in flight do not say how many fill a limit in tokens that they do not reach.
        at = known.limit if seen.tokens is None else min(known.limit, seen.in_flight)
        if why := self._misses(address, at):
            self._fall(known, math.floor(known.limit * _CUT), why, now_s)
        page = seen.page
        if page is None:
            self._grow_until_refused(address, seen, now_s, waiting=waiting)
            return
        if page.read_s <= known.page_s:
            return
        since_s, known.page_s = page.read_s - known.page_s, page.read_s
        before, known.preemptions = known.preemptions, page.preemptions
        if abs(page.started_s - known.started_s) > _SAME_START_S:  # the engine has restarted
            known.started_s, known.pages, before = page.started_s, [], None
        preempted = 0.0
        if before is not None and page.preemptions is not None:
            preempted = max(page.preemptions - before, 0.0)  # a restart resets the counter
        if page.read_s < known.changed_s + _SETTLED_S:
            return
        # A request is one sequence or several in the engine; others may use the engine, too. If more requests
        # are in flight than the page has sequences, some are on their way.
        sequences = page.running + page.waiting
        runs = min(seen.in_flight / max(sequences, 1.0), seen.mean_request) * page.running
        ended = self._rate * seen.requests * since_s
        known.pages = [*known.pages[1 - _KEPT :], _Figures(runs, preempted, ended)]
        batch = max(each.running for each in known.pages)
        on_way = max(seen.requests - sequences, 0.0)
        known.on_way = max(on_way, known.on_way * _REMEMBERED)
        refill = min(known.on_way, self._rate * seen.requests * _SLACK_S)
        share = max(_SLACK, refill * seen.mean_request / max(batch, 1.0))
        one = math.ceil(seen.mean_request)
        slack = max(one, int(max(batch, 1.0) * share))
        is_queueing = seen.requests > 0 and page.waiting > max(1.0, page.running * share - on_way)
        known.queued_pages = known.queued_pages + 1 if is_queueing else 0
        may_grow = waiting and not is_queueing and now_s >= known.resumes_s
        if (page.kv_utilisation or 0.0) >= _KV_NEAR:
            known.grows_fast = False
        if known.queued_pages >= (_CONFIRMED if _is_reached(known, seen) else _CONFIRMED_BELOW):
            limit = max(math.ceil(batch) + slack, math.ceil(known.limit * _DEEPEST_CUT))
            why = f"engine queued {page.waiting:g} requests at {seen.load}"
            self._fall(known, limit, why, now_s)
        elif (preempted := sum(each.preempted for each in known.pages)) > max(
            1.0,
            page.running * _PREEMPTED,
            sum(each.ended for each in known.pages) * _PREEMPTED,
        ):
            limit = math.floor(min(known.limit, batch + slack) * _CUT)
            self._fall(known, limit, f"engine preempted {preempted:g} requests at {seen.load}", now_s)
        elif may_grow and seen.is_on_page and _is_reached(known, seen):
            doubles = known.grows_fast or known.limit * 2 <= known.full_at
            step = max(one, known.limit if doubles else known.limit // 16)
            self._grow(address, step, f"requests wait, and the engine runs all {seen.load}", now_s)

    def _grow_until_refused(self, address: str, seen: Observation, now_s: float, *, waiting: bool) -> None:
        """Raise the limit of an endpoint without a page that has refused requests: no trial raises it."""
        known, trial = self.endpoints[address], self._trial
        may_grow = waiting and now_s >= max(known.resumes_s, known.changed_s + _SETTLED_S)
        if not (known.full_at and may_grow and _is_reached(known, seen)) or (
            trial and address in trial.former
        ):
            return
        step = max(math.ceil(seen.mean_request), known.limit // 16)
        self._grow(address, step, f"requests wait, and the engine refused none of {seen.load}", now_s)

    def _grow(self, address: str, step: int, why: str, now_s: float) -> None:
        """Raise a limit by `step`, unless a latency objective would then be missed."""
        known = self.endpoints[address]
        if self._misses(address, known.limit + step):
            known.grows_fast = False
        else:
            self._move(known, self._bounded(known.limit + step), why, now_s)

    def _fall(self, known: EndpointLimit, limit: int, why: str, now_s: float) -> None:
        """Lower a limit, or keep it where the engine is just full; growth pauses in both cases."""
        limit = self._bounded(limit)
        if now_s >= known.resumes_s:
            is_known = abs(limit - known.full_at) <= max(1, known.full_at * _SAME)
            known.pause_s = min(known.pause_s * 2, _LONGEST_PAUSE_S) if is_known else _FIRST_PAUSE_S
        known.grows_fast, known.full_at, known.queued_pages = False, limit, 0
        known.resumes_s = now_s + known.pause_s
        if limit < known.limit:
            self._move(known, limit, why, now_s)

    @staticmethod
    def _move(known: EndpointLimit, limit: int, why: str, now_s: float) -> None:
        if limit != known.limit:
            known.limit, known.reason, known.changed_s = limit, why, now_s
            known.pages, known.queued_pages, known.refused = [], 0, False

    def _try(
        self,
        unseen: Mapping[str, Observation],
        now_s: float,
        completed: int,
        *,
        requests: int,
        waiting: bool,
    ) -> None:
        """Move the limits of the endpoints `unseen`, which have no page, by the rate of completions.

        The pool has `requests` in flight.
        """
        known = self.endpoints
        at_limit = {address for address, seen in unseen.items() if _is_reached(known[address], seen)}
        is_over = not waiting or not at_limit  # a load below the limits ends a trial, by the rate so far
        trial = self._trial
        if trial is None or not unseen.keys() >= trial.former.keys():
            trial = self._trial = _Trial(now_s, completed)
        rate = trial.rate(now_s, completed, is_over=is_over)
        if rate is None:
            return
        if trial.factor != 1.0 and rate < trial.wanted:
            for address, limit in trial.former.items():
                why = f"{rate:.1f} requests/s, {trial.base:.1f} before at {limit}"
                self._move(known[address], self._bounded(limit), why, now_s)
            self._next_factor = _DOWN if trial.factor > 1 else _UP
            self._trial_pause_s = min(self._trial_pause_s * 2, _LONGEST_PAUSE_S)
            self._trial = _Trial(now_s + self._trial_pause_s, completed)
            return
        if is_over:
            self._trial = None
            return
        factor = self._next_factor
        former = {
            address: limit
            for address in at_limit
            if not (factor > 1 and known[address].full_at)
            and not self._misses(address, math.ceil((limit := known[address].limit) * factor))
        }
        for address, limit in former.items():
            least = limit + math.ceil(unseen[address].mean_request)
            moved = max(math.ceil(limit * factor), least) if factor > 1 else math.floor(limit * factor)
            why = f"no usable page: a trial, {rate:.1f} requests/s at {limit}"
            self._move(known[address], self._bounded(moved), why, now_s)
        share = sum(unseen[address].requests for address in former) / max(requests, 1)
        self._trial = _Trial(now_s, completed, factor, former, rate, share)

    def _bounded(self, limit: int) -> int:
        return max(self._least, min(limit, self._most))


def _is_reached(known: EndpointLimit, seen: Observation) -> bool:
    return seen.in_flight >= known.limit - max(math.ceil(seen.mean_request), known.limit // 16)
