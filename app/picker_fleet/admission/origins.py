"""Finds the endpoint that stores the state of a response or conversation, by its id (Responses API).

Model servers keep responses in memory. So a request that continues, reads or deletes a response must go to
the endpoint whose answer had the response's id. In mode `standard`, a replica learns the id from the answer;
in the modes `lean` and `http`, from Envoy's access log. Redis keeps id and endpoint for all replicas.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

from picker_fleet.admission.reports import ignore_loss
from picker_fleet.domain.errors import StateFault
from picker_fleet.domain.units import has_control
from picker_fleet.state import accounting_token
from picker_fleet.state.accounting_token import Keyring
from picker_fleet.state.store import Store

MAX_ID_BYTES = 256
_MAX_KNOWN = 50_000
KEPT_S = 3600.0  # for so many seconds a replica itself remembers an id, in case Redis is unavailable
# A client's next request may arrive before the access-log entry that has its id: look an unknown id up again
# after each of these pauses, in seconds, for `FIND_S` seconds in total.
_PAUSES_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.12, 0.2, 0.25, 0.25)
_MOST_REPEATING = 100  # further searches for unknown ids look them up only once: each repetition takes CPU
FIND_S = 1.0  # longer than the half second for which a busy host may stop this process


class Origins:
    """The endpoints of stored responses and conversations, by id. All calls come from one event loop."""

    def __init__(self, store: Store, keys: Keyring, clock: Callable[[], float]) -> None:
        self._store, self._keys = store, keys
        self._clock = clock
        self._known: OrderedDict[str, tuple[float, str]] = OrderedDict()  # id -> (time noted, endpoint)
        self._repeating = 0  # number of searches that look ids up again

    def note(self, ids: Iterable[str], endpoint: str | None) -> None:
        """Store that `endpoint` has the state of `ids`. Returns without waiting for Redis."""
        for state_id in ids:
            if endpoint and _is_id(state_id):
                self._remember(state_id, endpoint)
                ignore_loss(self._store.note_origin(state_id, endpoint))

    async def find(self, ids: Collection[str], most_s: float = FIND_S) -> str:
        """The endpoint that has the state of one of `ids`; '' if it is not found within `most_s` seconds.
        Without Redis, only this replica's own memory is searched."""
        wanted = [state_id for state_id in ids if _is_id(state_id)]
        pauses_s = (0.0, *(_PAUSES_S if self._repeating < _MOST_REPEATING else ()))
        self._repeating += 1
        try:
            async with asyncio.timeout(min(most_s, FIND_S)):
                for pause_s in pauses_s:
                    await asyncio.sleep(pause_s)
                    if self._store.fault is not None or not wanted:
                        break
                    for state_id, endpoint in zip(wanted, await self._store.origins(wanted), strict=True):
                        if endpoint:
                            self._remember(state_id, endpoint)
                            return endpoint
                    if known := self._known_of(wanted):
                        return known
        except (TimeoutError, StateFault):
            pass
        finally:
            self._repeating -= 1
        return self._known_of(wanted)

    def read_token(self, request_id: str) -> str:
        """The accounting token of a request that needs no admission. Envoy returns the token in the request's
        access-log entry, so that the replica trusts the ids in that entry."""
        return accounting_token.of_read(request_id, self._keys)

    def _remember(self, state_id: str, endpoint: str) -> None:
        known, now_s = self._known, self._clock()
        known[state_id] = now_s, endpoint
        known.move_to_end(state_id)
        while len(known) > _MAX_KNOWN or next(iter(known.values()))[0] < now_s - KEPT_S:
            known.popitem(last=False)

    def _known_of(self, ids: Iterable[str]) -> str:
        return next((self._known[state_id][1] for state_id in ids if state_id in self._known), "")


def _is_id(text: str) -> bool:
    return (
        0 < len(text) <= MAX_ID_BYTES
        and len(text.encode(errors="replace")) <= MAX_ID_BYTES
        and not has_control(text)
    )
