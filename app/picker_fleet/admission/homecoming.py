"""What a replica tells the shared state that answers again: what is over, and what runs."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

from picker_fleet.admission.outbox import Outbox, unseen_s
from picker_fleet.admission.tombstones import Tombstones
from picker_fleet.errors import ScriptFailed
from picker_fleet.state.store import Store

_AT_ONCE = 512  # requests; the link sends 16 a call
_JITTER_S = 0.1  # replicas that come back together do not all begin at once


async def tell_what_runs(
    store: Store,
    outbox: Outbox,
    tombstones: Tombstones,
    others_told: Callable[[], Awaitable[None]],
    report_s: float,
    clock: Callable[[], float],
) -> int:
    """Tell it of the ends in `tombstones` and, when the other replicas have told theirs, of the requests that
    run by `outbox`; how many those are.

    `report_s` is how often the access log gives a sign of life.

    Raises:
        StateUnavailable: it has gone again.
        WritesRefused: it takes no writes for now.
    """
    await asyncio.sleep(random.random() * _JITTER_S)
    await tombstones.tell()
    await others_told()
    return await bring(store, outbox, report_s, clock)


async def bring(store: Store, outbox: Outbox, report_s: float, clock: Callable[[], float]) -> int:
    """Tell the shared state of what runs by `outbox`, as `tell_what_runs`."""
    running = outbox.in_flight(clock() - unseen_s(report_s))
    for at in range(0, len(running), _AT_ONCE):
        asked = [
            store.renew(each.id, each.attempt, each.served, each.ticket, clock() - each.seen_s)
            for each in running[at : at + _AT_ONCE]
        ]
        for answer in asked:
            with contextlib.suppress(ScriptFailed):  # its lease makes it good
                await answer
    return len(running)
