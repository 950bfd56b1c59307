"""How near requests are to being turned away, as each answer tells its client: `x-queue-pressure`.

Documented in docs/fairness.md, "Backpressure". What it is made of is known where the answer is made, so
that no request asks Redis for it.
"""

from typing import Final

HEADER: Final = "x-queue-pressure"

# To write a number anew for each answer costs more than the rest of it.
_STEPS = 100
_TEXTS = tuple(f"{step / _STEPS:.2f}" for step in range(_STEPS + 1))
FULL: Final = _TEXTS[-1]


def pressure(fill: float, waited_s: float, ttl_s: float) -> str:
    """`0.00` to `1.00`: the greater of `fill`, the part of the queue that is taken, and the part of its time
    to live that the request has waited."""
    waited = waited_s / ttl_s
    greater = fill if fill > waited else waited
    return _TEXTS[round(greater * _STEPS)] if greater < 1 else FULL
