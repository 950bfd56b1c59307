"""Readings, shared between replicas through Redis: a hash of the newest, and a channel of new ones.
scraping.py is the caller.

    epp:{POOL}:metrics   hash      endpoint -> its newest reading (endpoints/readings.py)   `remove`
    epp:{POOL}:metrics   channel   batches of readings, never stored:

    {"from": "replica-1", "sent": 1700000000123, "readings": {"10.0.0.1:8000": {"at": 1700000000100, ...}},
     "suspects": ["10.0.0.1:8000"]}

`suspects`, if there are any, are endpoints where requests in flight have shown no sign of life. Times in both
are Redis's own, so that the age of a stored reading is known without comparing replicas' clocks: each round
trip asks for TIME, and the difference to this replica's monotonic clock is kept. Of `sent` and `at` only the
difference is used: how old a reading was when it was sent.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from picker_fleet.endpoints.readings import (
    BadReading,
    EndpointMetrics,
    decode_reading,
    encode_reading,
    reading_of_json,
)
from picker_fleet.errors import StateUnavailable
from picker_fleet.state import subscriptions
from picker_fleet.state.keys import Keys
from picker_fleet.state.subscriptions import CHECK_S, Command, CommandClient


@dataclass(frozen=True, slots=True)
class Message:
    """`readings` are on the clock of the replica that reads it; those it could not read are in `faults`."""

    sender: str
    readings: Mapping[str, EndpointMetrics]
    suspects: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


def message_head(sender: str) -> bytes:
    """What each message of `sender` begins with, and nobody else's."""
    return orjson.dumps({"from": sender})[:-1] + b","


def encode_message(
    sender: str, sent_ms: int, readings: Mapping[str, bytes], suspects: Sequence[str] = ()
) -> bytes:
    """The message; `readings` are encoded ones, by address."""
    parts = {address: orjson.Fragment(reading) for address, reading in readings.items()}
    message: dict[str, object] = {"from": sender, "sent": sent_ms, "readings": parts}
    if suspects:
        message["suspects"] = list(suspects)
    return orjson.dumps(message)


def decode_message(text: bytes | str, received_ms: int) -> Message:
    """What `text` says, as if its readings had travelled in no time.

    Raises:
        BadReading: the message as a whole is not one.
    """
    try:
        message = orjson.loads(text)
    except orjson.JSONDecodeError as fault:
        raise BadReading(f"a message is no JSON: {fault}") from None
    match message:
        case {"from": str(sender), "sent": int(sent_ms), "readings": dict(readings)}:
            pass
        case _:
            raise BadReading("a message has no sender, time or readings")
    read: dict[str, EndpointMetrics] = {}
    faults: list[str] = []
    for address, reading in readings.items():
        try:
            read[address] = reading_of_json(reading, received_ms - sent_ms)
        except BadReading as fault:
            faults.append(f"{address}: {fault}")
    suspects = message.get("suspects", [])
    if not (isinstance(suspects, list) and all(isinstance(each, str) for each in suspects)):
        suspects, faults = [], [*faults, "suspects are no list of addresses"]
    return Message(sender, read, tuple(suspects), tuple(faults))


_log = logging.getLogger(__name__)
_DEADLINE_S = 0.5


