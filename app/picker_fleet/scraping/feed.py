"""Redis's part in scraping: readings go into a hash for who comes later and over a channel to who is there.

    epp:{POOL}:metrics   hash      endpoint -> its newest reading (scraping/metrics.py)   `remove`
    epp:{POOL}:metrics   channel   batches of readings (scraping/message.py)              (never stored)

Moments in both are Redis's own, so that the age of a stored reading can be told without comparing replicas'
clocks: each round trip asks for TIME, and the difference to this replica's monotonic clock is kept.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from picker_fleet.errors import StateUnavailable
from picker_fleet.scraping import message, metrics
from picker_fleet.scraping.metrics import BadReading, EndpointMetrics
from picker_fleet.state import channel
from picker_fleet.state.asker import Asker, Command
from picker_fleet.state.channel import CHECK_S
from picker_fleet.state.keys import Keys

_log = logging.getLogger(__name__)
_DEADLINE_S = 0.5


class Feed:
    """One replica's reading and writing of its pool's readings, on connections of its own.

    `scraped_ms` of what goes in and comes out is of this replica's clock `now_ms` (monotonic, milliseconds).
    """

    def __init__(
        self, url: str, pool: str, replica: str, *, now_ms: Callable[[], int], deadline_s: float = _DEADLINE_S
    ) -> None:
        self._url = url
        self._name = Keys.of(pool).prefix + "metrics"
        self._replica = replica
        self._own = message.head(replica)
        self._now_ms = now_ms
        self._asker = Asker(url, self._name, deadline_s=deadline_s)
        self._ahead_ms: int | None = None  # Redis's clock minus this replica's, or a little less
        self._told_fault = False

    async def publish(self, batch: Mapping[str, EndpointMetrics], suspects: Sequence[str] = ()) -> None:
        """Store and announce `batch`, in one round trip. An empty one only says that this replica lives.

        The pages of `suspects` are wanted soon, whoever reads them.

        Raises:
            StateUnavailable: Redis did not take it in time.
        """
        if self._ahead_ms is None:
            self._note_clock((await self._ask([("TIME",)]))[0])
        assert self._ahead_ms is not None
        encoded = {address: metrics.encode(one, self._ahead_ms) for address, one in batch.items()}
        text = message.encode(self._replica, self._now_ms() + self._ahead_ms, encoded, suspects)
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
                found[address.decode()] = metrics.decode(text, shift_ms)
            except (BadReading, UnicodeDecodeError) as fault:
                _log.warning("a stored reading of %r is left out: %s", address[:60], fault)
        return found

    async def follow(
        self,
        on_readings: Callable[[str | None, Mapping[str, EndpointMetrics], Sequence[str]], None],
        *,
        on_link: Callable[[], None],
        check_s: float = CHECK_S,
    ) -> None:
        """Pass readings to `on_readings` until cancelled: what is stored (sender None), and messages with
        their suspects. Of its own messages it hears only that they came.

        It begins anew after a fault (state/channel.py). `on_link` is called each time messages have begun
        to come and what is stored was read.
        """

        async def catch_up() -> None:
            # Only now is no message missed between what is stored and what is announced.
            on_readings(None, await self.stored(), ())
            self._told_fault = False
            on_link()

        def take(text: bytes) -> None:
            if text.startswith(self._own):
                on_readings(self._replica, {}, ())
                return
            try:
                heard = message.decode(text, self._now_ms())
            except BadReading as fault:
                self._warn((str(fault),))
            else:
                on_readings(heard.sender, heard.readings, heard.suspects)
                self._warn(heard.faults)

        what = "metrics of other replicas"
        await channel.follow(self._url, self._name, take, what=what, on_link=catch_up, check_s=check_s)

    async def close(self) -> None:
        """End the connection that `publish` uses."""
        await self._asker.close()

    def _warn(self, faults: Sequence[str]) -> None:
        if faults and not self._told_fault:
            self._told_fault = True  # they would come with every message
            _log.warning("readings of other replicas are left out: %s", "; ".join(faults[:3]))

    def _note_clock(self, time: tuple[bytes, bytes]) -> int:
        # Now is later than Redis's answer was: what is stamped seems a little older, never younger.
        ahead_ms = int(time[0]) * 1000 + int(time[1]) // 1000 - self._now_ms()
        self._ahead_ms = ahead_ms
        return ahead_ms

    async def _ask(self, commands: Sequence[Command]) -> list[Any]:
        try:
            return await self._asker.ask(commands)
        except StateUnavailable as fault:
            raise StateUnavailable(f"Redis took no metrics: {fault}") from None
