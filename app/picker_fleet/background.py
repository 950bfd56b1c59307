"""Tasks that run as long as a replica does, and survive their own failures.

`keep` runs one; whoever starts a task for as long as a replica, a pool or an outage lasts uses it.
"""

import asyncio
import contextvars
import logging
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from picker_fleet.errors import StartupError

_log = logging.getLogger(__name__)
_PAUSE_S = 1.0  # between a failure and the next attempt
_CALLBACKS = "callbacks"  # the event loop's, and tasks that are not awaited

Work = Callable[[], Coroutine[Any, Any, None]]

# Of the pool whose tasks run in this context; pool.py and serve.py set it before they start any.
_count: contextvars.ContextVar[Callable[[str], object]] = contextvars.ContextVar("background-failures")


def count_failures(count: Callable[[str], object]) -> None:
    """Have `count` called with the name of each task that fails, for tasks started from here on."""
    _count.set(count)


async def keep(task: str, work: Work) -> None:
    """Run `work`, and run it again a second after each failure, until it returns or is cancelled.

    A failure is counted (`epp_background_failures_total`). The first of each kind, by the lines of its
    traceback, is logged.

    Raises:
        StartupError: `work` cannot begin; nothing but another configuration or environment helps.
    """
    logged: set[tuple[str, ...]] = set()
    while True:
        try:
            return await work()
        except Exception as fault:
            if isinstance(fault, StartupError) and not logged:
                raise
            if (kind := _kind_of(fault)) not in logged:
                logged.add(kind)
                _log.exception("background task %s failed; it goes on in %g s", task, _PAUSE_S)
            _counted(task)
        await asyncio.sleep(_PAUSE_S)


def report_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log and count a failure that nothing awaits: a callback's, or a task's whose result is dropped."""
    loop.default_exception_handler(context)
    _counted(_CALLBACKS)


def _counted(task: str) -> None:
    if (count := _count.get(None)) is not None:
        count(task)


def _kind_of(fault: BaseException) -> tuple[str, ...]:
    """The type of a failure and the lines of its traceback; of a group, of all that it holds too."""
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(fault.__traceback__)]
    parts = fault.exceptions if isinstance(fault, BaseExceptionGroup) else ()
    return type(fault).__name__, *lines, *(part for each in parts for part in _kind_of(each))
