"""The replica info, which each heartbeat publishes for the other replicas."""

import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from picker_fleet import version
from picker_fleet.admission.ledger import ServiceMeter
from picker_fleet.admission.shared_queue import SharedQueue
from picker_fleet.domain.units import is_loopback

_log = logging.getLogger(__name__)
_ANY_ADDRESS = ("0.0.0.0", "[::]")
_LOOPBACK = "127.0.0.1"
_UP_STEP_S = 10  # rounds the uptime down, so that an idle replica's info seldom changes
_MANY_STREAMS = 32  # the replica info omits peer addresses with fewer streams
# Envoy's default limit of concurrent requests to a cluster (circuit breaker); Envoy refuses further requests.
_ENVOY_LIMIT = 1024
_NEAR = 0.03 * _ENVOY_LIMIT
_NEAR_S = 10.0  # time that an Envoy must be near its stream limit before the warning
_MOST_WARNED = 1000  # maximum Envoy addresses that get the warning
_ELSEWHERE = ("192.0.2.1", 9)  # a documentation address (RFC 5737), which no host has


class ReplicaInfo:
    """Returns the replica info when called: the JSON object `about` of docs/redis-schema.md."""

    def __init__(self, queue: SharedQueue, service: ServiceMeter, clock_s: Callable[[], float]) -> None:
        self._queue = queue
        self._service = service
        self._clock_s = clock_s
        self._started_s = clock_s()
        self._host = socket.gethostname()
        self._reached: dict[str, str] = {}
        self._streams_by_peer: Callable[[], Mapping[str, int]] = dict

    def reached(self, *, admin: str, grpc: str) -> None:
        """Set the addresses at which this replica listens for requests. `admin` is the admin API's URL,
        `grpc` is `host:port`. This host's own address replaces a wildcard."""
        self._reached = {"admin": self._named(admin), "grpc": self._named(grpc)}

    def follow_streams(self, by_peer: Callable[[], Mapping[str, int]]) -> None:
        """Set `by_peer`, which returns the number of open gRPC streams by peer address."""
        self._streams_by_peer = by_peer

    def grpc_address(self) -> str:
        """The host:port at which other replicas reach this replica; '' until this replica listens."""
        return self._reached.get("grpc", "")

    def __call__(self) -> dict[str, object]:
        return {
            "host": self._host,
            "version": version(),
            **self._reached,
            "up_s": _UP_STEP_S * int((self._clock_s() - self._started_s) / _UP_STEP_S),
            "waiting": self._queue.waiting,
            **({"streams": many} if (many := self._many_streams()) else {}),
            "served": self._service.report(),
        }

    def _many_streams(self) -> dict[str, int]:
        """Peer address -> its number of streams, if large: small numbers would change the info too often."""
        return {peer: count for peer, count in self._streams_by_peer().items() if count >= _MANY_STREAMS}

    def _named(self, address: str) -> str:
        for wildcard in _ANY_ADDRESS:
            address = address.replace(f"{wildcard}:", f"{_own_address(self._host)}:")
        return address


class EnvoyLimits:
    """Warns once for each Envoy that stays at Envoy's default limit of streams to the fleet."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._since_s: dict[str, float] = {}  # address near the stream limit -> since when
        self._warned: set[str] = set()

    def look(self, infos: Iterable[Mapping[str, object]]) -> None:
        """Check the stream counts of `infos`, the infos of all replicas."""
        total: Counter[str] = Counter()
        for info in infos:
            streams = info.get("streams")
            for peer, count in streams.items() if isinstance(streams, Mapping) else ():
                total[peer] += count if isinstance(count, int) else 0
        now_s = self._clock_s()
        near = [peer for peer, count in total.items() if abs(count - _ENVOY_LIMIT) <= _NEAR]
        self._since_s = {peer: self._since_s.get(peer, now_s) for peer in near}
        for peer, since_s in self._since_s.items():
            if now_s - since_s >= _NEAR_S and peer not in self._warned and len(self._warned) < _MOST_WARNED:
                self._warned.add(peer)
                _log.warning(
                    "the Envoy at %s has %d streams to the fleet: its circuit breaker for the pickers may be "
                    "at its default and refuse further ones",
                    peer,
                    total[peer],
                )


def _own_address(host: str) -> str:
    """The address by which other hosts reach this host.

    If the host's name resolves to a loopback address, use the source address of the route to other hosts.
    """
    try:
        address = socket.gethostbyname(host)
        if not is_loopback(address):
            return address
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect(_ELSEWHERE)  # connecting a UDP socket sends no packet
            return str(route.getsockname()[0])
    except OSError:
        return _LOOPBACK
