"""Calls extensions (domain/extensions.py) within a time budget, so that none of them can fail or hold up a
request.

Each extension of a pool has a thread. The caller, the event loop, waits for the result at most for the
budget; then the request goes on without the extension. An extension that raises, returns nonsense or takes
longer than its budget is suspended, for 1 s at first, and twice as long after each further failure, up to
60 s. An extension that has not returned gets no calls. The thread adds about 15 µs to a call.

The budget bounds waiting (sleep, network, files), not computing: a thread that computes in Python keeps the
interpreter for up to `sys.getswitchinterval()` (5 ms), and C code keeps it until it releases the interpreter.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

from picker_fleet.domain import extensions
from picker_fleet.domain.config import Settings
from picker_fleet.domain.errors import StartupError
from picker_fleet.domain.request import InferenceRequest
from picker_fleet.domain.units import LEAST_COST, MOST_COST
from picker_fleet.scheduling.scheduler import Filter, Reasons
from picker_fleet.scheduling.scorers import EndpointState, PickRequest, Scorer

Fault = Literal["raised", "invalid", "late", "suspended"]
OnFault = Callable[[str, Fault], None]
R = TypeVar("R")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_LONGEST_TEXT = 500  # maximum characters of an exception or of a filter's reason
_EARLIEST_S = -86_400.0  # an ordering may say that a request was due a day before it arrived, at most

_log = logging.getLogger(__name__)


class CostFacts(NamedTuple):
    """A request whose cost is to be estimated.

    `sequences`: the request's prompts times the answers per prompt. `prompt_tokens` and `answer_tokens` are
    the picker's estimates; `answer_tokens` is 0 if the request sets no maximum. `members` are the members of
    the request's JSON body, each decoded or a JSON text (memoryview, msgspec.Raw).
    """

    model: str
    body_bytes: int
    sequences: int
    prompt_tokens: float
    answer_tokens: float
    members: Mapping[str, Any]


class Ordering(Protocol):
    def __call__(self, request: InferenceRequest, /) -> float:
        """Seconds after its arrival by which `request` is due: of each flow, the request that is due first is
        served first (ordering `edf`). A time after the TTL's end counts as the TTL's end."""


class CostEstimator(Protocol):
    def __call__(self, facts: CostFacts, /) -> float:
        """The cost of a request, at least 0.001, in the stock's unit (`request_queue_controller.unit`)."""


class Nonsense(ValueError):
    """An extension returned a result of a wrong form or range."""


class _Failure(NamedTuple):
    fault: Fault
    why: str


def _failure(raised: BaseException) -> _Failure:
    why = type(raised).__name__
    with suppress(BaseException):  # computing an exception's text runs the extension's code, too
        why = f"{why}: {raised}"[:_LONGEST_TEXT]
    return _Failure("invalid" if isinstance(raised, Nonsense) else "raised", why)


