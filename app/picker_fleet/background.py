"""Background tasks that restart after their own failures.

The function `keep` runs tasks that last as long as a replica, a pool or an outage.
"""

import asyncio
import contextvars
import logging
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from picker_fleet.domain.errors import StartupError

_log = logging.getLogger(__name__)
_PAUSE_S = 1.0  # seconds between a task's failure and its restart
_CALLBACKS = "callbacks"  # counts failures of callbacks, and of tasks that nothing awaits, under this name

Work = Callable[[], Coroutine[Any, Any, None]]

# The failure counter of this context's pool; pool.py and serve.py set it before they start tasks.
_count: contextvars.ContextVar[Callable[[str], object]] = contextvars.ContextVar("background-failures")


def count_failures(count: Callable[[str], object]) -> None:
    """From now on, call `count` with the name of each task that this context starts and that fails."""
    _count.set(count)


async def keep(task: str, work: Work) -> None:
    """Run `work`, and restart it a second after each failure, until `work` returns or is cancelled.

    Count each failure (`epp_background_failures_total`). Log failures with the same type and traceback lines
    only once.

    Raises:
        StartupError: the task `work` cannot start, and only another configuration or environment would help.
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
                _log.exception("background task %s failed; the task restarts in %g s", task, _PAUSE_S)
            _counted(task)
        await asyncio.sleep(_PAUSE_S)


def report_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log and count the failure of a callback, or of a task that nothing awaits."""
    loop.default_exception_handler(context)
    _counted(_CALLBACKS)


def _counted(task: str) -> None:
    if (count := _count.get(None)) is not None:
        count(task)


def _kind_of(fault: BaseException) -> tuple[str, ...]:
    """The type and traceback lines of a failure and, for an exception group, of each member."""
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in traceback.walk_tb(fault.__traceback__)]
    parts = fault.exceptions if isinstance(fault, BaseExceptionGroup) else ()
    return type(fault).__name__, *lines, *(part for each in parts for part in _kind_of(each))
