"""Background tasks that restart after their own failures.

Tasks that last as long as a replica, a pool or an outage are run by the function `keep`.
"""

import asyncio
import contextvars
import logging
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from picker_fleet.domain.errors import StartupError

_log = logging.getLogger(__name__)
_PAUSE_S = 1.0  # pause between a failure and the next attempt
_CALLBACKS = "callbacks"  # name for failures of callbacks and of tasks that nothing awaits

Work = Callable[[], Coroutine[Any, Any, None]]

# The failure counter of this context's pool; pool.py and serve.py set it before they start tasks.
_count: contextvars.ContextVar[Callable[[str], object]] = contextvars.ContextVar("background-failures")


def count_failures(count: Callable[[str], object]) -> None:
    """Call `count` with the name of each failing task that this context starts from now on."""
    _count.set(count)


async def keep(task: str, work: Work) -> None:
    """Run `work`, and again a second after each failure of `work`, until `work` returns or is cancelled.

    Each failure is counted (`epp_background_failures_total`); failures with the same type and traceback lines
    are logged once.

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
