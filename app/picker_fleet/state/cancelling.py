"""Cancellations that get lost on the way: uvloop (seen with 0.23) can drop one that arrives while a
connection is being made, and a fault while a connection is being closed can take its place. Whoever
connects, or goes on after a fault, asks here."""

import asyncio


def heed() -> None:
    """Raise the CancelledError that the current task was owed."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