class MetricsChannel:
    """One replica's reading and writing of its pool's readings, on connections of its own.

    `scraped_ms` of what goes in and comes out is of this replica's clock `now_ms` (monotonic, milliseconds).
    """

    def __init__(
        self, url: str, pool: str, replica: str, *, now_ms: Callable[[], int], deadline_s: float = _DEADLINE_S
    ) -> None:
        self._url = url
        self._name = Keys.of(pool).metrics
        self._replica = replica
        self._own = message_head(replica)
        self._now_ms = now_ms
        self._commands = CommandClient(url, self._name, deadline_s=deadline_s)
        self._ahead_ms: int | None = None  # Redis's clock minus this replica's, or a little less
        self._fault_logged = False

    async def publish(self, batch: Mapping[str, EndpointMetrics], suspects: Sequence[str] = ()) -> None:
        """Store and announce `batch`, in one round trip. An empty one is a sign of life.

        Replicas that scrape `suspects` read those pages soon.

        Raises:
            StateUnavailable: Redis did not take it in time.
        """
        if self._ahead_ms is None:
            self._note_clock((await self._ask([("TIME",)]))[0])
        assert self._ahead_ms is not None
        encoded = {address: encode_reading(one, self._ahead_ms) for address, one in batch.items()}
        text = encode_message(self._replica, self._now_ms() + self._ahead_ms, encoded, suspects)
        commands: list[Command] = [("TIME",), ("PUBLISH", self._name, text)]
        if encoded:
            commands.append(("HSET", self._name, *(part for pair in encoded.items() for part in pair)))
        self._note_clock((await self._ask(commands))[0])

    async def remove(self, addresses: Iterable[str]) -> None:
        """Drop what is stored of `addresses`.

        Raises:
            StateUnavailable: Redis did not take it in time.
        """
        if listed := list(addresses):
            await self._ask([("HDEL", self._name, *listed)])

    async def stored(self) -> dict[str, EndpointMetrics]:
        """Every stored reading that can be read.

        Raises:
            StateUnavailable: Redis did not answer in time.
        """
        time, flat = await self._ask([("TIME",), ("HGETALL", self._name)])
        shift_ms = -self._note_clock(time)
        found: dict[str, EndpointMetrics] = {}
        for address, text in zip(flat[::2], flat[1::2], strict=True):
            try:
                found[address.decode()] = decode_reading(text, shift_ms)
            except (BadReading, UnicodeDecodeError) as fault:
                _log.warning("a stored reading of %r is left out: %s", address[:60], fault)
        return found

    async def follow(
        self,
        on_readings: Callable[[str | None, Mapping[str, EndpointMetrics], Sequence[str]], None],
        *,
        on_subscribed: Callable[[], None],
        check_s: float = CHECK_S,
    ) -> None:
        """Pass readings to `on_readings` until cancelled: what is stored (sender None), and messages with
        their suspects. Of this replica's own messages only the sender is passed on.

        It reconnects after a fault (state/subscriptions.py). `on_subscribed` is called each time messages
        begin to come and what is stored has been read.
        """

        async def catch_up() -> None:
            # Only now is no message missed between what is stored and what is announced.
            on_readings(None, await self.stored(), ())
            self._fault_logged = False
            on_subscribed()

        def take(text: bytes) -> None:
            if text.startswith(self._own):
                on_readings(self._replica, {}, ())
                return
            try:
                message = decode_message(text, self._now_ms())
            except BadReading as fault:
                self._warn((str(fault),))
            else:
                on_readings(message.sender, message.readings, message.suspects)
                self._warn(message.faults)

        what = "metrics of other replicas"
        await subscriptions.follow(
            self._url, self._name, take, what=what, on_subscribed=catch_up, check_s=check_s
        )

    async def close(self) -> None:
        await self._commands.close()

    def _warn(self, faults: Sequence[str]) -> None:
        if faults and not self._fault_logged:
            self._fault_logged = True  # every message would repeat it
            _log.warning("readings of other replicas are left out: %s", "; ".join(faults[:3]))

    def _note_clock(self, time: tuple[bytes, bytes]) -> int:
        # Redis answered before now, so stamped readings seem a little older, never younger.
        ahead_ms = int(time[0]) * 1000 + int(time[1]) // 1000 - self._now_ms()
        self._ahead_ms = ahead_ms
        return ahead_ms

    async def _ask(self, commands: Sequence[Command]) -> list[Any]:
        try:
            return await self._commands.execute(commands)
        except StateUnavailable as fault:
            raise StateUnavailable(f"Redis took no metrics: {fault}") from None
