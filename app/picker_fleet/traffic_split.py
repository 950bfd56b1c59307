"""Which variant of a model a request is sent as: exact shares, and the same one for the same id. Pure.

Exact shares and a choice that follows from the id alone exclude each other: of ids that nobody chose, any
fixed share of them falls on a variant only on average (docs/decisions.md, 26). So the id proposes, and the
counts decide: a proposal that would take a variant further than one request from its exact share is replaced.
The counts are the fleet's (lua/split.lua, admission/variants.py), or while Redis is away each replica's own.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from itertools import accumulate
from typing import Final, NamedTuple

from xxhash import xxh64_hexdigest, xxh64_intdigest

_REMEMBERED: Final = 10_000  # request ids


class Split(NamedTuple):
    """What requests for a model are sent as: names, and the cumulated weights that choose among them."""

    names: tuple[str, ...]
    bounds: tuple[int, ...]

    @classmethod
    def of(cls, targets: Iterable[tuple[str, int]]) -> "Split":
        """Of names and weights; a weight of 0 is never chosen."""
        weighted = [(name, weight) for name, weight in targets if weight]
        return cls(tuple(name for name, _ in weighted), tuple(accumulate(weight for _, weight in weighted)))

    @property
    def weights(self) -> tuple[int, ...]:
        lower = (0, *self.bounds[:-1])
        return tuple(bound - below for below, bound in zip(lower, self.bounds, strict=True))

    def at(self, share: float) -> int:
        """The position of the name that `share`, from 0 to 1, falls on."""
        # It may round up to the last bound.
        return min(bisect_right(self.bounds, share * self.bounds[-1]), len(self.names) - 1)


class Shares:
    """Hands out the names of `split`, which requests for `model` are sent as; '' for any. One event loop.

    `of` counts by itself: after any number of requests each of two names has been given to its exact share
    of them or one more or less; of more names, two more or less. `propose` and `remember` are for those that
    have the fleet's counts. An id that comes again gets what it got, as long as it is among the last
    `_REMEMBERED`.
    """

    def __init__(self, split: Split, model: str = "") -> None:
        self.split = split
        names = "\n".join((model, *split.names)).encode()  # which have no control characters
        self._weights = split.weights
        self.weights = " ".join(map(str, self._weights))
        # New weights have counts of their own, so nobody catches up on old ones; ids keep their variants.
        self.key = xxh64_hexdigest(names + b"\n" + self.weights.encode())
        self._seed = xxh64_intdigest(names)
        # How many requests more than its exact share each name has been given here, times the sum of the
        # weights: whole numbers.
        self._surplus = [0] * len(split.names)
        self._given: OrderedDict[int, int] = OrderedDict()  # by the id's hash: an id may be long

    def hash_of(self, request_id: str) -> int:
        """Of 64 bits, which are others for the same id of another model."""
        return xxh64_intdigest(request_id.encode(errors="surrogatepass"), self._seed)

    def remembered(self, digest: int) -> int | None:
        """The position of the name that an id, by its hash, was given here; None if it is not known."""
        return self._given.get(digest)

    def propose(self, digest: int) -> int:
        """The position of the name that an id alone leads to."""
        return self.split.at(digest / 2**64)

    def remember(self, digest: int, at: int) -> None:
        self._given[digest] = at
        if len(self._given) > _REMEMBERED:
            self._given.popitem(last=False)

    def of(self, request_id: str) -> str:
        """The name that a request is sent as, by this replica's counts."""
        names = self.split.names
        if len(names) == 1:
            return names[0]
        digest = self.hash_of(request_id)
        at = self.remembered(digest)
        if at is None:
            at = self._decide(self.propose(digest))
            self.remember(digest, at)
        return names[at]

    def _decide(self, proposed: int) -> int:
        """As lua/split.lua has it."""
        total = self.split.bounds[-1]
        surplus = [have - weight for have, weight in zip(self._surplus, self._weights, strict=True)]
        last = min(range(len(surplus)), key=surplus.__getitem__)
        keeps_up = last == proposed or surplus[last] >= -total
        given = proposed if keeps_up and surplus[proposed] <= 0 else last
        surplus[given] += total
        self._surplus = surplus
        return given
