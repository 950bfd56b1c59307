"""Shares readings between replicas through Redis: a hash of the newest, and a channel for new readings.
scraping.py calls this module.

    epp:{POOL}:metrics   hash      endpoint -> its newest reading (endpoints/readings.py)   `remove`
    epp:{POOL}:metrics   channel   batches of readings, never stored:

    {"from": "replica-1", "sent": 1700000000123, "readings": {"10.0.0.1:8000": {"at": 1700000000100, ...}},
     "suspects": ["10.0.0.1:8000"]}

`suspects`, if present, are endpoints where requests in flight may have ended unnoticed. Times in the hash and
in messages are by Redis's clock, so that replicas learn the age of a stored reading without comparing their
own clocks: each round trip asks Redis for TIME, and keeps the difference to this replica's monotonic clock.
The receiver of a message uses only `sent` - `at`, the age of a reading when it was sent.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from picker_fleet.domain.errors import MALFORMED, StateUnavailable
from picker_fleet.endpoints.readings import (
    BadReading,
    EndpointMetrics,
    decode_reading,
    encode_reading,
)
from picker_fleet.state import subscriptions
from picker_fleet.state.keys import Keys
from picker_fleet.state.subscriptions import CHECK_S, Command, CommandClient


@dataclass(frozen=True, slots=True)
class Message:
    """A decoded message: `readings` have times of the receiver's clock; `faults` names malformed parts."""

    sender: str
    readings: Mapping[str, EndpointMetrics]
    suspects: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()


class _Wire(msgspec.Struct, omit_defaults=True):
    sender: str = msgspec.field(name="from")
    sent: int
    readings: dict[str, msgspec.Raw]
    suspects: list[str] = []


def message_head(sender: str) -> bytes:
    """The bytes with which every message of `sender` begins, and no other message."""
    return msgspec.json.encode({"from": sender})[:-1] + b","


def encode_message(
    sender: str, sent_ms: int, readings: Mapping[str, bytes], suspects: Sequence[str] = ()
) -> bytes:
    """Encode a message; `readings` maps addresses to encoded readings."""
    parts = {address: msgspec.Raw(reading) for address, reading in readings.items()}
    return msgspec.json.encode(_Wire(sender, sent_ms, parts, list(suspects)))


def decode_message(text: bytes | str, received_ms: int) -> Message:
    """Decode `text`; ages of readings do not include the transmission time.

    Raises:
        BadReading: the channel carried `text`, which is not a message of readings.
    """
    try:
        message = msgspec.json.decode(text, type=_Wire)
    except MALFORMED as fault:
        raise BadReading(f"not a message: {fault}") from None
    read: dict[str, EndpointMetrics] = {}
    faults: list[str] = []
    for address, reading in message.readings.items():
        try:
            read[address] = decode_reading(reading, received_ms - message.sent)
        except BadReading as fault:
            faults.append(f"{address}: {fault}")
    return Message(message.sender, read, tuple(message.suspects), tuple(faults))


_log = logging.getLogger(__name__)
_DEADLINE_S = 0.5


class MetricsChannel:
    """Reads and writes the pool's readings for one replica, on its own connections.

    `scraped_ms` of all arguments and results is by this replica's clock `now_ms` (monotonic, milliseconds).
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
        self._ahead_ms: int | None = None  # Redis's clock minus this replica's clock in ms, or slightly less
        self._fault_logged = False

    async def publish(self, batch: Mapping[str, EndpointMetrics], suspects: Sequence[str] = ()) -> None:
        """Store `batch` and publish it on the channel, in one round trip. An empty batch is a sign of life.

        The replicas that scrape the endpoints `suspects` read the pages of these endpoints soon.

        Raises:
            StateUnavailable: Redis did not accept the batch in time.
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
        """Delete the stored readings of `addresses`.

        Raises:
            StateUnavailable: there was no answer in time.
        """
        if listed := list(addresses):
            await self._ask([("HDEL", self._name, *listed)])

    async def stored(self) -> dict[str, EndpointMetrics]:
        """All stored readings; malformed readings are logged and left out.

        Raises:
            StateUnavailable: there was no answer in time.
        """
        time, flat = await self._ask([("TIME",), ("HGETALL", self._name)])
        shift_ms = -self._note_clock(time)
        found: dict[str, EndpointMetrics] = {}
        for address, text in zip(flat[::2], flat[1::2], strict=True):
            try:
                found[address.decode()] = decode_reading(text, shift_ms)
            except (BadReading, UnicodeDecodeError) as fault:
                _log.warning("ignoring a malformed stored reading of %r: %s", address[:60], fault)
        return found

    async def follow(
        self,
        on_readings: Callable[[str | None, Mapping[str, EndpointMetrics], Sequence[str]], None],
        *,
        check_s: float = CHECK_S,
    ) -> None:
        """Pass readings to `on_readings` until cancelled: the readings of each message with its sender and
        suspects, and after each SUBSCRIBE the stored readings with sender None. Of this replica's own
        messages only the sender is passed on. Reconnects after a fault (state/subscriptions.py).
        """

        async def catch_up() -> None:
            # Read the stored readings after SUBSCRIBE, so that no message between the two is missed.
            on_readings(None, await self.stored(), ())
            self._fault_logged = False

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
            self._fault_logged = True  # log a fault once: every message would repeat the fault
            _log.warning("ignoring malformed readings of other replicas: %s", "; ".join(faults[:3]))

    def _note_clock(self, time: tuple[bytes, bytes]) -> int:
        # Redis read its clock before now, so the difference makes readings slightly older, never newer.
        ahead_ms = int(time[0]) * 1000 + int(time[1]) // 1000 - self._now_ms()
        self._ahead_ms = ahead_ms
        return ahead_ms

    async def _ask(self, commands: Sequence[Command]) -> list[Any]:
        try:
            return await self._commands.execute(commands)
        except StateUnavailable as fault:
            raise StateUnavailable(f"Redis took no metrics: {fault}") from None
