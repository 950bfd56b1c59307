"""Which variant of a model a request is sent to: exact shares, and the same one for the same id. Pure.

Exact shares and a choice that follows from the id alone exclude each other: of ids that nobody chose, any
fixed share of them falls on a variant only on average (docs/decisions.md, 26). So the id proposes, and the
counts decide: a proposal that would take a variant further than one request from its exact share is replaced.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from itertools import accumulate
from typing import Final, NamedTuple

from xxhash import xxh64_intdigest

_REMEMBERED: Final = 10_000  # request ids
_EPSILON: Final = 1e-9


class Split(NamedTuple):
    """What requests for a model are sent as: names, and the cumulated weights that choose among them."""

    names: tuple[str, ...]
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, targets: Iterable[tuple[str, int]]) -> "Split":
        """Of names and weights; a weight of 0 is never chosen."""
        weighted = [(name, weight) for name, weight in targets if weight]
        return cls(tuple(name for name, _ in weighted), tuple(accumulate(weight for _, weight in weighted)))

    def at(self, share: float) -> int:
        """The position of the name that `share`, from 0 to 1, falls on."""
        # It may round up to the last bound.
        return min(bisect_right(self.bounds, share * self.bounds[-1]), len(self.names) - 1)


class Shares:
    """Hands out the names of `split`. One event loop.

    After any number of requests each of two names has been given to its exact share of them or one more or
    less; of more names, two more or less. An id that comes again gets what it got, as long as it is among the
    last `_REMEMBERED`; with two names at 9:1 another replica gives it the same in about 9 cases of 10.
    """

    def __init__(self, split: Split) -> None:
        self.split = split
        total = split.bounds[-1]
        lower = (0, *split.bounds[:-1])
        self._parts = [(bound - below) / total for below, bound in zip(lower, split.bounds, strict=True)]
        self._surplus = [0.0] * len(
            split.names
        )  # how many more than its exact share each name has been given
        self._given: OrderedDict[int, int] = OrderedDict()  # by the id's hash: an id may be long

    def of(self, request_id: str) -> str:
        names = self.split.names
        if len(names) == 1:
            return names[0]
        digest = xxh64_intdigest(request_id.encode(errors="surrogatepass"))
        at = self._given.get(digest)
        if at is None:
            at = self._given[digest] = self._decide(self.split.at(digest / 2**64))
            if len(self._given) > _REMEMBERED:
                self._given.popitem(last=False)
        return names[at]

    def _decide(self, proposed: int) -> int:
        surplus = [have - part for have, part in zip(self._surplus, self._parts, strict=True)]
        last = min(range(len(surplus)), key=surplus.__getitem__)
        keeps_up = last == proposed or surplus[last] >= -1.0 - _EPSILON
        given = proposed if keeps_up and surplus[proposed] <= _EPSILON else last
        surplus[given] += 1.0
        self._surplus = surplus
        return given
