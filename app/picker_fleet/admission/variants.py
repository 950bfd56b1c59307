"""Which variant of a model a request is sent as, by the counts of the whole fleet while Redis has them.

Called only for requests whose model is split among several variants, once for each, before their endpoint is
chosen: prompts' hashes and adapters are the variant's.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from picker_fleet.errors import StateFault
from picker_fleet.state.schema import MOST_VARIANTS
from picker_fleet.traffic_split import Shares

# Of the question. A Redis that is away is noticed sooner (state/connection.py); this one answers, and slowly.
DEADLINE_S: Final = 2.0
_PAUSE_S: Final = 5.0  # after a late answer: requests must not all wait for answers that come too late


class SplitStore(Protocol):
    """The shared state, as far as it goes (state/store.py)."""

    async def split(self, split: str, weights: str, request_id: str, proposed: int) -> int: ...


class Variants:
    """Chooses variants. `in_use` says whether Redis decides; while it does not, or is late, shares and ids
    are those of this replica."""

    def __init__(self, store: SplitStore, in_use: Callable[[], bool]) -> None:
        self._store, self._in_use = store, in_use
        self._asks_from_s = 0.0

    async def of(self, shares: Shares, request_id: str, within_s: float) -> str:
        """The name that a request is sent as, which has `within_s` left; the same for an id that comes again,
        at any replica."""
        names, clock = shares.split.names, asyncio.get_running_loop().time
        digest = shares.hash_of(request_id)
        at = shares.remembered(digest)
        if at is not None:
            return names[at]
        if self._in_use() and len(names) < MOST_VARIANTS and clock() >= self._asks_from_s:
            try:
                async with asyncio.timeout(min(DEADLINE_S, within_s)):
                    at = await self._store.split(
                        shares.key, shares.weights, f"{digest:016x}", shares.propose(digest)
                    )
            except TimeoutError:
                if within_s >= DEADLINE_S:  # else a client has asked for the haste
                    self._asks_from_s = clock() + _PAUSE_S
            except StateFault:
                pass
            else:
                shares.remember(digest, at)
                return names[at]
        return shares.of(request_id)
