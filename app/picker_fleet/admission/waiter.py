"""Requests that wait: their time in the queue, and how those at the gate on shared state are told."""

import asyncio
from dataclasses import dataclass

from picker_fleet.request import InferenceRequest
from picker_fleet.state.store import Verdict


@dataclass(slots=True)
class Wait:
    """A request's time in the queue: one wait, however often it crosses between the shared and the local one.

    It is counted once, when the outcome of its request is known (`epp_queue_latency_seconds`).
    """

    arrived_s: float  # event-loop time
    queued: bool = False


@dataclass(slots=True)
class Waiter:
    """A request between its admission and its placement. `news` brings what happens to it meanwhile.

    `asking` says that its admission is asked for; `placing` that its placement is: it has been granted, and
    need not be told of again. `given_up` says that its task was cancelled because the shared state is away,
    or, where it is also `expired`, has not answered in its time.
    """

    request: InferenceRequest
    attempt: int
    arrived: float  # event-loop time
    news: asyncio.Future[Verdict]
    task: asyncio.Task[object]
    asking: bool = True
    placing: bool = False
    given_up: bool = False
    expired: bool = False


def tell(news: asyncio.Future[Verdict], verdict: Verdict) -> bool:
    """Bring news, unless some has come already: False then."""
    if news.done():
        return False
    news.set_result(verdict)
    return True
