"""Compares the answers of endpoints, to find servers that fail but report success. Bounds its memory; no I/O.

Each replica compares the answers whose ends it reports (`admission/reports.py`).
"""

import random
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Final, NamedTuple

from picker_fleet.domain.request import Completion, Outcome
from picker_fleet.state import accounting_token

ODD: Final = "unlike others"  # the reason of the fault
FAILING: Final = 8  # the score from which an endpoint fails: four odd answers in a row
_ODD, _GOOD = 2, -1  # added to the score by each answer, so that an endpoint fails if half of its answers do
_REFUSALS = 64  # in a row from which an endpoint refuses all requests; and the span of the moving mean
_FEW_REFUSALS = 2  # in a row, which clients' errors cause at any endpoint
_REFUSED_FLOWS = 4  # fewer flows may all be of one client; one alone counts if it has the pool alone (Lua)
_ONE_IN = 16  # good answers, of which one is kept for comparison and stands for all
_ALL_KEPT, _ALL_WATCHED = 1000, 64  # answers all kept for a new path and model, and after an odd answer
_KEPT = 16  # last answers kept of each kind, by endpoint
_FEWEST = 4  # no answer is compared with an endpoint of fewer answers
_MOST_KINDS = 8  # kinds of answers kept of an endpoint
_MOST_ENDPOINTS = 4096  # maximum endpoints kept, each for each path and model; about 5 KB each
_SAMPLED = 16  # maximum endpoints with whose answers an answer is compared
_FRESH = 16  # kept answers of each endpoint before the endpoints are compared again
_INACTIVE = 32  # an endpoint without answers is forgotten after this many of each other endpoint
_MARGIN = 2.0  # an answer counts as smaller or faster from this factor on


class _Form(NamedTuple):
    """How an answer looks: its `kind` (status and content type; '' if it reports tokens of an answer), size,
    and the endpoint's time."""

    kind: str
    body_bytes: int
    seconds: float


@lru_cache(maxsize=256)
def _kind(status: int, content_type: str) -> str:
    return f"{status} {content_type.partition(';')[0].strip().lower()}"


class _Answers:
    """The last answers of one endpoint to requests of one path and model, by kind; its score `odd`; its
    `refusals` (4xx) in a row, to `flows`; and their share of its answers, a moving mean."""

    def __init__(self) -> None:
        self.by_kind: dict[str, deque[_Form]] = {}
        self.odd = self.refusals = self.seen_at = 0
        self.refused_share = 0.0
        self.flows: set[str] = set()

    def keep(self, form: _Form) -> None:
        if form.kind not in self.by_kind:
            if len(self.by_kind) >= _MOST_KINDS:
                del self.by_kind[next(iter(self.by_kind))]
            self.by_kind[form.kind] = deque(maxlen=_KEPT)
        self.by_kind[form.kind].append(form)

    def answered(self, weight: int) -> None:
        self.odd = max(self.odd + _GOOD * weight, 0)
        self.refusals, self.refused_share = 0, self.refused_share * (1 - 1 / _REFUSALS) ** weight
        self.flows.clear()

    def refused(self, flow: str) -> bool:
        """Whether the endpoint refuses all requests."""
        self.refusals += 1
        self.refused_share += (1 - self.refused_share) / _REFUSALS
        if len(self.flows) < _REFUSED_FLOWS:
            self.flows.add(flow)
        return self.refusals >= _REFUSALS and len(self.flows) in (1, _REFUSED_FLOWS)


class _Comparison:
    """The answers of all endpoints to requests of one path and model. `_usual` has by kind the least size and
    time of most endpoints that give this kind, `_least` the same of all kinds (None: too few endpoints). An
    answer with `large_bytes` that took `slow_s` is neither small nor fast."""

    def __init__(self) -> None:
        self.endpoints: dict[str, _Answers] = {}
        self.large_bytes = self.slow_s = 0.0
        self._count, self._due = 0, _FRESH
        self._usual: dict[str, _Form] = {}
        self._least: _Form | None = None

    def is_odd(self, form: _Form) -> bool:
        if not form.kind or self._least is None:
            return False
        usual, is_unlike = self._usual.get(form.kind, self._least), form.kind not in self._usual
        is_small = form.body_bytes * _MARGIN < usual.body_bytes
        is_fast = form.seconds * _MARGIN < usual.seconds
        return is_unlike + is_small + is_fast >= 2

    def keep(self, address: str, form: _Form | None) -> _Answers:
        """The answers of the endpoint `address`, to which `form` is added unless it is None."""
        answers = self.endpoints.get(address)
        if answers is None:
            answers = self.endpoints[address] = _Answers()
        self._count += 1
        answers.seen_at = self._count
        if form is not None:
            answers.keep(form)
        return answers

    def do_most_answer(self) -> bool:
        answering = sum(each.refused_share < 0.5 for each in self.endpoints.values())
        return 2 * answering >= len(self.endpoints)

    def compare(self) -> bool:
        """Compare the endpoints again if enough answers are new; returns whether they are."""
        if self._count < self._due:
            return False
        forgotten = self._count - _INACTIVE * len(self.endpoints)
        self.endpoints = {name: each for name, each in self.endpoints.items() if each.seen_at >= forgotten}
        self._due = self._count + _FRESH * max(4, len(self.endpoints))
        able = [each for each in self.endpoints.values() if sum(map(len, each.by_kind.values())) >= _FEWEST]
        if len(able) < 2 or 2 * len(able) <= len(self.endpoints):
            self._due = self._count + _FRESH
            return False  # keep the figures of endpoints that get no requests now
        known = [
            [_least(forms) for forms in each.by_kind.values()]
            for each in random.sample(able, min(_SAMPLED, len(able)))
        ]
        by_kind: dict[str, list[_Form]] = {}
        for form in chain.from_iterable(known):
            by_kind.setdefault(form.kind, []).append(form)
        self._usual = {kind: _middle(forms) for kind, forms in by_kind.items() if 2 * len(forms) > len(known)}
        self._least = _middle([_least(forms) for forms in known])
        usual = [*self._usual.values(), self._least]
        self.large_bytes = max(each.body_bytes for each in usual) / _MARGIN
        self.slow_s = max(each.seconds for each in usual) / _MARGIN
        return True


