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

DEADLINE_S: Final = 0.5  # of the question; it is part of the request's time


class SplitStore(Protocol):
    """The shared state, as far as it goes (state/store.py)."""

    async def split(self, split: str, weights: str, request_id: str, proposed: int) -> int: ...


class Variants:
    """Chooses variants. `in_use` says whether Redis decides; while it does not, or is late, shares and ids
    are those of this replica."""

    def __init__(self, store: SplitStore, in_use: Callable[[], bool]) -> None:
        self._store, self._in_use = store, in_use

    async def of(self, shares: Shares, request_id: str) -> str:
        """The name that a request is sent as; the same for an id that comes again, at any replica."""
        names = shares.split.names
        digest = shares.hash_of(request_id)
        at = shares.remembered(digest)
        if at is not None:
            return names[at]
        if self._in_use() and len(names) < MOST_VARIANTS:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    at = await self._store.split(
                        shares.key, shares.weights, f"{digest:016x}", shares.propose(digest)
                    )
            except (TimeoutError, StateFault):
                return shares.of(request_id)
            shares.remember(digest, at)
            return names[at]
        return shares.of(request_id)
