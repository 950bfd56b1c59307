"""Which of the live replicas are there to scrape, judged by what is heard of them."""

import math
from collections.abc import Sequence


class Presence:
    """Leaves out who has fallen silent, long before its membership lapses.

    A killed replica counts as live until `replica_silence` is over, which is too long for an endpoint to go
    unread. Every replica speaks on the metrics channel several times a heartbeat; one that has been silent
    for `silence_s`, while others were heard, is left out until it speaks. When nothing is heard at all it is
    Redis that is silent, and nobody is judged. Times are seconds of one monotonic clock.
    """

    def __init__(self, replica: str, silence_s: float) -> None:
        self._replica = replica
        self._silence_s = silence_s
        self._heard_s: dict[str, float] = {}
        self._newest_s = -math.inf

    def link(self, now_s: float) -> None:
        """The channel is heard anew: what was said before may have been missed."""
        for replica in self._heard_s:
            self._heard_s[replica] = now_s

    def heard(self, replica: str, now_s: float) -> None:
        """`replica` spoke."""
        self._heard_s[replica] = self._newest_s = now_s

    def among(self, live: Sequence[str], now_s: float) -> tuple[str, ...]:
        """Those of `live`, in order of their names, that are there. This replica is, if it is live.

        With nobody live the pool is not known yet, and this replica is on its own.
        """
        if not live:
            return (self._replica,)
        for gone in self._heard_s.keys() - frozenset(live):
            del self._heard_s[gone]
        for replica in live:
            self._heard_s.setdefault(replica, now_s)  # it just joined and has its time to speak
        return tuple(replica for replica in sorted(live) if self._is_there(replica))

    def _is_there(self, replica: str) -> bool:
        return replica == self._replica or self._newest_s - self._heard_s[replica] <= self._silence_s
