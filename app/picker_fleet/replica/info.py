"""What a replica tells the others of itself with each heartbeat."""

import socket
from collections.abc import Callable

from picker_fleet import version
from picker_fleet.admission.shared_gate import ServiceMeter, SharedGate
from picker_fleet.units import is_loopback

_ANY_ADDRESS = ("0.0.0.0", "[::]")
_LOOPBACK = "127.0.0.1"
_UP_STEP_S = 10  # the uptime is rounded to this, so that the info of an idle replica seldom changes
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

    def reached(self, *, admin: str, grpc: str) -> None:
        """Where this replica listens: a URL and a `host:port`. This host's own address replaces a
        wildcard."""
        self._reached = {"admin": self._named(admin), "grpc": self._named(grpc)}

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
            "served": self._service.report(),
        }

    def _named(self, address: str) -> str:
        for wildcard in _ANY_ADDRESS:
            address = address.replace(f"{wildcard}:", f"{_own_address(self._host)}:")
        return address


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
