"""One arrival as `lua/admit.lua` takes it: packed into one argument, which Redis and Lua each take over once
instead of once for each field."""

import struct

from picker_fleet.request import InferenceRequest
from picker_fleet.state.schema import ARRIVAL_NUMBERS, ARRIVAL_TEXTS

_NUMBERS = struct.Struct(f"<{len(ARRIVAL_NUMBERS)}d")


def arrival(request: InferenceRequest, attempt: int, candidates: str, age_s: float = 0.0) -> bytes:
    """Packed for Redis; times in ms, the age to the µs: it orders those that come again in one message.

    ValueError where a text holds byte 0, which would end it early.
    """
    workload = request.workload
    return pack(
        (
            request.id,
            str(attempt),
            request.flow,
            workload.id if workload.registered else "",
            request.model,
            candidates,
        ),
        (
            int(request.band),
            request.weight,
            request.cost,
            int(request.ttl_s * 1000),
            round(age_s * 1000, 3),
            workload.criticality,
            request.limit,
            request.learn,
        ),
    )


def pack(texts: tuple[str, str, str, str, str, str], numbers: tuple[float, ...]) -> bytes:
    """ARRIVAL_TEXTS and ARRIVAL_NUMBERS in their order. ValueError as above."""
    packed = ("\0".join(texts) + "\0").encode(errors="surrogateescape")
    if packed.count(0) != len(ARRIVAL_TEXTS):
        raise ValueError("byte 0 in a text")
    return packed + _NUMBERS.pack(*numbers)
