"""Several things at once, of which the first fault on purpose is the one to tell."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from picker_fleet.errors import PickerError


async def together(*works: Coroutine[Any, Any, object]) -> None:
    """Run `works` side by side until all are done; one that fails cancels the rest.

    Raises:
        PickerError: the first that one of them raised, out of whatever group it came in.
    """
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as faults:
        told = on_purpose(faults)
        if told is None:
            raise
        raise told from None


def on_purpose(faults: BaseExceptionGroup[BaseException]) -> PickerError | None:
    """The first fault in the group, however deep, that was raised on purpose; None if none was."""
    return next((fault for fault in _leaves(faults) if isinstance(fault, PickerError)), None)


def _leaves(faults: BaseExceptionGroup[BaseException]) -> Iterable[BaseException]:
    for fault in faults.exceptions:
        if isinstance(fault, BaseExceptionGroup):
            yield from _leaves(fault)
        else:
            yield fault
