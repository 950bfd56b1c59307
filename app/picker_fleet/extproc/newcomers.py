"""How many flows that nobody has heard of one source may begin (docs/fairness.md, "Invented ids").

Each new flow has a share of its own, so whoever may invent names could have many. A flow that has been seen
costs a look into a dictionary.
"""

import ipaddress
import math
from collections.abc import Callable, Collection

from picker_fleet.errors import TooManyFlows
from picker_fleet.rates import Rates

_MOST_SOURCES = 10_000
_MOST_FLOWS = 16_384  # that are remembered; one forgotten counts as new again
_NETWORK_BITS = 64  # of an IPv6 address: what one customer has at least
_MINUTE_S = 60.0


class Newcomers:
    """Lets `per_minute` new flows a minute of each source through; those of `configured` are never new.

    `hops` is how many proxies between clients and Envoy append to x-forwarded-for. `clock` is in seconds.
    """

    def __init__(
        self, per_minute: int, configured: Collection[str], hops: int, clock: Callable[[], float]
    ) -> None:
        self._per_minute = per_minute
        self._hops = hops
        self._seen: dict[str, None] = {}
        self._configured = frozenset(configured)
        self._rates = Rates(per_minute / _MINUTE_S, per_minute, _MOST_SOURCES, clock)

    def check(self, flow: str, forwarded_for: bytes) -> None:
        """`flow` asks for something, from where `forwarded_for`, a header as Envoy has it, says.

        Raises:
            TooManyFlows: it is new, and its source has begun as many as it may.
        """
        if flow in self._seen or flow in self._configured:
            return
        source = self._source(forwarded_for)
        if source:  # else there is nothing to tell one client from another by
            wait_s = self._rates.take(source)
            if wait_s:
                raise TooManyFlows(
                    f"more than {self._per_minute} new flows a minute from one source",
                    retry_after_s=max(1, math.ceil(wait_s)),
                )
        self._seen[flow] = None
        if len(self._seen) > _MOST_FLOWS:
            del self._seen[next(iter(self._seen))]

    def _source(self, forwarded_for: bytes) -> str:
        """The address that the first trusted proxy was called from; of IPv6 its network."""
        if not forwarded_for:
            return ""
        entries = forwarded_for.split(b",")
        text = entries[max(len(entries) - 1 - self._hops, 0)].strip().decode("latin-1")
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return text[:64]
        if isinstance(address, ipaddress.IPv4Address):
            return text
        return str(ipaddress.IPv6Network((address, _NETWORK_BITS), strict=False))
