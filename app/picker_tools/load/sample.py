"""What is seen of the fleet while the load runs: the shared state, and the endpoints' own counts."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from picker_tools.load.client import Client

INTERVAL_S = 0.25
_CALL_S = 1.0
_ON_ENDPOINT = re.compile(rb"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sample:
    """The shared state as one replica told it. `at_s` is since the load began."""

    at_s: float
    stock: float
    lower: float
    upper: float
    queued: Mapping[str, int]
    in_flight: Mapping[str, int]
    leases: int
    replicas: int
    degraded: bool

    @property
    def total_queued(self) -> int:
        return sum(self.queued.values())

    @property
    def at_rest(self) -> bool:
        """Whether every count is 0."""
        return not any((self.stock, self.total_queued, self.leases, *self.in_flight.values()))

    @classmethod
    def read(cls, at_s: float, page: bytes) -> "Sample | None":
        """Of an answer of `GET /api/v1/state`; None if it is none."""
        try:
            state = json.loads(page)
            return cls(
                at_s=at_s,
                stock=float(state["stock"]),
                lower=float(state["bounds"]["lower"]),
                upper=float(state["bounds"]["upper"]),
                queued={str(band): int(count) for band, count in state["queue_length"].items()},
                in_flight={str(address): int(count) for address, count in state["in_flight"].items()},
                leases=int(state.get("leases", 0)),
                replicas=len(state["replicas"]),
                degraded=bool(state["degraded"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            return None


@dataclass(frozen=True, slots=True)
class OnEndpoints:
    """How many requests the endpoints themselves have, running and waiting there, of the `answered` ones."""

    at_s: float
    requests: int
    answered: int


class Sampler:
    """Asks every INTERVAL_S. `admins` are tried in turn, a new one each time; `endpoints` all at once."""

    def __init__(self, admins: Sequence[str], endpoints: Sequence[str], now_s: Callable[[], float]) -> None:
        self._admins = [Client(url) for url in admins]
        self._endpoints = [Client(f"http://{address}") for address in endpoints]
        self._now_s = now_s
        self._turn = 0
        self.samples: list[Sample] = []
        self.on_endpoints: list[OnEndpoints] = []

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                next_s = self._now_s() + INTERVAL_S
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self.look())
                    tasks.create_task(self._look_at_endpoints())
                await asyncio.sleep(max(0.0, next_s - self._now_s()))
        finally:
            self.close()

    async def look(self) -> Sample | None:
        """The state now, kept; None if nobody told it."""
        for _ in self._admins:
            client = self._admins[self._turn % len(self._admins)]
            self._turn += 1
            reply = await client.get("/api/v1/state", within_s=_CALL_S)
            sample = Sample.read(self._now_s(), reply[1]) if reply and reply[0] == 200 else None
            if sample is not None:
                self.samples.append(sample)
                return sample
        return None

    def close(self) -> None:
        for client in (*self._admins, *self._endpoints):
            client.hang_up()

    async def _look_at_endpoints(self) -> None:
        if not self._endpoints:
            return
        asked = (client.get("/metrics", within_s=_CALL_S) for client in self._endpoints)
        pages = [reply[1] for reply in await asyncio.gather(*asked) if reply and reply[0] == 200]
        requests = sum(int(float(count)) for page in pages for count in _ON_ENDPOINT.findall(page))
        self.on_endpoints.append(OnEndpoints(self._now_s(), requests, len(pages)))
