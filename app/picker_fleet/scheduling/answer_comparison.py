"""Compares the answers of endpoints, to find servers that fail but report success; in bounded memory.

Each replica compares the answers whose ends it reports (`admission/reports.py`).
"""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

from picker_fleet.domain.request import Completion, Outcome
from picker_fleet.state import accounting_token

ODD: Final = "unlike others"  # `Fault.why` of an endpoint that fails by its odd answers
_KEPT = 16  # last answers kept of each endpoint
_FEWEST = 4  # an endpoint with fewer answers, or good answers since its last refusal, is not compared
_OTHERS = 4  # maximum other endpoints with which an endpoint is compared: the last to answer
_MARGIN = 2.0  # an answer is smaller or faster than another only by more than this factor
_ODD, _GOOD, _FAILING = 2, -1, 8  # added to `score` by an odd, a good answer; score of a failing endpoint
_REFUSALS, _OF_ONE_FLOW = 16, 4  # odd refusals at which an endpoint fails; most that count of one flow
_MOST_TYPE_CHARS = 64  # compare at most this many characters of content types
_MOST_ENDPOINTS = 4096  # maximum endpoints kept, each for each path and model; about 5 KB each


class _Answer(NamedTuple):
    """How an answer looks: its `kind` (status and content type; '' if it reports tokens of an answer), size,
    and the endpoint's time; and the request's flow."""

    kind: str
    body_bytes: int
    seconds: float
    flow: str

    def is_like(self, other: "_Answer") -> bool:
        is_large = self.body_bytes * _MARGIN >= other.body_bytes
        is_slow = self.seconds * _MARGIN >= other.seconds
        return (self.kind == other.kind) + is_large + is_slow >= 2


class _Endpoint:
    """One endpoint's last answers to requests of one path and model, except refusals (4xx). Odd answers raise
    `score`, good answers lower it. `good` counts the good answers since the last refusal, `refusals` the odd
    refusals of each flow since the last good answer."""

    def __init__(self) -> None:
        self.answers: deque[_Answer] = deque(maxlen=_KEPT)
        self.score = self.good = 0
        self.refusals: Counter[str] = Counter()

    def answered(self, answer: _Answer, others: Sequence["_Endpoint"]) -> tuple[bool, bool]:
        """Add an answer. Returns whether the answer is odd, and whether the endpoint fails."""
        self.answers.append(answer)
        unlike = 0
        for each in others:
            unlike += len(each.answers) >= _FEWEST and not any(map(answer.is_like, each.answers))
        if 2 * unlike > len(others):
            self.score = min(self.score + _ODD, _FAILING)
            return True, self.score == _FAILING
        self.score, self.good = max(self.score + _GOOD, 0), self.good + 1
        self.refusals.clear()
        return False, False

    def refused(self, flow: str, others: Sequence["_Endpoint"]) -> tuple[bool, bool]:
        """Add a refusal. Returns whether the refusal is odd, and whether the endpoint fails."""
        self.good = 0
        if 2 * sum(each.good >= _FEWEST for each in others) <= len(others):
            return False, False
        if flow in self.refusals or len(self.refusals) < _REFUSALS:
            self.refusals[flow] += 1
        if self.refusals.total() < _REFUSALS:
            return True, False
        served = {answer.flow for each in others for answer in each.answers}
        of_several = sum(min(count, _OF_ONE_FLOW) for count in self.refusals.values())
        return True, of_several >= _REFUSALS or self.refusals.keys() >= served


class AnswerComparison:
    """Finds odd answers: most other endpoints lately gave no such answer for the same path and model.

    A server that fails fast is always the emptiest, and would attract most requests. An answer is odd if it
    is like none of the last answers of most other endpoints; never if it reports its tokens. Two answers are
    alike in two of three ways: (1) they have the same status and content type, or both report tokens; (2) the
    first has at least half the second's bytes; (3) the first took at least half the second's time. Good
    servers seldom give odd answers: an endpoint fails if about half of its answers are odd.

    Clients' errors cause refusals (4xx) at all endpoints: a refusal is odd only if the last four answers of
    most other endpoints are good. An endpoint fails at 16 odd refusals without a good answer between. At most
    four refusals of a flow count, since one client may cause them, unless the endpoint refuses all flows that
    the other endpoints answer.
    """

    def __init__(self, *, most_endpoints: int = _MOST_ENDPOINTS) -> None:
        self._most_endpoints = most_endpoints
        # (path, model) -> address -> endpoint; the endpoint that answered last is the last.
        self._compared: dict[tuple[str, str], dict[str, _Endpoint]] = {}
        self._endpoints = 0  # number of endpoints in `_compared`

    def compare(self, end: Completion, token: str) -> Completion:
        """Compare the answer in `end` with other endpoints' answers. Returns `end`, with `is_odd` set if the
        answer is odd, and with a `fault` if its endpoint fails. `token` is the request's accounting token."""
        is_answer = token and end.is_read and end.outcome is Outcome.COMPLETED and not end.fault
        if not is_answer or end.service_s is None:
            return end
        key = end.path.partition("?")[0], accounting_token.model_of(token)
        endpoints = self._compared[key] = self._compared.pop(key, {})
        address, flow = end.served or accounting_token.endpoint_of(token), accounting_token.flow_of(token)
        endpoint = endpoints.pop(address, None)
        if endpoint is None:
            endpoint, self._endpoints = _Endpoint(), self._endpoints + 1
        has_tokens = end.completion_tokens and end.status == 200
        others = [] if has_tokens else list(islice(reversed(endpoints.values()), _OTHERS))
        endpoints[address] = endpoint
        while self._endpoints > self._most_endpoints and len(self._compared) > 1:
            self._endpoints -= len(self._compared.pop(next(iter(self._compared))))
        if 400 <= end.status < 500:
            is_odd, fails = endpoint.refused(flow, others)
        else:
            content_type = end.content_type[:_MOST_TYPE_CHARS].partition(";")[0].strip().lower()
            kind = "" if has_tokens else f"{end.status} {content_type}"
            is_odd, fails = endpoint.answered(_Answer(kind, end.body_bytes, end.service_s, flow), others)
        return end._replace(is_odd=True, fault=ODD if fails else "") if is_odd else end
