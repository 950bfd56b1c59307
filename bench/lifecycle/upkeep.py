"""The calls that come seldom and have much to do: sweeps, live changes, preemption under a full queue."""

import time
from collections.abc import Iterator

from bench.lifecycle.life import Lives
from picker_fleet.state.calls import MAX_BATCH

_CALLS = 150  # of each kind, at most
MANY = 6000  # requests that are due at once
_PER_CALL = MAX_BATCH
_STARVING_MS, _TTL_MS = 4000, 8000  # longer than it takes to bring MANY
_SILENCE_MS = 1000
_MARGIN_S = 0.05
_POLICIES = (
    ("ordering", "edf"),
    ("ordering", "workload-aware"),
    ("fairness", "none"),
    ("fairness", "round-robin"),
)


def upkeep(state: Lives) -> Iterator[str]:
    """Do each kind of upkeep to `state`; yields what it was when its calls have been made."""
    # What waits becomes overdue, then reaches the end of its TTL
    began = time.monotonic()
    state.tune(starvation_ms=_STARVING_MS)
    state.admit(MANY, _PER_CALL, ttl_ms=_TTL_MS)
    brought = time.monotonic()
    yield "arrivals"
    _wait_until(brought + _STARVING_MS / 1000)
    state.sweep(_CALLS)
    yield "a sweep, requests become overdue"
    _wait_until(max(began, brought) + _TTL_MS / 1000)
    state.sweep(_CALLS)
    yield "a sweep, requests expire"
    state.tune(starvation_ms=None)
    # Requests of higher rank find the queue full
    state.tune(total_capacity=state.queued())
    state.admit(_CALLS * _PER_CALL // 3, _PER_CALL, band=0)
    yield "arrivals that preempt"
    state.tune(total_capacity=None)
    state.sweep(_CALLS)
    yield "a sweep, preemptions are forgotten"
    # The bounds are raised while many wait: each call serves as many as one may; then their leases run out
    state.tune(lease_ms=1)
    state.bound(MANY)
    state.touch(_CALLS)
    yield "grants"
    state.bound(0)
    state.sweep(_CALLS)
    yield "a sweep, leases have run out"
    state.tune(lease_ms=None)
    # The order of what waits is changed
    for name, value in _POLICIES:
        state.tune(**{name: value})
        state.sweep(_CALLS)
        yield f"a sweep, after a change to {value}"
    # A replica falls silent that has brought many
    state.admit(MANY, _PER_CALL, owner="silent")
    state.silence(_SILENCE_MS)
    _wait_until(time.monotonic() + _SILENCE_MS / 1000)
    state.silence(_SILENCE_MS)
    state.sweep(_CALLS)
    yield "a sweep, a replica is silent"


def _wait_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()) + _MARGIN_S)
