"""News that a lost wake-up left behind: looked for while somebody waits, the sooner the more is found."""

import asyncio
import contextlib

from picker_fleet.admission.shared import SharedGate
from picker_fleet.errors import StateFault
from picker_fleet.state.store import Store

# One cheap command each. Where wake-ups arrive a look finds nothing; where none does, a grant is taken up
# within the shorter pause while there is a flow of them, and within the longer one at worst. A second without
# any goes by before the longer one is reached again: few grants a second are a flow too.
_SHORTEST_S = 0.01
_LONGEST_S = 0.1
_EASE = 1.1


class Inbox:
    """Looks into this replica's inbox for `gate`; see `run`. The heartbeat empties it."""

    def __init__(self, store: Store, gate: SharedGate) -> None:
        self._store = store
        self._gate = gate

    async def run(self) -> None:
        """Until cancelled. Faults of Redis are waited out."""
        pause_s = _LONGEST_S
        while True:
            await self._gate.someone_waits()
            await asyncio.sleep(pause_s)
            late = await self._look()
            pause_s = _SHORTEST_S if late else min(_EASE * pause_s, _LONGEST_S)

    async def _look(self) -> int:
        """How much it found that nobody had been told of."""
        late = 0
        with contextlib.suppress(StateFault):
            for what, request_id in await self._store.news():
                # A grant stays there until its placement has been answered.
                if not self._gate.is_placing(request_id):
                    late += self._gate.hear(what, request_id)
        return late
