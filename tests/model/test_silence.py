"""The moment at which a silent replica is gone is one and the same for all who ask."""

import json

import pytest
from direct_calls import OPEN, arrival
from script_fleet import SETTINGS
from script_side import SILENCE_MS, ScriptSide

START_US = 1_000_000_000


@pytest.mark.parametrize(("silent_ms", "live"), [(SILENCE_MS - 1, True), (SILENCE_MS, False)])
def test_heartbeat_state_dispatch_and_sweep_agree(side: ScriptSide, silent_ms: int, live: bool) -> None:
    # A's request, which waits behind b's.
    side.clear()
    settings = json.dumps({**SETTINGS, "upper_per": 1, "lower_per": 1, "silence_ms": SILENCE_MS})
    side.call(START_US, "publish", ["b", "1", "1", settings, "e", OPEN])
    side.call(START_US, "heartbeat", ["b", "{}", SILENCE_MS])
    for caller, request in (("b", "runs"), ("a", "waits")):
        side.call(START_US, "admit", [caller, arrival(request)])
    side.call(START_US, "heartbeat", ["a", "{}", SILENCE_MS])
    now_us = START_US + silent_ms * 1000
    # When a has been silent, to the millisecond
    beat = side.call(now_us, "heartbeat", ["b", "{}", SILENCE_MS])
    settled = side.call(now_us, "settle", ["b", "runs", "completed", "", ""])
    swept = side.call(now_us, "sweep", ["b", 0, 1000, 60_000, 10**9])
    # It is live for all or for none: it counts, it is shown, it is granted, it is kept.
    assert beat.reply.answers[2] == (2 if live else 1)
    assert beat.numbers["replicas"] == (["a", "b"] if live else ["b"])
    assert ("granted waits turn" in settled.events) is live
    assert any(event.startswith("held waits") for event in settled.events + swept.events) is not live
    assert ("a" in swept.numbers["replicas"]) is live
