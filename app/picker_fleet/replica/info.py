"""What a replica tells the others of itself with each heartbeat."""

import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from picker_fleet import version
from picker_fleet.admission.shared_gate import ServiceMeter, SharedGate
from picker_fleet.units import is_loopback

_log = logging.getLogger(__name__)
_ANY_ADDRESS = ("0.0.0.0", "[::]")
_LOOPBACK = "127.0.0.1"
_UP_STEP_S = 10  # the uptime is rounded to this, so that the info of an idle replica seldom changes
_MANY_STREAMS = 32
# What an Envoy sends to one cluster at once, unless it is configured otherwise; it refuses the rest itself.
_ENVOY_LIMIT = 1024
_NEAR = 0.03 * _ENVOY_LIMIT
_NEAR_S = 10.0
_MOST_WARNED = 1000
_ELSEWHERE = ("192.0.2.1", 9)  # an address for documentation (RFC 5737)


class ReplicaInfo:
    """Called, it returns the JSON object of docs/redis-schema.md, `about`."""

    def __init__(self, gate: SharedGate, service: ServiceMeter, clock_s: Callable[[], float]) -> None:
        self._gate = gate
        self._service = service
        self._clock_s = clock_s
        self._started_s = clock_s()
        self._host = socket.gethostname()
        self._reached: dict[str, str] = {}
        self._streams_by_peer: Callable[[], Mapping[str, int]] = dict

    def reached(self, *, admin: str, grpc: str) -> None:
        """Where this replica listens: a URL and a `host:port`. This host's own address replaces a
        wildcard."""
        self._reached = {"admin": self._named(admin), "grpc": self._named(grpc)}

    def follow_streams(self, by_peer: Callable[[], Mapping[str, int]]) -> None:
        """`by_peer` returns how many streams of gRPC each address has open here."""
        self._streams_by_peer = by_peer

    @property
    def grpc(self) -> str:
        """Where the others reach this replica, host:port; '' until it listens."""
        return self._reached.get("grpc", "")

    def __call__(self) -> dict[str, object]:
        return {
            "host": self._host,
            "version": version(),
            **self._reached,
            "up_s": _UP_STEP_S * int((self._clock_s() - self._started_s) / _UP_STEP_S),
            "waiting": self._gate.waiting,
            **({"streams": many} if (many := self._many_streams()) else {}),
            "served": self._service.report(),
        }

    def _many_streams(self) -> dict[str, int]:
        """Of addresses with few streams nothing is told: the info of a quiet replica seldom changes."""
        return {peer: count for peer, count in self._streams_by_peer().items() if count >= _MANY_STREAMS}

    def _named(self, address: str) -> str:
        for wildcard in _ANY_ADDRESS:
            address = address.replace(f"{wildcard}:", f"{_own_address(self._host)}:")
        return address


class EnvoyLimits:
    """Warns, once for each, of addresses whose streams to the fleet stand at an Envoy's default limit."""

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._since_s: dict[str, float] = {}  # addresses that are near it
        self._warned: set[str] = set()

    def look(self, infos: Iterable[Mapping[str, object]]) -> None:
        """`infos` are those of all replicas."""
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
    """The address by which other hosts reach this one.

    Where the hosts file gives the own name a loopback address, it is the address of the route to the others.
    """
    try:
        address = socket.gethostbyname(host)
        if not is_loopback(address):
            return address
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
            route.connect(_ELSEWHERE)  # nothing is sent
            return str(route.getsockname()[0])
    except OSError:
        return _LOOPBACK
