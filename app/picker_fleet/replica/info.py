"""What a replica tells the others of itself with each heartbeat."""

import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from picker_fleet import version
from picker_fleet.admission.shared_gate import SharedGate
from picker_fleet.units import is_loopback

METER_WINDOW_S = 10  # whole seconds, without the present one
_MAX_METERED_FLOWS = 5000  # a second
_MAX_LISTED = 200
_MAX_LISTED_BYTES = 16_000  # of names, about

_ANY_ADDRESS = ("0.0.0.0", "[::]")
_LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("192.0.2.1", 9)  # an address for documentation (RFC 5737)


class ServiceMeter:
    """Costs of placed requests by band and flow. Recording one is a dictionary entry; memory is bounded.

    A flow beyond 5000 in one second counts for its band only.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._seconds: deque[tuple[int, dict[tuple[int, str], float], list[float]]] = deque()
        self._reported: tuple[int, dict[str, Any]] = (-1, {})  # in which second, and what

    def record(self, band: int, flow: str, cost: float) -> None:
        """A request of `flow` has been placed."""
        second = int(self._clock_s())
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, {}, [0.0, 0.0, 0.0]))
            self._forget(second)
        _, flows, bands = self._seconds[-1]
        bands[band] += cost
        key = band, flow
        if key in flows or len(flows) < _MAX_METERED_FLOWS:
            flows[key] = flows.get(key, 0.0) + cost

    def report(self) -> dict[str, Any]:
        """`bands`: cost by band; `flows`: [band, flow, cost] of the busiest; `cut`: there are more.

        Added up once a second, however often it is asked for. Not to be changed.
        """
        second = int(self._clock_s())
        if self._reported[0] != second:
            self._reported = second, self._add_up(second)
        return self._reported[1]

    def _add_up(self, second: int) -> dict[str, Any]:
        self._forget(second)
        bands = [0.0, 0.0, 0.0]
        flows: Counter[tuple[int, str]] = Counter()
        for begun, costs, totals in self._seconds:
            if begun != second:
                flows.update(costs)
                bands = [a + b for a, b in zip(bands, totals, strict=True)]
        listed: list[list[object]] = []
        room = _MAX_LISTED_BYTES
        for (band, flow), cost in flows.most_common(_MAX_LISTED):
            room -= len(flow) + 16
            if room < 0:
                break
            listed.append([band, flow, round(cost, 3)])
        return {"bands": [round(cost, 3) for cost in bands], "flows": listed, "cut": len(listed) < len(flows)}

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] < second - METER_WINDOW_S:
            self._seconds.popleft()


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

    def __call__(self) -> dict[str, Any]:
        return {
            "host": self._host,
            "version": version(),
            **self._reached,
            "up_s": round(self._clock_s() - self._started_s, 3),
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
