"""When a Redis that says nothing counts as away. Pure; seconds are of awake time (state/awake.py).

Silence is time in which something waits for Redis and nothing at all comes from it; any answer ends it. So a
Redis that is slow, but answers, is waited for. A silent one is suspected after the time that its replies
really take: the retransmission timeout of RFC 6298, SRTT + 4 RTTVAR. It is then probed on other connections.
Where those are answered, the connection is stuck, and made anew. Where they are not for `proof_s`, Redis is
away: `floor_s`, or the retransmission timeout if that is longer, and twice as long each time this replica
has left again within `CALM_S` of having returned, up to `ceiling_s`. The answered heartbeats in a row after
which it returns double likewise, from two to sixteen. So no Redis, however slow, makes a replica go to and
fro.
"""

import enum
import math

CALM_S = 30.0
_ALPHA, _BETA, _K = 1 / 8, 1 / 4, 4  # RFC 6298, section 2
_SUSPECTED = 0.1  # of the floor, at least
_STUCK = 0.25  # of the floor, at least, for a connection that is silent while probes are answered
_MOST_REPEATS = 4


class Verdict(enum.Enum):
    """What is thought of a connection. SUSPECT: probe Redis. STUCK: make it anew. AWAY: give Redis up."""

    WELL = "well"
    SUSPECT = "suspect"
    STUCK = "stuck"
    AWAY = "away"


class ReplyTimes:
    """The retransmission timeout of RFC 6298 over the replies that came, between two limits."""

    def __init__(self, least_s: float, most_s: float) -> None:
        self._least_s, self._most_s = least_s, most_s
        self._mean_s: float | None = None  # SRTT
        self._deviation_s = 0.0  # RTTVAR

    def took(self, seconds: float) -> None:
        """A reply came after so long."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        off_s = seconds - self._mean_s
        self._deviation_s += _BETA * (abs(off_s) - self._deviation_s)
        self._mean_s += _ALPHA * off_s

    @property
    def timeout_s(self) -> float:
        """How long a reply may take before it is missed."""
        found_s = 0.0 if self._mean_s is None else self._mean_s + _K * self._deviation_s
        return min(max(found_s, self._least_s), self._most_s)


class Silence:
    """`look` regularly; a verdict other than WELL and SUSPECT begins the observation anew. `floor_s` and
    `ceiling_s` limit the proof."""

    def __init__(self, floor_s: float, ceiling_s: float) -> None:
        self._floor_s, self._ceiling_s = floor_s, max(floor_s, ceiling_s)
        self._replies = ReplyTimes(_SUSPECTED * floor_s, self._ceiling_s)
        self.took = self._replies.took
        self._repeats = 0  # times it left in a row
        self._returned_s = -math.inf
        self._begin()

    def _begin(self) -> None:
        self._silent_s = 0.0
        self._unanswered_s: float | None = None  # since the first probe; None: not suspected
        self._answered_s: float | None = None  # since a probe was answered
        self._due = False  # the time was up at the last look; what waited in the socket has been read since

    @property
    def suspected(self) -> bool:
        return self._unanswered_s is not None

    @property
    def beats(self) -> int:
        """Answered heartbeats in a row after which a replica that has left returns."""
        return 1 << max(self._repeats, 1)

    def proof_s(self, now_s: float) -> float:
        """For how long probes must go unanswered."""
        repeats = self._repeats if now_s - self._returned_s < CALM_S else 0
        return min(max(self._floor_s, self._replies.timeout_s) * 2.0**repeats, self._ceiling_s)

    def left(self, now_s: float) -> None:
        """This replica goes on without Redis."""
        again = now_s - self._returned_s < CALM_S
        self._repeats = min(self._repeats + 1, _MOST_REPEATS) if again else 1

    def returned(self, now_s: float) -> None:
        """It is back."""
        self._returned_s = now_s

    def look(self, now_s: float, awake_s: float, *, waits: bool, heard: bool, answered: bool) -> Verdict:
        """What is thought now. Since the last look this replica was awake for `awake_s`; something `waits`
        for an answer; the connection was `heard`; a probe was `answered`.
        """
        if heard or not waits:
            self._begin()
            return Verdict.WELL
        self._silent_s += awake_s
        if self._unanswered_s is None:
            if self._silent_s < self._replies.timeout_s:
                return Verdict.WELL
            self._unanswered_s = 0.0
            return Verdict.SUSPECT
        self._unanswered_s += awake_s
        if answered and self._answered_s is None:
            self._answered_s = 0.0
        elif self._answered_s is not None:
            self._answered_s += awake_s
        return self._judge(now_s)

    def _judge(self, now_s: float) -> Verdict:
        assert self._unanswered_s is not None
        if self._answered_s is not None:
            stuck_s = max(_STUCK * self._floor_s, self._replies.timeout_s)
            verdict, up = Verdict.STUCK, self._answered_s >= stuck_s
        else:
            verdict, up = Verdict.AWAY, self._unanswered_s >= self.proof_s(now_s)
        due, self._due = self._due, up
        if not (due and up):
            return Verdict.SUSPECT
        self._begin()
        return verdict