def _least(forms: Sequence[_Form]) -> _Form:
    kinds, sizes, seconds = zip(*forms, strict=True)
    return _Form(kinds[0], min(sizes), min(seconds))


def _middle(forms: Sequence[_Form]) -> _Form:
    """The medians of `forms`, of an even number the higher of two."""
    _, sizes, seconds = (sorted(each) for each in zip(*forms, strict=True))
    at = len(forms) // 2
    return _Form(forms[0].kind, sizes[at], seconds[at])


class AnswerComparison:
    """Finds odd answers: most other endpoints give no such answers to requests of the same path and model.

    A server that fails fast is always the emptiest, and would attract most requests. An answer that reports
    its tokens is never odd. Other answers are odd by two of three signs: (1) most endpoints give no answers
    of this kind (status and content type) without reporting tokens; (2) the answer has less than half the
    bytes of most endpoints' smallest last answer; (3) it took less than half the time of their fastest. Only
    answers of its kind count, or all if most endpoints give none of its kind. A refusal (4xx) is odd if the
    endpoint gives nothing else, to several flows, while most endpoints answer half of their requests. If most
    endpoints answer alike, no answer is odd. Good servers seldom give odd answers: an endpoint fails if about
    half of its answers are odd.
    """

    def __init__(self, *, most_endpoints: int = _MOST_ENDPOINTS) -> None:
        self._most_endpoints = most_endpoints
        self._compared: dict[tuple[str, str], _Comparison] = {}  # oldest first
        self._endpoints = 0  # of all comparisons
        self._large_bytes = self._slow_s = 0.0  # the highest of all comparisons
        self._turn, self._watched = 0, 0  # while `_watched` is above 0, all answers are kept

    def add(self, end: Completion, token: str) -> int:
        """Compare the answer to a request with this accounting token. Returns the endpoint's score, at least
        `FAILING` if the endpoint fails; 0 if the answer is not odd, or a failure without comparison."""
        if end.fault or end.outcome is not Outcome.COMPLETED or end.service_s is None:
            return 0
        is_refusal = 400 <= end.status < 500
        has_tokens = bool(end.completion_tokens) and end.status == 200
        self._turn = (self._turn + 1) % _ONE_IN
        may_skip = self._turn > 0 and self._watched == 0 and not is_refusal
        is_usual = end.body_bytes >= self._large_bytes and end.service_s >= self._slow_s
        if may_skip and (has_tokens or is_usual):
            return 0
        key = end.path.partition("?")[0], accounting_token.model_of(token)
        compared = self._compared.get(key)
        if compared is None:
            compared, self._watched = self._compared.setdefault(key, _Comparison()), _ALL_KEPT
        kind = "" if has_tokens else _kind(end.status, end.content_type)
        form = _Form(kind, end.body_bytes, end.service_s)
        is_odd = compared.is_odd(form)
        if may_skip and not is_odd:
            return 0
        address = end.served or accounting_token.endpoint_of(token)
        if address not in compared.endpoints:
            self._make_room()
        answers = compared.keep(address, None if is_refusal else form)
        if compared.compare():
            self._large_bytes = max(each.large_bytes for each in self._compared.values())
            self._slow_s = max(each.slow_s for each in self._compared.values())
            self._endpoints = sum(len(each.endpoints) for each in self._compared.values())
        weight = 1 if self._watched else _ONE_IN
        self._watched = max(self._watched - 1, 0)
        if is_refusal:
            is_odd = answers.refused(accounting_token.flow_of(token)) and compared.do_most_answer()
            if answers.refusals > _FEW_REFUSALS:
                self._watched = max(self._watched, _ALL_WATCHED)
            return FAILING if is_odd else 0
        if not is_odd:
            answers.answered(weight)
            return 0
        self._watched = max(self._watched, _ALL_WATCHED)
        answers.odd = min(answers.odd + _ODD, FAILING)
        return answers.odd

    def _make_room(self) -> None:
        self._endpoints += 1
        while self._endpoints > self._most_endpoints and len(self._compared) > 1:
            self._endpoints -= len(self._compared.pop(next(iter(self._compared))).endpoints)
