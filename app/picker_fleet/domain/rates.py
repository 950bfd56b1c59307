"""Token buckets by key: limits for the rates of client addresses and other keys."""

import math
from collections import OrderedDict
from collections.abc import Callable

_MOST_RETRY_S = 3600


def retry_after_s(wait_s: float) -> int:
    """`wait_s` as a Retry-After: whole seconds, at least 1 and at most an hour."""
    return max(1, math.ceil(min(wait_s, _MOST_RETRY_S)))


class Rates:
    """One bucket for each key: refilled with `per_s` tokens a second, up to `burst` tokens.

    The `most_keys` most recently used buckets are kept; `clock` is in seconds.
    """

    def __init__(self, per_s: float, burst: float, most_keys: int, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._burst = burst
        self._most_keys = most_keys
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # (tokens left, when counted)

    def take(self, key: str = "", cost: float = 1.0) -> float:
        """Take `cost` tokens from the bucket of `key`. Returns 0, or the seconds until there are enough."""
        now_s = self._clock()
        left, as_of_s = self._left.pop(key, (self._burst, now_s))
        left = min(self._burst, left + (now_s - as_of_s) * self._per_s)
        enough = left >= cost
        self._left[key] = left - cost if enough else left, now_s
        if len(self._left) > self._most_keys:
            self._left.popitem(last=False)
        return 0.0 if enough else (cost - left) / self._per_s
