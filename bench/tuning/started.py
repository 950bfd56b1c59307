"""Trials of settings that are given when a fleet starts; each value has a fleet of its own, or shares one."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from bench.tuning.fleet import SERVICE_MS, SLOW_MS, Group, Seen
from bench.tuning.knobs import BURST, Trial, answers, queue, shares, stock

# What each fleet is started with, and how long its answers take; '' is the one of most live changes.
FLEETS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "": ({}, SERVICE_MS),
    BURST: ({}, SLOW_MS),
    "other": ({"fair_request_queue": {"queue_ttl": "2s", "overload_status": 429}}, SERVICE_MS),
    "tokens": ({"request_queue_controller": {"unit": "tokens", "watermark_per_backend": 400}}, SERVICE_MS),
}
_LENGTHS = (Group("long", 24, max_tokens=300), Group("short", 24))


def _lengths(seen: Seen) -> str:
    return f"{shares(16)(seen)}; {stock(seen)}"


def _statuses(seen: Seen) -> str:
    told = Counter((answer.status, answer.code or "ok") for answer in seen.answers)
    return "; ".join(f"{count} {status} `{code}`" for (status, code), count in sorted(told.items()))


STARTED = (
    Trial(
        "unit",
        "24 requests of `long` (300 tokens at most) wait, then 24 of `short` (1 token); the first 16 served",
        {"requests": {}, "tokens, watermark 400": {}},
        _LENGTHS,
        _lengths,
        fleets={"tokens, watermark 400": "tokens"},
    ),
    Trial(
        "queue_ttl",
        "8 requests wait while dispatch is paused for 4 s",
        {"600s": {}, "2s": {}},
        (Group("client", 8),),
        answers,
        fleets={"2s": "other"},
        hold_s=4.0,
    ),
    Trial(
        "overload_status",
        "a queue of 4: a flow sends 8 requests",
        {status: queue(total_capacity=4, flow_capacity=4) for status in ("503", "429")},
        (Group("client", 8),),
        _statuses,
        fleets={"429": "other"},
    ),
)
