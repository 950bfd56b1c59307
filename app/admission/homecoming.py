"""What a replica tells the shared state that answers again: what is over, and what runs."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from app.admission.outbox import Outbox
from app.errors import ScriptFailed
from app.state.store import Store

_AT_ONCE = 512  # requests; the link sends 64 a call
_JITTER_S = 0.1  # replicas that come back together do not all begin at once
_SPREAD_S = 0.5  # within which replicas that come back together have all told what has ended
_REPORT_SLACK_S = 1.0  # by which the access log may be late with a sign of life


async def tell_what_runs(store: Store, outbox: Outbox, report_s: float) -> int:
    """Tell it, in batches, of all that `outbox` has; how many requests run.

    `report_s` is how often the access log gives a sign of life.

    Raises:
        StateUnavailable: it has gone again.
        WritesRefused: it takes no writes for now.
    """
    await asyncio.sleep(random.random() * _JITTER_S)
    await _tell([(end.id,) for end in outbox.ends()], store.bury)
    await asyncio.sleep(_SPREAD_S)
    since_s = asyncio.get_running_loop().time() - report_s - _REPORT_SLACK_S
    running = outbox.in_flight(since_s)
    await _tell(running, store.renew)
    return len(running)


async def _tell(items: Sequence[Any], how: Callable[..., asyncio.Future[str]]) -> None:
    for at in range(0, len(items), _AT_ONCE):
        asked = (how(*each) for each in items[at : at + _AT_ONCE])
        for fault in await asyncio.gather(*asked, return_exceptions=True):
            # What one of them is at fault itself the others must not wait for; its lease makes it good.
            if isinstance(fault, BaseException) and not isinstance(fault, ScriptFailed):
                raise fault
