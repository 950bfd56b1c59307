"""A batch of readings as it goes over the channel `epp:{POOL}:metrics`: who sent it, when, and what.

    {"from": "replica-1", "sent": 1700000000123, "readings": {"10.0.0.1:8000": {"at": 1700000000100, ...}},
     "suspects": ["10.0.0.1:8000"]}

`suspects`, if there are any, are endpoints where requests in flight have given no sign of life.

`sent` and `at` are the sender's idea of Redis's clock, in ms. Only their difference is used: how old a
reading was when it was sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import orjson

from picker_fleet.scraping.metrics import BadReading, EndpointMetrics, of_object


@dataclass(frozen=True, slots=True)
class Message:
    """`readings` are on the clock of the replica that reads it; those it could not read are in `faults`."""

    sender: str
    readings: Mapping[str, EndpointMetrics]
    suspects: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


def head(sender: str) -> bytes:
    """What each message of `sender` begins with, and nobody else's."""
    return orjson.dumps({"from": sender})[:-1] + b","


def encode(sender: str, sent_ms: int, readings: Mapping[str, bytes], suspects: Sequence[str] = ()) -> bytes:
    """The message; `readings` are encoded ones, by address."""
    parts = {address: orjson.Fragment(reading) for address, reading in readings.items()}
    told: dict[str, object] = {"from": sender, "sent": sent_ms, "readings": parts}
    if suspects:
        told["suspects"] = list(suspects)
    return orjson.dumps(told)


def decode(text: bytes | str, received_ms: int) -> Message:
    """What `text` says, as if its readings had travelled in no time.

    Raises:
        BadReading: the message as a whole is not one.
    """
    try:
        told = orjson.loads(text)
    except orjson.JSONDecodeError as fault:
        raise BadReading(f"a message is no JSON: {fault}") from None
    match told:
        case {"from": str(sender), "sent": int(sent_ms), "readings": dict(readings)}:
            pass
        case _:
            raise BadReading("a message has no sender, time or readings")
    read: dict[str, EndpointMetrics] = {}
    faults: list[str] = []
    for address, reading in readings.items():
        try:
            read[address] = of_object(reading, received_ms - sent_ms)
        except BadReading as fault:
            faults.append(f"{address}: {fault}")
    suspects = told.get("suspects", [])
    if not (isinstance(suspects, list) and all(isinstance(each, str) for each in suspects)):
        suspects, faults = [], [*faults, "suspects are no list of addresses"]
    return Message(sender, read, tuple(suspects), tuple(faults))