class Calls(Generic[R]):
    """Calls one extension in a thread of its own. One event loop.

    `call` returns the checked result. `label` names the extension in the log and for `on_fault`.
    """

    def __init__(
        self,
        label: str,
        call: Callable[..., R],
        budget_s: float,
        on_fault: OnFault,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._call, self._budget_s = label, call, budget_s
        self._on_fault, self._clock = on_fault, clock
        self._arguments: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        # The result or the failure, and the seconds that the call took.
        self._results: SimpleQueue[tuple[R | _Failure, float]] = SimpleQueue()
        self._is_late = False  # whether the result of an earlier call is still due
        self._suspended_until_s = -1.0
        self._pause_s = _FIRST_PAUSE_S
        # A daemon: a call that never returns must not keep the process alive.
        threading.Thread(target=self._run, name=label, daemon=True).start()

    def __call__(self, *arguments: Any) -> R | None:
        """The extension's result; None if the extension is left out."""
        if not self._is_free():
            self._on_fault(self._label, "suspended")
            return None
        self._arguments.put(arguments)
        try:
            result, _ = self._results.get(timeout=self._budget_s)
        except Empty:
            self._is_late = True
            self._report("late", f"no result within {self._budget_s * 1000:g} ms")
            return None
        if isinstance(result, _Failure):
            self._report(result.fault, result.why)
            self._suspend()
            return None
        self._pause_s = _FIRST_PAUSE_S
        return result

    def _is_free(self) -> bool:
        """Whether the extension may be called now."""
        if self._is_late:
            try:
                _, took_s = self._results.get_nowait()
            except Empty:
                return False
            self._is_late = False
            # A call that itself was quick has waited for a CPU, which is not the extension's fault.
            if took_s > self._budget_s:
                self._suspend()
        return self._clock() >= self._suspended_until_s

    def _suspend(self) -> None:
        self._suspended_until_s = self._clock() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _report(self, fault: Fault, why: str) -> None:
        self._on_fault(self._label, fault)
        _log.warning("extension %s is left out, %s: %s", self._label, fault, why)

    def _run(self) -> None:
        while True:
            arguments = self._arguments.get()
            began_s = time.perf_counter()
            result: R | _Failure
            try:
                result = self._call(*arguments)
            except BaseException as fault:  # also SystemExit, which would end the thread
                result = _failure(fault)
            self._results.put((result, time.perf_counter() - began_s))
            del arguments, result  # free large objects: the next call may be far off


class Extensions:
    """The extensions that a pool's settings name; a call that fails or is late returns None.

    Raises:
        StartupError: an extension cannot be made.
    """

    def __init__(self, settings: Settings, on_fault: OnFault = lambda label, fault: None) -> None:
        self._budget_s, self._on_fault = settings.scheduling.extension_budget, on_fault
        scheduling, queue = settings.scheduling, settings.fair_request_queue
        self.scorers: Mapping[str, Calls[list[float]]] = {
            name: self._calls(extensions.SCORERS, name, scheduling.scorer_parameters.get(name, {}), _scores)
            for name in scheduling.outside
        }
        self.filters: Mapping[str, Calls[Reasons | None]] = {
            each.name: self._calls(extensions.FILTERS, each.name, each.parameters, _reasons)
            for each in scheduling.filters
        }
        due, cost = queue.due, queue.cost
        self.due: Calls[float] | None = (
            None if due is None else self._calls(extensions.ORDERINGS, due.name, due.parameters, _due_s)
        )
        self.cost: Calls[float] | None = (
            None
            if cost is None
            else self._calls(extensions.COST_ESTIMATORS, cost.name, cost.parameters, _cost)
        )

    def _calls(
        self, group: str, name: str, parameters: Mapping[str, Any], checked: Callable[..., R]
    ) -> Calls[R]:
        try:
            made = extensions.made(group, name, parameters)
        except ValueError as fault:
            raise StartupError(str(fault)) from fault
        return Calls(
            f"{extensions.KINDS[group]} {name}", partial(checked, made), self._budget_s, self._on_fault
        )


def _scores(scorer: Scorer, pick: PickRequest, candidates: Sequence[EndpointState]) -> list[float]:
    # Pass a copy: an extension that changed the list would change later picks. Do not call with an empty
    # list. Read only one score too many, since the result may be endless.
    given = scorer(pick, tuple(candidates)) if candidates else ()
    scores = [float(score) for score in islice(given, len(candidates) + 1)]
    if len(scores) != len(candidates):
        raise Nonsense(f"{len(scores)} scores for {len(candidates)} candidates")
    if not all(0.0 <= score <= 1.0 for score in scores):
        raise Nonsense("a score is outside 0 to 1")
    return scores


def _reasons(keep: Filter, pick: PickRequest, endpoints: Sequence[EndpointState]) -> Reasons | None:
    reasons = keep(pick, tuple(endpoints))  # a copy, since the extension could change the list
    if reasons is None:
        return None
    given = tuple(islice(reasons, len(endpoints) + 1))
    if len(given) != len(endpoints):
        raise Nonsense(f"{len(given)} reasons for {len(endpoints)} endpoints")
    if not all(isinstance(reason, str | None) for reason in given):
        raise Nonsense("a reason is neither a text nor None")
    return [reason and reason[:_LONGEST_TEXT] for reason in given]


def _due_s(ordering: Ordering, request: InferenceRequest) -> float:
    due_s = float(ordering(request))
    if not math.isfinite(due_s):
        raise Nonsense(f"{due_s} is no time")
    return max(due_s, _EARLIEST_S)


def _cost(estimator: CostEstimator, facts: CostFacts) -> float:
    cost = float(estimator(facts))
    if not LEAST_COST <= cost <= MOST_COST:
        raise Nonsense(f"{cost} is no cost: it must be between {LEAST_COST:g} and {MOST_COST:g}")
    return cost
